"""The records of a run, in its folder: metrics.jsonl, samples.md, loss_curve.png; `summary.py` adds summary.md."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import atomic_write
from common.formatting import cell, table_row
from training.file_names import METRICS, SAMPLES, SUMMARY

if TYPE_CHECKING:  # torch takes seconds to import, and whoever only reads records needs none
    from training.numbers.evaluate import Answer


def metrics_line(row: dict[str, Any]) -> str:
    """One line of metrics.jsonl; a field that was not measured is left out."""
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in finite(row).items()}
    return json.dumps(rounded) + "\n"


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what was not measured, or has no form in JSON, which knows no infinity."""
    return {key: value for key, value in row.items() if value is not None and math.isfinite(value)}


def samples_header(answers: Sequence[Answer]) -> list[str]:
    """The first lines of a table of samples.md: one column a prompt, one row a step."""
    columns = ["step", "exactly right", *(cell(answer.prompt.text) for answer in answers)]
    lines = [table_row(columns), table_row(["---"] * len(columns))]
    if any(answer.prompt.expected is not None for answer in answers):
        lines.append(table_row(["expected", "", *(cell(answer.prompt.expected or "") for answer in answers)]))
    return lines


def samples_row(step: int, answers: Sequence[Answer]) -> str:
    from training.numbers.evaluate import accuracy

    right, judged = accuracy(answers)
    score = f"{right} of {judged}" if judged else ""
    return table_row([str(step), score, *(cell(answer.text) for answer in answers)])


def rewind(run_dir: Path, step: int) -> None:
    """Forget rows after `step`: the steps a killed session took beyond its last checkpoint are taken again; and the
    summary, which is of a shorter run. A record that cannot be changed is told, and no reason not to train."""
    with contextlib.suppress(OSError):  # which is told where the next one is written
        (run_dir / SUMMARY).unlink()
    for name, row_step in ((METRICS, metrics_step), (SAMPLES, samples_step)):
        path = run_dir / name
        if not path.exists():
            continue
        try:
            lines = path.read_bytes().splitlines(keepends=True)  # bytes: the last may end inside a character
            kept = [line for line in lines if line.endswith(b"\n") and row_step(line.decode(errors="replace")) <= step]
            if kept != lines:
                with atomic_write(path) as file:
                    file.write(b"".join(kept))
        except OSError as problem:
            print(f"Warning: {path} cannot be brought back to step {step:,} ({reason(problem)}); the training goes on.")


def unwritable(path: Path, problem: Exception) -> str:
    """The sentence about a record of which no more is told."""
    return f"Warning: {path} cannot be written ({reason(problem)}); the training goes on without it."


def reason(problem: Exception) -> str:
    """Without the file, which is named already."""
    return str(getattr(problem, "strerror", None) or problem)


def metrics_step(line: str) -> float:
    """Infinity for a line that was cut short."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def samples_step(line: str) -> float:
    first = line.split("|")[1].strip() if line.count("|") > 1 else ""
    return int(first) if first.isdigit() else -math.inf  # the header stays


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, none if it cannot be read; a line that was torn, by a disk that was full for a moment
    say, is passed over."""
    try:
        lines = (run_dir / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # there is none yet, or what is there is no file, of which the run told
        lines = []
    return [json.loads(line) for line in lines if metrics_step(line) < math.inf]


def draw_curve(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=(8, 5))
    axes = figure.add_axes((0.12, 0.11, 0.86, 0.86))  # to lay them out would take as long as to draw them
    for key, label, style in (("train_loss", "training", {"alpha": 0.6}), ("val_loss", "validation", {"marker": "o"})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
