"""Files and folders: atomic writes, hashes, JSON with errors that name the line, locks."""

from __future__ import annotations

import codecs
import contextlib
import datetime
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from common.errors import UserError

# Names of checkpoint folders. In a mirror (`--checkpoint_dir`), the session that made the copy is part of the name.
STEP_NAME = re.compile(r"step_(\d{8})(-[0-9a-f]{8})?")
RECORDS_FOLDER = "run"  # folder in each copy of a mirror
WINDOWS_RENAME_SECONDS = 60.0
CHECKPOINT_NAME = re.compile(rf"best|base|best_\d{{8}}-[0-9a-f]{{8}}|{STEP_NAME.pattern}")


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for writing, and rename it to `path` once it is complete and on disk.

    If the body raises or the disk is full, the file at `path` is unchanged, and the temporary file is deleted.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with name_in_errors(path, temporary):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextlib.contextmanager
def name_in_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name `path` in an OSError inside that names no file, as those of an open file do, or that names `temporary`."""
    try:
        yield
    except OSError as problem:
        names_no_file = problem.errno is not None and problem.filename is None
        if names_no_file or (temporary is not None and problem.filename == str(temporary)):
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise


def rename(source: Path, target: Path) -> None:
    """os.replace, repeated on Windows, which refuses while another thread, process or virus scanner has a file open."""
    deadline = time.monotonic() + WINDOWS_RENAME_SECONDS
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def sync_directory(path: Path) -> None:
    """Make a rename inside `path` durable. Does nothing on Windows, which needs no sync of directories."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # network and FUSE file systems (Drive among them) may lack fsync for directories
        pass
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush their names to disk."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def flush_file(path: Path) -> None:
    """Flush what was written to a file to disk."""
    with open(path, "r+b") as file:  # Windows cannot flush a file opened for reading
        os.fsync(file.fileno())


def write_json(path: str | Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return JSON in UTF-8. Lone surrogates, from file names that are not UTF-8, become escapes."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def require_regular(path: Path, error: type[UserError]) -> None:
    """Raise `error` for a folder, pipe or device. Reading a pipe or device may never end."""
    if os.path.isdir(path):
        raise error(f"{path} is a folder, but a file is needed.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise error(f"{path} is not a regular file. Write its content to a file first.")


def _decode_small(content: bytes) -> str:
    """Decode UTF-8, or the UTF-16 of Windows programs, without its byte order mark."""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf16 else "utf-8-sig")


def read_text(path: str | Path, error: type[UserError], flag: str) -> str:
    """Read a small text file without its byte order mark. Raises `error` with the name of the file; if it does not
    exist, also with `flag`."""
    path = Path(path)
    require_regular(path, error)
    try:
        return _decode_small(path.read_bytes()).replace("\r\n", "\n")
    except FileNotFoundError:
        raise error(f"No such file: {path} ({flag}).") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start}).") from None


def read_json(path: str | Path, error: type[UserError]) -> dict[str, Any]:
    """Read a JSON object. Raises `error` with the name of the file, and the line and column of a syntax error."""
    path = Path(path)
    require_regular(path, error)
    try:
        value = json.loads(_decode_small(path.read_bytes()))
    except FileNotFoundError:
        raise error(f"No such file: {path}.") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start}), but a JSON file is needed.") from None
    except json.JSONDecodeError as problem:
        place = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{path} is not valid JSON: {problem.msg} at {place}.") from None
    except (ValueError, RecursionError) as problem:  # thousands of digits, or of open brackets
        raise error(f"{path} is not usable JSON: {problem}.") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}, but an object {{...}} is needed.")
    return value


def name_input(given: str) -> str:
    """Return a folder name for an input: `my_book` for my_book.txt, `my_code` for my_code/**/*.py, `c4` for
    hf://datasets/allenai/c4/en/*.json.gz."""
    if dataset := re.match(r"hf://datasets/[^/]+/([^/@]+)", given):
        given = dataset[1]
    path = Path(os.path.abspath(Path(given).expanduser()))
    while glob.has_magic(path.name) and not path.exists():
        path = path.parent
    name = path.name if path.is_dir() else os.path.splitext(re.sub(r"\.(gz|zst)$", "", path.name))[0]
    return re.sub(r"[^\w.-]+", "_", name).strip("_.")


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_space(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


@contextlib.contextmanager
def locked(folder: Path, busy: Callable[[], UserError]) -> Iterator[None]:
    """Lock a folder, which need not exist yet, by a file beside it. The system releases the lock when the process ends,
    even if it is killed. Raises `busy()` if another process holds it."""
    place = folder.resolve()  # a link to the folder gets the same lock
    # filelock's soft lock, for file systems without locks, would outlive a killed process.
    lock = filelock.FileLock(place.with_name(f".{place.name}.lock"), timeout=0, fallback_to_soft=False)
    try:
        make_folder(folder.parent)
        lock.acquire()
    except filelock.Timeout:
        raise busy() from None
    except (OSError, NotImplementedError) as problem:
        print(f"Note: {place.parent} does not support locks ({problem}). Do not start a second process for {folder}.")
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # filelock deletes it on Windows
                os.unlink(lock.lock_file)  # while held, so that a waiting process sees it is gone
            lock.release()


@functools.cache
def describe_session() -> dict[str, Any]:
    """Return the id, machine and start of this process, which the holder of a folder writes there."""
    started = datetime.datetime.now().isoformat(" ", timespec="seconds")
    return {"pid": os.getpid(), "machine": socket.gethostname(), "started": started}


def describe_holder(path: Path) -> str:
    """Return the "session" of a JSON file in parentheses; "" if there is none."""
    with contextlib.suppress(UserError, KeyError, TypeError):
        session = read_json(path, UserError)["session"]
        return f" ({session['pid']} on {session['machine']}, since {session['started']})"
    return ""
