"""Score models on held-out passages: how well they predict each, and how often they pick the right next sentence.

Every run holds out the same passages of a text (tokenization/held_out.py), so any two runs can be compared on them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from generation.scoring import BATCH_TOKENS, Score, score_batch, score_documents
from model import TransformerLanguageModel
from tokenization.held_out import find_passage_end
from tokenization.metadata import TokenMetadata, read_mask, read_tokens
from tokenization.token_folder import find_tokens
from tokenizer import Tokenizer, load_tokenizer
from tokenizer_bpe import UnknownCharacterError

T = TypeVar("T")
MAX_PASSAGES = 200
NUM_RESAMPLES = 2000
PASSAGES_AT_ONCE = 8  # scored between two looks at the clock
PART_CHARACTERS = 100  # a passage is searched for by parts of this length
SEARCH_BLOCK_TOKENS = 1 << 20

# Sentence ends, also Chinese ones.
SENTENCE_ENDS = re.compile(r"(?<=[.!?\u2026])[\"'\u201d\u2019\xbb)\]]*\s+|(?<=[\u3002\uff01\uff1f])")
MIN_SENTENCE, MAX_SENTENCE = 20, 200  # characters
MIN_CHARACTERS_BEFORE = 100
MAX_CONTEXT_TOKENS = 128  # the next sentence hardly depends on more
MAX_CHARACTERS_BEFORE = 2000  # enough for MAX_CONTEXT_TOKENS


class Passage(NamedTuple):
    """A passage of text, or a conversation."""

    text: str
    ids: np.ndarray | None = None  # conversations only, because text cannot express their special tokens


def find_training_tokens(checkpoint: Checkpoint) -> TokenMetadata | None:
    """Return the metadata of a checkpoint's training tokens, if they are in its `data_dir` or below datasets_cache/."""
    try:
        state = checkpoint.training_state()
        return find_tokens(str(state["data"]["tokens_sha256"]), state["config"].get("data_dir"))
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None


def read_held_out(metadata: TokenMetadata) -> list[Passage]:
    """Return the passages, or conversations, of the validation split of a token folder. Raises DataError if files are
    missing or damaged."""
    tokenizer = load_tokenizer(metadata.path_beside("tokenizer_file"))
    ids = read_tokens(metadata.path_beside("bin_file"), metadata, mapped=True)[metadata.train_tokens :]
    if metadata.chat_template is None:
        return [Passage(text) for text in _split_into_passages(ids, tokenizer)]
    starts = np.flatnonzero((ids == tokenizer.start_id) & ~read_mask(metadata)[metadata.train_tokens :])
    return [Passage(tokenizer.decode(part), part) for part in np.split(ids, starts)[1:]]


