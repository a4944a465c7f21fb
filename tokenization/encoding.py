"""Pieces of text to arrays of token ids, in threads; the sample for the vocabulary; the split for validation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.chat import encode_parts
from common.errors import DataError
from tokenization.conversations import Conversation
from tokenization.documents import Piece
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_base import UnknownCharacterError

SPLIT_TOLERANCE = 0.05  # share of all tokens by which the split may move to reach the end of a document


def sample_evenly(texts: Iterable[str], share: float) -> Iterator[str]:
    """Some of the texts, evenly spread, that make up `share` of the total length; all if `share` is 1 or more. If every
    text is longer than that, a part of the last one."""
    credit, text, is_empty = 0.0, "", True
    for text in texts:
        credit += len(text) * min(share, 1)
        if credit >= len(text):
            credit -= len(text)
            is_empty = False
            yield text
    if is_empty:
        yield text[: math.ceil(credit)]


Text = Piece | Conversation
Reader = Callable[[Callable[[int], None]], Iterator[Text]]  # its argument is called with the number of bytes read


def begins_document(text: Text) -> bool:
    return isinstance(text, Conversation) or text.begins_document


@dataclass(frozen=True)
class Chunk:
    """The text that one thread encodes at a time."""

    pieces: list[Text]
    bytes_read: int  # of all input, up to the end of this chunk


class Encoded(NamedTuple):
    """A chunk's tokens."""

    tokens: np.ndarray  # (tokens,)
    document_ends: np.ndarray  # (documents,) int64
    in_answer: np.ndarray | None = None  # (tokens,) bool, of conversations


def read_chunks(read: Reader, characters_per_chunk: float) -> Iterator[Chunk]:
    """Group the pieces of the input into chunks of about the same size."""
    bytes_read = 0

    def on_read(count: int) -> None:
        nonlocal bytes_read
        bytes_read += count

    pieces: list[Text] = []
    characters = 0
    for piece in read(on_read):
        pieces.append(piece)
        characters += len(piece.text)
        if characters >= characters_per_chunk:
            yield Chunk(pieces, bytes_read)
            pieces, characters = [], 0
    if pieces:
        yield Chunk(pieces, bytes_read)


def encode_in_order(
    tokenizer: Tokenizer, chunks: Iterable[Chunk], unknown: str, dtype: np.dtype, workers: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Encode all chunks, in order; `workers` + 1 of them are in memory at a time.

    Threads are enough: tiktoken, `tokenizers` and NumPy release the interpreter lock while they work.
    """
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(encode_chunk, tokenizer, chunk.pieces, unknown, dtype)))
            if len(waiting) > workers:
                oldest, encoded = waiting.popleft()
                yield oldest, encoded.result()
        for chunk, encoded in waiting:
            yield chunk, encoded.result()
    finally:
        pool.shutdown(cancel_futures=True)


def encode_chunk(tokenizer: Tokenizer, pieces: Sequence[Text], unknown: str, dtype: np.dtype) -> Encoded:
    """A BPE document ends with the end-of-text token, and begins with the tokenizer's own beginning if that is another
    token. A character vocabulary has none and keeps the line break before the separator. A conversation is encoded with
    `encode_parts`."""
    begin = [] if tokenizer.bos_id in (None, tokenizer.end_of_text_id) else [np.array([tokenizer.bos_id], np.int32)]
    end = [] if tokenizer.end_of_text_id is None else [np.array([tokenizer.end_of_text_id], np.int32)]
    arrays, ends, count, answers = [], [], 0, []
    for piece in pieces:
        if isinstance(piece, Conversation):
            ids, in_answer = encode_parts(tokenizer, piece.parts)
            answers.append(in_answer)
        else:
            ids = encode_piece(tokenizer, piece, unknown)
            if piece.begins_document or piece.ends_document:
                ids = np.concatenate([*begin * piece.begins_document, ids, *end * piece.ends_document])
        arrays.append(ids)
        count += len(ids)
        if isinstance(piece, Conversation) or piece.ends_document:
            ends.append(count)
    return Encoded(
        np.concatenate(arrays).astype(dtype),
        np.array(ends, dtype=np.int64),
        np.concatenate(answers) if answers else None,
    )


def encode_documents(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[Iterator[np.ndarray]]:
    """The ids of each document's text, a piece at a time, without an end-of-text token and without the line break after
    it. Read each document to its end before the next one. Raises UnknownCharacterError."""
    pieces = iter(pieces)

    def document(piece: Piece) -> Iterator[np.ndarray]:
        yield encode_piece(tokenizer, piece._replace(line_break=""), "error")
        while not piece.ends_document:
            piece = next(pieces)
            yield encode_piece(tokenizer, piece._replace(line_break=""), "error")

    yield from map(document, pieces)


def encode_piece(tokenizer: Tokenizer, piece: Piece, unknown: str) -> np.ndarray:
    """Raises UnknownCharacterError that names the place in the file."""
    if not isinstance(tokenizer, CharacterTokenizer):
        return tokenizer.encode(piece.text)
    try:
        return tokenizer.encode(piece.text + piece.line_break, unknown)
    except UnknownCharacterError as error:
        # The column is unknown in a line of JSONL, because of its escapes, and where a piece begins inside a line.
        line = piece.line if piece.source.is_jsonl else piece.line + error.line - 1
        column = 0 if piece.source.is_jsonl or error.line == 1 else error.column
        raise UnknownCharacterError(error.characters, line, column, piece.source.place) from None


def split_index(total: int, document_ends: np.ndarray, train_split: float, tolerance: float = SPLIT_TOLERANCE) -> int:
    """Where the training tokens end: at the document end nearest to `train_split`, or exactly at `train_split` if no
    document ends within `tolerance`, a share of all tokens.

    Raises DataError if there are too few tokens for two splits.
    """
    if total < 2:
        raise DataError(f"The text gives {total} tokens; training and validation need at least one each.")
    target = min(max(int(total * train_split), 1), total - 1)
    after = int(np.searchsorted(document_ends, target))
    near = [int(end) for end in document_ends[max(after - 1, 0) : after + 1] if 0 < end < total]
    best = min(near, key=lambda end: abs(end - target), default=target)
    return best if abs(best - target) <= tolerance * total else target
