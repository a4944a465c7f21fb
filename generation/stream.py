"""Generate the tokens of a batch of prompts with a key/value cache, one step of all rows at a time.

`sampling.py` chooses each token, and `completion.py` turns tokens into text, which may become longer than the context.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.graphs import Capture, GraphCapture, free_unused_memory
from common.machine import exact_device, runs_ahead
from common.output import say_once
from generation.captured import CapturedDecoder
from generation.sampling import Penalties, Sampling, choose, draw_uniforms
from model import KVCache, TransformerLanguageModel
from tokenizer import Tokenizer

MIN_CAPTURED_TOKENS = 16  # capturing takes as long as a few tokens
MIN_CAPACITY = 64  # the attention kernels work on blocks


@torch.inference_mode()
def stream(
    model: TransformerLanguageModel, rows: Sequence[list[int]], sampling: Sampling, bias: torch.Tensor
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the next token of each row, and its logits in fp32, (B, V), max_new_tokens times.

    `bias`, (V,), is added to the logits before a token is chosen; see `forbid_unused_ids`. Row i has the seed
    `sampling.seed + i`, so its random numbers do not depend on the batch. (In bf16 the rounding does, which may
    change a sampled token.)

    On a GPU the next step is queued before the host reads the token, so that the GPU never waits for the host. Hence
    everything that depends on tokens stays on the device. The host waits only when the context is full.
    """
    rows = [list(row) for row in rows]
    exact = exact_device(model.device)  # the device on which tokens are chosen
    uniforms = torch.stack([draw_uniforms(sampling, i) for i in range(len(rows))]).to(exact)  # (B, max_new_tokens)
    penalties = Penalties(sampling, rows, bias)
    context, ahead, longest = model.config.max_seq_len, runs_ahead(model.device), max(map(len, rows))
    capacity = min(context, longest + sampling.max_new_tokens)
    decoder = take_decoder(model, len(rows), capacity, sampling) if longest < context else None
    cache, next_logits = prefill(model, rows, capacity if decoder is None else longest)
    if decoder is not None:
        decoder.fill(cache, next_logits, penalties, uniforms)
        del cache, next_logits
        try:
            yield from replay(decoder, rows, sampling.max_new_tokens)
        finally:  # also if the text ends early
            model.kept_decoder = decoder
        return
    for t in range(sampling.max_new_tokens):
        logits = next_logits.to(exact).float()
        tokens = choose(penalties.apply(logits), uniforms[:, t], sampling)  # (B,)
        penalties.count(tokens)
        fetch_tokens = _send_to_host(tokens)
        is_last = t + 1 == sampling.max_new_tokens
        queued = ahead and not is_last and max(cache.lengths) < context
        if queued:
            next_logits = _decode_one_token(model, cache, tokens)
        values = fetch_tokens()
        for row, token in zip(rows, values, strict=True):
            row.append(token)
        yield values, logits
        if not queued and not is_last:
            prefill_full_rows(model, cache, rows)
            next_logits = _decode_one_token(model, cache, tokens.to(model.device))


def take_decoder(
    model: TransformerLanguageModel, rows: int, capacity: int, sampling: Sampling
) -> CapturedDecoder | None:
    """Return a decoder for texts of up to `capacity` tokens; None where nothing is captured. Capturing takes longer
    than ten tokens, so the model keeps the last decoder for texts of the same kind. While it is used, others get their
    own."""
    kept = model.__dict__.pop("kept_decoder", None)  # at once: a server has several threads
    limit = model.config.max_seq_len + -model.config.max_seq_len % MIN_CAPACITY
    capacity = min(limit, max(MIN_CAPACITY, 1 << (capacity - 1).bit_length()))  # a conversation grows
    sampling, weights = replace(sampling, seed=0, stop=()), model.token_embedding.weight.data_ptr()
    key = (rows, capacity, sampling, weights)
    if kept and kept.key == key:
        return kept
    del kept
    free_unused_memory(model.device)
    graphs = build_capture(model.device) if sampling.max_new_tokens >= MIN_CAPTURED_TOKENS else None
    if graphs is None:
        return None
    try:
        with _without_cudnn(model.device):
            decoder = CapturedDecoder(model, rows, capacity, sampling, graphs)
    except RuntimeError as error:  # memory may be too small
        say_once(f"Capturing CUDA graphs failed ({str(error).splitlines()[0]}); generation is slower without them.")
        return None
    decoder.key = key
    return decoder


