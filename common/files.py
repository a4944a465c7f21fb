"""Files and folders: writes that are whole or not there, hashes, JSON with errors that name the line, and locks."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from common.errors import UserError

# Of checkpoints. In a mirror (`--checkpoint_dir`), the session that made the copy is part of the name.
STEP_NAME = re.compile(r"step_(\d{8})(-[0-9a-f]{8})?")
OF_RUN = "run"  # in such a copy: the records of its run
CHECKPOINT_NAME = re.compile(rf"best|best_\d{{8}}-[0-9a-f]{{8}}|{STEP_NAME.pattern}")


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for writing. It is renamed to `path` when it is complete and on disk.

    If the body raises, or if the disk is full, the file at `path` stays as it was, and the temporary file is deleted.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        if problem.filename == str(temporary):
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make a rename inside `path` durable. Windows cannot open a directory, and needs no sync of it."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network and FUSE file systems (Drive among them) have no fsync for directories
        pass
    finally:
        os.close(descriptor)


def write_json(path: str | Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Write JSON in UTF-8. A byte of a file name that is not UTF-8 is a lone surrogate in Python, and becomes an
    escape."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def require_regular(path: Path, error: type[UserError]) -> None:
    """Raise `error` for a folder, and for a pipe or device: reading one may never end."""
    if os.path.isdir(path):
        raise error(f"{path} is a folder, and a file is needed.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise error(f"{path} is not a regular file. Write its content to one first.")


def read_text(path: str | Path, error: type[UserError], flag: str) -> str:
    """Read a small file in UTF-8, without its byte order mark. Raises `error` that names the file, and `flag` if there
    is no such file."""
    path = Path(path)
    require_regular(path, error)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise error(f"There is no file {path} ({flag}).") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start}).") from None


def read_json(path: str | Path, error: type[UserError]) -> dict[str, Any]:
    """Read a JSON object. Raises `error` that names the file, and the line and column of a syntax error."""
    path = Path(path)
    require_regular(path, error)
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise error(f"There is no file {path}.") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start}); a JSON file was expected.") from None
    except json.JSONDecodeError as problem:
        place = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{path} is not valid JSON: {problem.msg} at {place}.") from None
    except (ValueError, RecursionError) as problem:  # a number with thousands of digits, or thousands of open brackets
        raise error(f"{path} is not usable JSON: {problem}.") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}; an object {{...}} was expected.")
    return value


def name_of(given: str) -> str:
    """Return a name for what an input names, for folders that are made from it: `my_book` for my_book.txt, `my_code`
    for my_code/**/*.py, and `c4` for hf://datasets/allenai/c4/en/*.json.gz."""
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
    """Return the free bytes on the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


@contextlib.contextmanager
def locked(folder: Path, busy: Callable[[], UserError]) -> Iterator[None]:
    """Keep other processes out of a folder, which may not exist yet, by a lock file beside it. The system releases the
    lock when the process ends, even if it is killed. Raises `busy()` if another process holds it."""
    place = folder.resolve()  # the same for a link to it
    # A soft lock, filelock's answer where a file system has none, would outlive a process that is killed.
    lock = filelock.FileLock(place.with_name(f".{place.name}.lock"), timeout=0, fallback_to_soft=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise busy() from None
    except (OSError, NotImplementedError) as problem:
        print(f"Note: {place.parent} has no locks ({problem}); do not start a second process for {folder}.")
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows deletes it itself
                os.unlink(lock.lock_file)  # while it is held: whoever waits for this file finds it gone
            lock.release()


@functools.cache
def session() -> dict[str, Any]:
    """Describe this process, as whoever holds a folder does in a JSON file there."""
    started = datetime.datetime.now().isoformat(" ", timespec="seconds")
    return {"pid": os.getpid(), "machine": socket.gethostname(), "started": started}


def holder(path: Path) -> str:
    """Return the `session` in a JSON file, for the end of a sentence; "" if there is none."""
    with contextlib.suppress(UserError, KeyError, TypeError):
        theirs = read_json(path, UserError)["session"]
        return f" ({theirs['pid']} on {theirs['machine']}, since {theirs['started']})"
    return ""
