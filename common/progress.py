"""Progress: a bar in a terminal, or a line every ten seconds if the output is a file or a notebook's cell."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from common.formatting import byte_size, clock

if TYPE_CHECKING:
    from tqdm import tqdm

# What happens, told by any thread: a line each on stdout, above the progress bar where there is one.
log = logging.getLogger("gpt2")
LOG_LINE_SECONDS = 10.0  # between two lines if the output cannot be redrawn


class Lines(logging.Handler):
    """Prints what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(record.getMessage(), file=sys.stdout)
        sys.stdout.flush()


def print_log() -> None:
    """Print what is logged from now on."""
    if not log.handlers:
        log.addHandler(Lines())
        log.setLevel(logging.INFO)
        log.propagate = False


def is_interactive() -> bool:
    """Whether a written line can be overwritten."""
    return sys.stderr.isatty()


def progress_bar(**options: Any) -> tqdm[Any]:
    """tqdm's bar on stderr if that is interactive, else a bar that draws and counts nothing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """tqdm without its thread, which cannot start when memory is short (before 4.70 that is a traceback)."""

        monitor_interval = 0

    # Some terminals, such as Colab's, do not report their size; tqdm alone would then draw nothing.
    size = shutil.get_terminal_size((100, 24))
    # Without the thread, tqdm must check at each step whether it is time to draw.
    ways: dict[str, Any] = {"miniters": 1, "ncols": min(size.columns, 120), "nrows": size.lines}
    return Bar(disable=not is_interactive(), **ways, **options)


class BytesRead:
    """Progress through a known number of bytes."""

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = self.done_before = 0
        self.is_all_read = False
        self.bar = progress_bar(desc=what, total=total, unit="B", unit_scale=True, mininterval=0.5)
        self.began = self.told = time.monotonic()

    def __enter__(self) -> BytesRead:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def start_at(self, done: int) -> None:
        """`done` bytes come from an earlier session and do not count for the speed."""
        self.bar.update(done - self.done)
        self.bar.unpause()
        self.done = self.done_before = done
        self.began = time.monotonic()

    def add(self, count: int) -> None:
        self.reach(self.done + count)

    def reach(self, done: int) -> None:
        self.bar.update(done - self.done)
        self.done = done
        if seconds := self.seconds_to_tell():
            speed = (done - self.done_before) / seconds
            left = f", {clock((self.total - done) / speed)} left" if speed else ""
            share = f"{done / self.total:.0%} of {byte_size(self.total)}"
            print(f"{self.what}: {share}, {byte_size(speed)}/s{left}", flush=True)

    def to_the_end_of(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts. After the last one, `wait` reports that all is read."""
        yield from texts
        self.is_all_read = True

    def wait(self, what: str) -> None:
        """If all is read, report that `what` is running and for how long. Call it about once a second."""
        if self.is_all_read:
            self.bar.bar_format = "{desc}: all read, " + what + " [{elapsed}]"
        self.bar.refresh()
        if self.is_all_read and (seconds := self.seconds_to_tell()):
            print(f"{self.what}: all read, {what}, {clock(seconds)} so far", flush=True)

    def seconds_to_tell(self) -> float:
        """Seconds since the start if a new line is due, else 0."""
        now = time.monotonic()
        if not self.bar.disable or now - self.told < LOG_LINE_SECONDS:
            return 0.0
        self.told = now
        return now - self.began
