"""Atomic writes (a file is whole, or not there), hashes, and JSON with errors that name the line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError


@contextlib.contextmanager
def atomic_write(path: str | Path, staging: Path | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, beside `path` or in the folder `staging` on the same disk. It is renamed to
    `path` when it is complete and on disk.

    If the body raises, or if the disk is full, the file at `path` stays as it was, and the temporary file is deleted.
    """
    path = Path(path)
    temporary = (staging or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
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


def write_json(path: str | Path, value: Any, staging: Path | None = None) -> None:
    with atomic_write(path, staging) as file:
        file.write(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8. A byte of a file name that is not UTF-8 is a lone surrogate in Python, and becomes an escape."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def require_regular(path: Path, error: type[UserError]) -> None:
    """Raises `error` for a folder, and for a pipe or device: reading one may never end."""
    if os.path.isdir(path):
        raise error(f"{path} is a folder, and a file is needed.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise error(f"{path} is not a regular file. Write its content to one first.")


def read_text(path: str | Path, error: type[UserError], flag: str) -> str:
    """A small file in UTF-8, without its byte order mark. Raises `error` that names the file, and `flag` if there is no
    such file."""
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


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
