"""Progress: a bar in a terminal, or a line every ten seconds if the output is a file or a notebook's cell."""

from __future__ import annotations

import logging
import shutil
import sys
from typing import TYPE_CHECKING, Any

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
