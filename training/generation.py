"""From a model and prompts to text: a key/value cache, batches of prompts, sampling, stop strings.

`generate.py` is the script around this; the trainer uses it to answer prompts at each evaluation.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import is_out_of_memory
from model import KVCache, StaticKVCache, TransformerLanguageModel
from tokenizer import CharacterTokenizer, TokenizerError, UnknownCharacterError

if TYPE_CHECKING:
    from tokenizer_bpe import BPETokenizer

HEAD = 512  # likeliest tokens that are sorted first; the rest only where the choice depends on it
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
    """Complete each prompt; the one at index i with seed `sampling.seed + i` and the same random numbers whatever it is
    batched with. (In bf16 the rounding depends on the batch, and may change a choice.)

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
    streams = [TextStream(tokenizer, sampling.stop) for _ in rows]
    counts = [0] * len(rows)
    active = set(range(len(rows)))
    uniforms = torch.stack([draws(sampling, first + i) for i in range(len(rows))]).to(model.device)  # (B, new)
    unused = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, model.config.vocab_size)]
    for tokens in continuations(model, rows, unused, uniforms, sampling):
        for i in sorted(active):
            counts[i] += 1
            if tokens[i] != tokenizer.end_of_text_id:
                on_text(first + i, streams[i].push(tokens[i]))
            if tokens[i] == tokenizer.end_of_text_id or streams[i].stopped:
                active.remove(i)
        if not active:
            break
    for i, stream in enumerate(streams):
        on_text(first + i, stream.finish())
    seed = sampling.seed + first
    return [
        Completion(stream.text, count, seed + i) for i, (stream, count) in enumerate(zip(streams, counts, strict=True))
    ]


def continuations(
    model: TransformerLanguageModel,
    rows: list[list[int]],
    unused: list[int],
    uniforms: torch.Tensor,
    sampling: Sampling,
) -> Iterator[list[int]]:
    """The next token of each row, again and again; never one of `unused`. uniforms: (B, max_new_tokens).

    On a GPU the step after a token is queued before the token is read, so that the GPU does not wait for what is done
    with it here. Whatever depends on tokens is on the device for that; only a full context makes it wait.
    """
    rows = [list(row) for row in rows]
    forbidden = torch.tensor(unused, dtype=torch.long, device=model.device)
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool, device=model.device)
        for i, row in enumerate(rows):
            seen[i, row] = True

    context = model.config.max_seq_len
    cache, logits = read(model, rows, context, min(context, max(map(len, rows)) + sampling.max_new_tokens))
    ahead = runs_ahead(model.device)
    if ahead:
        cache = StaticKVCache(cache)
        step = StaticStep(model, cache)
    else:
        step = functools.partial(next_logits, model, cache)
    for t in range(sampling.max_new_tokens):
        logits = logits.float().index_fill_(1, forbidden, -torch.inf)
        if seen is not None:
            logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
        tokens = choose(logits, uniforms[:, t], sampling)  # (B,)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        arrive = send_to_host(tokens)
        is_last = t + 1 == sampling.max_new_tokens
        queued = ahead and not is_last and max(cache.lengths) < context
        if queued:
            logits = step(tokens)
        values = arrive()
        for row, token in zip(rows, values, strict=True):
            row.append(token)
        yield values
        if not queued and not is_last:
            make_room(model, cache, rows)
            logits = step(tokens)


def runs_ahead(device: torch.device) -> bool:
    """Whether work is queued on the device while Python goes on."""
    return device.type == "cuda"


