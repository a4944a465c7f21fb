"""From a model and prompts to completions: batches of prompts on a key/value cache, past the end of the context too.

`generate.py` is the script around this; the trainer uses it to answer prompts at each evaluation. How a token is chosen
stands in `sampling.py`, how tokens become text in `text_stream.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from common.machine import exact_device, runs_ahead
from generation.cuda_graph import StaticKVCache, StaticStep
from generation.likelihood import Likelihood, Likelihoods, likelihoods, prompt_likelihoods
from generation.sampling import Sampling, choose, draws, penalize_counts, penalize_repetition
from generation.text_stream import TextStream
from model import KVCache, TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_base import TokenizerError, UnknownCharacterError

ROWS_AT_ONCE = 32  # bounds the memory of the cache: about 40 MB a row at GPT-2 small's size


@dataclass
class Completion:
    text: str  # without the prompt, the end-of-text token and the stop string
    tokens: int  # sampled, the end-of-text token included
    seed: int
    ended: bool  # by the end-of-text token or a stop string, not for want of tokens or time


def generate(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    sampling: Sampling,
    on_text: Callable[[int, str], None] | None = None,
    go_on: Callable[[], bool] = lambda: True,
    told: Likelihoods | None = None,
) -> list[Completion]:
    """Complete each prompt, a text or its ids; the one at index i with seed `sampling.seed + i` and the same random
    numbers whatever it is batched with. (In bf16 the rounding depends on the batch, and may change a choice.)

    `on_text(i, piece)` is called as text becomes certain, `go_on()` after each token: where it says no, the text made
    so far is all. `told` is told how likely the tokens were. Raises TokenizerError for a prompt that cannot be encoded.
    """
    encoded = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    was_training = model.training
    model.eval()
    try:
        completions = []
        for first in range(0, len(prompts), ROWS_AT_ONCE):
            rows = encoded[first : first + ROWS_AT_ONCE]
            show = on_text or (lambda index, text: None)
            completions += generate_rows(model, tokenizer, rows, sampling, first, show, go_on, told)
        return completions
    finally:
        model.train(was_training)


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    """The ids of a prompt; those of an empty one begin a document, for a model needs something to continue.

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
    return [tokenizer.end_of_text_id] if tokenizer.end_of_text_id is not None else [0]


@torch.inference_mode()
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
    uniforms = torch.stack([draws(sampling, first + i) for i in range(len(rows))])  # (B, new)
    uniforms = uniforms.to(exact_device(model.device))
    unused = unused_ids(model, tokenizer)
    look, look_at_prompts, said = None, None, list[Likelihood]()
    if told is not None:
        told.texts += [[] for _ in rows]
        look, look_at_prompts = observers(model, rows, unused, told, said)
    for tokens in continuations(model, rows, unused, uniforms, sampling, look, look_at_prompts):
        for i in sorted(active):
            counts[i] += 1
            if tokens[i] != tokenizer.end_of_text_id:
                if told is not None:
                    told.texts[first + i].append(said[i])
                on_text(first + i, streams[i].push(tokens[i]))
            if tokens[i] == tokenizer.end_of_text_id or streams[i].stopped:
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
    model: TransformerLanguageModel, rows: list[list[int]], unused: list[int], told: Likelihoods, said: list[Likelihood]
) -> tuple[Callable[[torch.Tensor, torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """`look` and `look_at_prompts` of `continuations`: what was said of the newest tokens is in `said` each time."""
    forbidden = torch.tensor(unused, dtype=torch.long, device=exact_device(model.device))

    def look(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        said[:] = likelihoods(logits, tokens, told.count, forbidden)

    def look_at_prompts(hidden: torch.Tensor) -> None:
        if told.of_prompts:
            read = [row[-model.config.max_seq_len :] for row in rows]
            told.prompts += prompt_likelihoods(model, hidden, read, told.count, forbidden)

    return look, look_at_prompts


def unused_ids(model: TransformerLanguageModel, tokenizer: Tokenizer) -> list[int]:
    """Ids that stand for no text, those included that the model has and its tokenizer does not."""
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
    """The next token of each row, again and again; never one of `unused`. uniforms: (B, max_new_tokens). `look` is
    shown each time what the model said, logits (B, V) that it may change, and the tokens (B,) that were chosen;
    `look_at_prompts` what the head is given for the rows, (B, T, C).

    On a GPU the step after a token is queued before the token is read, so that the GPU does not wait for what is done
    with it here. Whatever depends on tokens is on the device for that; only a full context makes it wait.
    """
    rows = [list(row) for row in rows]
    exact = exact_device(model.device)  # where tokens are chosen
    forbidden = torch.tensor(unused, dtype=torch.long, device=exact)
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool, device=exact)
        for i, row in enumerate(rows):
            seen[i, row] = True
    counts = None  # of the tokens that are generated
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = torch.zeros(len(rows), model.config.vocab_size, device=exact)

    context = model.config.max_seq_len
    capacity = min(context, max(map(len, rows)) + sampling.max_new_tokens)
    cache, logits = read(model, rows, context, capacity, look_at_prompts)
    ahead = runs_ahead(model.device)
    step: Callable[[torch.Tensor], torch.Tensor]
    if ahead:
        cache = StaticKVCache(cache)
        step = StaticStep(model, cache)
    else:
        step = functools.partial(model.next_logits, cache)
    for t in range(sampling.max_new_tokens):
        logits = logits.to(exact).float()
        said = logits if look is None else logits.clone()
        logits.index_fill_(1, forbidden, -torch.inf)
        if seen is not None:
            logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
        if counts is not None:
            logits = penalize_counts(logits, counts, sampling)
        tokens = choose(logits, uniforms[:, t], sampling)  # (B,)
        if look is not None:
            look(said, tokens)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        if counts is not None:
            counts.scatter_(1, tokens[:, None], 1, reduce="add")
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
            logits = step(tokens.to(model.device))


def send_to_host(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Start copying; the function returned waits for the copy, and for nothing that is queued after it."""
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
    of each row's next token, (B, V). `look` is shown what the head is given for all of them, (B, T, C).

    Shorter rows are padded on the right, where causal attention keeps the padding out of sight of what precedes it.
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
