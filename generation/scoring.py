"""How well a model predicts a text: the log-probability of each of its tokens, over sliding windows.

Each document is scored alone. Its first token is predicted from an end-of-text token, which separates documents in
training too. A character vocabulary has no such token: the first character is then not predicted, and does not count.
The end-of-text token itself never counts: it is not text.
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

TOKENS_AT_ONCE = 8192  # positions in a batch of windows: about 100 MB for the widest layer of GPT-2 small, in fp32
LOGITS_AT_ONCE = 1 << 24  # 64 MiB in fp32; the logits of whole windows would take more than the model
Documents = Iterable[Iterable[np.ndarray]]  # the ids of each, (tokens,) at a time


@dataclass
class Score:
    """What was predicted, and how well."""

    nats: float = 0.0  # negative log-likelihood, summed in fp64
    tokens: int = 0  # predicted tokens
    bytes: int = 0  # UTF-8 bytes of their text
    characters: int = 0
    cjk: int = 0  # characters that are Chinese, Japanese or Korean

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
        """Comparable across tokenizers; nan if no byte of text was predicted."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bits_per_character(self) -> float:
        """Comparable across alphabets, of which many take two or three bytes a letter; nan like `bits_per_byte`."""
        return self.nats / math.log(2) / self.characters if self.characters else math.nan


def score_documents(
    model: TransformerLanguageModel, tokenizer: Tokenizer, documents: Documents, stride: int
) -> Iterator[Score]:
    """The score of each document, in order. Memory is that of one batch of windows, however long a document is.

    `stride` is 1 to max_seq_len: see `windows`. Use a model in fp32: bf16 changes log-probabilities by some hundredths.
    Errors of `documents` are raised.
    """
    lengths = np.column_stack([tokenizer.byte_lengths, character_counts(tokenizer)])
    context = model.config.max_seq_len
    rows = max(1, TOKENS_AT_ONCE // context)
    unfinished: list[Score] = []  # in order; the last is that of the document that is being read
    batch: list[tuple[Score, np.ndarray, int]] = []  # (score of its document, window, first)
    for document in documents:
        score = Score()
        unfinished.append(score)
        ids = counted_ids(document, tokenizer.start_id, lengths, score)
        for window, first in windows(ids, context, stride):
            batch.append((score, window, first))
            if len(batch) == rows:
                score_batch(model, batch)
                batch.clear()
                yield from unfinished[:-1]
                del unfinished[:-1]
    score_batch(model, batch)
    yield from unfinished


def counted_ids(
    document: Iterable[np.ndarray], start_id: int | None, lengths: np.ndarray, score: Score
) -> Iterator[np.ndarray]:
    """The ids of a document, after that which begins it if there is one. Adds the `lengths` of the predicted ones to
    `score`: (vocab_size, 3), bytes, characters, and those that are Chinese, Japanese or Korean."""
    is_predicted = start_id is not None
    if start_id is not None:
        yield np.array([start_id])
    for ids in document:
        size, characters, cjk = lengths[ids if is_predicted else ids[1:]].sum(axis=0).tolist()
        score.add(Score(bytes=size, characters=characters, cjk=cjk))
        is_predicted = is_predicted or len(ids) > 0
        yield ids


def windows(ids: Iterable[np.ndarray], context: int, stride: int) -> Iterator[tuple[np.ndarray, int]]:
    """Cut a stream of ids into windows of at most `context` inputs and as many targets, `stride` apart.

    Yields (window, first): window[:-1] are inputs, window[1:] their targets, and the targets from window[first] on
    count. Every id counts once, except the very first. Before it are at least context - stride + 1 ids, or all that
    there are. stride == context: windows do not overlap, as in training; 1: each id has the whole context before it.
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
    """Add the predictions of each (score, window, first) to its score. Draws no random numbers: dropout is off.

    Shorter windows are padded on the right: attention is causal, so no token sees the padding after it. Logits are
    computed only for the targets that count, some at a time.
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
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    losses = [cross_entropy(model, *part) for part in zip(hidden.split(at_once), targets.split(at_once), strict=True)]
    per_window = torch.cat(losses).cpu().split(counts.sum(dim=1).tolist())
    for (score, _, _), nats in zip(batch, per_window, strict=True):
        score.nats += nats.sum().item()
        score.tokens += len(nats)


def cross_entropy(model: TransformerLanguageModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """hidden (N, C), targets (N,) -> nats (N,) in fp64, computed in fp32 or more."""
    logits = model.logits(hidden)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="none").to(exact_device(logits.device)).double()


def json_row(score: Score) -> dict[str, int | float | None]:
    """Numbers that are not finite become None, because JSON has no such numbers."""
    names = ("loss", "perplexity", "bits_per_byte", "bits_per_character")
    values = {name: getattr(score, name) for name in names}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"tokens": score.tokens, "bytes": score.bytes, "characters": score.characters} | finite


def table_head() -> list[str]:
    names = ["text", "tokens", "bytes", "loss", "perplexity", "bits per byte"]
    return [table_row(names), table_row(["---", *["---:"] * (len(names) - 1)])]


def table_line(name: str, score: Score) -> str:
    numbers = f"{score.tokens:,}", f"{score.bytes:,}", f"{score.loss:.4f}", f"{score.perplexity:,.3f}"
    return table_row([cell(name), *numbers, f"{score.bits_per_byte:.4f}"])


# What a text with fewer bits per character than each of these reads like, in alphabets (docs/reading_losses.md); 8 bits
# are a byte drawn blindly.
MEANINGS = (
    (0.5, "it knows this text by heart, or the text repeats itself"),
    (1.1, "as models of hundreds of millions of parameters read English"),
    (1.6, "sentences that hold together, without much sense"),
    (2.0, "mostly real words, in phrases that fit for a moment"),
    (2.6, "words and pieces of words, in no order that lasts"),
    (4.0, "frequent letters and syllables; it has only begun to learn texts like this"),
    (8.0, "it has learned nothing of texts like this"),
    (math.inf, "worse than chance: a text of another kind or language, or other weights"),
)
MOST_CJK = 0.1  # share of the characters of a text that the meanings are for


def meaning(score: Score) -> str:
    """One line for people about a score."""
    if not score.bytes:
        return "nothing was predicted"
    per_byte, per_character = f"{score.bits_per_byte:.2f}", f"{score.bits_per_character:.2f}"
    numbers = f"{per_byte} bits per byte" + (f", {per_character} per character" if per_character != per_byte else "")
    if score.cjk > MOST_CJK * score.characters:
        return f"{numbers}: what that reads like was measured for alphabets only"
    said = next(words for most, words in MEANINGS if score.bits_per_character < most)
    return f"{numbers}: {said} (docs/reading_losses.md)"


class Likelihood(NamedTuple):
    """A token, and the model's probabilities at its place: over the whole vocabulary, before temperature, penalties,
    top-k and top-p. Logarithms are natural."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]  # (token, logprob), likeliest first, only tokens with text


def likelihoods(logits: torch.Tensor, tokens: Sequence[int], count: int, bias: torch.Tensor) -> list[Likelihood]:
    """The Likelihood of each of the N tokens. `logits` (N, V) are fp32; only ids with text are listed as likeliest: see
    `only_text` for `bias`."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]) - total
    values, ids = (logits + bias).topk(min(count, int(bias.isfinite().sum())), dim=-1)
    rows = zip(tokens, chosen.squeeze(1).tolist(), ids.tolist(), (values - total).tolist(), strict=True)
    return [Likelihood(token, logprob, list(zip(*likeliest, strict=True))) for token, logprob, *likeliest in rows]
