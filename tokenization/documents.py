"""The documents of the input: text between separator lines, and records of JSON files."""

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
from tokenization.corpus import Source, Unreadable, decoded_blocks, require_unchanged, text_blocks, unpacked_blocks
from tokenization.settings import DOCUMENT_SEPARATOR, Settings
from tokenizer_base import joining_character_class, replace_surrogates

# Text without a place to cut it (no whitespace, or only whitespace) is cut at this length anyway: one token in as many
# characters may differ. If longer text waited for such a place, it would be searched again and again.
PIECE_CHARACTERS = 1 << 18
LONGEST_JSON_LINE = 50_000_000  # bytes: some fifty books
# The cut is before the last character of a match. There every pre-tokenizer of `tokenizer_bpe.SPLITTINGS` starts a new
# word. Llama 3's and Qwen's put line breaks into one word with the punctuation before them. (A lookbehind takes twice
# as long.)
CUT = re.compile(r"\S[ \t]|[^\W_][\r\n]|\S\n[^\W_]")
JOINERS = "\u200c\u200d"
MOST_MARKS = 32  # on one letter; a longer row of marks is no writing


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins_document: bool
    ends_document: bool
    line_break: str  # "\n" or ""; part of no document, but a character vocabulary keeps it between documents
    source: Source
    line: int  # of the piece's first character in the file, from 1


def read_pieces(
    sources: Iterable[Source],
    separator: str = DOCUMENT_SEPARATOR,
    text_key: str = "text",
    on_read: Callable[[int], None] = lambda count: None,
) -> Iterator[Piece]:
    """Stream the documents of all sources. Long documents come in pieces, cut where it does not change the tokens.

    A document is the text between two lines that are exactly `separator` ("" is a blank line); the line break before
    the separator belongs to the separator. In JSONL a document is the value of `text_key` in a line. Every line break
    becomes "\n". Empty documents and a byte order mark are left out. `on_read` is called with the number of unpacked
    bytes of each block that is read.

    Records without a text are left out. Raises DataError that names the file and the place: not UTF-8, a damaged
    `.gz`, or a file that has changed since it was found.
    """
    for source in sources:
        if source.is_jsonl:
            yield from jsonl_pieces(source, text_key, on_read)
        else:
            line, begins_document = 1, True
            for text, ends_document, line_break, lines_before in split_documents(
                decoded_blocks(source, on_read), separator
            ):
                line += lines_before
                yield Piece(text, begins_document, ends_document, line_break, source, line)
                begins_document = ends_document
                line += text.count("\n")
        require_unchanged(source)


def split_documents(blocks: Iterable[str], separator: str) -> Iterator[tuple[str, bool, str, int]]:
    """Split a stream of text at its separator lines, and long documents into pieces.

    Yields (text, whether it ends its document, the line break before the separator that follows, number of line breaks
    skipped just before the text).
    """
    # A newline is added at the start of the stream, so that the first line is like every other: a separator stands
    # between two newlines. The second one is also the newline before the next document (`fresh`).
    separator_line = re.compile(r"\n" + re.escape(separator) + r"(?=\n)")
    last_line = re.compile(r"\n" + re.escape(separator) + r"\Z")
    rest, fresh, skipped = "\n", True, 0
    for block in blocks:
        unseen = max(len(rest) - len(separator) - 1, 0)  # a separator that ends in this block begins here or later
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
            newline = rest.rfind("\n")  # after it may be the beginning of a separator
            end = newline if len(rest) - newline <= len(separator) + 1 else len(rest) - 1
            cut = cut_point(rest, end) or between_letters(rest, min(end, PIECE_CHARACTERS))
            if cut > fresh:
                yield rest[fresh:cut], False, "", skipped
                rest, fresh, skipped = rest[cut:], False, 0
    match = last_line.search(rest)
    text = rest[fresh : match.start()] if match else rest[fresh:]
    if text or not fresh:
        yield text, True, "\n" if match else "", skipped


def cut_point(text: str, limit: int) -> int:
    """The last place up to `limit` where a cut changes no token: the index of the character after it; 0 if none.

    `limit` < len(text), so neither part is empty.
    """
    for window in (4096, limit):
        if cuts := deque(CUT.finditer(text, max(limit - window - 1, 0), limit + 1), maxlen=1):
            return cuts[0].end() - 1
    return 0


