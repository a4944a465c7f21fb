"""Signals that ask the training to stop: Ctrl-C, a notebook's stop button, a closed terminal, a shutdown."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType

from common.script import is_rank_0
from training.machine.processes import any_process, count, note_part

SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
SAME_WISH_SECONDS = 2.0  # a notebook's stop button sends two signals for one click
LONG_STEP_SECONDS = 1.0  # a longer step is not finished first: the machine may be gone by then


class StopRequested(BaseException):
    """Abandon what is under way, so that the state before it can be saved in time. Not an Exception, so that code which
    handles errors, of a compiler for instance, does not catch it."""


class Interruption:
    """The first signal sets `requested`: the loop saves and ends.

    The current step is finished first. If steps are long, it is abandoned instead (StopRequested out of train_step,
    while only gradients have changed), and the state after the step before it is saved. Compiling takes minutes and
    changes nothing that is saved, so it is abandoned, too (StopRequested out of `compiling`). A second signal within
    two seconds is ignored. A later or a third one stops at once, without saving (KeyboardInterrupt).
    """

    def __init__(self, ends_process: bool = False) -> None:
        """`ends_process`: the process ends after the training, as a script does. Further signals are then ignored until
        its end, because a default handler would change its exit code."""
        self.ends_process = ends_process
        self.requested = False
        self.signals = 0
        self.first_signal = 0.0
        self.answer = "Stopping after this step, then saving"
        self.part = ""  # of the step
        self.step_began = 0.0
        self.step_seconds: float | None = None  # of the last one

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread gets signals
            return
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self.ask) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                is_over = self.requested or count() > 1  # torchrun ends all processes when one has an exit code
                signal.signal(number, signal.SIG_IGN if is_over and self.ends_process else handler)

    def ask(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            self.requested = True
            self.first_signal = time.monotonic()
            is_long = self.step_seconds is None or self.step_seconds > LONG_STEP_SECONDS
            gives_up = self.part == "compile" or (self.part in ("data", "gradients") and is_long)
            gives_up = gives_up and count() == 1  # others would wait for this process in the same step
            if self.part == "compile":
                now = "Stopping now" if gives_up else "Stopping once every process has compiled the model"
            else:
                now = "Stopping now, and saving the last finished step" if gives_up else self.answer
            with contextlib.suppress(OSError):  # not print: the terminal may be gone, and a print may be under way
                if is_rank_0():
                    os.write(2, f"\n{now}. Once more, after two seconds, stops at once.\n".encode())
            if gives_up:
                raise StopRequested
        elif self.signals > 2 or time.monotonic() - self.first_signal > SAME_WISH_SECONDS:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile the model inside. Raises StopRequested, also if the signal came before."""
        self.part = "compile"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Error detected in")  # PyTorch's own, of where the signal came
            try:
                self.check()
                yield
            finally:
                self.part = ""

    def begin(self, part: str) -> None:
        """A `part` of a step begins: one of PARTS."""
        if part == "data":
            self.step_began = time.monotonic()
        self.part = part
        note_part(part)

    def step_over(self) -> None:
        """The step has ended, done or not."""
        self.part = ""

    def step_done(self) -> None:
        self.step_over()
        self.step_seconds = time.monotonic() - self.step_began

    def agreed(self, limit: object = None) -> bool:
        """Whether all processes stop here, because one of them got a signal or has another reason (`limit` is not
        None)."""
        requested, is_over = any_process(self.requested, limit is not None)
        if requested:
            self.requested = True
        return requested or is_over

    def check(self) -> None:
        """To be called between two batches of something long that can be abandoned. Raises StopRequested."""
        if self.agreed():
            raise StopRequested
