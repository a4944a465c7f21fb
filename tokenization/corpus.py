"""Text files as a stream of documents. Memory does not grow with the size of a file, a document or a line. Only a line
of JSON is held whole, so its size is limited."""

from __future__ import annotations

import codecs
import functools
import glob
import gzip
import io
import math
import os
import shlex
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from common.errors import DataError
from tokenization.settings import DEFAULT_FOLDER, HUB

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

PLAIN = (".txt", ".md", ".jsonl")
BOOKS = (".epub", ".docx", ".odt", ".rtf", ".html", ".htm", ".pdf", ".mbox", ".eml", ".srt", ".vtt")
MARKUP = (".tex", ".ipynb", ".fb2", ".org", ".rst")
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".json")
SUFFIXES = (*PLAIN, *BOOKS, *MARKUP, *TABLES, ".zip")  # of the files that are read in a folder
PACKED = (".gz", ".zst")
BLOCK_BYTES = 1 << 18
PACKING_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, *([zstd.ZstdError] if zstd else []))
MOST_UNPACKED = 200  # bytes from a packed one; text comes to ten, and a bomb to a thousand
SMALL = 10_000_000  # bytes: so many may come from any file
# Documents that no library reads here, and what to do with them.
ADVICE = {
    (".doc", ".wpd", ".wps", ".pages"): "save it as .docx",
    (".ppt", ".pptx", ".odp", ".key"): "save it as .pdf",
    (".xls", ".xlsx", ".ods", ".numbers"): "save it as .csv",
    (".mobi", ".azw", ".azw3", ".lit"): "convert it to .epub",
    (".djvu", ".ps", ".xps"): "convert it to .pdf",
    (".zip", ".rar", ".7z", ".tar", ".tgz", ".bz2", ".xz"): "unpack it",
}
NOT_READ = "no text, by its name"
SNIFFED_BYTES = 4096  # of a file with an unknown name, to see whether it holds text
# How files begin that people mistake for text, and what to do with them.
NOT_TEXT = {
    b"%PDF-": "a PDF, not text. Take the text out of it first, for example with `pdftotext -enc UTF-8 {name}`.",
    b"PK\x03\x04": "a zip archive (like .docx, .odt and .epub), not text. Save it as plain text (UTF-8) first.",
    b"\xd0\xcf\x11\xe0": "an Office document, not text. Save it as plain text (UTF-8) first.",
    b"{\\rtf": "an RTF document, not text. Save it as plain text (UTF-8) first.",
    b"\x1f\x8b": "packed with gzip. Give it a name that ends in .gz.",
}
HOLDS_ZEROS = "It has zero bytes, which text never has. Save it as plain text (UTF-8) in the program that wrote it."


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
    left_out: str = ""  # which of its records, and why
    inline_marks: int = 0  # <|endoftext|> inside lines

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


def left_out(inputs: Sequence[str], suffixes: tuple[str, ...], taken: Container[Path]) -> list[tuple[str, str]]:
    """Return the files and folders in the given folders that are not `taken`, with the reason."""
    found: list[tuple[str, str]] = []
    for given in inputs:
        folder = Path(given).expanduser()

        def add(path: Path | str, reason: str, folder: Path = folder) -> None:
            found.append((Path(path).relative_to(folder).as_posix(), reason))

        problems: list[OSError] = []
        for parent, folders, names in os.walk(folder, onerror=problems.append) if folder.is_dir() else ():
            folders.sort()
            for path in sorted(Path(parent, name) for name in names):
                try:
                    if not stat.S_ISREG(path.stat().st_mode) or path.resolve() in taken:
                        continue
                except OSError as error:
                    problems.append(error)
                    continue
                if is_hidden(path.relative_to(folder).as_posix()):
                    add(path, "hidden")
                elif reason := why_not(path.name, suffixes):
                    is_text = reason == NOT_READ and path.suffix and holds_text(path)
                    add(path, reading_as_text(given, path.suffix) if is_text else reason)
        for problem in problems:
            add(problem.filename, f"cannot be opened: {problem.strerror}")
    return found


def is_hidden(name: str) -> bool:
    """Return whether a path leads through a hidden folder, or what a Mac adds to archives."""
    parts = [part for part in name.split("/") if part not in (".", "..")]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def holds_text(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            beginning = file.read(SNIFFED_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning)  # the last character may be cut
    except (OSError, UnicodeDecodeError):
        return False
    return bool(text.strip()) and "\0" not in text


def reading_as_text(folder: str, suffix: str) -> str:
    """Say how to read the files of a name that is not known as text."""
    return f"it may be text: --input {shlex.quote(f'{folder}/**/*{suffix}')} reads such files"


def why_not(name: str, suffixes: tuple[str, ...]) -> str:
    """Why a file of this name is not read; "" if it is."""
    if unpacked_name(name).endswith(suffixes) and not Path(name).name.startswith("~$"):  # Word's lock
        return ""
    return next((advice for known, advice in ADVICE.items() if name.lower().endswith(known)), NOT_READ)


def require_unchanged(source: Source) -> None:
    """Raises DataError for a file that has changed since it was found."""
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
        raise DataError(
            f"{source.place} changed while it was read. Run the same command again when it no longer changes."
        )


def expand(given: str, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """(path, name) of the files that one input names."""
    if not given:
        raise DataError("An input has an empty name. Name a file or a folder; . is the current folder.")
    if given.startswith(HUB):
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
            files += [path for path in visible if os.path.isfile(path)]  # reading a pipe would wait for its writer
        if not files:
            endings = f"{', '.join(suffixes)} (or these with .gz or .zst)"
            reasons = Counter(reason for _, reason in left_out([given], suffixes, taken=()))
            there = "".join(f" {count:,} files: {reason}." for reason, count in reasons.most_common(3))
            raise DataError(f"The folder {given} has no file whose name ends in {endings}.{there}")
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
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(source.path)) from None
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
    message = f"{source.place} is {encoding}, not UTF-8 text."
    raise NotUTF8(message, beginning, encoding if encoding == "UTF-16" else None)


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
        position += len(block)
        on_read(len(block))
        yield text.replace("\ufeff", "")  # files that were put together have one inside
    try:
        yield decoder.decode(b"", final=True)  # a line break that may have had a second part
    except UnicodeDecodeError as error:
        raise not_utf8(source, position - len(error.object) + error.start, error) from None


def not_utf8(source: Source, position: int, error: UnicodeDecodeError) -> DataError:
    where = f"byte {position}{' of the unpacked text' if source.is_compressed else ''}"
    found = f"{source.place} is not UTF-8 text: {error.reason} at {where} (0x{error.object[error.start]:02x})."
    if 0 in error.object:
        return DataError(f"{found} {HOLDS_ZEROS}")
    return NotUTF8(found, error.object)
