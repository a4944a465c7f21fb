"""Text files as a stream of documents. Memory does not grow with the size of a file, a document or a line. Only a line
of JSON is held whole, so its size is limited."""

from __future__ import annotations

import codecs
import functools
import glob
import gzip
import io
import json
import math
import os
import re
import shlex
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from common.errors import DataError
from common.output import byte_size
from tokenization.settings import DEFAULT_FOLDER, DOCUMENT_SEPARATOR, Settings
from tokenizer_base import valid_unicode

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

PLAIN = (".txt", ".md", ".jsonl")
BOOKS = (".epub", ".docx", ".odt", ".rtf", ".html", ".htm", ".pdf", ".mbox", ".eml")
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".json")
SUFFIXES = (*PLAIN, *BOOKS, *TABLES, ".zip")  # of the files that are read in a folder
PACKED = (".gz", ".zst")
SCHEME = "hf://"
BLOCK_BYTES = 1 << 18
PACKING_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, *([zstd.ZstdError] if zstd else []))
# Text without a place to cut it (no whitespace, or only whitespace) is cut at this length anyway: one token in as many
# characters may differ. If longer text waited for such a place, it would be searched again and again.
PIECE_CHARACTERS = 1 << 18
LONGEST_JSON_LINE = 50_000_000  # bytes: some fifty books
MOST_UNPACKED = 200  # bytes from a packed one; text comes to ten, and a bomb to a thousand
SMALL = 10_000_000  # bytes: so many may come from any file
# Documents that no library reads here, and what to do with them.
ADVICE = {
    (".doc", ".wpd", ".wps", ".pages"): "save it as .docx",
    (".ppt", ".pptx", ".odp", ".key"): "save it as .pdf",
    (".xls", ".xlsx", ".ods", ".numbers"): "save it as .csv",
    (".mobi", ".azw", ".azw3", ".fb2", ".lit"): "convert it to .epub",
    (".djvu", ".ps", ".xps"): "convert it to .pdf",
    (".zip", ".rar", ".7z", ".tar", ".tgz", ".bz2", ".xz"): "unpack it",
}
NOT_READ = "no text, by its name (--input 'FOLDER/*.log' would read such files as text)"
# How files begin that people mistake for text, and what to do with them.
NOT_TEXT = {
    b"%PDF-": "a PDF, not text. Take the text out of it first, for example with `pdftotext -enc UTF-8 {name}`.",
    b"PK\x03\x04": "a zip archive (like .docx, .odt and .epub), not text. Save it as plain text (UTF-8) first.",
    b"\xd0\xcf\x11\xe0": "an Office document, not text. Save it as plain text (UTF-8) first.",
    b"{\\rtf": "an RTF document, not text. Save it as plain text (UTF-8) first.",
    b"\x1f\x8b": "packed with gzip. Give it a name that ends in .gz.",
}
HOLDS_ZEROS = "It has zero bytes, which text never has. Save it as plain text (UTF-8) in the program that wrote it."
# The cut is before the last character of a match. There every pre-tokenizer of `tokenizer_bpe.SPLITTINGS` starts a new
# word. Llama 3's and Qwen's put line breaks into one word with the punctuation before them. (A lookbehind takes twice
# as long.)
CUT = re.compile(r"\S[ \t]|[^\W_][\r\n]|\S\n[^\W_]")


@dataclass(frozen=True)
class Source:
    """An input file. `name` is its path below the given folder, or its file name. Size and time are those when it was
    found."""

    path: Path
    name: str
    size: int  # bytes on disk
    modified_ns: int
    note: str = ""  # on what it was made from
    is_converted: bool = False  # from another encoding
    member: int | None = None  # its number in the zip archive at `path`
    text_bytes: int = 0  # of what is read, unpacked; 0: not known yet
    most_bytes: float = math.inf  # of its text, if a part of it is wanted

    @property
    def file_name(self) -> str:
        return self.path.name if self.member is None else self.name

    @property
    def is_compressed(self) -> bool:
        return self.packing in PACKED

    @property
    def packing(self) -> str:
        return os.path.splitext(self.file_name)[1].lower()

    @property
    def suffix(self) -> str:
        """That of the unpacked file."""
        return os.path.splitext(unpacked_name(self.file_name))[1]

    @property
    def place(self) -> str:
        """For messages. What was made from it need not be known."""
        return f"{self.name} ({self.note})" if self.note else str(self.path)

    @property
    def is_jsonl(self) -> bool:
        return self.suffix == ".jsonl"

    def open(self) -> BinaryIO:
        """The unpacked file."""
        if self.member is None:
            return self.unpacked(open(self.path, "rb"))
        archive = opened_archive(self.path, self.modified_ns)
        return self.unpacked(archive.open(archive.infolist()[self.member]))

    def unpacked(self, file: IO[bytes]) -> BinaryIO:
        if self.packing == ".zst" and zstd is None:
            raise Unreadable("it needs backports.zstd: pip install backports.zstd")
        unpack = {".gz": gzip.open, ".zst": zstd and zstd.open}.get(self.packing)
        return cast(BinaryIO, unpack(file) if unpack else file)


