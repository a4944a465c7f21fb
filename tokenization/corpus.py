"""Find input files and read them as blocks of text, in constant memory. Only a line of JSON is held whole, so its size
is limited."""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import gzip
import io
import math
import os
import posixpath
import re
import shlex
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO, cast

from common.errors import DataError
from tokenization.kinds import SNIFFED_BYTES, TEXT_SUFFIXES, UNKNOWN_SUFFIX, UNPACK, holds_prose, recognize
from tokenization.settings import DEFAULT_FOLDER, HUB

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

BLOCK_BYTES, JUDGED_BYTES = 1 << 18, 1 << 16
PACKING_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, *([zstd.ZstdError] if zstd else []))
MAX_UNPACK_RATIO = 200  # unpacked bytes per packed byte: about ten for text, a thousand for a zip bomb
ALWAYS_ALLOWED_BYTES = 10_000_000  # any file may unpack to this size
GZIP, ZSTD = b"\x1f\x8b", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # first bytes
MAX_WINDOW_LOG = 31  # Reddit's dumps have windows of 2 GB
# Folders that programs write, with texts that nobody reads.
FOLDERS_OF_PROGRAMS = ("node_modules", "site-packages", "__pycache__", "build")
PROGRAMS = "in a folder of programs; name it to read it"
BOOK_MARK = "META-INF/container.xml"  # a folder with it is an EPUB, as Apple Books keeps them
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
    kind: str = ""  # suffix of its kind, by its content; "": that of its name
    refusal: str = ""  # why it cannot be read
    left_out: str = ""  # records left out, and why
    is_named: bool = True  # by its path or a pattern, not only by a folder
    signs: str = ""  # that it is not what somebody wrote; see examine.py

    @property
    def file_name(self) -> str:
        return self.path.name if self.member is None else self.name

    @property
    def suffix(self) -> str:
        return self.kind or os.path.splitext(strip_packing(self.file_name))[1]

    @property
    def place(self) -> str:
        """The file's name in messages. For an extracted file, that of the original."""
        return f"{self.name} ({self.note})" if self.note else str(self.path)

    @property
    def is_jsonl(self) -> bool:
        return self.suffix == ".jsonl"

    def open(self) -> BinaryIO:
        """Open the file, unpacked."""
        if self.path.is_dir():
            return _pack_folder(self.path)
        if self.member is None:
            return unpack(_open_regular(self.path))
        archive = _open_archive(self.path, self.modified_ns)
        try:
            return unpack(archive.open(archive.infolist()[self.member]))
        except NotImplementedError as error:
            raise UnreadableError(f"its way of packing is not supported ({error}); unpack the archive") from None

    def look(self) -> Source:
        """Return the source with its kind."""
        kind, refusal = look(self)
        return replace(self, kind=kind, refusal=refusal)


@functools.lru_cache(maxsize=1 << 16)
def look(source: Source) -> tuple[str, str]:
    """Return kind and refusal of a file by its content."""
    return recognize(_read_beginning(source), strip_packing(source.name))


def _read_beginning(source: Source) -> bytes:
    try:
        with source.open() as file:
            return file.read(SNIFFED_BYTES) or b""
    except (DataError, OSError, zipfile.BadZipFile, RuntimeError, *PACKING_ERRORS):
        return b""  # reading all of it will tell why


def unpack(file: IO[bytes]) -> BinaryIO:
    """Return the content of a file, which may be packed by gzip or zstd."""
    beginning = file.read(4) or b""
    if not beginning:  # empty, or one of the kernel's files, which cannot be rewound
        return cast(BinaryIO, file)
    file.seek(0)
    if beginning.startswith(GZIP):
        return cast(BinaryIO, gzip.open(file))
    if not ZSTD.match(beginning):
        return cast(BinaryIO, file)
    if zstd is None:
        raise UnreadableError("it needs backports.zstd (pip install backports.zstd)")
    return cast(BinaryIO, zstd.open(file, options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}))


