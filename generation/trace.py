"""--trace: which parts of a generated text stand, word for word, in the text that the model was trained on."""

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

FEWEST_WORDS = 8  # shorter spans are common phrases
MAX_OCCURRENCES = 100  # places where a span may begin that are tried
# Words have no spaces and no punctuation in them, except for an apostrophe. A Chinese, Japanese or Korean character
# counts as a word.
LETTERS = r"[^\s!-/:-@\[-`{-~\u00ab\u00bb\u2000-\u206f\u3000-\ud7ff\uff00-\uff0f\uff1a-\uff20\uff3b-\uff65]+"
WORD = re.compile(rf"[\u3040-\ud7ff]|{LETTERS}(?:['\u2019]{LETTERS})*")
FACTORS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, FEWEST_WORDS + 1, dtype=np.uint64)


class Span(NamedTuple):
    text: str
    words: int
    place: str  # the file and the line that it begins in


class TracedText:
    """The words of a training text, and where each FEWEST_WORDS of them stand. Case, punctuation and line breaks do not
    count. About 40 bytes and a microsecond a word."""

    def __init__(self, pieces: Iterable[Piece]):
        self.pieces = list(pieces)
        hashes = [hashes_of(piece.text) for piece in self.pieces]
        self.starts = np.cumsum([0, *map(len, hashes)])  # the number of the first word of each piece
        self.words = np.concatenate([*hashes, np.zeros(0, np.uint64)])
        grams = grams_of(self.words)
        self.order = np.argsort(grams, kind="stable")
        self.sorted = grams[self.order]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TracedText:
        """Read the training text of a checkpoint. Raises DataError if it does not say which one it is, or if that
        holds conversations."""
        if checkpoint.chat_template() is not None:
            raise DataError(
                f"{checkpoint.path} was trained to repeat the answers of conversations: --trace is for text."
            )
        try:
            config = checkpoint.training_state()["config"]
            if not config["input"]:
                raise KeyError
        except (CheckpointError, KeyError, TypeError):
            raise DataError(
                f"{checkpoint.path} does not say which text it was trained on: --trace is for runs with --input."
            ) from None
        return cls(read_training_text(config))

    def spans(self, text: str) -> list[Span]:
        """Return the spans of `text` that stand in the training text, each as long as possible, from left to right."""
        found, matches = [], list(WORD.finditer(text))
        words = hashes_of(text)
        grams = grams_of(words)
        first, last = np.searchsorted(self.sorted, grams, "left"), np.searchsorted(self.sorted, grams, "right")
        number = 0
        while number < len(grams):
            places = self.order[first[number] : min(last[number], first[number] + MAX_OCCURRENCES)]
            if not len(places):
                number += 1
                continue
            lengths = [self.common(words[number:], place) for place in places.tolist()]
            length = max(lengths)
            span = text[matches[number].start() : matches[number + length - 1].end()]
            found.append(Span(span, length, self.place(int(places[lengths.index(length)]))))
            number += length
        return found

    def common(self, words: np.ndarray, place: int) -> int:
        """Return how many of these words the training text has from word number `place` on."""
        there = self.words[place : place + len(words)]
        differs = np.flatnonzero(there != words[: len(there)])
        return int(differs[0]) if len(differs) else len(there)

    def place(self, number: int) -> str:
        """Return the file and the line of a word."""
        index = int(np.searchsorted(self.starts, number, "right")) - 1
        piece = self.pieces[index]
        if piece.source.note:  # its lines are not those of the file that was given
            return piece.source.name
        match = next(islice(WORD.finditer(piece.text), number - int(self.starts[index]), None))
        line = piece.line + piece.text.count("\n", 0, match.start())
        return f"{piece.source.name}, line {line:,}"


def hashes_of(text: str) -> np.ndarray:
    """Return a number for each word, (words,) uint64; the same only within this process."""
    return np.fromiter((hash(word.casefold()) for word in WORD.findall(text)), np.int64).view(np.uint64)


def grams_of(words: np.ndarray) -> np.ndarray:
    """Return a number for the FEWEST_WORDS words that begin at each word."""
    count = max(0, len(words) - FEWEST_WORDS + 1)
    grams = np.zeros(count, np.uint64)
    for offset, factor in enumerate(FACTORS):
        grams += factor * words[offset : offset + count]
    return grams


def read_training_text(config: dict[str, Any]) -> Iterator[Piece]:
    """Read the text that `input` of a run's configuration names. Raises DataError if it is not there any more."""
    settings = Settings(input=(str(config["input"]),), text_key=str(config.get("text_key") or Settings.text_key))
    return read_pieces(make_readable(find_sources(settings.input), settings).sources, text_key=settings.text_key)


def describe_share(spans: Iterable[Span], texts: Iterable[str]) -> str:
    """Say how many of the words of the texts are in the spans."""
    words, copied = len(WORD.findall(" ".join(texts))), sum(span.words for span in spans)
    share = f"{copied / words:.0%}" if copied else "none"
    return f"{share} of its words stand in the training text, {FEWEST_WORDS} or more in a row"
