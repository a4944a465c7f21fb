"""Text files as a stream of documents: memory stays the same whatever the size of a file, a document or a line. Only a
line of JSON is held whole, and has a longest size for that."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import re
import shlex
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import DataError
from common.formatting import byte_size
from tokenization.settings import DOCUMENT_SEPARATOR
from tokenizer_base import valid_unicode

SUFFIXES = (".txt", ".md", ".jsonl")
BLOCK_BYTES = 1 << 18
# Text with no place to cut it (no whitespace, or nothing else) is cut anyway at this length: one token in as many
# characters may differ. What waited for such a place longer would be searched again and again.
PIECE_CHARACTERS = 1 << 18
LONGEST_JSON_LINE = 50_000_000  # bytes: some fifty books
# How files begin that people take for text, and what to do with them.
NOT_TEXT = {
    b"%PDF-": "a PDF, not text. Take the text out of it first, for example with `pdftotext -enc UTF-8 {name}`.",
    b"PK\x03\x04": "a zip archive, as .docx, .odt and .epub files are, not text. Save it as plain text (UTF-8) first.",
    b"\xd0\xcf\x11\xe0": "an Office document, not text. Save it as plain text (UTF-8) first.",
    b"{\\rtf": "an RTF document, not text. Save it as plain text (UTF-8) first.",
    b"\x1f\x8b": "packed with gzip. Give it a name that ends in .gz.",
}
HOLDS_ZEROS = "It holds zero bytes, as no text does. Save it as plain text (UTF-8) in the program that wrote it."
# Between a character that is not whitespace and one that is, GPT-2's pre-tokenizer always starts anew. (A lookbehind
# for the first of the two takes twice as long.)
CUT = re.compile(r"\S[ \n\r\t]")


@dataclass(frozen=True)
class Source:
    """An input file as it was found; `name` is its path below the folder that was given, or its own name."""

    path: Path
    name: str
    size: int  # bytes on disk
    modified_ns: int

    @property
    def is_compressed(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    @property
    def is_jsonl(self) -> bool:
        return [suffix.lower() for suffix in self.path.suffixes if suffix.lower() != ".gz"][-1:] == [".jsonl"]


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    line_break: str  # between this document and the next; not part of either, but characters are told apart by it
    source: Source
    line: int  # in the file, from 1, of the piece's first character


def find_sources(inputs: Sequence[str], suffixes: tuple[str, ...] = SUFFIXES) -> list[Source]:
    """The files that files, folders (searched recursively for `suffixes`, in sorted order) and glob patterns stand for,
    each once.

    Raises DataError for an input that stands for nothing.
    """
    found: dict[Path, Source] = {}
    for given in inputs:
        for path, name in expand(given, suffixes):
            status = path.stat()
            found.setdefault(path.resolve(), Source(path.resolve(), name, status.st_size, status.st_mtime_ns))
    return list(found.values())


def unpacked_bytes(sources: Iterable[Source]) -> int:
    """Bytes of all sources, those in `.gz` files unpacked (which has to read them)."""
    return sum(sum(map(len, unpacked_blocks(source))) if source.is_compressed else source.size for source in sources)


def read_pieces(
    sources: Iterable[Source],
    separator: str = DOCUMENT_SEPARATOR,
    text_key: str = "text",
    on_read: Callable[[int], None] = lambda count: None,
) -> Iterator[Piece]:
    """Stream the documents of all sources, long ones in pieces that do not change how they are tokenized.

    A document's text is what the file holds between two lines that are exactly `separator` ("" is a blank line), line
    endings untranslated; the line break before the separator belongs to the separator. In JSONL it is the value of
    `text_key` of each line. Empty documents and a byte order mark are left out. `on_read` is called with the number of
    unpacked bytes as they are read.

    Raises DataError naming the file and the place: not UTF-8, not JSON, no such key, a damaged `.gz`, or a file that
    has changed since it was found.
    """
    for source in sources:
        if source.is_jsonl:
            yield from jsonl_pieces(source, text_key, on_read)
        else:
            line = 1
            for text, ends_document, line_break, lines_before in split_documents(
                decoded_blocks(source, on_read), separator
            ):
                line += lines_before
                yield Piece(text, ends_document, line_break, source, line)
                line += text.count("\n")
        require_unchanged(source)


def require_unchanged(source: Source) -> None:
    """Raises DataError for a file that has changed since it was found."""
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
        raise DataError(f"{source.path} changed while it was read. Run the same command again once it is at rest.")


def split_documents(blocks: Iterable[str], separator: str) -> Iterator[tuple[str, bool, str, int]]:
    """Split a stream of text at its separator lines, and long documents into pieces.

    Yields (text, whether it ends its document, the line break it ends with if a separator follows, line breaks left out
    just before it).
    """
    # The stream is looked at with a newline put in front, so that the first line is like any other: a separator is
    # what stands between two newlines, and the newline after it is the one in front of the next document (`fresh`).
    separator_line = re.compile(r"(\r?\n)" + re.escape(separator) + r"\r?(?=\n)")
    last_line = re.compile(r"(\r?\n)" + re.escape(separator) + r"\r?\Z")
    rest, fresh, skipped = "\n", True, 0
    for block in blocks:
        unseen = max(len(rest) - len(separator) - 3, 0)  # no separator that ends in this block begins before
        rest += block
        start = 0
        for separated in separator_line.finditer(rest, unseen):
            text = rest[start + fresh : separated.start()]
            if text or not fresh:
                yield text, True, separated[1], skipped
                skipped = 0
            skipped += 1 + (separated.start() > start or not fresh)
            start, fresh = separated.end(), True
        rest = rest[start:]
        if len(rest) > PIECE_CHARACTERS:
            newline = rest.rfind("\n")  # what follows may be the beginning of a separator
            newline -= rest[newline - 1 : newline] == "\r"
            end = newline if len(rest) - newline <= len(separator) + 3 else len(rest) - 1
            cut = cut_point(rest, end) or min(end, PIECE_CHARACTERS)
            if cut > fresh:
                yield rest[fresh:cut], False, "", skipped
                rest, fresh, skipped = rest[cut:], False, 0
    match = last_line.search(rest)
    text = rest[fresh : match.start()] if match else rest[fresh:]
    if text or not fresh:
        yield text, True, match[1] if match else "", skipped


def cut_point(text: str, limit: int) -> int:
    """The last place up to `limit` where cutting changes no token: the index of the whitespace that follows; 0 if none.

    `limit` < len(text), so both parts have text.
    """
    for window in (4096, limit):
        if cuts := deque(CUT.finditer(text, max(limit - window - 1, 0), limit + 1), maxlen=1):
            return cuts[0].end() - 1
    return 0


def expand(given: str, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """(path, name) of the files that one input stands for."""
    if not given:
        raise DataError("A name is empty where text is to be named; name a file or a folder, . for this one.")
    path = Path(given).expanduser()
    if path.is_dir():
        files = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            named = [Path(folder, name) for name in names if not name.startswith(".") and is_named(name, suffixes)]
            files += [path for path in named if path.is_file()]  # reading a pipe would wait for its writer
        if not files:
            endings = f"{', '.join(suffixes)} (or these with .gz)"
            raise DataError(f"The folder {given} holds no file whose name ends in {endings}.")
        return [(file, file.relative_to(path).as_posix()) for file in sorted(files)]
    if path.is_file():
        return [(path, path.name)]
    if path.exists():
        raise DataError(f"{given} is not a regular file. Text is read twice, so write it to a file first.")
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if matches:
            return [(match, match.name) for match in matches]
        raise DataError(f"No file matches {given} (looked for from {Path.cwd()}).")
    raise DataError(f"There is no file or folder {given} (looked for from {Path.cwd()}).")


def is_named(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().removesuffix(".gz").endswith(suffixes)


def open_source(source: Source) -> io.BufferedIOBase:
    return gzip.open(source.path, "rb") if source.is_compressed else open(source.path, "rb")


def unpacked_blocks(source: Source) -> Iterator[bytes]:
    """The unpacked bytes of a file."""
    try:
        with open_source(source) as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{source.path} is not a whole gzip file ({error}). Fetch or pack it again.") from None


def text_blocks(source: Source) -> Iterator[bytes]:
    """The unpacked bytes of a file. Raises DataError for one that is plainly not UTF-8 text."""
    blocks = unpacked_blocks(source)
    first = next(blocks, b"")
    require_text(source, first)
    yield first
    yield from blocks


def require_text(source: Source, beginning: bytes) -> None:
    """Raises DataError for a file that begins as other kinds of file do, though its bytes may all be UTF-8."""
    for signature, what in NOT_TEXT.items():
        if beginning.startswith(signature):
            raise DataError(f"{source.path} is {what.format(name=shlex.quote(source.path.name))}")
    # In UTF-16 one half of the bytes has zeros: text of any language has spaces or line breaks.
    high, low = beginning[::2].count(0), beginning[1::2].count(0)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif (high + low) * 100 <= len(beginning):
        return
    elif min(high, low) * 10 > max(high, low):
        raise DataError(f"{source.path} is not text. {HOLDS_ZEROS}")
    else:
        encoding = "UTF-16BE" if high > low else "UTF-16LE"
    raise DataError(f"{source.path} is {encoding}, not UTF-8 text. {conversion(source, encoding)}")


def conversion(source: Source, encoding: str) -> str:
    name = shlex.quote(source.path.name)
    given, file = (f"gzip -dc {name} | ", "") if source.is_compressed else ("", f" {name}")
    return f"Convert it first, for example with `{given}iconv -f {encoding} -t UTF-8{file} > converted.txt`."


def decoded_blocks(source: Source, on_read: Callable[[int], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    for block in text_blocks(source):
        waiting = len(decoder.getstate()[0])  # bytes of a character that the block before began
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise not_utf8(source, position - waiting + error.start, error) from None
        if position == 0:
            text = text.removeprefix("\ufeff")
        position += len(block)
        on_read(len(block))
        yield text
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise not_utf8(source, position - len(error.object) + error.start, error) from None


def not_utf8(source: Source, position: int, error: UnicodeDecodeError) -> DataError:
    where = f"byte {position}{' of the unpacked text' if source.is_compressed else ''}"
    advice = HOLDS_ZEROS if 0 in error.object else conversion(source, "WINDOWS-1252")
    return DataError(
        f"{source.path} is not UTF-8 text: {error.reason} at {where} (0x{error.object[error.start]:02x}). {advice}"
    )


def jsonl_pieces(source: Source, text_key: str, on_read: Callable[[int], None]) -> Iterator[Piece]:
    position = 0
    for number, line in enumerate(raw_lines(source, on_read), start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            text = valid_unicode(text_of_record(source, number, position, line, text_key))
            start = 0
            while len(text) - start > PIECE_CHARACTERS:
                piece = text[start : start + PIECE_CHARACTERS + 1]
                end = start + (cut_point(piece, PIECE_CHARACTERS) or PIECE_CHARACTERS)
                yield Piece(text[start:end], False, "", source, number)
                start = end
            if text:
                yield Piece(text[start:], True, "\n", source, number)
        position += len(line)


def raw_lines(source: Source, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """Lines with their ends. Raises DataError for one that is longer than LONGEST_JSON_LINE."""
    rest: list[bytes] = []
    number, length = 1, 0  # of the line that is not whole yet
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
                f"{source.path}, line {number} is longer than {byte_size(LONGEST_JSON_LINE)}, and a line of JSON is "
                f"held in memory as a whole. Write it as several lines."
            )
    if last_line := b"".join(rest):
        yield last_line


def record_of_line(source: Source, number: int, position: int, line: bytes) -> Any:
    """The JSON of a line, which begins at byte `position`. Raises DataError naming the place."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(source, position + error.start, error) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{source.path}, line {number}, column {error.colno}: not valid JSON ({error.msg}).") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of open brackets
        raise DataError(f"{source.path}, line {number}: not usable JSON ({error}).") from None


def text_of_record(source: Source, number: int, position: int, line: bytes, text_key: str) -> str:
    record = record_of_line(source, number, position, line)
    if not isinstance(record, dict):
        raise DataError(
            f"{source.path}, line {number}: a JSON {type(record).__name__}; an object {{...}} was expected."
        )
    if text_key not in record:
        raise DataError(
            f'{source.path}, line {number} has no key "{text_key}"; it has {", ".join(map(repr, record)) or "none"}. '
            f"Name the one that holds the text with --text_key."
        )
    if not isinstance(record[text_key], str):
        raise DataError(f'{source.path}, line {number}: "{text_key}" is not a string.')
    return record[text_key]
