"""Output that may be lost: a reader that ends (`| head`), a terminal that closes, a full disk behind `> log`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class Unbreakable:
    """A stream whose writes never fail: what can no longer be written is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        with self.dropping():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.dropping():
            self.stream.flush()

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        try:
            yield
        except UnicodeError:  # this text alone cannot be written
            pass
        except (OSError, ValueError):  # ValueError: the stream was closed
            with contextlib.suppress(OSError, ValueError):  # a stream without a file
                drop(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def drop(stream: TextIO) -> None:
    """Have the file behind a stream swallow what is still to come; Python flushes the stream at exit, and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Nothing that is printed inside can fail, nor its end in a buffer afterwards."""
    stdout, stderr = cast(TextIO, Unbreakable(sys.stdout)), cast(TextIO, Unbreakable(sys.stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()
