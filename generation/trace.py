"""--trace: find the parts of a generated text that occur, word for word, in the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import CheckpointError, DataError
from tokenization.corpus import find_sources
from tokenization.documents import Piece, read_pieces
from tokenization.extract import make_readable
from tokenization.settings import Settings

MIN_SPAN_WORDS = 8  # shorter spans are common phrases
MAX_OCCURRENCES = 100  # places tried for each span
# A word has no spaces or punctuation except apostrophes. A Chinese, Japanese or Korean character counts as a word.
LETTERS_PATTERN = r"[^\s!-/:-@\[-`{-~\u00ab\u00bb\u2000-\u206f\u3000-\ud7ff\uff00-\uff0f\uff1a-\uff20\uff3b-\uff65]+"
WORD = re.compile(rf"[\u3040-\ud7ff]|{LETTERS_PATTERN}(?:['\u2019]{LETTERS_PATTERN})*")
HASH_FACTORS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, MIN_SPAN_WORDS + 1, dtype=np.uint64)


class Span(NamedTuple):
    """A part of a text that occurs in the training text."""

    text: str
    words: int
    place: str  # file and line in which it begins


class TracedText:
    """An index of a training text by runs of MIN_SPAN_WORDS words. Ignores case, punctuation and line breaks. Takes
    about 40 bytes and a microsecond per word."""

    def __init__(self, pieces: Iterable[Piece]):
        self.pieces = list(pieces)
        hashes = [_hash_words(piece.text) for piece in self.pieces]
        self.starts = np.cumsum([0, *map(len, hashes)])  # index of each piece's first word
        self.words = np.concatenate([*hashes, np.zeros(0, np.uint64)])
        grams = _hash_ngrams(self.words)
        self.order = np.argsort(grams, kind="stable")
        self.sorted = grams[self.order]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TracedText:
        """Index the training text of a checkpoint. Raises DataError if it is unknown, or holds conversations."""
        if checkpoint.chat_template() is not None:
            raise DataError(f"--trace works for text only, and {checkpoint.path} was trained on conversations.")
        try:
            config = checkpoint.training_state()["config"]
            if not config["input"]:
                raise KeyError
        except (CheckpointError, KeyError, TypeError):
            raise DataError(
                f"--trace works for runs with --input only, and {checkpoint.path} does not name its text."
            ) from None
        return cls(read_training_text(config))

    def find_spans(self, text: str) -> list[Span]:
        """Return the spans of `text` that occur in the training text, from left to right, each as long as possible."""
        found, matches = [], list(WORD.finditer(text))
        words = _hash_words(text)
        grams = _hash_ngrams(words)
        first, last = np.searchsorted(self.sorted, grams, "left"), np.searchsorted(self.sorted, grams, "right")
        number = 0
        while number < len(grams):
            places = self.order[first[number] : min(last[number], first[number] + MAX_OCCURRENCES)]
            if not len(places):
                number += 1
                continue
            lengths = [self.count_common(words[number:], place) for place in places.tolist()]
            length = max(lengths)
            span = text[matches[number].start() : matches[number + length - 1].end()]
            found.append(Span(span, length, self.place(int(places[lengths.index(length)]))))
            number += length
        return found

    def count_common(self, words: np.ndarray, place: int) -> int:
        """Return how many of these words match the training text from word number `place` on."""
        text_words = self.words[place : place + len(words)]
        differs = np.flatnonzero(text_words != words[: len(text_words)])
        return int(differs[0]) if len(differs) else len(text_words)

    def place(self, number: int) -> str:
        """Return the file and line of a word."""
        index = int(np.searchsorted(self.starts, number, "right")) - 1
        piece = self.pieces[index]
        if piece.source.note:  # extracted text has other lines than the file
            return piece.source.name
        match = next(islice(WORD.finditer(piece.text), number - int(self.starts[index]), None))
        line = piece.line + piece.text.count("\n", 0, match.start())
        return f"{piece.source.name}, line {line:,}"


def _hash_words(text: str) -> np.ndarray:
    """Return a hash of each word, (words,) uint64, valid within this process."""
    return np.fromiter((hash(word.casefold()) for word in WORD.findall(text)), np.int64).view(np.uint64)


def _hash_ngrams(words: np.ndarray) -> np.ndarray:
    """Return a hash of each run of MIN_SPAN_WORDS words."""
    count = max(0, len(words) - MIN_SPAN_WORDS + 1)
    grams = np.zeros(count, np.uint64)
    for offset, factor in enumerate(HASH_FACTORS):
        grams += factor * words[offset : offset + count]
    return grams


def read_training_text(config: dict[str, Any]) -> Iterator[Piece]:
    """Read the text of a run's `input`. Raises DataError if it is gone."""
    settings = Settings(input=(str(config["input"]),), text_key=str(config.get("text_key") or Settings.text_key))
    return read_pieces(make_readable(find_sources(settings.input), settings).sources, text_key=settings.text_key)


def describe_share(spans: Iterable[Span], texts: Iterable[str]) -> str:
    """Describe the share of words of the texts that are in the spans."""
    words, copied = len(WORD.findall(" ".join(texts))), sum(span.words for span in spans)
    if not copied:
        return f"nothing: no {MIN_SPAN_WORDS} words in a row occur in the training text"
    return f"{copied / words:.0%} of its words, in runs of {MIN_SPAN_WORDS} or more, occur in the training text"