def between_letters(text: str, at: int) -> int:
    """Return the last place up to `at` that parts no letter from its marks."""
    joining = re.compile(f"[{joining_character_class()}]")
    for place in range(at, max(0, at - MOST_MARKS), -1):
        if not joining.match(text, place) and text[place - 1] not in JOINERS:
            return place
    return at


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used."""

    place: str  # line 12, record 3, message 7
    reason: str


OnBad = Callable[[BadRecord], None]


@dataclass
class Tally:
    """How many records of a file can be used, and how many cannot."""

    good: int = 0
    bad: int = 0
    first: BadRecord | None = None

    def skip(self, record: BadRecord) -> None:
        self.bad += 1
        self.first = self.first or record

    def describe(self) -> str:
        """Return what was left out, and why; "" if nothing was."""
        if self.first is None:
            return ""
        return f"{self.bad:,} of its {self.good + self.bad:,} records; {self.first.place}: {self.first.reason}"

    def require_most(self) -> None:
        """Raise Unreadable if more than half of the records cannot be used."""
        if self.bad > self.good:
            raise Unreadable(f"most of it cannot be used: {self.describe()}")


class Record(NamedTuple):
    number: int  # in an array, or the line; from 1
    place: str
    value: Any


def jsonl_pieces(source: Source, text_key: str, on_read: Callable[[int], None]) -> Iterator[Piece]:
    for number, _, record in records(source, lambda bad: None, on_read):
        try:
            text = text_of_record(record, text_key)
        except ValueError:  # it is in the report
            continue
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            piece = text[start : start + PIECE_CHARACTERS + 1]
            end = start + (cut_point(piece, PIECE_CHARACTERS) or between_letters(piece, PIECE_CHARACTERS))
            yield Piece(text[start:end], start == 0, False, "", source, number)
            start = end
        if text:
            yield Piece(text[start:], start == 0, True, "\n", source, number)


def normalized(text: str) -> str:
    """Return valid Unicode, in which every line break is "\n"."""
    return replace_surrogates(text).replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")


def records(source: Source, on_bad: OnBad, on_read: Callable[[int], None]) -> Iterator[Record]:
    """Stream the records of a JSON file: one a line, or an array, or a single object over many lines, whatever its name
    says. All but lines are read whole."""
    beginning = next(unpacked_blocks(source), b"").removeprefix(codecs.BOM_UTF8).lstrip()
    if beginning[:1] == b"[" or is_spread(beginning):
        yield from records_of_text("".join(decoded_blocks(source, on_read)), on_bad)
        return
    for number, line in json_lines(source, on_read):
        try:
            yield Record(number, f"line {number}", json.loads(line.decode()))
        except (ValueError, RecursionError) as problem:
            on_bad(BadRecord(f"line {number}", why_no_json(problem)))


def is_spread(beginning: bytes) -> bool:
    """Return whether a file begins with an object that goes over several lines."""
    return all(is_cut(line) for line in beginning.split(b"\n")[:2]) and b"\n" in beginning


def is_cut(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def why_no_json(problem: Exception) -> str:
    if isinstance(problem, UnicodeDecodeError):
        return f"not UTF-8 ({problem.reason} at byte {problem.start})"
    if isinstance(problem, json.JSONDecodeError):
        return f"not valid JSON ({problem.msg}, line {problem.lineno}, column {problem.colno})"
    return f"not usable JSON ({problem})"  # a number of thousands of digits, or thousands of open brackets


def records_of_text(text: str, on_bad: OnBad) -> Iterator[Record]:
    """The values of an array, or values that follow each other. After one that is not JSON, no other can be found."""
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
            on_bad(BadRecord(f"record {number}", f"{why_no_json(problem)}; what follows was not read"))
            return
        at = skip_space(text, at + (is_array and text[at] == ","))
    if is_array and skip_space(text, at + 1) != len(text):
        is_cut = at >= len(text)
        on_bad(BadRecord("the end", f"{'the array does not end' if is_cut else 'there is more after the array'}"))


def skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def json_lines(source: Source, on_read: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of each line that is not blank, without a byte order mark."""
    for number, line in enumerate(raw_lines(source, on_read), start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield number, content


def raw_lines(source: Source, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """Lines with their ends. Raises DataError for one that is longer than LONGEST_JSON_LINE."""
    rest: list[bytes] = []
    number, length = 1, 0  # of the unfinished line
    for block in text_blocks(source):
        on_read(len(block))
        *lines, last = block.split(b"\n")
        for line in lines:
            yield b"".join([*rest, line, b"\n"])
            rest.clear()
        rest.append(last)
        number += len(lines)
        length = len(last) + (0 if lines else length)
        if length > LONGEST_JSON_LINE:
            raise DataError(
                f"{source.place}, line {number} is longer than {byte_size(LONGEST_JSON_LINE)}, and a whole line of "
                f"JSON has to fit in memory. Write it as several lines."
            )
    if last_line := b"".join(rest):
        yield last_line


def text_of_record(record: Any, text_key: str) -> str:
    """Return the text of a record. Raises ValueError that says why there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}; an object {{...}} was expected")
    key = key_of(record, text_key)
    if key is None:
        keys = ", ".join(f"{key!r:.50}" for key in list(record)[:10]) or "none"
        raise ValueError(f'it has no key "{text_key}", but {keys}: --text_key names the one with the text')
    if not isinstance(record[key], str):
        raise ValueError(f'its "{key}" is a JSON {type(record[key]).__name__}, not a text')
    return normalized(record[key])


def key_of(record: Container[str], text_key: str) -> str | None:
    """Return the key of its text: `text_key`, or the usual one, for files in a folder differ."""
    return next((key for key in (text_key, Settings.text_key) if key in record), None)
