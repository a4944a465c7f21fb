"""Score how well a model predicts a text: the log-probability of each token, over sliding windows.

Each document is scored alone. Its first token is predicted from an end-of-text token, which also separates documents in
training. A character vocabulary has no such token, so the first character does not count. The end-of-text token itself
never counts, because it is not text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.machine import exact_device
from common.output import cell, table_row
from model import TransformerLanguageModel
from tokenizer import Tokenizer, character_counts

BATCH_TOKENS = 8192  # about 100 MB for the widest layer of GPT-2 small, in fp32
BATCH_LOGITS = 1 << 24  # 64 MiB in fp32; all logits of a window would take more than the model
Documents = Iterable[Iterable[np.ndarray]]  # each document yields arrays of ids, (tokens,)


@dataclass
class Score:
    """The prediction of a text: its size and log-likelihood."""

    nats: float = 0.0  # negative log-likelihood, summed in fp64
    tokens: int = 0  # predicted tokens
    bytes: int = 0  # UTF-8 bytes of their text
    characters: int = 0
    cjk: int = 0  # Chinese, Japanese and Korean characters

    def add(self, other: Score) -> None:
        self.nats += other.nats
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.characters += other.characters
        self.cjk += other.cjk

    @property
    def loss(self) -> float:
        """Nats per token; nan if nothing was predicted."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); inf if that is too large for a float."""
        return math.exp(self.loss) if not self.loss >= 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, comparable across tokenizers; nan if no text was predicted."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bits_per_character(self) -> float:
        """Bits per character, comparable across alphabets, many of which take two or three bytes per letter; or nan."""
        return self.nats / math.log(2) / self.characters if self.characters else math.nan


