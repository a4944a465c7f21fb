"""Ctrl-C, and SIGTERM, which a machine that goes away sends: the training is asked to stop, and saves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """`requested` becomes true at the first signal; the loop reads it after each step."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM only ask: the loop ends after the step in hand, and saves. A second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread alone
            return
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        with contextlib.suppress(OSError):  # not print: the terminal may be gone, and a print may be under way
            os.write(2, b"\nStopping after this step, then saving. Once more stops at once.\n")
