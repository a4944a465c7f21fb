"""What a notebook's cell shows of a training: its newest line, the loss so far and the newest answers, in place."""

from __future__ import annotations

import html
import io
import math
import re
import sys
from pathlib import Path
from typing import Any

from common.formatting import shortened
from training.telling.run_reader import RunReader

PROGRESS = re.compile(r"step [\d,]+/[\d,]+, ")
EVALUATED = re.compile(r"step [\d,]+: validation loss ")
MOST_ANSWERS = 8
LONGEST_ANSWER = 150  # characters; of what a model repeats at first
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 290, 62, 42, 26  # of the chart, in its own units
COLORS = {"train_loss": "#3d85c6", "val_loss": "#e07b39"}  # to be seen on white and on black
LABELS = {"train_loss": "training", "val_loss": "validation"}


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
    """The HTML of a run as RunReader reads it."""
    parts = [f"<div style='font-family: monospace; margin-bottom: 6px'>{html.escape(status)}</div>", loss_chart(run)]
    if tables := [table for table in run["samples"] if table["rows"]]:
        parts.append(newest_answers(tables[-1]))
    return "".join(parts)


def loss_chart(run: dict[str, Any]) -> str:
    """An SVG of the losses by step; its text has the colour of the text around it."""
    steps = run["columns"].get("step", [])
    lines: dict[str, list[tuple[float, float]]] = {}
    for key in COLORS:
        points = [point for point in zip(steps, run["columns"].get(key, []), strict=False) if point[1] is not None]
        lines |= {key: points} if points else {}
    if not lines:
        return ""
    everything = [point for points in lines.values() for point in points]
    first, last = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    right = WIDTH - 12

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return LEFT + across * (right - LEFT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    parts = []
    for value in round_values(low, high, 5):
        y = place(first, value)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="currentColor" opacity="0.15"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in round_values(first, last, 8, least=1):
        parts.append(
            f'<text x="{place(value, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{value:,.0f}</text>'
        )
    for key, points in lines.items():
        placed = [place(x, y) for x, y in points]
        way, color = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed), COLORS[key]
        parts.append(f'<path d="M{way}" fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"/>')
        if key == "val_loss" or len(points) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in placed[-40:]]
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 7}" text-anchor="middle">step</text>')
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">loss, nats per token</text>'
    )
    named = [
        f'<tspan fill="{COLORS[key]}">&#9632;</tspan> {LABELS[key]} {points[-1][1]:.4f}'
        for key, points in lines.items()
    ]
    parts.append(f'<text x="{right}" y="14" text-anchor="end" font-size="13">{"&#160; ".join(named)}</text>')
    style = f"width: 100%; max-width: {WIDTH}px; font: 11.5px sans-serif; fill: currentColor"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}" role="img" aria-label="Loss">{"".join(parts)}</svg>'


def round_values(low: float, high: float, most: int, least: float = 0) -> list[float]:
    """At the most so many round numbers between two, at least so far apart."""
    if not high > low:
        return [low]
    rough = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


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
