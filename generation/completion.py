"""Prompts to completions: a stream of tokens becomes text, until it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from generation.sampling import Sampling
from generation.stream import only_text, stream
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_base import TokenizerError, UnknownCharacterError

ROWS_AT_ONCE = 32  # bounds the memory of the cache: about 40 MB a row at GPT-2 small's size


@dataclass
class Completion:
    """Tokens in, text out: only whole characters, and nothing that may be the beginning of a stop string."""

    tokenizer: Tokenizer = field(repr=False, compare=False)
    stop: tuple[str, ...] = ()
    text: str = ""  # without the prompt, the end-of-text token and the stop string
    tokens: int = 0  # generated, including the end-of-text token
    ended: bool = False  # by the end-of-text token or a stop string
    shown: int = 0  # characters of the text that `push` and `finish` returned

    def __post_init__(self) -> None:
        self.decoder = self.tokenizer.decoder()

    def push(self, token: int) -> str:
        """Returns the text that can be shown now. What comes after the end is ignored."""
        if self.ended:
            return ""
        self.tokens += 1
        if token in self.tokenizer.end_ids:
            self.ended = True
            return ""
        return self.extend(self.decoder.push([token]))

    def finish(self) -> str:
        """The rest, once no more tokens come. A character that was not finished is left out."""
        return self.extend("", is_last=True)

    def extend(self, piece: str, is_last: bool = False) -> str:
        # A stop string may begin in text that came before this piece.
        search_from = max(0, len(self.text) - max(map(len, self.stop), default=1) + 1)
        self.text += piece
        hits = [(at + len(word), at) for word in self.stop if (at := self.text.find(word, search_from)) >= 0]
        if hits:  # take the one that ends first, so that the result does not depend on how tokens divide the text
            self.text = self.text[: min(hits)[1]]
            self.ended = is_last = True
        end = len(self.text) - (0 if is_last else self.held_back())
        fresh, self.shown = self.text[self.shown : end], max(end, self.shown)
        return fresh

    def held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max((n for word in self.stop for n in range(1, len(word)) if self.text.endswith(word[:n])), default=0)

    def pieces(self, steps: Iterator[tuple[list[int], torch.Tensor]]) -> Iterator[str]:
        """The text as it comes from the `stream` of one prompt."""
        for (token,), _ in steps:
            yield self.push(token)
            if self.ended:
                break
        yield self.finish()


def generate(
    model: TransformerLanguageModel, tokenizer: Tokenizer, prompts: Sequence[str | list[int]], sampling: Sampling
) -> list[Completion]:
    """Complete each prompt, a text or its ids, in batches. Prompt i has the seed `sampling.seed + i`.

    Raises TokenizerError for a prompt that cannot be encoded.
    """
    rows = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    completions = [Completion(tokenizer, sampling.stop) for _ in rows]
    bias = only_text(model, tokenizer)
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            seeded = dataclasses.replace(sampling, seed=sampling.seed + first)
            for tokens, _ in stream(model, rows[some], seeded, bias):
                for completion, token in zip(completions[some], tokens, strict=True):
                    completion.push(token)
                if all(completion.ended for completion in completions[some]):
                    break
    finally:
        model.train(was_training)
    for completion in completions:
        completion.finish()
    return completions


def ends_with_space(prompt: str) -> bool:
    """Return whether a single space follows the last word. More of them may be the indentation of code."""
    return prompt.endswith(" ") and prompt[-2:-1].strip() != ""


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    """The ids of a prompt, after the tokenizer's own beginning of a text if it has one. A model needs at least one
    token to continue, so an empty prompt becomes the token that begins a document, or id 0 without one. A space at the
    end is left out where words begin with their space: with byte-level BPE hardly any word would fit after it.

    Raises TokenizerError for characters that the tokenizer does not know.
    """
    if not isinstance(prompt, str):
        return prompt
    if ends_with_space(prompt) and tokenizer.kind == "bpe":
        prompt = prompt[:-1]
    try:
        ids = tokenizer.encode(prompt).tolist()
    except UnknownCharacterError as error:
        raise TokenizerError(f"The prompt {prompt!r} cannot be read: {error.finding}.") from None
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.start_id or 0]
