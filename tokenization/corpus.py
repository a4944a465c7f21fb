"""Find input files and read them as blocks of text, in constant memory. Only a line of JSON is held whole, so its size
is limited."""

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

PLAIN_SUFFIXES = (".txt", ".md", ".jsonl")
BOOK_SUFFIXES = (".epub", ".docx", ".odt", ".rtf", ".html", ".htm", ".pdf", ".mbox", ".eml", ".srt", ".vtt")
MARKUP_SUFFIXES = (".tex", ".ipynb", ".fb2", ".org", ".rst")
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow", ".json")
TEXT_SUFFIXES = (
    *PLAIN_SUFFIXES,
    *BOOK_SUFFIXES,
    *MARKUP_SUFFIXES,
    *TABLE_SUFFIXES,
    ".zip",
)
PACKED_SUFFIXES = (".gz", ".zst")
BLOCK_BYTES = 1 << 18
PACKING_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, *([zstd.ZstdError] if zstd else []))
MAX_UNPACK_RATIO = 200  # unpacked bytes per packed byte: about ten for text, a thousand for a zip bomb
ALWAYS_ALLOWED_BYTES = 10_000_000  # any file may unpack to this size
# Unsupported documents, and what to do with them.
ADVICE = {
    (".doc", ".wpd", ".wps", ".pages"): "save it as .docx",
    (".ppt", ".pptx", ".odp", ".key"): "save it as .pdf",
    (".xls", ".xlsx", ".ods", ".numbers"): "save it as .csv",
    (".mobi", ".azw", ".azw3", ".lit"): "convert it to .epub",
    (".djvu", ".ps", ".xps"): "convert it to .pdf",
    (".zip", ".rar", ".7z", ".tar", ".tgz", ".bz2", ".xz"): "unpack it",
}
UNKNOWN_SUFFIX = "not text, by its name"
SNIFFED_BYTES = 4096
# First bytes of files that people mistake for text, and what to do with them.
NOT_TEXT_SIGNATURES = {
    b"%PDF-": "a PDF. Give it a name that ends in .pdf.",
    b"PK\x03\x04": "a zip archive (like .docx, .odt and .epub), not text. Save it as plain text (UTF-8) first.",
    b"\xd0\xcf\x11\xe0": "an Office document, not text. Save it as plain text (UTF-8) first.",
    b"{\\rtf": "an RTF document, not text. Save it as plain text (UTF-8) first.",
    b"\x1f\x8b": "packed with gzip. Give it a name that ends in .gz.",
}
ZERO_BYTES_ADVICE = (
    "It contains NUL bytes, which text never does. Save it as plain text (UTF-8) in the program that wrote it."
)


@dataclass(frozen=True)
class Source:
    """An input file. `name` is its path below the given folder, or its file name. Size and time are those at the time
    it was found."""

    path: Path
    name: str
    size: int  # bytes on disk
    modified_ns: int
    note: str = ""  # the original format or encoding
    is_converted: bool = False  # was in another encoding
    member: int | None = None  # index in the zip archive at `path`
    text_bytes: int = 0  # unpacked size; 0 if not known yet
    max_bytes: float = math.inf  # limit on its text, if only a part is wanted
    left_out: str = ""  # records left out, and why
    inline_marks: int = 0  # occurrences of <|endoftext|> inside lines

    @property
    def file_name(self) -> str:
        return self.path.name if self.member is None else self.name

    @property
    def is_compressed(self) -> bool:
        return self.packing in PACKED_SUFFIXES

    @property
    def packing(self) -> str:
        return os.path.splitext(self.file_name)[1].lower()

    @property
    def suffix(self) -> str:
        """Suffix of the unpacked file."""
        return os.path.splitext(strip_packing(self.file_name))[1]

    @property
    def place(self) -> str:
        """The file's name in messages. For an extracted file, that of the original."""
        return f"{self.name} ({self.note})" if self.note else str(self.path)

    @property
    def is_jsonl(self) -> bool:
        return self.suffix == ".jsonl"

    def open(self) -> BinaryIO:
        """Open the file, unpacked."""
        if self.member is None:
            return self.unpack(open_regular(self.path))
        archive = open_archive(self.path, self.modified_ns)
        return self.unpack(archive.open(archive.infolist()[self.member]))

    def unpack(self, file: IO[bytes]) -> BinaryIO:
        if self.packing == ".zst" and zstd is None:
            raise UnreadableError("it needs backports.zstd (pip install backports.zstd)")
        unpack = {".gz": gzip.open, ".zst": zstd and zstd.open}.get(self.packing)
        return cast(BinaryIO, unpack(file) if unpack else file)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises UnreadableError if it is a pipe or a device by now: reading it may never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