def _pack_folder(folder: Path) -> BinaryIO:
    """Return the files of an EPUB that is a folder as the archive that it would be."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "mimetype"):
            archive.write(path, path.relative_to(folder).as_posix())
    packed.seek(0)
    return packed


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises UnreadableError if it is a pipe or a device by now: reading it may never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_beside(source: Source, name: str) -> bytes:
    """Return the content of another file, whose path is given from the folder of a source; b"" if it is missing."""
    with contextlib.suppress(OSError, KeyError):
        if source.member is None:
            return (source.path.parent / name).read_bytes()
        archive = _open_archive(source.path, source.modified_ns)
        folder = posixpath.dirname(archive.infolist()[source.member].filename)
        return archive.read(posixpath.normpath(posixpath.join(folder, name)))
    return b""


@functools.lru_cache(maxsize=1)
def _open_archive(path: Path, modified_ns: int) -> zipfile.ZipFile:
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
    for pattern in inputs:
        for source in expand(pattern, suffixes):
            if source.is_named or source.path not in found:
                found[source.path] = source
    return list(found.values())


def source_at(path: Path, name: str, note: str = "") -> Source:
    files = [entry for entry in path.rglob("*") if entry.is_file()] if path.is_dir() else [path]
    stats = [entry.stat() for entry in files]
    size, modified_ns = sum(entry.st_size for entry in stats), max(entry.st_mtime_ns for entry in stats)
    return Source(path.resolve(), name, size, modified_ns, note)


def strip_packing(name: str) -> str:
    """Return a file name in lower case, without the suffix of a compression."""
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def walk(pattern: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, Source | str]]:
    """Yield the name of each file below a folder, with its source, or with the reason why it is not read."""
    top = Path(pattern).expanduser()
    problems: list[OSError] = []
    for parent, folders, names in os.walk(top, onerror=problems.append):
        below = {name: Path(parent, name).relative_to(top).as_posix() for name in folders + names}
        for folder in sorted(folders):
            if is_hidden(folder):
                found: Source | str = "hidden"
            elif folder in FOLDERS_OF_PROGRAMS:
                found = PROGRAMS
            elif Path(parent, folder, BOOK_MARK).is_file():
                found = source_at(Path(parent, folder), below[folder]).look()
            else:
                continue
            folders.remove(folder)
            yield below[folder], found
        folders.sort()
        for name in sorted(names):
            try:
                if not stat.S_ISREG(Path(parent, name).stat().st_mode):  # reading a pipe may never end
                    continue
                source = source_at(Path(parent, name), below[name])
            except OSError as error:
                problems.append(error)
                continue
            yield below[name], find_obstacle(source, pattern, suffixes) or replace(source.look(), is_named=False)
    for problem in problems:
        yield Path(problem.filename).relative_to(top).as_posix(), f"cannot be opened: {problem.strerror}"


def match(pattern: str) -> Iterator[tuple[str, Source | str]]:
    """Yield the name of each file that a pattern names, with its source, or with the reason why it is not read."""
    for path in map(Path, sorted(glob.glob(os.path.expanduser(pattern), recursive=True))):
        if any(part in FOLDERS_OF_PROGRAMS and part not in pattern for part in path.parts):
            yield str(path), PROGRAMS
        elif path.is_file() or (path / BOOK_MARK).is_file():
            yield path.name, source_at(path, path.name).look()


def list_left_out(inputs: Sequence[str], suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, reason) of what the folders and patterns hold and is not read."""
    found = (walk(pattern, suffixes) if Path(pattern).expanduser().is_dir() else match(pattern) for pattern in inputs)
    return [(name, reason) for entries in found for name, reason in entries if isinstance(reason, str)]


def is_hidden(name: str) -> bool:
    """Return whether a path has a hidden part, or a folder that macOS adds to archives."""
    parts = [part for part in name.split("/") if part not in (".", "..")]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def find_obstacle(source: Source, typed: str, suffixes: tuple[str, ...]) -> str:
    """Return why a file in the folder `typed` is not read; "" if it is."""
    name = Path(source.name).name
    if is_hidden(source.name):
        return "hidden"
    if name.startswith("~$"):  # Word's lock file
        return UNKNOWN_SUFFIX
    kind, refusal = look(source)
    if kind in suffixes or refusal:
        return refusal
    if kind == ".zip":
        return UNPACK
    if not holds_prose(_read_beginning(source)):
        return UNKNOWN_SUFFIX
    pattern = f"{glob.escape(typed)}/**/{'*' + glob.escape(source.suffix) if source.suffix else glob.escape(name)}"
    return f"it may be text; read such files with --input {shlex.quote(pattern)}"


def require_unchanged(source: Source) -> None:
    """Raise DataError if a file has changed since it was found."""
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
        raise DataError(f"{source.place} changed while it was read. Run the same command again once it is complete.")


