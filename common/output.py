"""Output: the log, the progress bar, and readable numbers, durations and generated text."""

from __future__ import annotations

import logging
import shutil
import sys
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

# Any thread may log: a line each on stdout, above the progress bar.
log = logging.getLogger("gpt2")
LOG_INTERVAL_SECONDS = 10.0  # progress lines, where a bar cannot be redrawn


@lru_cache
def say_once(text: str) -> None:
    log.info(text)


def printable(text: str) -> str:
    """Remove control characters, so that generated text cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def cell(text: str) -> str:
    """Return text that fits in a cell of a Markdown table."""
    return " ".join(printable(text).split()).replace("|", "\\|")


def shorten(text: str, limit: int) -> str:
    """Return the first `limit` characters, with " ..." if there are more."""
    return text if len(text) <= limit else f"{text[:limit]} ..."


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plural(count: float, noun: str) -> str:
    """Return "1 file", "2 files", "1,000 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def byte_size(number: float) -> str:
    """Format a number of bytes: 1_600_000_000 -> 1.6 GB, 40_000 -> 40.0 kB."""
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if number >= least:
            return f"{number / least:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"


def si(number: float) -> str:
    """Format a number with an SI prefix: 1234 -> 1.23k."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


class LineHandler(logging.Handler):
    """Prints log records above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(record.getMessage(), file=sys.stdout)
        sys.stdout.flush()


def print_log() -> None:
    """Print log records from now on."""
    if not log.handlers:
        log.addHandler(LineHandler())
        log.setLevel(logging.INFO)
        log.propagate = False


def is_interactive() -> bool:
    """Return whether stderr is a terminal, so that a line can be redrawn."""
    return sys.stderr.isatty()


def progress_bar(**options: Any) -> tqdm[Any]:
    """Return a tqdm bar on stderr; if that is not interactive, a disabled one."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """tqdm without its monitor thread, which cannot start when memory is short (a traceback before 4.70)."""

        monitor_interval = 0

    # Some terminals, Colab's among them, do not report their size, and tqdm would draw nothing.
    size = shutil.get_terminal_size((100, 24))
    # Without the monitor, tqdm has to check at each step whether to draw.
    ways: dict[str, Any] = {"miniters": 1, "ncols": min(size.columns, 120), "nrows": size.lines}
    return Bar(disable=not is_interactive(), **ways, **options)