@functools.lru_cache(maxsize=1)
def opened_archive(path: Path, modified_ns: int) -> zipfile.ZipFile:
    """Stays open, because its directory may be long."""
    return zipfile.ZipFile(path)


class Unreadable(DataError):
    """Why a file gives no text. The others are read."""


class NotUTF8(DataError):
    """A file in another encoding: `encoding`, if it is known, else that of the `sample`."""

    def __init__(self, message: str, sample: bytes, encoding: str | None = None):
        super().__init__(message)
        self.sample, self.encoding = sample, encoding


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins_document: bool
    ends_document: bool
    line_break: str  # "\n" or ""; part of no document, but a character vocabulary keeps it between documents
    source: Source
    line: int  # of the piece's first character in the file, from 1


def find_sources(inputs: Sequence[str], suffixes: tuple[str, ...] = SUFFIXES) -> list[Source]:
    """The files that the inputs name, each once. An input is a file, a folder (searched recursively for `suffixes`, in
    sorted order) or a glob pattern.

    Raises DataError for an input that names no file.
    """
    found: dict[Path, Source] = {}
    for given in inputs:
        for path, name in expand(given, suffixes):
            found.setdefault(path.resolve(), source_at(path, name))
    return list(found.values())


def source_at(path: Path, name: str, note: str = "") -> Source:
    status = path.stat()
    return Source(path.resolve(), name, status.st_size, status.st_mtime_ns, note)


def unpacked_name(name: str) -> str:
    """In small letters."""
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def left_out(inputs: Sequence[str], suffixes: tuple[str, ...] = SUFFIXES) -> list[tuple[str, str]]:
    """The files in the given folders that `find_sources` does not take, with the reason."""
    found = []
    for given in inputs:
        folder = Path(given).expanduser()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ():
            name = path.relative_to(folder)
            if reason := "hidden" if any(part.startswith(".") for part in name.parts) else why_not(path.name, suffixes):
                found.append((name.as_posix(), reason))
    return found


def why_not(name: str, suffixes: tuple[str, ...]) -> str:
    """Why a file of this name is not read; "" if it is."""
    if unpacked_name(name).endswith(suffixes) and not Path(name).name.startswith("~$"):  # Word's lock
        return ""
    return next((advice for known, advice in ADVICE.items() if name.lower().endswith(known)), NOT_READ)


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

    Raises DataError that names the file and the place: not UTF-8, not JSON, no such key, a damaged `.gz`, or a file
    that has changed since it was found.
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


def require_unchanged(source: Source) -> None:
    """Raises DataError for a file that has changed since it was found."""
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
        raise DataError(
            f"{source.place} changed while it was read. Run the same command again when it no longer changes."
        )


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
            cut = cut_point(rest, end) or min(end, PIECE_CHARACTERS)
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


