"""Closed output must not stop a script: a reader that ended (`| head`), a closed terminal, a full disk (`> log`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class Unbreakable:
    """A stream whose writes never fail: text that cannot be written is dropped."""

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
        except UnicodeError:  # only this text cannot be written
            pass
        except (OSError, ValueError):  # ValueError: the stream was closed
            with contextlib.suppress(OSError, ValueError):  # the stream has no file
                drop(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def drop(stream: TextIO) -> None:
    """Send all further output of a stream to /dev/null; else Python flushes the stream at exit and reports an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Printing inside never raises, and neither does flushing the rest afterwards."""
    stdout, stderr = cast(TextIO, Unbreakable(sys.stdout)), cast(TextIO, Unbreakable(sys.stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()