def expand(pattern: str, suffixes: tuple[str, ...]) -> list[Source]:
    """Return the files that an input names."""
    if not pattern:
        raise DataError("An input has an empty name. Name a file or a folder (. is the current folder).")
    if pattern.startswith(HUB):
        raise DataError(
            f"Tokenize {pattern} first: python tokenize_local_bpe.py --input {shlex.quote(pattern)} --max_mb 500 "
            f"--output_dir {DEFAULT_FOLDER}/hub. It prints the command for training."
        )
    path = Path(pattern).expanduser()
    if path.is_dir() and not (path / BOOK_MARK).is_file():
        inside = list(walk(pattern, suffixes))
        if sources := [source for _, source in inside if isinstance(source, Source)]:
            return sorted(sources, key=lambda source: source.path)
        reasons = Counter(reason for _, reason in inside if isinstance(reason, str)).most_common(3)
        described = "".join(f" {count:,} files: {reason}." for reason, count in reasons)
        endings = f"{', '.join(suffixes)} (also with .gz or .zst)"
        raise DataError(f"The folder {pattern} has no file with a name that ends in {endings}.{described}")
    if path.is_file() or path.is_dir():
        return [source_at(path, path.name).look()]
    if path.exists():
        raise DataError(f"{pattern} is not a regular file. Write its text to a file first, because it is read twice.")
    if glob.has_magic(pattern):
        if matches := [source for _, source in match(pattern) if isinstance(source, Source)]:
            return matches
        raise DataError(f"No file matches {pattern} in {Path.cwd()}.")
    raise _missing_error(pattern)


def require_existing(inputs: Sequence[str]) -> None:
    """Raise DataError for an input that is neither a path that exists nor a pattern nor an address on the hub."""
    for pattern in inputs:
        if not (pattern.startswith(HUB) or glob.has_magic(pattern) or os.path.exists(os.path.expanduser(pattern))):
            raise _missing_error(pattern)


def _missing_error(pattern: str) -> DataError:
    return DataError(f"No such file or folder: {pattern} (in {Path.cwd()}).")


def read_blocks(source: Source) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file. Raises UnreadableError for a zip bomb, DataError for a damaged file."""
    remaining = max(ALWAYS_ALLOWED_BYTES, MAX_UNPACK_RATIO * source.size)
    try:
        with source.open() as file:
            while block := file.read(BLOCK_BYTES):
                remaining -= len(block)
                if remaining < 0 and source.size:
                    raise UnreadableError(f"it unpacks to more than {MAX_UNPACK_RATIO} times its size, like a zip bomb")
                yield block
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(source.path)) from None
        if source.member is None and not isinstance(error, PACKING_ERRORS):
            raise
        kind = "zip" if source.member is not None else "zstd" if source.name.lower().endswith(".zst") else "gzip"
        raise DataError(f"{source.place} is a damaged {kind} file ({error}). Download or pack it again.") from None


def read_text_blocks(source: Source) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file. Raises DataError if the first block is not UTF-8 text."""
    for number, block in enumerate(read_blocks(source)):
        if number == 0:
            require_text(source, block[:JUDGED_BYTES])
        yield block


def require_text(source: Source, beginning: bytes) -> None:
    """Raise DataError if a file begins with NUL bytes, in UTF-16 or in the Japanese encoding that looks like ASCII."""
    # In UTF-16, one byte of each space and line break is zero, always at even or always at odd offsets.
    high, low = beginning[::2].count(0), beginning[1::2].count(0)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif b"\x1b$" in beginning:
        encoding = "iso2022_jp"
    elif (high + low) * 100 <= len(beginning):
        return
    elif min(high, low) * 10 > max(high, low):
        raise DataError(f"{source.place} is not text. {ZERO_BYTES_ADVICE}")
    else:
        encoding = "UTF-16BE" if high > low else "UTF-16LE"
    message = f"{source.place} is {encoding}, not UTF-8 text."
    raise NotUTF8Error(message, beginning, encoding if encoding in ("UTF-16", "iso2022_jp") else None)


def remove_invisible(text: str) -> str:
    """Remove byte order marks, which concatenated files have inside, and marks of places to divide a word."""
    if text.isascii():
        return text
    return text.replace("\ufeff", "").replace("\u00ad", "").replace("\u200b", "")


def decode_blocks(source: Source, on_read: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of a file, with "\\n" for every line break. Raises NotUTF8Error."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    position = 0
    for block in read_text_blocks(source):
        waiting = len(decoder.getstate()[0])  # bytes of an incomplete character
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise _build_not_utf8_error(source, position - waiting + error.start, error) from None
        position += len(block)
        on_read(len(block))
        yield remove_invisible(text)
    try:
        yield decoder.decode(b"", final=True)  # a final \r
    except UnicodeDecodeError as error:
        raise _build_not_utf8_error(source, position - len(error.object) + error.start, error) from None


def _build_not_utf8_error(source: Source, position: int, error: UnicodeDecodeError) -> DataError:
    found = f"{source.place} is not UTF-8 text: {error.reason} at byte {position} (0x{error.object[error.start]:02x})."
    if 0 in error.object:
        return DataError(f"{found} {ZERO_BYTES_ADVICE}")
    return NotUTF8Error(found, error.object)
