"""Faults at a chosen operation on files, to be given to `tests.forked.Forked` as what is called first.

Python tells audit hooks (PEP 578) before it opens, renames or deletes a file or makes a folder. So nothing of the
program is patched, and each place where it may be killed, or may find the disk full, can be tried.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("full", "kill")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


@dataclass
class Fault:
    """At the operation of this number (from 0) that changes something in one of `folders`, kill the process or let the
    operation fail as on a full disk. Reading counts for nothing."""

    number: int
    folders: tuple[Path, ...]
    kind: str  # one of KINDS
    seen: int = 0

    def __call__(self) -> None:
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event not in CHANGES:
            return
        if not isinstance(path := arguments[0], str | os.PathLike):
            return
        if not any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in self.folders):
            return
        self.seen += 1
        if self.seen != self.number + 1:
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
