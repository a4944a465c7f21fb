"""Prompts to completions, in batches, with a key/value cache. A text may become longer than the model's context.

The trainer uses this too, to answer prompts at each evaluation. `sampling.py` chooses each token, `text_stream.py`
turns tokens into text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.machine import exact_device, runs_ahead
from generation.sampling import Sampling, choose, draws, penalize_counts, penalize_repetition
from generation.scoring import Likelihood, Likelihoods, likelihoods, prompt_likelihoods
from model import KVCache, TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_base import TokenizerError, UnknownCharacterError

# Not cuDNN's, which plans each new length anew: seconds for a text on an H100.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ROWS_AT_ONCE = 32  # bounds the memory of the cache: about 40 MB a row at GPT-2 small's size


@dataclass
class Completion:
    text: str  # without the prompt, the end-of-text token and the stop string
    tokens: int  # generated, including the end-of-text token
    seed: int
    ended: bool  # by the end-of-text token or a stop string, not by max_new_tokens or `go_on`


def generate(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    sampling: Sampling,
    on_text: Callable[[int, str], None] = lambda index, piece: None,
    go_on: Callable[[], bool] = lambda: True,
    told: Likelihoods | None = None,
) -> list[Completion]:
    """Complete each prompt: a text, or its ids. Prompt i has the seed `sampling.seed + i`. Its random numbers do not
    depend on the batch. (In bf16 the rounding does, which may change a choice.)

    `on_text(i, piece)` is called with each piece of text that can no longer change. `go_on()` is called after each
    token; False ends the batch. `told` collects the likelihood of each token. Raises TokenizerError for a prompt that
    cannot be encoded.
    """
    encoded = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    was_training = model.training
    model.eval()
    try:
        completions = []
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            rows = encoded[first : first + ROWS_AT_ONCE]
            completions += generate_rows(model, tokenizer, rows, sampling, first, on_text, go_on, told)
        return completions
    finally:
        model.train(was_training)


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    """The ids of a prompt. A model needs at least one token to continue, so an empty prompt becomes the end-of-text
    token, or id 0 without one.

    Raises TokenizerError for characters that the tokenizer does not know.
    """
    if not isinstance(prompt, str):
        return prompt
    try:
        ids = tokenizer.encode(prompt).tolist()
    except UnknownCharacterError as error:
        raise TokenizerError(f"The prompt {prompt!r} cannot be read: {error.finding}.") from None
    if ids:
        return ids
    return [tokenizer.end_of_text_id or 0]


@torch.inference_mode()
@sdpa_kernel(ATTENTION)
def generate_rows(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    rows: list[list[int]],
    sampling: Sampling,
    first: int,
    on_text: Callable[[int, str], None],
    go_on: Callable[[], bool],
    told: Likelihoods | None,
) -> list[Completion]:
    streams = [TextStream(tokenizer, sampling.stop) for _ in rows]
    counts = [0] * len(rows)
    active = set(range(len(rows)))
    uniforms = torch.stack([draws(sampling, first + i) for i in range(len(rows))])  # (B, max_new_tokens)
    uniforms = uniforms.to(exact_device(model.device))
    unused = unused_ids(model, tokenizer)
    look, look_at_prompts, newest = None, None, list[Likelihood]()
    if told is not None:
        told.texts += [[] for _ in rows]
        look, look_at_prompts = observers(model, rows, unused, told, newest)
    for tokens in continuations(model, rows, unused, uniforms, sampling, look, look_at_prompts):
        for i in sorted(active):
            counts[i] += 1
            if tokens[i] not in tokenizer.end_ids:
                if told is not None:
                    told.texts[first + i].append(newest[i])
                on_text(first + i, streams[i].push(tokens[i]))
            if tokens[i] in tokenizer.end_ids or streams[i].stopped:
                active.remove(i)
        if not active or not go_on():
            break
    for i, stream in enumerate(streams):
        on_text(first + i, stream.finish())
    seed = sampling.seed + first
    return [
        Completion(stream.text, count, seed + i, i not in active)
        for i, (stream, count) in enumerate(zip(streams, counts, strict=True))
    ]


def observers(
    model: TransformerLanguageModel,
    rows: list[list[int]],
    unused: list[int],
    told: Likelihoods,
    newest: list[Likelihood],
) -> tuple[Callable[[torch.Tensor, torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """`look` and `look_at_prompts` of `continuations`. They fill `newest` (the newest token of each row) at each step,
    and `told.prompts`."""
    forbidden = torch.tensor(unused, dtype=torch.long, device=exact_device(model.device))

    def look(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        newest[:] = likelihoods(logits, tokens, told.count, forbidden)

    def look_at_prompts(hidden: torch.Tensor) -> None:
        if told.of_prompts:
            prompts = [row[-model.config.max_seq_len :] for row in rows]
            told.prompts += prompt_likelihoods(model, hidden, prompts, told.count, forbidden)

    return look, look_at_prompts


def unused_ids(model: TransformerLanguageModel, tokenizer: Tokenizer) -> list[int]:
    """Ids without text, including those that the model has and its tokenizer does not."""
    return [*tokenizer.unused_ids, *range(tokenizer.vocab_size, model.config.vocab_size)]


def continuations(
    model: TransformerLanguageModel,
    rows: list[list[int]],
    unused: list[int],
    uniforms: torch.Tensor,
    sampling: Sampling,
    look: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    look_at_prompts: Callable[[torch.Tensor], None] | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of each row, max_new_tokens times; never one of `unused`. uniforms: (B, max_new_tokens).

    At each step `look` gets the model's logits (B, V), a copy that it may change, and the chosen tokens (B,).
    `look_at_prompts` gets the input of the head for the prompts, (B, T, C).

    On a GPU the next step is queued before the host reads the token, so that the GPU never waits for the host. So
    everything that depends on tokens stays on the device. Only a full context has to wait.
    """
    rows = [list(row) for row in rows]
    exact = exact_device(model.device)  # tokens are chosen here
    forbidden = torch.tensor(unused, dtype=torch.long, device=exact)
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool, device=exact)
        for i, row in enumerate(rows):
            seen[i, row] = True
    counts = None  # of the generated tokens
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = torch.zeros(len(rows), model.config.vocab_size, device=exact)

    context = model.config.max_seq_len
    capacity = min(context, max(map(len, rows)) + sampling.max_new_tokens)
    cache, logits = read(model, rows, context, capacity, look_at_prompts)
    ahead = runs_ahead(model.device)
    for t in range(sampling.max_new_tokens):
        logits = logits.to(exact).float()
        unchanged = logits if look is None else logits.clone()
        logits.index_fill_(1, forbidden, -torch.inf)
        if seen is not None:
            logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
        if counts is not None:
            logits = penalize_counts(logits, counts, sampling)
        tokens = choose(logits, uniforms[:, t], sampling)  # (B,)
        if look is not None:
            look(unchanged, tokens)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        if counts is not None:
            counts.scatter_(1, tokens[:, None], 1, reduce="add")
        arrive = send_to_host(tokens)
        is_last = t + 1 == sampling.max_new_tokens
        queued = ahead and not is_last and max(cache.lengths) < context
        if queued:
            logits = model.next_logits(cache, tokens)
        values = arrive()
        for row, token in zip(rows, values, strict=True):
            row.append(token)
        yield values
        if not queued and not is_last:
            make_room(model, cache, rows)
            logits = model.next_logits(cache, tokens.to(model.device))


