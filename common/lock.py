"""Only one process at a time writes into a folder. The next one is told which process that is."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import read_json

with contextlib.suppress(ImportError):  # Windows has none, and there is no lock there
    import fcntl


class FolderLock:
    """Locks folders against other processes. The system releases the locks when the process ends, even if it is
    killed."""

    def __init__(self, busy: Callable[[Path], UserError]) -> None:
        """`busy(folder)` is the error that says who holds it."""
        self.busy = busy
        self.held: dict[tuple[int, int], int] = {}  # (device, inode) -> descriptor

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self.held.values():
            os.close(descriptor)

    def take(self, folder: Path) -> None:
        """Raises the error of `busy` if another process holds the folder. One that does not exist is not locked."""
        if os.name == "nt" or not folder.is_dir():
            return
        descriptor = os.open(folder, os.O_RDONLY)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) in self.held:
            os.close(descriptor)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise self.busy(folder) from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            return
        self.held[status.st_dev, status.st_ino] = descriptor


@functools.cache
def session() -> dict[str, Any]:
    """This process, as whoever holds a folder describes itself in a JSON file there."""
    started = datetime.datetime.now().isoformat(" ", timespec="seconds")
    return {"pid": os.getpid(), "machine": socket.gethostname(), "started": started}


def holder(path: Path) -> str:
    """The `session` in a JSON file, for the end of a sentence; "" if there is none."""
    with contextlib.suppress(UserError, KeyError, TypeError):
        theirs = read_json(path, UserError)["session"]
        return f" ({theirs['pid']} on {theirs['machine']}, since {theirs['started']})"
    return ""
