"""What a notebook's cell shows of a training: its newest line, the loss so far and the newest answers, in place."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import re
import sys
from pathlib import Path
from typing import Any

from common.output import shortened
from serving.run_reader import RunReader
from training.reports.records import CURVE

PROGRESS = re.compile(r"step [\d,]+/[\d,]+, ")
EVALUATED = re.compile(r"step [\d,]+: validation loss ")
MOST_ANSWERS = 8
LONGEST_ANSWER = 150  # characters; of what a model repeats at first


class Lines(io.TextIOBase):
    """Stands in for stdout: each line goes to `line`, which decides what the cell shows of it."""

    def __init__(self) -> None:
        self.out = sys.stdout
        self.pending = ""

    def line(self, line: str) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """All lines are there."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            self.line(line)
        return len(text)

    def flush(self) -> None:
        self.out.flush()

    def close(self) -> None:
        if not self.closed:
            self.out.write(self.pending)
            self.end()
        super().close()


class Until(Lines):
    """Leaves out the rest from the line `last` on: what to type next in a terminal."""

    def __init__(self, last: str):
        super().__init__()
        self.last = last
        self.is_over = False

    def line(self, line: str) -> None:
        self.is_over = self.is_over or line == self.last
        if not self.is_over:
            self.out.write(f"{line}\n")


class Tables(Lines):
    """Lays out the tables, which a cell would show as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def line(self, line: str) -> None:
        if line.startswith("| "):
            self.rows.append(line)
            return
        self.end()
        self.out.write(f"{line}\n")

    def end(self) -> None:
        rows, self.rows = self.rows, []  # first: outside a notebook, what is shown is printed, and so comes here
        if rows:
            show_markdown("\n".join(rows))


class LiveView(Lines):
    """Progress lines are shown in place of each other, with the chart and the newest answers; all others as they come,
    but for the table of answers at the end, which stands there already. A view that fails must not stop the
    training."""

    def __init__(self, run_dir: Path):
        from IPython.display import HTML, display

        super().__init__()
        self.reader = RunReader(run_dir, run_dir.name)
        self.status = ""
        self.handle = display(HTML(""), display_id=True)

    def line(self, line: str) -> None:
        is_progress = PROGRESS.match(line)
        if is_progress:
            self.status = line
        elif not line.startswith("| "):
            self.out.write(f"{line}\n")
        if is_progress or EVALUATED.match(line):
            self.refresh()

    def end(self) -> None:
        self.status = ""  # of some seconds before the end
        self.refresh()

    def refresh(self) -> None:
        from IPython.display import HTML

        if self.handle is None:
            return
        try:
            self.handle.update(HTML(view(self.reader.read(), self.status)))
        except Exception as problem:  # of a file, of the connection to the notebook
            self.handle = None
            self.out.write(f"The chart is not shown any more: {problem}\n")


def view(run: dict[str, Any], status: str) -> str:
    """The HTML of a run as RunReader reads it, with the curve that the training last drew."""
    parts = [f"<div style='font-family: monospace; margin-bottom: 6px'>{html.escape(status)}</div>"]
    with contextlib.suppress(OSError):  # there is none yet
        image = base64.b64encode((Path(run["folder"]) / CURVE).read_bytes()).decode()
        parts.append(f'<img src="data:image/png;base64,{image}" width="640" alt="The loss by step">')
    if tables := [table for table in run["samples"] if table["rows"]]:
        parts.append(newest_answers(tables[-1]))
    return "".join(parts)


def newest_answers(table: dict[str, Any]) -> str:
    """The first of the answers of the last evaluation, beside what was expected where anything was."""
    last = table["rows"][-1]
    columns = {"prompt": table["prompts"], "answer": [shortened(answer, LONGEST_ANSWER) for answer in last["answers"]]}
    if any(table["expected"]):
        columns["expected"] = table["expected"]
    rows = [tuple(columns), *list(zip(*columns.values(), strict=False))[:MOST_ANSWERS]]
    kind = ("th", *["td"] * len(rows))
    cells = [
        "".join(f"<{tag} style='text-align: left'>{html.escape(text)}</{tag}>" for text in row)
        for tag, row in zip(kind, rows, strict=False)
    ]
    right = f", {last['right']} exactly right" if last["right"] else ""
    head = f"<div>After step {last['step']:,}{html.escape(right)}:</div>"
    return f"{head}<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def framed(page: str, height: int) -> None:
    """A whole page in a cell, apart from the notebook around it. It is as high as its content; `height` counts where a
    cell may not run JavaScript."""
    from IPython.display import display

    grow = "const page = this.contentDocument.documentElement; "
    grow += "new ResizeObserver(() => { this.style.height = `${page.offsetHeight}px` }).observe(page)"
    style = f"width: 100%; height: {height}px; border: 0"
    frame = f'<iframe srcdoc="{html.escape(page)}" style="{style}" onload="{html.escape(grow)}"></iframe>'
    display({"text/html": frame}, raw=True)  # not as HTML, which would ask for the address of a page


def show_markdown(text: str) -> None:
    from IPython.display import Markdown, display

    display(Markdown(text))
