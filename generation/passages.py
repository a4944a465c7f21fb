"""Passages of text that a model has not learned: how well it predicts each, and how often it knows the sentence that
comes next.

Every run holds out the same passages of a text (tokenization/held_out.py), so any two runs can be compared on them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from generation.scoring import TOKENS_AT_ONCE, Score, score_batch, score_documents
from model import TransformerLanguageModel
from tokenization.held_out import find_passage_end
from tokenization.metadata import TokenMetadata, read_mask, read_tokens
from tokenization.token_folder import find_tokens
from tokenizer import Tokenizer, load_tokenizer
from tokenizer_base import UnknownCharacterError

T = TypeVar("T")
MOST_PASSAGES = 200
RESAMPLED = 2000  # times
FOUND_BY = 100  # characters of its beginning, middle and end
BLOCK = 1 << 20  # tokens that are searched at a time

SENTENCE_ENDS = re.compile(r"(?<=[.!?\u2026])[\"'\u201d\u2019\xbb)\]]*\s+|(?<=[\u3002\uff01\uff1f])")  # in Chinese too
SHORTEST, LONGEST = 20, 200  # characters of a sentence
BEFORE_SENTENCE = 100  # characters, at least
CONTEXT = 128  # tokens, at most: what comes next hardly depends on more
MOST_BEFORE = 2000  # characters, for as many tokens or more


class Passage(NamedTuple):
    text: str
    ids: np.ndarray | None = None  # of a conversation, whose special tokens no text can express


def learned_text(checkpoint: Checkpoint) -> TokenMetadata | None:
    """The tokens that it was trained on, if it says so and they are in its `data_dir` or below datasets_cache/."""
    try:
        state = checkpoint.training_state()
        return find_tokens(str(state["data"]["tokens_sha256"]), state["config"].get("data_dir"))
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None


def held_out_passages(metadata: TokenMetadata) -> list[Passage]:
    """The validation part of a token folder, passage by passage; or conversation by conversation. Raises DataError if
    the files are missing or damaged."""
    tokenizer = load_tokenizer(metadata.path_beside("tokenizer_file"))
    ids = read_tokens(metadata.path_beside("bin_file"), metadata, mapped=True)[metadata.train_tokens :]
    if metadata.chat_template is None:
        return [Passage(text) for text in passages_in(ids, tokenizer)]
    starts = np.flatnonzero((ids == tokenizer.start_id) & ~read_mask(metadata)[metadata.train_tokens :])
    return [Passage(tokenizer.decode(each), each) for each in np.split(ids, starts)[1:]]


def passages_in(ids: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of ids (tokens,), cut where documents end, and into passages."""
    for document in np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text_id) + 1):  # None equals no id
        text, start = tokenizer.decode(document[tokenizer.byte_lengths[document] > 0]), 0
        while end := find_passage_end(text, start, is_whole=True):
            yield text[start:end]
            start = end


