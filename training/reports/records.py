"""The records of a run, in its folder: metrics.jsonl and loss_curve.png; samples.py and summary.py have the rest."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.files import atomic_write
from training.file_names import METRICS, SAMPLES, SAMPLES_TABLE, SUMMARY
from training.reports.samples import Sample, drawn, read_samples, sample_line


def metrics_line(row: dict[str, Any]) -> str:
    """One line of metrics.jsonl; a field that was not measured is left out."""
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in finite(row).items()}
    return json.dumps(rounded) + "\n"


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what was not measured, or has no form in JSON, which knows no infinity."""
    return {key: value for key, value in row.items() if value is not None and math.isfinite(value)}


def rewind(run_dir: Path, step: int) -> None:
    """Forget rows after `step`: the steps that a killed session took beyond its last checkpoint are taken again. The
    summary goes too, as it is of a shorter run; samples.md is drawn anew. A record that cannot be changed is a warning.
    """

    def metrics() -> bytes:
        lines = (run_dir / METRICS).read_bytes().splitlines(keepends=True)  # bytes: the last may end inside a character
        whole = (line for line in lines if line.endswith(b"\n"))
        return b"".join(line for line in whole if metrics_step(line.decode(errors="replace")) <= step)

    def samples() -> list[Sample]:
        return [sample for sample in read_samples(run_dir) if sample["step"] <= step]

    with contextlib.suppress(OSError):  # the next one that is written warns
        (run_dir / SUMMARY).unlink()
    records: dict[str, Callable[[], bytes]] = {
        METRICS: metrics,
        SAMPLES: lambda: "".join(map(sample_line, samples())).encode(errors="replace"),
        SAMPLES_TABLE: lambda: drawn(samples()).encode(errors="replace"),
    }
    for name, kept in records.items():
        path = run_dir / name
        try:
            content = kept()
            if content != (path.read_bytes() if path.exists() else b""):
                with atomic_write(path) as file:
                    file.write(content)
        except FileNotFoundError:  # there is none yet
            continue
        except OSError as problem:
            print(f"Warning: {path} cannot be brought back to step {step:,} ({reason(problem)}); the training goes on.")


def unwritable(path: Path, problem: Exception) -> str:
    """The warning about a record that is given up."""
    return f"Warning: {path} cannot be written ({reason(problem)}); the training goes on without it."


def reason(problem: Exception) -> str:
    """What went wrong, without the name of the file."""
    return str(getattr(problem, "strerror", None) or problem)


def metrics_step(line: str) -> float:
    """Infinity for a line that was cut short."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, none if it cannot be read. Torn lines are skipped: a full disk can leave one."""
    try:
        lines = (run_dir / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # there is none yet, or it cannot be read, of which the run has warned
        lines = []
    return [json.loads(line) for line in lines if metrics_step(line) < math.inf]


def draw_curve(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(8, 5))
    axes = figure.add_axes((0.12, 0.11, 0.86, 0.86))  # automatic layout takes as long as drawing
    for key, label, style in (("train_loss", "training", {"alpha": 0.6}), ("val_loss", "validation", {"marker": "o"})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
