"""What ends a training early: Ctrl-C, a notebook's stop button, a closed terminal, a shutdown, a lack of memory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from common.errors import is_out_of_memory
from common.script import is_main_process, world

SIGNALS = [
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if (number := getattr(signal, name, None)) is not None
]
DOUBLE_SIGNAL_SECONDS = 2.0
LONG_STEP_SECONDS = 1.0  # a longer step is abandoned, because the machine may be gone before it ends


class Abandoned(BaseException):
    """Raised to abandon what is under way, so that the state before it can be saved. A BaseException, because code that
    handles errors, a compiler's for instance, must not catch it."""


class Stop:
    """A context in which signals request a stop. The first one sets `requested`, and the loop saves and ends.

    The current step is finished first. If steps are long, its `abandonable` part is abandoned instead, and the state
    before the step is saved. With several processes nothing is abandoned,
    because the others would wait in the same step. A second signal within two seconds is ignored, because a notebook's
    stop button sends two per click. A later or third one stops at once, without saving (KeyboardInterrupt).
    """

    def __init__(self, ends_process: bool = False) -> None:
        """`ends_process`: the process ends after the training. Further signals are then ignored until its end, because
        a default handler would change the exit code."""
        self.ends_process = ends_process
        self.requested = False
        self.agreed = False  # all processes stop after this step
        self.out_of_memory = False  # memory ran out in an abandonable part
        self.signals = 0
        self.first_signal = 0.0
        self.message = "Stopping after this step, then saving"
        self.began: float | None = None  # time.monotonic() at the start of the abandonable part, inside one
        self.is_long = True  # the last abandonable part took long; assumed for the first
        self.handlers: dict[int, Any] = {}  # the handlers before

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other thread gets signals
            # Ignored under nohup
            numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self.handlers = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        is_over = self.requested or world().size > 1  # torchrun ends all processes when one exits with a code
        for number, handler in self.handlers.items():
            signal.signal(number, signal.SIG_IGN if is_over and self.ends_process else handler)

    @property
    def begins_again(self) -> bool:
        """Whether the run begins again, with less memory."""
        return self.out_of_memory and not self.requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            self.requested = True
            self.first_signal = time.monotonic()
            since = None if self.began is None else time.monotonic() - self.began
            abandons = since is not None and world().size == 1 and (self.is_long or since > LONG_STEP_SECONDS)
            action = "Stopping now, and saving what is finished" if abandons else self.message
            with contextlib.suppress(OSError):  # print may be interrupted by this handler, or the terminal gone
                if is_main_process():
                    os.write(2, f"\n{action}. Another signal after two seconds stops at once.\n".encode())
            if abandons:
                raise Abandoned
        elif self.signals > 2 or time.monotonic() - self.first_signal > DOUBLE_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def abandonable(self, is_long: bool = False) -> Iterator[None]:
        """Let a signal, or running out of memory, abandon what happens inside, which changes nothing that is saved.
        `is_long`: expected to take long, so a signal ends it at once. Raises Abandoned."""
        self.is_long |= is_long
        self.began = began = time.monotonic()
        try:
            if self.requested and world().size == 1:
                raise Abandoned
            yield
        except Exception as error:
            if world().size > 1 or not is_out_of_memory(error):  # the other processes would wait in the same step
                raise
            self.out_of_memory = True
            raise Abandoned from error
        finally:
            self.began = None
        self.is_long = time.monotonic() - began > LONG_STEP_SECONDS


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let every signal that asks to stop end what is inside as Ctrl-C does, by KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in SIGNALS if is_main and signal.getsignal(number) == signal.SIG_DFL]
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
