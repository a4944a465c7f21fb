"""From a model and prompts to text: a key/value cache, batches of prompts, sampling, stop strings.

`generate.py` is the script around this; the trainer uses it to answer prompts at each evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from model import KVCache, TransformerLanguageModel
from tokenizer import CharacterTokenizer, TokenizerError, UnknownCharacterError

if TYPE_CHECKING:
    from tokenizer_bpe import BPETokenizer

ROWS_AT_ONCE = 32  # bounds the memory of the cache: about 40 MB a row at GPT-2 small's size


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises ValueError listing every value out of range."""

    max_new_tokens: int = 200
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 0.9  # 1: off
    repetition_penalty: float = 1.0  # 1: off
    stop: tuple[str, ...] = ()
    seed: int = 1337

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        problems = [
            f"{name} is {getattr(self, name)}; {allowed}"
            for name, holds, allowed in (
                ("max_new_tokens", self.max_new_tokens >= 0, "0 or more is needed"),
                ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more is needed"),
                ("top_k", self.top_k >= 0, "0 (off) or more is needed"),
                ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 is needed"),
                ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "more than 0 is needed"),
                ("seed", self.seed >= 0, "0 or more is needed"),
            )
            if not holds
        ]
        if "" in self.stop:
            problems.append("an empty stop string would stop at once")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass
class Completion:
    text: str  # without the prompt, the end-of-text token and the stop string
    tokens: int  # sampled, the end-of-text token included
    seed: int


class TextStream:
    """Token ids in, printable text out: whole characters only, nothing that may turn out to begin a stop string."""

    def __init__(self, tokenizer: CharacterTokenizer | BPETokenizer, stop: tuple[str, ...]):
        self.decoder = tokenizer.decoder()
        self.stop = stop
        self.text = ""
        self.shown = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Returns the text that can be shown now."""
        return self.extend(self.decoder.push([token]))

    def finish(self) -> str:
        """The rest, once no more tokens come."""
        return self.extend(self.decoder.flush(), final=True)

    def extend(self, piece: str, final: bool = False) -> str:
        if self.stopped:
            return ""
        # A stop string may begin in text that came before this piece.
        search_from = max(0, len(self.text) - max(map(len, self.stop), default=1) + 1)
        self.text += piece
        hits = [(at + len(word), at) for word in self.stop if (at := self.text.find(word, search_from)) >= 0]
        if hits:  # the one completed first, so that it does not matter how the text is cut into tokens
            self.text = self.text[: min(hits)[1]]
            self.stopped = True
        end = len(self.text) if final or self.stopped else len(self.text) - self.held_back()
        fresh, self.shown = self.text[self.shown : end], max(end, self.shown)
        return fresh

    def held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (n for word in self.stop for n in range(1, len(word)) if self.text.endswith(word[:n])),
            default=0,
        )


def generate(
    model: TransformerLanguageModel,
    tokenizer: CharacterTokenizer | BPETokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Complete each prompt; the one at index i with seed `sampling.seed + i`, whatever it is batched with.

    `on_text(i, piece)` is called as text becomes certain. Raises TokenizerError for a prompt that cannot be encoded.
    """
    encoded = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    was_training = model.training
    model.eval()
    try:
        completions = []
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            rows = encoded[first : first + ROWS_AT_ONCE]
            completions += generate_rows(model, tokenizer, rows, sampling, first, on_text or (lambda index, text: None))
        return completions
    finally:
        model.train(was_training)


def prompt_ids(tokenizer: CharacterTokenizer | BPETokenizer, prompt: str) -> list[int]:
    """A model needs something to continue: nothing is read as the beginning of a document."""
    try:
        ids = tokenizer.encode(prompt).tolist()
    except UnknownCharacterError as error:
        raise TokenizerError(f"The prompt {prompt!r} cannot be read: {error.finding}.") from None
    if ids:
        return ids
    return [tokenizer.end_of_text_id] if tokenizer.end_of_text_id is not None else [0]