def score_documents(
    model: TransformerLanguageModel, tokenizer: Tokenizer, documents: Documents, stride: int
) -> Iterator[Score]:
    """Yield the score of each document, in order, with the memory of one batch of windows.

    `stride` is 1 to max_seq_len; see `cut_windows`. Use a model in fp32, because bf16 changes log-probabilities by some
    hundredths. Raises what `documents` raises.
    """
    lengths = np.column_stack([tokenizer.byte_lengths, character_counts(tokenizer)])
    context = model.config.max_seq_len
    rows = max(1, BATCH_TOKENS // context)
    unfinished: list[Score] = []  # document order; the last is being read
    batch: list[tuple[Score, np.ndarray, int]] = []  # (score of the document, window, first)
    for document in documents:
        score = Score()
        unfinished.append(score)
        ids = _count_ids(document, tokenizer.start_id, lengths, score)
        for window, first in cut_windows(ids, context, stride):
            batch.append((score, window, first))
            if len(batch) == rows:
                score_batch(model, batch)
                batch.clear()
                yield from unfinished[:-1]
                del unfinished[:-1]
    score_batch(model, batch)
    yield from unfinished


def _count_ids(
    document: Iterable[np.ndarray], start_id: int | None, lengths: np.ndarray, score: Score
) -> Iterator[np.ndarray]:
    """Yield the ids of a document, after `start_id` if given. Add the `lengths` of predicted ids to `score`: bytes,
    characters, and Chinese, Japanese or Korean characters per id, (vocab_size, 3)."""
    is_predicted = start_id is not None
    if start_id is not None:
        yield np.array([start_id])
    for ids in document:
        size, characters, cjk = lengths[ids if is_predicted else ids[1:]].sum(axis=0).tolist()
        score.add(Score(bytes=size, characters=characters, cjk=cjk))
        is_predicted = is_predicted or len(ids) > 0
        yield ids


def cut_windows(ids: Iterable[np.ndarray], context: int, stride: int) -> Iterator[tuple[np.ndarray, int]]:
    """Cut a stream of ids into windows of at most `context` inputs and as many targets, `stride` apart.

    Yields (window, first): window[:-1] are inputs, window[1:] targets, of which those from window[first] on count.
    Every id counts once, except the very first, with at least context - stride + 1 ids before it, or all there are.
    With stride == context windows do not overlap, as in training; with 1 each id has the whole context before it.
    """
    assert 1 <= stride <= context
    held = np.empty(0, dtype=np.int64)
    first = 1
    for more in ids:
        held = np.concatenate((held, more))
        start = 0
        while len(held) - start > context:
            yield held[start : start + context + 1], first
            start += stride
            first = context + 1 - stride
        held = held[start:]
    if len(held) > first:
        yield held, first


@torch.inference_mode()
def score_batch(model: TransformerLanguageModel, batch: list[tuple[Score, np.ndarray, int]]) -> None:
    """Add the predictions of each (score, window, first) to its score. Dropout is off.

    Shorter windows are padded on the right, which no token sees, because attention is causal. Logits are computed only
    for targets that count, some at a time.
    """
    if not batch:
        return
    length = max(len(window) for _, window, _ in batch)
    padded = torch.tensor(np.stack([np.pad(window, (0, length - len(window))) for _, window, _ in batch]))  # (B, T + 1)
    counts = torch.zeros(len(batch), length - 1, dtype=torch.bool)  # (B, T)
    for i, (_, window, first) in enumerate(batch):
        counts[i, first - 1 : len(window) - 1] = True
    padded, counted = padded.to(model.device), counts.to(model.device)
    was_training = model.training
    model.eval()
    hidden = model.hidden(padded[:, :-1])[counted]  # (B, T, C) -> (N, C)
    model.train(was_training)
    targets = padded[:, 1:][counted]  # (N,)
    at_once = max(1, BATCH_LOGITS // model.config.vocab_size)
    losses = [cross_entropy(model, *part) for part in zip(hidden.split(at_once), targets.split(at_once), strict=True)]
    per_window = torch.cat(losses).cpu().split(counts.sum(dim=1).tolist())
    for (score, _, _), nats in zip(batch, per_window, strict=True):
        score.nats += nats.sum().item()
        score.tokens += len(nats)


def cross_entropy(model: TransformerLanguageModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the nats of each target in fp64, (N,), computed in fp32 or more, from hidden (N, C) and targets (N,)."""
    logits = model.logits(hidden)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="none").to(exact_device(logits.device)).double()


def score_to_json(score: Score) -> dict[str, int | float | None]:
    """Return a score for JSON, with None for infinity and NaN."""
    names = ("loss", "perplexity", "bits_per_byte", "bits_per_character")
    values = {name: getattr(score, name) for name in names}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"tokens": score.tokens, "bytes": score.bytes, "characters": score.characters} | finite


def render_header() -> list[str]:
    names = ["text", "tokens", "bytes", "loss", "perplexity", "bits per byte"]
    return [table_row(names), table_row(["---", *["---:"] * (len(names) - 1)])]


def render_score(name: str, score: Score) -> str:
    numbers = f"{score.tokens:,}", f"{score.bytes:,}", f"{score.loss:.4f}", f"{score.perplexity:,.3f}"
    return table_row([cell(name), *numbers, f"{score.bits_per_byte:.4f}"])


# (bits per character, how text below it reads), for alphabets (docs/reading_losses.md). 8 bits are a random byte.
MEANINGS = (
    (0.5, "known by heart, or a text that repeats itself"),
    (1.1, "as models of hundreds of millions of parameters read English"),
    (1.6, "sentences that hold together, without much sense"),
    (2.0, "mostly real words, in phrases that fit for a moment"),
    (2.6, "words and pieces of words, in no order that lasts"),
    (4.0, "frequent letters and syllables; learning has only begun"),
    (8.0, "nothing learned about texts like this"),
    (math.inf, "worse than chance: a text of another kind or language, or other weights"),
)
MIN_JUDGED_BYTES = 100
MAX_CJK_SHARE = 0.1  # the meanings do not hold above this share of characters


def describe_score(score: Score) -> str:
    """Describe a score in a line."""
    if not score.bytes:
        return "nothing was predicted"
    per_byte, per_character = f"{score.bits_per_byte:.2f}", f"{score.bits_per_character:.2f}"
    numbers = f"{per_byte} bits per byte" + (f", {per_character} per character" if per_character != per_byte else "")
    if score.cjk > MAX_CJK_SHARE * score.characters:
        return f"{numbers} (how this reads was measured for alphabets only)"
    if score.bytes < MIN_JUDGED_BYTES:
        return f"{numbers} (too little text to say how that reads)"
    meaning = next(words for limit, words in MEANINGS if score.bits_per_character < limit)
    return f"{numbers}: {meaning} (docs/reading_losses.md)"


class Likelihood(NamedTuple):
    """A token and the model's log-probabilities (natural) at its position, over the whole vocabulary, before
    temperature, penalties, top-k and top-p."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]  # (token, logprob) of tokens with text, likeliest first


def compute_likelihoods(
    logits: torch.Tensor, tokens: Sequence[int], count: int, bias: torch.Tensor
) -> list[Likelihood]:
    """Return the Likelihood of each of N tokens. `logits`: (N, V), fp32; `bias`: see `forbid_unused_ids`."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]) - total
    values, ids = (logits + bias).topk(min(count, int(bias.isfinite().sum())), dim=-1)
    rows = zip(tokens, chosen.squeeze(1).tolist(), ids.tolist(), (values - total).tolist(), strict=True)
    return [Likelihood(token, logprob, list(zip(*likeliest, strict=True))) for token, logprob, *likeliest in rows]
