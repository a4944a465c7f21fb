"""Read the documents of the input: text between separator lines, and records of JSON files."""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import DataError
from common.output import byte_size
from tokenization.corpus import (
    Source,
    UnreadableError,
    decode_blocks,
    read_blocks,
    read_text_blocks,
    remove_invisible,
    require_unchanged,
)
from tokenization.settings import DOCUMENT_SEPARATOR, Settings
from tokenizer_bpe import joining_character_class, replace_surrogates

# Longer text is cut into pieces. Without a good place to cut (no whitespace, or only whitespace), it is cut here
# anyway, which may change a token. Waiting for a good place would mean searching the same text again and again.
PIECE_CHARACTERS = 1 << 18
MAX_JSON_LINE_BYTES = 50_000_000  # some fifty books
# The cut is before the last character of a match, where every pre-tokenizer of `tokenizer_bpe.SPLITTINGS` starts a new
# word. Llama 3's and Qwen's join line breaks with the punctuation before them. (A lookbehind takes twice as long.)
CUT_PATTERN = re.compile(r"\S[ \t]|[^\W_][\r\n]|\S\n[^\W_]")
JOINERS = "\u200c\u200d"
MAX_MARKS = 32  # combining marks on a letter; more are not writing


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins_document: bool
    ends_document: bool
    line_break: str  # "\n" or "": not part of the document, but kept by character vocabularies
    source: Source
    line: int  # line of its first character in the file, from 1


def read_pieces(
    sources: Iterable[Source],
    separator: str = DOCUMENT_SEPARATOR,
    text_key: str = "text",
    on_read: Callable[[int], None] = lambda count: None,
) -> Iterator[Piece]:
    """Yield the documents of all sources. Long documents come in pieces, cut where it does not change the tokens.

    A document is the text between two lines that equal `separator` ("" is a blank line); the line break before the
    separator belongs to the separator. In JSONL a document is the value of `text_key` in a line. Every line break
    becomes "\n". Empty documents, byte order marks and records without text are left out. Calls `on_read` with the
    number of unpacked bytes of each block.

    Raises DataError with file and place for invalid UTF-8, a damaged `.gz`, or a file that has changed.
    """
    for source in sources:
        if source.is_jsonl:
            yield from _read_jsonl_pieces(source, text_key, on_read)
        else:
            line, begins_document = 1, True
            for text, ends_document, line_break, lines_before in split_documents(
                decode_blocks(source, on_read), separator
            ):
                line += lines_before
                yield Piece(text, begins_document, ends_document, line_break, source, line)
                begins_document = ends_document
                line += text.count("\n")
        require_unchanged(source)


def split_documents(blocks: Iterable[str], separator: str) -> Iterator[tuple[str, bool, str, int]]:
    """Split a stream of text at separator lines, and long documents into pieces.

    Yields (text, ends_document, line break before the next separator, line breaks skipped before the text).
    """
    # A newline is added at the start of the stream, so that every separator is between two newlines. The second one is
    # also the newline before the next document (`fresh`).
    separator_line = re.compile(r"\n" + re.escape(separator) + r"(?=\n)")
    last_line = re.compile(r"\n" + re.escape(separator) + r"\Z")
    rest, fresh, skipped = "\n", True, 0
    for block in blocks:
        unseen = max(len(rest) - len(separator) - 1, 0)  # a new separator begins here or later
        rest += block
        start = 0
        for separated in separator_line.finditer(rest, unseen):
            text = rest[start + fresh : separated.start()]
            if text or not fresh:
                yield text, True, "\n", skipped
                skipped = 0
            skipped += 1 + (separated.start() > start or not fresh)
            start, fresh = separated.end(), True
        rest = rest[start:]
        if len(rest) > PIECE_CHARACTERS:
            newline = rest.rfind("\n")  # a separator may begin after it
            end = newline if len(rest) - newline <= len(separator) + 1 else len(rest) - 1
            cut = find_cut(rest, end) or find_letter_boundary(rest, min(end, PIECE_CHARACTERS))
            if cut > fresh:
                yield rest[fresh:cut], False, "", skipped
                rest, fresh, skipped = rest[cut:], False, 0
    match = last_line.search(rest)
    text = rest[fresh : match.start()] if match else rest[fresh:]
    if text or not fresh:
        yield text, True, "\n" if match else "", skipped


def find_cut(text: str, limit: int) -> int:
    """Return the last index up to `limit` before which a cut changes no token; 0 if there is none.

    `limit` < len(text), so neither part is empty.
    """
    for window in (4096, limit):
        if cuts := deque(CUT_PATTERN.finditer(text, max(limit - window - 1, 0), limit + 1), maxlen=1):
            return cuts[0].end() - 1
    return 0


def find_letter_boundary(text: str, at: int) -> int:
    """Return the last index up to `at` that does not separate a letter from its marks."""
    joining = re.compile(f"[{joining_character_class()}]")
    for place in range(at, max(0, at - MAX_MARKS), -1):
        if not joining.match(text, place) and text[place - 1] not in JOINERS:
            return place
    return at


@dataclass(frozen=True)
class BadRecord:
    """An unusable record."""

    place: str  # line 12, record 3, message 7
    reason: str


OnBad = Callable[[BadRecord], None]


@dataclass
class Tally:
    """Counts the usable and unusable records of a file."""

    good: int = 0
    bad: int = 0
    first: BadRecord | None = None

    def skip(self, record: BadRecord) -> None:
        self.bad += 1
        self.first = self.first or record

    def describe(self) -> str:
        """Describe what was left out, and why; "" if nothing was."""
        if self.first is None:
            return ""
        return f"{self.bad:,} of its {self.good + self.bad:,} records; {self.first.place}: {self.first.reason}"

    def require_most(self) -> None:
        """Raise UnreadableError if more than half of the records are unusable."""
        if self.bad > self.good:
            raise UnreadableError(f"most of its records are unusable: {self.describe()}")


