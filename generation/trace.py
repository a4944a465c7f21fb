"""--trace: find the parts of a generated text that occur, word for word, in the training text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import CheckpointError, DataError
from tokenization.corpus import Source
from tokenization.documents import Piece, read_pieces
from tokenization.extract import find_files, make_readable
from tokenization.held_out import choose_held_out, split_passages
from tokenization.settings import HUB, Settings
from tokenization.token_folder import find_tokens

MIN_SPAN_WORDS = 8  # shorter spans are common phrases
MAX_OCCURRENCES = 100  # places tried for each span
MAX_COMPANION_BYTES = 2e8  # a larger companion is not searched
TEXTS = {"input": "tokens_sha256", "companion": "companion_sha256"}  # key of the config -> of the state's `data`
# A word has no spaces or punctuation except apostrophes. A Chinese, Japanese or Korean character counts as a word.
LETTERS_PATTERN = r"[^\s!-/:-@\[-`{-~\u00ab\u00bb\u2000-\u206f\u3000-\ud7ff\uff00-\uff0f\uff1a-\uff20\uff3b-\uff65]+"
WORD = re.compile(rf"[\u3040-\ud7ff]|{LETTERS_PATTERN}(?:['\u2019]{LETTERS_PATTERN})*")
HASH_FACTORS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, MIN_SPAN_WORDS + 1, dtype=np.uint64)


class Span(NamedTuple):
    """A part of a text that occurs in the training text."""

    text: str
    words: int
    place: str  # file and line in which it begins
    is_held_out: bool  # the passage was not trained on


class TracedText:
    """An index of a training text by runs of MIN_SPAN_WORDS words. Ignores case, punctuation and line breaks. Takes
    about 40 bytes and a microsecond per word."""

    def __init__(self, passages: Iterable[tuple[Piece, bool]], notes: Sequence[str] = ()):
        """`passages`: (passage, is_held_out); `notes`: what has changed since, or is not searched."""
        marked = list(passages)
        self.pieces = [piece for piece, _ in marked]
        self.held_out = [is_held_out for _, is_held_out in marked]
        self.notes = notes
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
            state = checkpoint.training_state()
            config, data = dict(state["config"]), dict(state.get("data", {}))
            if not config["input"]:
                raise KeyError
        except (CheckpointError, KeyError, TypeError):
            raise DataError(
                f"--trace works for runs with --input only, and {checkpoint.path} does not name its text."
            ) from None
        return cls.read(config, data)

    @classmethod
    def read(cls, config: dict[str, Any], data: dict[str, Any], max_companion: float = MAX_COMPANION_BYTES) -> Self:
        """Index the texts of a run: `input` and, up to `max_companion` bytes, its companion. `config`, `data`: of its
        training state. Raises DataError if a text is gone."""
        passages, notes = list[tuple[Piece, bool]](), []
        for key, hash_key in TEXTS.items():
            if not (name := config.get(key)):
                continue
            limit = config.get("max_mb") if name.startswith(HUB) else None
            settings = Settings(input=(name,), text_key=config.get("text_key") or Settings.text_key, max_mb=limit)
            sources = make_readable(find_files(settings), settings).sources
            if key == "companion" and sum(source.text_bytes for source in sources) > max_companion:
                notes.append(f"{name} is too large to be searched")
                continue
            then = find_tokens(str(data.get(hash_key)), config.get("data_dir"))
            files = [{"name": source.name, "size": source.size} for source in sources]
            if then is not None and sorted(map(str, then.source_files)) != sorted(map(str, files)):
                notes.append(f"the files of {name} have changed since the training")
            passages += _read_passages(sources, settings)
        return cls(passages, notes)

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
            # The longest; of several, one that was trained on.
            length, is_trained, place = max(
                (self.count_common(words[number:], place), not self.held_out[self.piece_of(place)], -place)
                for place in places.tolist()
            )
            span = text[matches[number].start() : matches[number + length - 1].end()]
            found.append(Span(span, length, self.place(-place), not is_trained))
            number += length
        return found

    def count_common(self, words: np.ndarray, place: int) -> int:
        """Return how many of these words match the training text from word number `place` on."""
        text_words = self.words[place : place + len(words)]
        differs = np.flatnonzero(text_words != words[: len(text_words)])
        return int(differs[0]) if len(differs) else len(text_words)

    def piece_of(self, number: int) -> int:
        """Return the index of the piece that a word is in."""
        return int(np.searchsorted(self.starts, number, "right")) - 1

    def place(self, number: int) -> str:
        """Return the file and line of a word."""
        index = self.piece_of(number)
        piece, line = self.pieces[index], self.pieces[index].line
        if piece.source.note:  # extracted text has other lines than the file
            return piece.source.name
        if not piece.source.is_jsonl:  # a record is in one line
            match = next(islice(WORD.finditer(piece.text), number - int(self.starts[index]), None))
            line += piece.text.count("\n", 0, match.start())
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


def _read_passages(sources: Sequence[Source], settings: Settings) -> list[tuple[Piece, bool]]:
    """Return the passages of a text, and which are held out from training."""

    def read(on_read: Callable[[int], None]) -> Iterator[Piece]:
        return read_pieces(sources, text_key=settings.text_key, on_read=on_read)

    total_bytes = sum(source.text_bytes for source in sources)
    held_out, *_ = choose_held_out(read, 1 - settings.train_split, total_bytes)
    passages = split_passages(read(lambda count: None))
    marked = held_out.mark_passages(passages) if held_out else ((passage, False) for passage in passages)
    return [(passage, is_held_out) for passage, is_held_out in marked if isinstance(passage, Piece)]


def describe_share(spans: Iterable[Span], texts: Iterable[str]) -> str:
    """Describe the share of words of the texts that are in the spans, without held-out passages."""
    words, copied = len(WORD.findall(" ".join(texts))), sum(span.words for span in spans if not span.is_held_out)
    if not copied:
        return f"nothing: no {MIN_SPAN_WORDS} words in a row occur in the training text"
    return f"{copied / words:.0%} of its words, in runs of {MIN_SPAN_WORDS} or more, occur in the training text"
