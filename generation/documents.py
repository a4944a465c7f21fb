"""Text files as documents in pieces, whatever their size: the pre-tokenizer's documents, for a model that reads them.

What a document is stands in `tokenization/corpus.py`, from which this wing may not import; a test compares the two.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from tokenizer import END_OF_TEXT, Tokenizer, TokenizerError, UnknownCharacterError, valid_unicode

BLOCK_BYTES = 1 << 14  # a few thousand tokens: what is read runs little ahead of what is scored
PIECE_CHARACTERS = 1 << 14
LONGEST_PIECE = 1 << 20  # text without whitespace is cut at this length anyway: one token in a million may differ
# Between a character that is not whitespace and one that is, GPT-2's pre-tokenizer always starts anew.
CUT = re.compile(r"(?<=\S)[ \n\r\t]")
TEXT_KEY = "text"


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    path: Path
    line: int  # in the file, from 1, of the first character
    column: int  # of the first character, from 0; -1 where escapes hide it


def check_files(paths: list[str]) -> list[Path]:
    """Raises DataError for the first that is no file: before a model is loaded for it."""
    for name in paths:
        if not name or not Path(name).exists():
            raise DataError(f"There is no file {name or 'of an empty name'} (looked for from {Path.cwd()}).")
        if Path(name).is_dir():
            raise DataError(f"{name} is a folder; name the files in it, such as {Path(name, '*.txt')}.")
    return [Path(name) for name in paths]


def read_documents(path: Path, on_read: Callable[[int], None] = lambda count: None) -> Iterator[Iterator[Piece]]:
    """The documents of a text file, or of a JSONL file ("text" of each line), either also as `.gz`.

    Each has to be read to its end before the next is asked for. `on_read` is called with the number of unpacked bytes
    as they are read. Raises DataError naming the file and the place: not UTF-8, not JSON, a damaged `.gz`.
    """
    is_jsonl = path.name.lower().removesuffix(".gz").endswith(".jsonl")
    pieces = jsonl_pieces(path, on_read) if is_jsonl else text_pieces(path, on_read)

    def document(piece: Piece) -> Iterator[Piece]:
        yield piece
        while not piece.ends_document:
            piece = next(pieces)
            yield piece

    for piece in pieces:
        yield document(piece)


def encode_piece(tokenizer: Tokenizer, piece: Piece) -> np.ndarray:
    """(tokens,) int32. Raises TokenizerError that says where in the file a character stands that no token is for."""
    try:
        return tokenizer.encode(piece.text)
    except UnknownCharacterError as error:
        line = piece.line if piece.column < 0 else piece.line + error.line - 1
        column = error.column + (piece.column if error.line == 1 else 0)
        placed = UnknownCharacterError(error.characters, line, 0 if piece.column < 0 else column)
        raise TokenizerError(
            f"{piece.path}: {placed.finding}. The model cannot give it a probability; take it out of the text."
        ) from None


def text_pieces(path: Path, on_read: Callable[[int], None]) -> Iterator[Piece]:
    """What stands between lines that are END_OF_TEXT, without the line break before such a line; nothing empty."""
    held, begun = "", False  # of the document being read; whether a piece of it was given
    line, column = 1, 0  # of `held`
    at_line_start = True
    for text in decoded(path, on_read):
        if at_line_start and text.removesuffix("\n").removesuffix("\r") == END_OF_TEXT:
            document = held.removesuffix("\n").removesuffix("\r") if held.endswith("\n") else held
            if document or begun:
                yield Piece(document, True, path, line, column)
            line, column = line + held.count("\n") + text.count("\n"), 0
            held, begun = "", False
            continue
        at_line_start = text.endswith("\n")
        held += text
        if len(held) > PIECE_CHARACTERS:
            # Never the line break at the end, which belongs to the separator if one follows.
            cuts = [match.start() for match in CUT.finditer(held, 0, len(held))]
            cut = cuts[-1] if cuts else (len(held) - 2 if len(held) > LONGEST_PIECE else 0)
            if cut:
                piece, held = held[:cut], held[cut:]
                yield Piece(piece, False, path, line, column)
                begun = True
                breaks = piece.count("\n")
                line, column = line + breaks, len(piece) - piece.rfind("\n") - 1 if breaks else column + len(piece)
    if held or begun:
        yield Piece(held, True, path, line, column)


def jsonl_pieces(path: Path, on_read: Callable[[int], None]) -> Iterator[Piece]:
    lines: list[str] = []
    number = 0
    for text in decoded(path, on_read):
        lines.append(text)
        if text.endswith("\n"):
            number += 1
            yield from record_pieces(path, number, "".join(lines))
            lines.clear()
    yield from record_pieces(path, number + 1, "".join(lines))


def record_pieces(path: Path, number: int, line: str) -> Iterator[Piece]:
    if not line.strip():
        return
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of open brackets
        raise DataError(f"{path}, line {number}: not valid JSON ({error}).") from None
    if not isinstance(record, dict) or not isinstance(record.get(TEXT_KEY), str):
        raise DataError(f'{path}, line {number}: an object with a string under "{TEXT_KEY}" is needed.')
    text = valid_unicode(record[TEXT_KEY])
    start = 0
    while len(text) - start > LONGEST_PIECE:
        cuts = [match.start() for match in CUT.finditer(text, start + 1, start + PIECE_CHARACTERS)]
        end = cuts[-1] if cuts else start + LONGEST_PIECE
        yield Piece(text[start:end], False, path, number, -1)
        start = end
    if text:
        yield Piece(text[start:], True, path, number, -1)


def decoded(path: Path, on_read: Callable[[int], None]) -> Iterator[str]:
    """The text of a file, line by line, long lines in parts; without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the next byte
    try:
        with open_binary(path) as file:
            while True:
                block = file.readline(BLOCK_BYTES)
                waiting = len(decoder.getstate()[0])  # bytes of a character that the block before began
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path} is not UTF-8 text: {error.reason} at byte {position - waiting + error.start}. Convert "
                        f"it first, for example: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > converted.txt"
                    ) from None
                if not block:
                    return
                text = text.removeprefix("\ufeff") if position == 0 else text
                position += len(block)
                on_read(len(block))
                if text:
                    yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Fetch or pack it again.") from None


def open_binary(path: Path) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")
