"""Processes that a test started and did not end, because it failed on the way: they end with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What one test starts for all that follow: helpers of multiprocessing, and torch's compile workers.
SHARED = (b"multiprocessing", b"compile_worker")
STARTED: list[Any] = []  # by `tests.forked`, in the test that runs


def children(pid: int | str = "self") -> set[int]:
    """Process ids, as Linux tells; none elsewhere."""
    found = set[int]()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has just ended
            found |= {int(child) for child in listed.read_text().split()}
    return found


def family(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    for child in children(pid):
        yield from family(child)


def is_shared(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(word in Path(f"/proc/{pid}/cmdline").read_bytes() for word in SHARED)
    return False


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Kill at the end what was started inside, and is there still."""
    before = children()
    try:
        yield
    finally:
        for child in children() - before:
            for pid in [] if is_shared(child) else list(family(child)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