def replay(
    decoder: CapturedDecoder, rows: list[list[int]], max_new_tokens: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Generate as `stream` does, with a captured step. Two steps are queued before the host reads the first one's
    tokens."""
    queued: deque[tuple[Callable[[], list[int]], torch.Tensor]] = deque()
    for t in range(max_new_tokens):
        while len(queued) < 2 and t + len(queued) < max_new_tokens and decoder.has_room:
            decoder.replay()
            queued.append((_send_to_host(decoder.tokens), decoder.logits.clone()))
        is_full = not queued
        if is_full:
            decoder.choose()
            queued.append((_send_to_host(decoder.tokens), decoder.logits.clone()))
        fetch_tokens, logits = queued.popleft()
        values = fetch_tokens()
        for row, token in zip(rows, values, strict=True):
            row.append(token)
        yield values, logits
        if is_full and t + 1 < max_new_tokens:
            prefill_full_rows(decoder.model, decoder.cache, rows)
            with _without_cudnn(decoder.model.device):
                decoder.read()


def build_capture(device: torch.device) -> Capture | None:
    return GraphCapture() if device.type == "cuda" else None


def forbid_unused_ids(model: TransformerLanguageModel, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the bias, (V,), that forbids ids without text and ids beyond the tokenizer's: -inf for them, else 0."""
    bias = torch.zeros(model.config.vocab_size, device=exact_device(model.device))
    bias[[*tokenizer.unused_ids, *range(tokenizer.vocab_size, len(bias))]] = -torch.inf
    return bias


def _send_to_host(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Start copying tokens to the host. Return a function that waits for the copy, but not for work queued later."""
    if not tokens.is_cuda:
        on_host = tokens.tolist()
        return lambda: on_host
    values = tokens.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def fetch_tokens() -> list[int]:
        copied.synchronize()
        return values.tolist()

    return fetch_tokens


def _without_cudnn(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context without cuDNN's attention, which plans each length anew: seconds per text on an H100."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels) if device.type == "cuda" else contextlib.nullcontext()


def _decode_one_token(model: TransformerLanguageModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    with _without_cudnn(model.device):
        return model.next_logits(cache, tokens)


def prefill(model: TransformerLanguageModel, rows: list[list[int]], capacity: int) -> tuple[KVCache, torch.Tensor]:
    """Read the last max_seq_len tokens of each row into a cache with room for `capacity`. Return the cache and the
    logits of each row's next token, (B, V).

    Shorter rows are padded on the right, which no token sees, because attention is causal.
    """
    rows = [row[-model.config.max_seq_len :] for row in rows]
    lengths = [len(row) for row in rows]
    padded = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=model.device)
    cache = KVCache(model.config, len(rows), model.device, model.token_embedding.weight.dtype, capacity)
    with _without_cudnn(model.device):
        hidden = model.hidden(padded, cache)  # (B, T, C)
    cache.truncate(lengths)
    last = torch.tensor(lengths, device=model.device) - 1
    # Only one position per row, because all logits of a long prompt would take more memory than the model.
    return cache, model.logits(hidden[torch.arange(len(rows), device=model.device), last]).float()


def prefill_full_rows(model: TransformerLanguageModel, cache: KVCache, rows: list[list[int]]) -> None:
    """Read the second half of rows that fill the context again, without the last token, which is the next input.

    Sliding by one token would change all positions, so each token would cost a full pass. Only full rows are read
    again, because a row's text must not depend on the other rows of its batch.
    """
    full = [i for i, length in enumerate(cache.lengths) if length == model.config.max_seq_len]
    if not full:
        return
    keep = max(1, model.config.max_seq_len // 2)
    lengths = list(cache.lengths)
    if keep > 1:
        fresh, _ = prefill(model, [rows[i][-keep:-1] for i in full], keep)
        cache.entries[:, :, full, :, :keep] = fresh.entries
    for i in full:
        lengths[i] = keep - 1
    cache.truncate(lengths)