@torch.inference_mode()
def generate_rows(
    model: TransformerLanguageModel,
    tokenizer: CharacterTokenizer | BPETokenizer,
    rows: list[list[int]],
    sampling: Sampling,
    first: int,
    on_text: Callable[[int, str], None],
) -> list[Completion]:
    rows = [list(row) for row in rows]
    streams = [TextStream(tokenizer, sampling.stop) for _ in rows]
    counts = [0] * len(rows)
    active = set(range(len(rows)))
    uniforms = torch.stack([draws(sampling, first + i) for i in range(len(rows))]).to(model.device)  # (B, new)
    unused = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, model.config.vocab_size)]
    forbidden = torch.tensor(unused, dtype=torch.long, device=model.device)

    context = model.config.max_seq_len
    cache, logits = read(model, rows, context, min(context, max(map(len, rows)) + sampling.max_new_tokens))
    for t in range(sampling.max_new_tokens):
        logits[:, forbidden] = -torch.inf
        if sampling.repetition_penalty != 1.0:
            penalize_repetition(logits, rows, sampling.repetition_penalty)
        tokens = choose(logits, uniforms[:, t], sampling)  # (B,)
        for i, token in enumerate(tokens.tolist()):
            rows[i].append(token)
            if i not in active:
                continue
            counts[i] += 1
            if token != tokenizer.end_of_text_id:
                on_text(first + i, streams[i].push(token))
            if token == tokenizer.end_of_text_id or streams[i].stopped:
                active.remove(i)
        if not active or t + 1 == sampling.max_new_tokens:
            break
        make_room(model, cache, rows)
        logits = model(tokens[:, None], cache=cache)[:, -1].float()  # (B, V)
    for i, stream in enumerate(streams):
        on_text(first + i, stream.finish())
    seed = sampling.seed + first
    return [
        Completion(stream.text, count, seed + i) for i, (stream, count) in enumerate(zip(streams, counts, strict=True))
    ]


def read(
    model: TransformerLanguageModel, rows: list[list[int]], keep: int, capacity: int
) -> tuple[KVCache, torch.Tensor]:
    """Read the last `keep` tokens of each row into a cache with room for `capacity`. Returns the cache and the logits
    of each row's next token, (B, V).

    Shorter rows are padded on the right, where causal attention keeps the padding out of sight of what precedes it.
    """
    rows = [row[-keep:] for row in rows]
    lengths = [len(row) for row in rows]
    padded = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=model.device)
    cache = KVCache(model.config, len(rows), model.device, model.token_embedding.weight.dtype, capacity)
    hidden = model.hidden(padded, cache)  # (B, T, C)
    cache.truncate(lengths)
    last = torch.tensor(lengths, device=model.device) - 1
    # The head on one position a row only: all logits of a long prompt would take more memory than the model.
    return cache, model.logits(hidden[torch.arange(len(rows), device=model.device), last]).float()


def make_room(model: TransformerLanguageModel, cache: KVCache, rows: list[list[int]]) -> None:
    """Where a row fills the context, read its second half again, all but the last token, which comes next.

    Sliding by one token instead would change every position and cost a full pass a token. Only full rows are read:
    a row's text must not depend on the rows it is batched with.
    """
    full = [i for i, length in enumerate(cache.lengths) if length == model.config.max_seq_len]
    if not full:
        return
    keep = max(1, model.config.max_seq_len // 2)
    lengths = list(cache.lengths)
    if keep > 1:
        fresh, _ = read(model, [rows[i][-keep:-1] for i in full], keep, keep)
        cache.keys[:, full, :, :keep], cache.values[:, full, :, :keep] = fresh.keys, fresh.values
    for i in full:
        lengths[i] = keep - 1
    cache.truncate(lengths)


def draws(sampling: Sampling, index: int) -> torch.Tensor:
    """The random numbers of one prompt, (max_new_tokens,): its own stream, on the CPU, so that neither the batch nor
    the device changes them."""
    generator = torch.Generator().manual_seed((sampling.seed + index) % 2**63)
    return torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)


def penalize_repetition(logits: torch.Tensor, rows: list[list[int]], penalty: float) -> None:
    """Make tokens a row already holds less likely (Keskar et al. 2019, "CTRL", section 4.1). logits: (B, V)."""
    for row_logits, row in zip(logits, rows, strict=True):
        seen = torch.tensor(sorted(set(row)), device=logits.device)
        values = row_logits[seen]
        row_logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def choose(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One token a row: logits (B, V) and uniform numbers (B,) in [0, 1) -> (B,).

    Top-k, then nucleus sampling (Holtzman et al. 2020), drawn by inverting the cumulative distribution.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    values, order = logits.double().sort(dim=-1, descending=True, stable=True)
    values = (values - values[:, :1]) / sampling.temperature  # at most 0, so that no temperature overflows to inf - inf
    if sampling.top_k:
        values[:, sampling.top_k :] = -torch.inf
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities[before >= sampling.top_p] = 0.0  # the most likely token has nothing before it and always stays
    cumulative = probabilities.cumsum(dim=-1)
    place = torch.searchsorted(cumulative, (uniforms[:, None] * cumulative[:, -1:]), right=True)
    return order.gather(1, place.clamp(max=order.size(1) - 1)).squeeze(1)
