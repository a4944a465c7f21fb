"""Encode pieces of text in threads; sample text for the vocabulary; choose the end of the training tokens."""

from __future__ import annotations

import itertools
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
from tokenizer_bpe import UnknownCharacterError

SPLIT_TOLERANCE = 0.05  # share of all tokens by which the split may move to the end of a document


def sample_evenly(texts: Iterable[str], share: float) -> Iterator[str]:
    """Yield evenly spread texts that make up `share` of the total length; all if `share` is 1 or more. If every text is
    longer than that, yield a part of the last one."""
    credit, text, is_empty = 0.0, "", True
    for text in texts:
        credit += len(text) * min(share, 1)
        if credit >= len(text):
            credit -= len(text)
            is_empty = False
            yield text
    if is_empty:
        yield text[: math.ceil(credit)]


SourceText = Piece | Conversation
Reader = Callable[[Callable[[int], None]], Iterator[SourceText]]  # calls its argument with the number of bytes read


def concatenate(*readers: Reader) -> Reader:
    """Return a reader of the texts of several, one after the other."""
    return lambda on_read: itertools.chain.from_iterable(read(on_read) for read in readers)


def begins_document(text: SourceText) -> bool:
    return isinstance(text, Conversation) or text.begins_document


@dataclass(frozen=True)
class Chunk:
    """Text that one thread encodes at a time."""

    pieces: list[SourceText]
    bytes_read: int  # position of its end in all input


class Encoded(NamedTuple):
    """The tokens of a chunk."""

    tokens: np.ndarray  # (tokens,)
    document_ends: np.ndarray  # (documents,) int64
    in_answer: np.ndarray | None = None  # (tokens,) bool, for conversations


def read_chunks(read: Reader, characters_per_chunk: float) -> Iterator[Chunk]:
    """Group the pieces of the input into chunks of about the same size."""
    bytes_read = 0

    def on_read(count: int) -> None:
        nonlocal bytes_read
        bytes_read += count

    pieces: list[SourceText] = []
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
    """Yield the chunks with their tokens, in order; `workers` + 1 of them are in memory at a time.

    Threads are enough, because tiktoken, `tokenizers` and NumPy release the interpreter lock.
    """
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_encode_chunk, tokenizer, chunk.pieces, unknown, dtype)))
            if len(waiting) > workers:
                oldest, encoded = waiting.popleft()
                yield oldest, encoded.result()
        for chunk, encoded in waiting:
            yield chunk, encoded.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_chunk(tokenizer: Tokenizer, pieces: Sequence[SourceText], unknown: str, dtype: np.dtype) -> Encoded:
    """Encode the pieces of a chunk. A BPE document ends with the end-of-text token, and begins with the tokenizer's
    `bos_id` if that is another token. A character vocabulary has neither, and keeps the line break before the
    separator. Conversations are encoded by `encode_parts`."""
    begin = [] if tokenizer.bos_id in (None, tokenizer.end_of_text_id) else [np.array([tokenizer.bos_id], np.int32)]
    end = [] if tokenizer.end_of_text_id is None else [np.array([tokenizer.end_of_text_id], np.int32)]
    arrays, ends, count, answers = [], [], 0, []
    for piece in pieces:
        if isinstance(piece, Conversation):
            ids, in_answer = encode_parts(tokenizer, piece.parts)
            answers.append(in_answer)
        else:
            ids = _encode_piece(tokenizer, piece, unknown)
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
    """Yield the ids of each document, a piece at a time, without end-of-text token and final line break. Read each
    document to its end before the next. Raises UnknownCharacterError."""
    pieces = iter(pieces)

    def document(piece: Piece) -> Iterator[np.ndarray]:
        yield _encode_piece(tokenizer, piece._replace(line_break=""), "error")
        while not piece.ends_document:
            piece = next(pieces)
            yield _encode_piece(tokenizer, piece._replace(line_break=""), "error")

    yield from map(document, pieces)


def _encode_piece(tokenizer: Tokenizer, piece: Piece, unknown: str) -> np.ndarray:
    """Encode a piece. Raises UnknownCharacterError with the place in the file."""
    if not isinstance(tokenizer, CharacterTokenizer):
        return tokenizer.encode(piece.text)
    try:
        return tokenizer.encode(piece.text + piece.line_break, unknown)
    except UnknownCharacterError as error:
        # The column is unknown in JSONL, because of escapes, and in a piece that begins inside a line.
        line = piece.line if piece.source.is_jsonl else piece.line + error.line - 1
        column = 0 if piece.source.is_jsonl or error.line == 1 else error.column
        raise UnknownCharacterError(error.characters, line, column, piece.source.place) from None


def split_index(total: int, document_ends: np.ndarray, train_split: float, cuts_documents: bool) -> int:
    """Return the number of training tokens: the document end nearest to `train_split` or, if it `cuts_documents`,
    exactly `train_split` if no document ends within SPLIT_TOLERANCE.

    Raises DataError if there are too few tokens for two splits.
    """
    if total < 2:
        raise DataError(f"The text has only {total} tokens, but training and validation need one each.")
    target = min(max(int(total * train_split), 1), total - 1)
    after = int(np.searchsorted(document_ends, target))
    near = [int(end) for end in document_ends[max(after - 1, 0) : after + 1] if 0 < end < total]
    best = min(near, key=lambda end: abs(end - target), default=target)
    return target if cuts_documents and abs(best - target) > SPLIT_TOLERANCE * total else best
