"""What people see: the log, the progress bar, and numbers, durations and generated text that they can read."""

from __future__ import annotations

import logging
import shutil
import sys
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

# What happens, told by any thread: a line each on stdout, above the progress bar where there is one.
log = logging.getLogger("gpt2")
LOG_LINE_SECONDS = 10.0  # between two lines if the output cannot be redrawn


@lru_cache
def say_once(text: str) -> None:
    log.info(text)


def printable(text: str) -> str:
    """Remove control characters, so that generated text cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def cell(text: str) -> str:
    """Make text stay inside one cell of a Markdown table."""
    return " ".join(printable(text).split()).replace("|", "\\|")


def shortened(text: str, limit: int) -> str:
    """Return the first `limit` characters, with " ..." if there are more."""
    return text if len(text) <= limit else f"{text[:limit]} ..."


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def byte_size(number: float) -> str:
    """Bytes: 1_600_000_000 -> 1.6 GB, 40_000 -> 40.0 kB"""
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if number >= least:
            return f"{number / least:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"


def si(number: float) -> str:
    """1234 -> 1.23k"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


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
    """Return whether a written line can be overwritten."""
    return sys.stderr.isatty()


def progress_bar(**options: Any) -> tqdm[Any]:
    """Make tqdm's bar on stderr if that is interactive, else a bar that draws and counts nothing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """tqdm without its thread, which cannot start when memory is short (before 4.70 that is a traceback)."""

        monitor_interval = 0

    # Some terminals, such as Colab's, do not report their size; tqdm alone would then draw nothing.
    size = shutil.get_terminal_size((100, 24))
    # Without the thread, tqdm must check at each step whether it is time to draw.
    ways: dict[str, Any] = {"miniters": 1, "ncols": min(size.columns, 120), "nrows": size.lines}
    return Bar(disable=not is_interactive(), **ways, **options)