def send_to_host(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Start a copy. The returned function waits for the copy, but not for work that is queued after it."""
    if not tokens.is_cuda:
        return tokens.tolist
    values = tokens.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def arrive() -> list[int]:
        copied.synchronize()
        return values.tolist()

    return arrive


def read(
    model: TransformerLanguageModel,
    rows: list[list[int]],
    keep: int,
    capacity: int,
    look: Callable[[torch.Tensor], None] | None = None,
) -> tuple[KVCache, torch.Tensor]:
    """Read the last `keep` tokens of each row into a cache with room for `capacity`. Returns the cache and the logits
    of each row's next token, (B, V). `look` gets the input of the head, (B, T, C).

    Shorter rows are padded on the right: attention is causal, so no token sees the padding after it.
    """
    rows = [row[-keep:] for row in rows]
    lengths = [len(row) for row in rows]
    padded = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=model.device)
    cache = KVCache(model.config, len(rows), model.device, model.token_embedding.weight.dtype, capacity)
    hidden = model.hidden(padded, cache)  # (B, T, C)
    cache.truncate(lengths)
    if look is not None:
        look(hidden)
    last = torch.tensor(lengths, device=model.device) - 1
    # Run the head on one position per row: all logits of a long prompt would take more memory than the model.
    return cache, model.logits(hidden[torch.arange(len(rows), device=model.device), last]).float()


def make_room(model: TransformerLanguageModel, cache: KVCache, rows: list[list[int]]) -> None:
    """If a row fills the context, read its second half again, without the last token: that one is the next input.

    Sliding by one token would change all positions, so each token would cost a full pass. Only full rows are read
    again: a row's text must not depend on the other rows of its batch.
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


class TextStream:
    """Token ids in, text out: only whole characters, and nothing that may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
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
        if hits:  # take the one that ends first, so that the result does not depend on how tokens divide the text
            self.text = self.text[: min(hits)[1]]
            self.stopped = True
        end = len(self.text) if final or self.stopped else len(self.text) - self.held_back()
        fresh, self.shown = self.text[self.shown : end], max(end, self.shown)
        return fresh

    def held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max((n for word in self.stop for n in range(1, len(word)) if self.text.endswith(word[:n])), default=0)