def _split_into_passages(ids: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the passages of the text of ids, (tokens,), document by document."""
    for document in np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text_id) + 1):  # no id equals None
        text, start = tokenizer.decode(document[tokenizer.byte_lengths[document] > 0]), 0
        while end := find_passage_end(text, start, is_whole=True):
            yield text[start:end]
            start = end


def pick_evenly(items: Sequence[T]) -> list[T]:
    """Return MAX_PASSAGES evenly spread items, or all."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, MAX_PASSAGES).astype(int))] if items else []


def find_in_training(metadata: TokenMetadata, passages: Collection[Passage]) -> set[str]:
    """Return the texts of the passages that occur, at least in part, in the training split of a token folder."""
    tokenizer = load_tokenizer(metadata.path_beside("tokenizer_file"))
    ids = read_tokens(metadata.path_beside("bin_file"), metadata, mapped=True)[: metadata.train_tokens]
    parts = {passage.text: _choose_parts(passage.text) for passage in passages}
    decoder, read, found = tokenizer.decoder(), "", set[str]()
    for first in range(0, len(ids), SEARCH_BLOCK_TOKENS):
        read = read[-PART_CHARACTERS:] + decoder.push(ids[first : first + SEARCH_BLOCK_TOKENS])
        found |= {text for text in parts.keys() - found if any(part in read for part in parts[text])}
    return found


def _choose_parts(text: str) -> list[str]:
    """Return the beginning, middle and end of a text."""
    text = text.strip()
    return [text[start : start + PART_CHARACTERS] for start in (0, len(text) // 2, max(0, len(text) - PART_CHARACTERS))]


def encode(tokenizer: Tokenizer, passage: Passage) -> np.ndarray:
    """Return the ids of a passage, (tokens,). Raises UnknownCharacterError."""
    if passage.ids is None:
        return tokenizer.encode(passage.text)
    return passage.ids[1:] if passage.ids[0] == tokenizer.start_id else passage.ids


def can_encode(tokenizer: Tokenizer, passage: Passage) -> bool:
    """Return whether the vocabulary has all characters of a passage."""
    try:
        return len(encode(tokenizer, passage)) > 1
    except UnknownCharacterError:
        return False


def score_passages(model: TransformerLanguageModel, tokenizer: Tokenizer, passages: Sequence[Passage]) -> list[Score]:
    """Return the score of each passage. Use a model in fp32. Raises UnknownCharacterError."""
    documents = [[encode(tokenizer, passage)] for passage in passages]
    return list(score_documents(model, tokenizer, documents, stride=max(1, model.config.max_seq_len // 2)))


def score_pair(
    models: Sequence[TransformerLanguageModel], tokenizer: Tokenizer, passages: Sequence[Passage], deadline: float
) -> list[list[Score]]:
    """Return each model's scores of the same passages: all, or as many as are scored until `deadline`, a
    time.monotonic(). Use models in fp32. Raises UnknownCharacterError."""
    scores: list[list[Score]] = [[] for _ in models]
    order = np.random.RandomState(0).permutation(len(passages))
    for first in range(0, len(order), PASSAGES_AT_ONCE):
        chosen = [passages[i] for i in order[first : first + PASSAGES_AT_ONCE]]
        for of_model, model in zip(scores, models, strict=True):
            of_model += score_passages(model, tokenizer, chosen)
        if time.monotonic() > deadline:
            break
    return scores


def add_scores(scores: Iterable[Score]) -> Score:
    result = Score()
    for score in scores:
        result.add(score)
    return result


class Difference(NamedTuple):
    """The difference of two models in bits per byte, negative if the first is better."""

    mean: float
    error: float  # two standard errors

    @property
    def is_clear(self) -> bool:
        return abs(self.mean) > self.error


def compare_scores(first: Sequence[Score], second: Sequence[Score]) -> Difference:
    """Return the difference of two models on the same passages, with its error by a paired bootstrap over passages."""
    counts = np.array([[(score.nats, score.bytes) for score in scores] for scores in (first, second)])  # (2, N, 2)
    drawn = np.random.RandomState(0).randint(0, len(first), (NUM_RESAMPLES, len(first)))
    nats, lengths = np.moveaxis(counts[:, drawn].sum(axis=2), -1, 0)  # (2, NUM_RESAMPLES) each
    error = 2 * np.subtract(*nats / lengths).std() / np.log(2)
    return Difference(add_scores(first).bits_per_byte - add_scores(second).bits_per_byte, float(error))


# Next sentences


class NextSentences(NamedTuple):
    """How many next sentences were picked correctly."""

    correct: int
    total: int

    def __str__(self) -> str:
        return f"{self.correct} of {self.total} picked correctly (chance: {self.total / 2:g})"


class SentenceBoundary(NamedTuple):
    """A place where a sentence ends and the next begins."""

    before: str
    gap: str  # white space
    sentence: str


def score_next_sentences(
    model: TransformerLanguageModel, tokenizer: Tokenizer, texts: Iterable[str], deadline: float = math.inf
) -> NextSentences:
    """Count how often the model gives the true next sentence fewer bits per byte than one of similar length from
    elsewhere, at up to MAX_PASSAGES places, or as many as are scored until `deadline`, a time.monotonic(). Pairs as in
    BLiMP and BabyLM, of text instead of grammar."""
    places = sorted(
        pick_evenly([place for text in texts for place in find_places(text)]), key=lambda place: len(place.sentence)
    )
    others = [place.sentence for place in (*places[1:], *places[-2:-1])]
    pairs = list(zip(places, others, strict=False))
    batch = list[tuple[Score, np.ndarray, int]]()
    for place, other in (pairs[i] for i in np.random.RandomState(0).permutation(len(pairs))):
        try:
            before = tokenizer.encode(place.before)
            after = [tokenizer.encode(place.gap + sentence) for sentence in (place.sentence, other)]
        except UnknownCharacterError:
            continue
        room = model.config.max_seq_len + 1 - max(map(len, after))
        if room > 0 and place.sentence != other:
            before = before[-min(MAX_CONTEXT_TOKENS, room) :]
            for ids in after:
                score = Score(bytes=int(tokenizer.byte_lengths[ids].sum()))
                batch.append((score, np.concatenate((before, ids)).astype(np.int64), len(before)))
    rows = 2 * max(1, BATCH_TOKENS // (4 * MAX_CONTEXT_TOKENS))
    for first in range(0, len(batch), rows):
        score_batch(model, batch[first : first + rows])
        if time.monotonic() > deadline:
            batch = batch[: first + rows]
            break
    bits = [score.bits_per_byte for score, _, _ in batch]
    return NextSentences(sum(true < other for true, other in zip(bits[::2], bits[1::2], strict=True)), len(bits) // 2)


def find_places(text: str) -> Iterator[SentenceBoundary]:
    """Yield the places where a sentence of suitable length begins, with enough text before it."""
    for end, following in pairwise(SENTENCE_ENDS.finditer(text, MIN_CHARACTERS_BEFORE)):
        sentence = text[end.end() : following.start()]
        if MIN_SENTENCE <= len(sentence) <= MAX_SENTENCE:
            yield SentenceBoundary(text[max(0, end.start() - MAX_CHARACTERS_BEFORE) : end.start()], end[0], sentence)
