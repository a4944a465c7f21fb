"""Complete prompts: turn a stream of tokens into text, until it ends."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from generation.sampling import Sampling
from generation.stream import forbid_unused_ids, stream
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_bpe import TokenizerError, UnknownCharacterError

ROWS_AT_ONCE = 32  # limits the memory of the cache: about 40 MB per row for GPT-2 small


@dataclass
class Completion:
    """The text of generated tokens. Shows only whole characters, and nothing that may begin a stop string."""

    tokenizer: Tokenizer = field(repr=False, compare=False)
    stop: tuple[str, ...] = ()
    text: str = ""  # without prompt, end-of-text token and stop string
    tokens: int = 0  # generated tokens, including the end-of-text token
    ended: bool = False  # an end-of-text token or a stop string has come
    shown: int = 0  # characters already returned by `push` and `finish`

    def __post_init__(self) -> None:
        self.decoder = self.tokenizer.decoder()

    def push(self, token: int) -> str:
        """Add a token, and return the new text that can be shown. Tokens after the end are ignored."""
        if self.ended:
            return ""
        self.tokens += 1
        if token in self.tokenizer.end_ids:
            self.ended = True
            return ""
        return self.extend(self.decoder.push([token]))

    def finish(self) -> str:
        """Return the rest of the text, without an unfinished character."""
        return self.extend("", is_last=True)

    def extend(self, piece: str, is_last: bool = False) -> str:
        # A stop string may begin in earlier text.
        search_from = max(0, len(self.text) - max(map(len, self.stop), default=1) + 1)
        self.text += piece
        hits = [(at + len(word), at) for word in self.stop if (at := self.text.find(word, search_from)) >= 0]
        if hits:  # the one that ends first, so that the division into tokens does not matter
            self.text = self.text[: min(hits)[1]]
            self.ended = is_last = True
        end = len(self.text) - (0 if is_last else self.count_held_back())
        fresh, self.shown = self.text[self.shown : end], max(end, self.shown)
        return fresh

    def count_held_back(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        return max((n for word in self.stop for n in range(1, len(word)) if self.text.endswith(word[:n])), default=0)

    def pieces(self, steps: Iterator[tuple[list[int], torch.Tensor]]) -> Iterator[str]:
        """Yield the text as it comes from the `stream` of one prompt."""
        for (token,), _ in steps:
            yield self.push(token)
            if self.ended:
                break
        yield self.finish()


def generate(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    sampling: Sampling,
    deadline: float = math.inf,
) -> list[Completion]:
    """Complete prompts (texts or ids) in batches. Prompt i has the seed `sampling.seed + i`. Texts end early at
    `deadline`, a time.monotonic().

    Raises TokenizerError for a prompt that cannot be encoded.
    """
    rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    completions = [Completion(tokenizer, sampling.stop) for _ in rows]
    bias = forbid_unused_ids(model, tokenizer)
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            seeded = dataclasses.replace(sampling, seed=sampling.seed + first)
            for tokens, _ in stream(model, rows[some], seeded, bias):
                for completion, token in zip(completions[some], tokens, strict=True):
                    completion.push(token)
                if all(completion.ended for completion in completions[some]) or time.monotonic() > deadline:
                    break
    finally:
        model.train(was_training)
    for completion in completions:
        completion.finish()
    return completions


def ends_with_space(prompt: str) -> bool:
    """Return whether a prompt ends with a single space after a word. Several may be the indentation of code."""
    return prompt.endswith(" ") and prompt[-2:-1].strip() != ""


def encode_prompt(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    """Return the ids of a prompt, after `bos_id` if the tokenizer has one. An empty prompt becomes the token that
    begins a document, or id 0, because a model needs a token to continue. With byte-level BPE a final space is left
    out, because words begin with their space, and hardly any would fit after it.

    Raises TokenizerError for unknown characters.
    """
    if not isinstance(prompt, str):
        return prompt
    if ends_with_space(prompt) and tokenizer.kind == "bpe":
        prompt = prompt[:-1]
    try:
        ids = tokenizer.encode(prompt).tolist()
    except UnknownCharacterError as error:
        raise TokenizerError(f"The prompt {prompt!r} cannot be encoded: {error.finding}.") from None
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.start_id or 0]
