"""A kill at a chosen operation on files.

Python tells audit hooks (PEP 578) before it opens, renames or deletes a file or makes a folder. So nothing of the
program is patched, and each place where it may be killed can be tried.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")


@dataclass
class Kill:
    """Called in a process, it kills the process right before the operation of this number (from 0) that changes
    something in one of `folders`. Reading counts for nothing."""

    number: int
    folders: tuple[Path, ...]
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
        if self.seen == self.number + 1:
            os.kill(os.getpid(), signal.SIGKILL)