class Record(NamedTuple):
    number: int  # index in an array, or line number; from 1
    place: str
    value: Any


def _read_jsonl_pieces(source: Source, text_key: str, on_read: Callable[[int], None]) -> Iterator[Piece]:
    for number, _, record in read_records(source, lambda bad: None, on_read):
        try:
            text = read_text(record, text_key)
        except ValueError:  # listed in the report
            continue
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            piece = text[start : start + PIECE_CHARACTERS + 1]
            end = start + (find_cut(piece, PIECE_CHARACTERS) or find_letter_boundary(piece, PIECE_CHARACTERS))
            yield Piece(text[start:end], start == 0, False, "", source, number)
            start = end
        if text:
            yield Piece(text[start:], start == 0, True, "\n", source, number)


def normalize_text(text: str) -> str:
    """Return valid Unicode with "\\n" for every line break, without invisible characters."""
    return remove_invisible(replace_surrogates(text).replace("\r\n", "\n").replace("\r", "\n"))


def read_records(source: Source, on_bad: OnBad, on_read: Callable[[int], None]) -> Iterator[Record]:
    """Yield the records of a JSON file, whatever its suffix: one per line, an array, or a single object over many
    lines. Arrays and objects are read whole."""
    beginning = next(read_blocks(source), b"").removeprefix(codecs.BOM_UTF8).lstrip()
    if beginning[:1] == b"[" or _is_spread(beginning):
        yield from _parse_records("".join(decode_blocks(source, on_read)), on_bad)
        return
    for number, line in _read_json_lines(source, on_read):
        try:
            yield Record(number, f"line {number}", json.loads(line.decode()))
        except (ValueError, RecursionError) as problem:
            on_bad(BadRecord(f"line {number}", _describe_json_error(problem)))


def _is_spread(beginning: bytes) -> bool:
    """Return whether a file begins with an object that spans several lines: no line is an object of its own."""
    return b"\n" in beginning and all(_is_incomplete(line) for line in beginning.split(b"\n") if line[:1] == b"{")


def _is_incomplete(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _describe_json_error(problem: Exception) -> str:
    if isinstance(problem, UnicodeDecodeError):
        return f"not UTF-8 ({problem.reason} at byte {problem.start})"
    if isinstance(problem, json.JSONDecodeError):
        return f"not valid JSON ({problem.msg}, line {problem.lineno}, column {problem.colno})"
    return f"not usable JSON ({problem})"  # thousands of digits, or of open brackets


def _parse_records(text: str, on_bad: OnBad) -> Iterator[Record]:
    """Yield the values of an array, or consecutive values. Stops at invalid JSON, because no later value can be
    found."""
    decoder, at = json.JSONDecoder(), skip_space(text, 0)
    is_array = text[at : at + 1] == "["
    at, number = skip_space(text, at + is_array), 0
    while at < len(text) and not (is_array and text[at] == "]"):
        number += 1
        try:
            value, at = decoder.raw_decode(text, at)
            yield Record(number, f"record {number}", value)
            at = skip_space(text, at)
            if is_array and text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("a comma or the end of the array is missing", text, at)
        except (ValueError, RecursionError) as problem:
            on_bad(BadRecord(f"record {number}", f"{_describe_json_error(problem)}; what follows was not read"))
            return
        at = skip_space(text, at + (is_array and text[at] == ","))
    if is_array and skip_space(text, at + 1) != len(text):
        on_bad(BadRecord("the end", f"{'the array has no end' if at >= len(text) else 'text follows the array'}"))


def skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def _read_json_lines(source: Source, on_read: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of each line that is not blank, without a byte order mark."""
    for number, line in enumerate(_read_raw_lines(source, on_read), start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield number, content


def _read_raw_lines(source: Source, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """Yield lines with their ends. Raises DataError for a line longer than MAX_JSON_LINE_BYTES."""
    rest: list[bytes] = []
    number, length = 1, 0  # the unfinished line's
    for block in read_text_blocks(source):
        on_read(len(block))
        *lines, last = block.split(b"\n")
        for line in lines:
            yield b"".join([*rest, line, b"\n"])
            rest.clear()
        rest.append(last)
        number += len(lines)
        length = len(last) + (0 if lines else length)
        if length > MAX_JSON_LINE_BYTES:
            raise DataError(
                f"{source.place}, line {number} is longer than {byte_size(MAX_JSON_LINE_BYTES)}, the limit for a "
                "line of JSON. Split the record into several, one per line."
            )
    if last_line := b"".join(rest):
        yield last_line


def read_text(record: Any, text_key: str) -> str:
    """Return the text of a record. Raises ValueError with the reason if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, but an object {{...}} is needed")
    key = find_text_key(record, text_key)
    if key is None:
        keys = ", ".join(f"{key!r:.50}" for key in list(record)[:10]) or "none"
        remedy = "name the one with the text with --text_key"
        if any(isinstance(value, list | dict) for value in record.values()):
            remedy += ", or if it lies deeper, write the texts to a .jsonl file"
        raise ValueError(f'it has no key "{text_key}", but {keys}; {remedy}')
    if not isinstance(record[key], str):
        raise ValueError(f'its "{key}" is a JSON {type(record[key]).__name__}, not a text')
    return normalize_text(record[key])


def find_text_key(record: Container[str], text_key: str) -> str | None:
    """Return the key of the text: `text_key` or, because the files of a folder may differ, "text"; None if it has
    neither."""
    return next((key for key in (text_key, Settings.text_key) if key in record), None)