def spread(items: Sequence[T]) -> list[T]:
    """MOST_PASSAGES of them, evenly spread, or all."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, MOST_PASSAGES).astype(int))] if items else []


def found_in_training(metadata: TokenMetadata, passages: Collection[Passage]) -> set[str]:
    """The texts of the passages that are, by a part of each, in the training part of a token folder."""
    tokenizer = load_tokenizer(metadata.path_beside("tokenizer_file"))
    ids = read_tokens(metadata.path_beside("bin_file"), metadata, mapped=True)[: metadata.train_tokens]
    parts = {passage.text: parts_of(passage.text) for passage in passages}
    decoder, read, found = tokenizer.decoder(), "", set[str]()
    for first in range(0, len(ids), BLOCK):
        read = read[-FOUND_BY:] + decoder.push(ids[first : first + BLOCK])
        found |= {text for text in parts.keys() - found if any(part in read for part in parts[text])}
    return found


def parts_of(text: str) -> list[str]:
    text = text.strip()
    return [text[start : start + FOUND_BY] for start in (0, len(text) // 2, max(0, len(text) - FOUND_BY))]


def encode(tokenizer: Tokenizer, passage: Passage) -> np.ndarray:
    """(tokens,). Raises UnknownCharacterError if the vocabulary lacks a character."""
    if passage.ids is None:
        return tokenizer.encode(passage.text)
    return passage.ids[1:] if passage.ids[0] == tokenizer.start_id else passage.ids


def is_known(tokenizer: Tokenizer, passage: Passage) -> bool:
    """Whether the vocabulary has all of its characters."""
    try:
        return len(encode(tokenizer, passage)) > 1
    except UnknownCharacterError:
        return False


def score_passages(model: TransformerLanguageModel, tokenizer: Tokenizer, passages: Sequence[Passage]) -> list[Score]:
    """The score of each. Use a model in fp32. Raises UnknownCharacterError."""
    documents = [[encode(tokenizer, passage)] for passage in passages]
    return list(score_documents(model, tokenizer, documents, stride=max(1, model.config.max_seq_len // 2)))


def total(scores: Iterable[Score]) -> Score:
    result = Score()
    for score in scores:
        result.add(score)
    return result


class Difference(NamedTuple):
    """Of two models, in bits per byte: negative if the first is better."""

    mean: float
    error: float  # two standard errors

    @property
    def is_clear(self) -> bool:
        return abs(self.mean) > self.error


def difference(one: Sequence[Score], other: Sequence[Score]) -> Difference:
    """Of the same passages. By a paired bootstrap over them: how it would vary with other passages of such a text."""
    counts = np.array([[(score.nats, score.bytes) for score in scores] for scores in (one, other)])  # (2, N, 2)
    drawn = np.random.RandomState(0).randint(0, len(one), (RESAMPLED, len(one)))
    nats, lengths = np.moveaxis(counts[:, drawn].sum(axis=2), -1, 0)  # (2, RESAMPLED) each
    error = 2 * np.subtract(*nats / lengths).std() / np.log(2)
    return Difference(total(one).bits_per_byte - total(other).bits_per_byte, float(error))


# The sentence that comes next


class Guessed(NamedTuple):
    right: int
    of: int

    def __str__(self) -> str:
        return f"{self.right} of {self.of}; a coin gets {self.of / 2:g}"


class Place(NamedTuple):
    """Where a sentence ends and the next begins."""

    before: str
    gap: str  # white space
    sentence: str


def next_sentences(model: TransformerLanguageModel, tokenizer: Tokenizer, texts: Iterable[str]) -> Guessed:
    """How often the model finds the true next sentence likelier, by byte, than one from elsewhere in the texts that is
    about as long, at MOST_PASSAGES places or fewer. Pairs as in BLiMP and BabyLM, of text instead of grammar."""
    places = sorted(
        spread([place for text in texts for place in places_in(text)]), key=lambda place: len(place.sentence)
    )
    others = [place.sentence for place in (*places[1:], *places[-2:-1])]
    batch = list[tuple[Score, np.ndarray, int]]()
    for place, other in zip(places, others, strict=False):
        try:
            before = tokenizer.encode(place.before)
            after = [tokenizer.encode(place.gap + sentence) for sentence in (place.sentence, other)]
        except UnknownCharacterError:
            continue
        room = model.config.max_seq_len + 1 - max(map(len, after))
        if room > 0 and place.sentence != other:
            before = before[-min(CONTEXT, room) :]
            for ids in after:
                score = Score(bytes=int(tokenizer.byte_lengths[ids].sum()))
                batch.append((score, np.concatenate((before, ids)).astype(np.int64), len(before)))
    rows = 2 * max(1, TOKENS_AT_ONCE // (4 * CONTEXT))
    for first in range(0, len(batch), rows):
        score_batch(model, batch[first : first + rows])
    bits = [score.bits_per_byte for score, _, _ in batch]
    return Guessed(sum(true < other for true, other in zip(bits[::2], bits[1::2], strict=True)), len(bits) // 2)


def places_in(text: str) -> Iterator[Place]:
    """Where a sentence of a fitting length begins, with enough before it."""
    for end, following in pairwise(SENTENCE_ENDS.finditer(text, BEFORE_SENTENCE)):
        sentence = text[end.end() : following.start()]
        if SHORTEST <= len(sentence) <= LONGEST:
            yield Place(text[max(0, end.start() - MOST_BEFORE) : end.start()], end[0], sentence)