@functools.lru_cache(maxsize=1)
def open_archive(path: Path, modified_ns: int) -> zipfile.ZipFile:
    """Open a zip archive, and keep it open, because its directory may be long."""
    return zipfile.ZipFile(path)


class UnreadableError(DataError):
    """A file cannot be read; the message says why. Other files are still read."""


class NotUTF8Error(DataError):
    """A file is not UTF-8. `encoding` is None if it is unknown; `sample` helps to guess it."""

    def __init__(self, message: str, sample: bytes, encoding: str | None = None):
        super().__init__(message)
        self.sample, self.encoding = sample, encoding


def find_sources(inputs: Sequence[str], suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Source]:
    """Return the files that the inputs name, without duplicates. An input is a file, a folder (searched recursively for
    `suffixes`, in sorted order) or a glob pattern.

    Raises DataError for an input without files.
    """
    found: dict[Path, Source] = {}
    for given in inputs:
        for path, name in expand(given, suffixes):
            found.setdefault(path.resolve(), source_at(path, name))
    return list(found.values())


def source_at(path: Path, name: str, note: str = "") -> Source:
    status = path.stat()
    return Source(path.resolve(), name, status.st_size, status.st_mtime_ns, note)


def strip_packing(name: str) -> str:
    """Return a file name in lower case, without the suffix of a compression."""
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def list_left_out(inputs: Sequence[str], suffixes: tuple[str, ...], taken: Container[Path]) -> list[tuple[str, str]]:
    """Return the paths in the given folders that are not `taken`, each with the reason."""
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
                elif reason := find_obstacle(path.name, suffixes):
                    is_text = reason == UNKNOWN_SUFFIX and path.suffix and holds_text(path)
                    add(path, advise_reading(given, path.suffix) if is_text else reason)
        for problem in problems:
            add(problem.filename, f"cannot be opened: {problem.strerror}")
    return found


