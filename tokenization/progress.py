"""Show the progress of reading a text, in bytes, and wait for a long native call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from common.output import LOG_INTERVAL_SECONDS, byte_size, duration, progress_bar


class ByteProgress:
    """Shows progress in bytes: a bar in a terminal, else a line now and then."""

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = self.done_before = 0
        self.is_all_read = False
        self.bar = progress_bar(desc=what, total=total, unit="B", unit_scale=True, mininterval=0.5)
        self.began = self.last_line = time.monotonic()

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def start_at(self, done: int) -> None:
        """Count `done` bytes of an earlier session, which do not count towards the speed."""
        self.bar.update(done - self.done)
        self.bar.unpause()
        self.done = self.done_before = done
        self.began = time.monotonic()

    def add(self, count: int) -> None:
        self.advance_to(self.done + count)

    def advance_to(self, done: int) -> None:
        self.bar.update(done - self.done)
        self.done = done
        if seconds := self.seconds_if_due():
            speed = (done - self.done_before) / seconds
            left = f", {duration((self.total - done) / speed)} left" if speed else ""
            share = f"{done / self.total:.0%} of {byte_size(self.total)}"
            print(f"{self.what}: {share}, {byte_size(speed)}/s{left}", flush=True)

    def until_end(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts. After the last one, `wait` reports that all are read."""
        yield from texts
        self.is_all_read = True

    def wait(self, what: str) -> None:
        """Report that `what` is running and for how long, once all texts are read. Call it about once a second."""
        if self.is_all_read:
            self.bar.bar_format = "{desc}: text read, " + what + " [{elapsed}]"
        self.bar.refresh()
        if self.is_all_read and (seconds := self.seconds_if_due()):
            print(f"{self.what}: text read, {what}, {duration(seconds)} so far", flush=True)

    def seconds_if_due(self) -> float:
        """Return the seconds since the start if a line is due, else 0."""
        now = time.monotonic()
        if not self.bar.disable or now - self.last_line < LOG_INTERVAL_SECONDS:
            return 0.0
        self.last_line = now
        return now - self.began


def run_in_background(function: Callable[[], Any], while_waiting: Callable[[], Any]) -> Any:
    """Call `function` in another thread, and `while_waiting` about once a second. Learning merges is one long native
    call, which Ctrl-C could not interrupt in the main thread."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised again in the caller's thread
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    while not result.done():
        try:
            result.exception(timeout=1)  # Windows delivers Ctrl-C only between waits
        except TimeoutError:
            while_waiting()
    return result.result()