def send_to_host(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Start copying; the function returned waits for the copy, and for nothing that is queued after it."""
    values = tokens.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
    if not tokens.is_cuda:
        return values.tolist
    copied = torch.cuda.Event()
    copied.record()

    def arrive() -> list[int]:
        copied.synchronize()
        return values.tolist()

    return arrive


def next_logits(model: TransformerLanguageModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    """tokens (B,), which continue the cache -> logits of what follows each, (B, V)."""
    return model(tokens[:, None], cache=cache)[:, -1]


class StaticStep:
    """`next_logits` with a StaticKVCache, recorded at the second call and replayed from then on.

    Launching a model's kernels from Python takes longer than a GPU takes to run them for one token. A CUDA graph
    launches all of them at once; torch.compile would fuse them as well, but takes longer to compile than to answer.
    The logits returned are overwritten by the next call.
    """

    def __init__(self, model: TransformerLanguageModel, cache: StaticKVCache):
        self.model, self.cache = model, cache
        self.tokens: torch.Tensor | None = None  # (B,), where the recording reads them
        self.replay: Callable[[], torch.Tensor] | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tokens is None:  # not recorded: libraries start up in the first step
            self.tokens = tokens.clone()
            return next_logits(self.model, self.cache, self.tokens)
        self.tokens.copy_(tokens)
        if self.replay is None:
            self.replay = self.recorded()
        return self.replay()

    def recorded(self) -> Callable[[], torch.Tensor]:
        """The step from `self.tokens` on as a recording or, where that fails, as it is: slower, same result."""
        lengths = self.cache.lengths

        def step() -> torch.Tensor:
            return next_logits(self.model, self.cache, self.tokens)

        try:
            graph, logits = record(step)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            warnings.warn(f"no CUDA graph ({error}): generation goes on without, more slowly", stacklevel=2)
            return step
        finally:
            self.cache.lengths = lengths  # recording does not run what it records

        cache = self.cache  # not self, which holds this function: a cycle would keep the cache's memory

        def replay() -> torch.Tensor:
            graph.replay()
            KVCache.advance(cache, 1)  # the lengths on the device are advanced by the replay
            return logits

        return replay


def record(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Record a CUDA graph of `step`. Returns it and the tensor it writes its result to at each replay.

    Raises RuntimeError where that is not possible.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread may be reading batches
            return graph, step()
    finally:
        torch.cuda.set_stream(stream)  # a recording that fails leaves its own behind


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


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make tokens a row already holds less likely (Keskar et al. 2019, "CTRL", section 4.1).

    logits (B, V), seen (B, V) true for those tokens -> logits (B, V)
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def choose(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One token a row: logits (B, V) and uniform numbers (B,) in [0, 1) -> (B,).

    Top-k, then nucleus sampling (Holtzman et al. 2020), drawn by inverting the cumulative distribution in descending
    order of probability.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # Sorting a large vocabulary takes longer than all else here, and the order of the tail seldom matters. On a GPU,
    # asking whether it does would be waiting for it.
    if not sampling.top_k < HEAD < logits.size(1) or runs_ahead(logits.device):
        return choose_among(logits.size(1), logits, uniforms, sampling)[0]
    tokens, certain = choose_among(HEAD, logits, uniforms, sampling)
    rest = (~certain).nonzero().squeeze(1)
    if len(rest):
        tokens[rest] = choose_among(logits.size(1), logits[rest], uniforms[rest], sampling)[0]
    return tokens


def choose_among(
    count: int, logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose` looking at the `count` largest logits only.

    Returns the tokens, (B,), and for each whether it is certain: no order of the other logits would change it.
    """
    if count < logits.size(1):
        order = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
        values, places = logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
        order = order.gather(1, places)  # equal logits in ascending order of their ids, as the full sort has them
    else:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
    largest = values[:, :1].double()

    def weigh(values: torch.Tensor) -> torch.Tensor:  # at most 1, whatever the temperature: no inf - inf
        return ((values.double() - largest) / sampling.temperature).exp()

    weights = weigh(values)[:, : sampling.top_k or None]  # (B, n)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:] if sampling.top_k else weigh(logits).sum(dim=-1, keepdim=True)
    before = cumulative - weights  # 0 for the most likely token, which always stays
    last = ((before < sampling.top_p * total) & (weights > 0)).sum(dim=-1, keepdim=True) - 1  # of the nucleus
    everything = sampling.top_p == 1 and not sampling.top_k
    mass = total if everything else cumulative.gather(1, last)
    place = torch.searchsorted(cumulative, uniforms[:, None] * mass, right=True).minimum(last)
    # What was left out is not larger than the smallest value here: it comes after all that is larger than that.
    certain = values.gather(1, place if everything else last) > values[:, -1:]
    return order.gather(1, place).squeeze(1), certain.squeeze(1)