def expand(given: str, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """(path, name) of the files that one input names."""
    if not given:
        raise DataError("An input has an empty name. Name a file or a folder; . is the current folder.")
    if given.startswith(SCHEME):
        raise DataError(
            f"Tokenize {given} first: python tokenize_local_bpe.py --input {shlex.quote(given)} --max_mb 500 "
            f"--output_dir {DEFAULT_FOLDER}/hub. Its last line trains on the tokens."
        )
    path = Path(given).expanduser()
    if path.is_dir():
        files = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            named = [name for name in names if not why_not(name, suffixes)]
            visible = [Path(folder, name) for name in named if not name.startswith(".")]
            files += [path for path in visible if path.is_file()]  # reading a pipe would wait for its writer
        if not files:
            endings = f"{', '.join(suffixes)} (or these with .gz or .zst)"
            raise DataError(f"The folder {given} has no file whose name ends in {endings}.")
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


def unpacked_blocks(source: Source) -> Iterator[bytes]:
    """The unpacked bytes of a file."""
    most = max(SMALL, MOST_UNPACKED * source.size)
    try:
        with source.open() as file:
            while block := file.read(BLOCK_BYTES):
                most -= len(block)
                if most < 0 and (source.is_compressed or source.member is not None):
                    raise Unreadable(f"it unpacks to more than {MOST_UNPACKED} times its size, as only a bomb does")
                yield block
    except DataError:
        raise
    except Exception as error:
        if source.member is None and not isinstance(error, PACKING_ERRORS):
            raise
        kind = {".zst": "zstd", ".gz": "gzip"}.get(source.packing, "zip")
        raise DataError(f"{source.place} is not a whole {kind} file ({error}). Download or pack it again.") from None


def text_blocks(source: Source) -> Iterator[bytes]:
    """The unpacked bytes of a file. Raises DataError if its first block shows that it is not UTF-8 text."""
    for number, block in enumerate(unpacked_blocks(source)):
        if number == 0:
            require_text(source, block)
        yield block


def require_text(source: Source, beginning: bytes) -> None:
    """Raises DataError for a file that begins like another kind of file, even if all its bytes are UTF-8."""
    for signature, what in NOT_TEXT.items():
        if beginning.startswith(signature):
            raise DataError(f"{source.place} is {what.format(name=shlex.quote(source.path.name))}")
    # In UTF-16 every second byte of a space or line break is zero, and text in any language has some of them.
    high, low = beginning[::2].count(0), beginning[1::2].count(0)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif (high + low) * 100 <= len(beginning):
        return
    elif min(high, low) * 10 > max(high, low):
        raise DataError(f"{source.place} is not text. {HOLDS_ZEROS}")
    else:
        encoding = "UTF-16BE" if high > low else "UTF-16LE"
    is_marked = encoding == "UTF-16"
    message = f"{source.place} is {encoding}, not UTF-8 text. {conversion(source, encoding)}"
    raise NotUTF8(message, beginning, encoding if is_marked else None)


def from_here(path: Path) -> str:
    """The path as the user would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def conversion(source: Source, encoding: str) -> str:
    name = shlex.quote(from_here(source.path))
    unpack = "zstd" if source.packing == ".zst" else "gzip"
    given, file = (f"{unpack} -dc {name} | ", "") if source.is_compressed else ("", f" {name}")
    return f"Convert it first, for example with `{given}iconv -f {encoding} -t UTF-8{file} > converted.txt`."


def decoded_blocks(source: Source, on_read: Callable[[int], None]) -> Iterator[str]:
    """The text of a file. Every line break is "\n"."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    position = 0
    for block in text_blocks(source):
        waiting = len(decoder.getstate()[0])  # bytes of a character that began in the block before
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
        yield decoder.decode(b"", final=True)  # a line break that may have had a second part
    except UnicodeDecodeError as error:
        raise not_utf8(source, position - len(error.object) + error.start, error) from None


def not_utf8(source: Source, position: int, error: UnicodeDecodeError) -> DataError:
    where = f"byte {position}{' of the unpacked text' if source.is_compressed else ''}"
    found = f"{source.place} is not UTF-8 text: {error.reason} at {where} (0x{error.object[error.start]:02x})."
    if 0 in error.object:
        return DataError(f"{found} {HOLDS_ZEROS}")
    return NotUTF8(f"{found} {conversion(source, 'WINDOWS-1252')}", error.object)


def jsonl_pieces(source: Source, text_key: str, on_read: Callable[[int], None]) -> Iterator[Piece]:
    for number, position, line in json_lines(source, on_read):
        text = normalized(text_of_record(source, number, record_of_line(source, number, position, line), text_key))
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            piece = text[start : start + PIECE_CHARACTERS + 1]
            end = start + (cut_point(piece, PIECE_CHARACTERS) or PIECE_CHARACTERS)
            yield Piece(text[start:end], start == 0, False, "", source, number)
            start = end
        if text:
            yield Piece(text[start:], start == 0, True, "\n", source, number)


def normalized(text: str) -> str:
    """Valid Unicode, in which every line break is "\n"."""
    return valid_unicode(text).replace("\r\n", "\n").replace("\r", "\n")


def json_lines(source: Source, on_read: Callable[[int], None]) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, position of the first byte, line) of each line that is not blank, without a byte order mark."""
    position = 0
    for number, line in enumerate(raw_lines(source, on_read), start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield number, position + len(line) - len(content), content
        position += len(line)


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


def record_of_line(source: Source, number: int, position: int, line: bytes) -> Any:
    """The JSON of a line that begins at byte `position`. Raises DataError that names the place."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(source, position + error.start, error) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{source.place}, line {number}, column {error.colno}: not valid JSON ({error.msg}).") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of open brackets
        raise DataError(f"{source.place}, line {number}: not usable JSON ({error}).") from None


def text_of_record(source: Source, number: int, record: Any, text_key: str) -> str:
    place = f"{source.place}, line {number}"
    if not isinstance(record, dict):
        raise DataError(f"{place}: a JSON {type(record).__name__}; an object {{...}} was expected.")
    key = key_of(record, text_key)
    if key is None:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f'{place} has no key "{text_key}"; it has {keys}. Name the key of the text with --text_key.')
    if not isinstance(record[key], str):
        raise DataError(f'{place}: "{key}" is not a string.')
    return str(record[key])


def key_of(record: Container[str], text_key: str) -> str | None:
    """The key of its text: `text_key`, or the usual one, for files in a folder differ."""
    return next((key for key in (text_key, Settings.text_key) if key in record), None)