def is_hidden(name: str) -> bool:
    """Return whether a path has a hidden part, or a folder that macOS adds to archives."""
    parts = [part for part in name.split("/") if part not in (".", "..")]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def holds_text(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            beginning = file.read(SNIFFED_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning)  # the last character may be incomplete
    except (OSError, UnicodeDecodeError):
        return False
    return bool(text.strip()) and "\0" not in text


def advise_reading(folder: str, suffix: str) -> str:
    """Return advice on reading files with an unknown suffix as text."""
    return f"it may be text; read such files with --input {shlex.quote(f'{folder}/**/*{suffix}')}"


def find_obstacle(name: str, suffixes: tuple[str, ...]) -> str:
    """Return why a file of this name is not read; "" if it is."""
    if strip_packing(name).endswith(suffixes) and not Path(name).name.startswith("~$"):  # Word's lock file
        return ""
    return next((advice for known, advice in ADVICE.items() if name.lower().endswith(known)), UNKNOWN_SUFFIX)


def require_unchanged(source: Source) -> None:
    """Raise DataError if a file has changed since it was found."""
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
        raise DataError(f"{source.place} changed while it was read. Run the same command again once it is complete.")


def expand(given: str, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """Return (path, name) of each file that an input names."""
    if not given:
        raise DataError("An input has an empty name. Name a file or a folder (. is the current folder).")
    if given.startswith(HUB):
        raise DataError(
            f"Tokenize {given} first: python tokenize_local_bpe.py --input {shlex.quote(given)} --max_mb 500 "
            f"--output_dir {DEFAULT_FOLDER}/hub. It prints the command for training."
        )
    path = Path(given).expanduser()
    if path.is_dir():
        files = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            named = [name for name in names if not find_obstacle(name, suffixes)]
            visible = [Path(folder, name) for name in named if not name.startswith(".")]
            files += [path for path in visible if os.path.isfile(path)]  # reading a pipe may never end
        if not files:
            endings = f"{', '.join(suffixes)} (also with .gz or .zst)"
            reasons = Counter(reason for _, reason in list_left_out([given], suffixes, taken=()))
            there = "".join(f" {count:,} files: {reason}." for reason, count in reasons.most_common(3))
            raise DataError(f"The folder {given} has no file with a name that ends in {endings}.{there}")
        return [(file, file.relative_to(path).as_posix()) for file in sorted(files)]
    if path.is_file():
        return [(path, path.name)]
    if path.exists():
        raise DataError(f"{given} is not a regular file. Write its text to a file first, because it is read twice.")
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if matches:
            return [(match, match.name) for match in matches]
        raise DataError(f"No file matches {given} in {Path.cwd()}.")
    raise missing_error(given)


def require_existing(inputs: Sequence[str]) -> None:
    """Raise DataError for an input that is neither a path that exists nor a pattern nor an address on the hub."""
    for given in inputs:
        if not (given.startswith(HUB) or glob.has_magic(given) or os.path.exists(os.path.expanduser(given))):
            raise missing_error(given)


def missing_error(given: str) -> DataError:
    return DataError(f"No such file or folder: {given} (in {Path.cwd()}).")


def read_blocks(source: Source) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file. Raises UnreadableError for a zip bomb, DataError for a damaged file."""
    remaining = max(ALWAYS_ALLOWED_BYTES, MAX_UNPACK_RATIO * source.size)
    try:
        with source.open() as file:
            while block := file.read(BLOCK_BYTES):
                remaining -= len(block)
                if remaining < 0 and (source.is_compressed or source.member is not None):
                    raise UnreadableError(f"it unpacks to more than {MAX_UNPACK_RATIO} times its size, like a zip bomb")
                yield block
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(source.path)) from None
        if source.member is None and not isinstance(error, PACKING_ERRORS):
            raise
        kind = {".zst": "zstd", ".gz": "gzip"}.get(source.packing, "zip")
        raise DataError(f"{source.place} is a damaged {kind} file ({error}). Download or pack it again.") from None


def read_text_blocks(source: Source) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file. Raises DataError if the first block is not UTF-8 text."""
    for number, block in enumerate(read_blocks(source)):
        if number == 0:
            require_text(source, block)
        yield block


def require_text(source: Source, beginning: bytes) -> None:
    """Raise DataError if a file begins like another format, with NUL bytes or in UTF-16."""
    for signature, what in NOT_TEXT_SIGNATURES.items():
        if beginning.startswith(signature):
            raise DataError(f"{source.place} is {what}")
    # In UTF-16, one byte of each space and line break is zero, always at even or always at odd offsets.
    high, low = beginning[::2].count(0), beginning[1::2].count(0)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif (high + low) * 100 <= len(beginning):
        return
    elif min(high, low) * 10 > max(high, low):
        raise DataError(f"{source.place} is not text. {ZERO_BYTES_ADVICE}")
    else:
        encoding = "UTF-16BE" if high > low else "UTF-16LE"
    message = f"{source.place} is {encoding}, not UTF-8 text."
    raise NotUTF8Error(message, beginning, encoding if encoding == "UTF-16" else None)


def decode_blocks(source: Source, on_read: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of a file, with "\\n" for every line break. Raises NotUTF8Error."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    position = 0
    for block in read_text_blocks(source):
        waiting = len(decoder.getstate()[0])  # bytes of an incomplete character
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise build_not_utf8_error(source, position - waiting + error.start, error) from None
        position += len(block)
        on_read(len(block))
        yield text.replace("\ufeff", "")  # concatenated files have byte order marks inside
    try:
        yield decoder.decode(b"", final=True)  # a final \r
    except UnicodeDecodeError as error:
        raise build_not_utf8_error(source, position - len(error.object) + error.start, error) from None


def build_not_utf8_error(source: Source, position: int, error: UnicodeDecodeError) -> DataError:
    where = f"byte {position}{' of the unpacked text' if source.is_compressed else ''}"
    found = f"{source.place} is not UTF-8 text: {error.reason} at {where} (0x{error.object[error.start]:02x})."
    if 0 in error.object:
        return DataError(f"{found} {ZERO_BYTES_ADVICE}")
    return NotUTF8Error(found, error.object)
