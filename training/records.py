"""Read and write the records of a run: metrics.jsonl, loss_curve.png, samples.jsonl with the answers to
`--eval_prompts`, and samples.md, which is rendered from it. For summary.md see summary.py.

This module does not import torch, because tools that only show a run use it too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.files import RECORDS_FOLDER, atomic_write, flush_file, sync_directory
from common.output import cell, shorten, table_row
from common.validation import STRICT, build

CONFIG = "config.json"
CHOICE = "choice.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SAMPLES_TABLE = "samples.md"  # SAMPLES as tables
CURVE = "loss_curve.png"
SUMMARY = "summary.md"
RECORDS = (CONFIG, CHOICE, METRICS, SAMPLES, SAMPLES_TABLE, CURVE, SUMMARY)
Count = Annotated[int, Field(ge=0, lt=10**15)]


def find_records(folder: Path) -> Path:
    """Return the folder that holds the records: the run folder itself or, in a mirror, the newest copy."""
    copies = sorted(folder.glob(f"step_*/{RECORDS_FOLDER}"))
    return copies[-1] if copies and not (folder / CONFIG).exists() else folder


@dataclass(frozen=True, config=STRICT)
class Sample:
    """The answers of an evaluation. `expected` is None where no answer is known; `judged` counts the others."""

    step: Count
    right: Count
    judged: Count
    prompts: list[str]
    expected: list[str | None]
    answers: list[str]

    @model_validator(mode="after")
    def checked(self) -> Sample:
        if not len(self.prompts) == len(self.expected) == len(self.answers):
            raise ValueError("prompts and answers differ in number")
        return self


def format_metrics(row: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl, without fields that were not measured."""
    rounded = {
        key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in drop_missing(row).items()
    }
    return json.dumps(rounded) + "\n"


def drop_missing(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without None, NaN and infinity, which JSON cannot hold."""
    return {key: value for key, value in row.items() if value is not None and math.isfinite(value)}


def rewind(run_dir: Path, step: int, evaluated_step: int) -> None:
    """Delete rows after `step`, evaluations after `evaluated_step` and the summary, and render samples.md again: steps
    that a killed session took beyond its last checkpoint are taken again. Warn if a record cannot be changed.
    """
    with contextlib.suppress(OSError):  # writing the next one will warn
        (run_dir / SUMMARY).unlink()
    for name in (METRICS, SAMPLES, SAMPLES_TABLE):
        path = run_dir / name
        if not path.exists():
            continue
        try:
            if not path.is_file():  # a device may have no end
                raise OSError("it is not a regular file")
            content = path.read_bytes()
            if name == SAMPLES_TABLE:  # rendered from the remaining samples
                kept = render_samples(read_samples(run_dir)).encode(errors="replace")
            else:
                lines = content.splitlines(keepends=True)  # bytes, because the last may end inside a character
                whole = (line for line in lines if line.endswith(b"\n"))
                last = {line: evaluated_step if name == SAMPLES or b'"val_loss"' in line else step for line in lines}
                kept = b"".join(line for line in whole if _read_step(line.decode(errors="replace")) <= last[line])
            if kept != content:
                with atomic_write(path) as file:
                    file.write(kept)
        except OSError as problem:
            reason = _describe_error(problem)
            print(f"Warning: {path} cannot be rewound to step {step:,} ({reason}); the training goes on.")


def flush_records(run_dir: Path) -> None:
    """Flush the rows to disk, before a checkpoint that goes on from them. Errors are ignored, because the next row
    will warn."""
    for name in (METRICS, SAMPLES):
        with contextlib.suppress(OSError):
            flush_file(run_dir / name)
    with contextlib.suppress(OSError):
        sync_directory(run_dir)


def describe_unwritable(path: Path, problem: Exception) -> str:
    """Return the warning that a record cannot be written."""
    return f"Warning: {path} cannot be written ({_describe_error(problem)}); the training goes on without it."


def _describe_error(problem: Exception) -> str:
    """Return the reason of an error, without the name of the file."""
    return str(getattr(problem, "strerror", None) or problem)


def _read_step(line: str) -> float:
    """Return the step of a line; infinity if the line is torn."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return one row per step of metrics.jsonl, in order; a step and its evaluation, which have a line each, are
    merged. Return [] if the file cannot be read. Skip torn lines, which a full disk can leave."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # the run has warned about it
        lines = read_lines(run_dir / METRICS)
    rows: list[dict[str, Any]] = []
    for row in (json.loads(line) for line in lines if _read_step(line) < math.inf):
        if rows and rows[-1]["step"] == row["step"]:
            rows[-1] = row | rows[-1]
        else:
            rows.append(row)
    return rows


def read_lines(path: Path) -> list[str]:
    """Return the lines of a regular file, [] for anything else, because a device may have no end. Raises OSError if it
    cannot be read."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []


def _import_figure() -> Any:
    """Import matplotlib's Figure, which needs no display, without MPLBACKEND: a `!python` cell in Colab inherits one
    that may be missing in this environment."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure


def draw_curve(rows: list[dict[str, Any]], path: Path) -> None:
    Figure = _import_figure()
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


def format_sample(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def read_samples(run_dir: Path) -> list[Sample]:
    """Return the evaluations of a run, in order. Skip torn and invalid lines. Raises OSError if the file exists and
    cannot be read."""
    samples = []
    for line in read_lines(run_dir / SAMPLES):
        with contextlib.suppress(ValueError, RecursionError):
            samples.append(build(Sample, json.loads(line)))
    return samples


def render_samples(samples: Sequence[Sample]) -> str:
    """Return the text of samples.md, a table per evaluation."""
    lines = []
    for sample in samples:
        right = f", {sample.right} of {sample.judged} exactly right" if sample.judged else ""
        rows = render_answers(sample.prompts, sample.answers, sample.expected)
        lines += [f"## Step {sample.step:,}{right}", "", *rows, ""]
    return "".join(f"{line}\n" for line in lines)


def render_answers(
    prompts: Sequence[str],
    answers: Sequence[str],
    expected: Sequence[str | None],
    before: Sequence[str] = (),
    longest: int | None = None,
) -> list[str]:
    """Return a Markdown table of prompts and answers, with the expected answer beside a wrong one. `before`: the
    answers of the initial weights, if any. Texts are cut at `longest` characters (None: never)."""

    def text_cell(text: str) -> str:
        return cell(text if longest is None else shorten(text, longest))

    head = ["prompt", *(["before"] if before else []), "answer", "exactly right"]
    lines = [table_row(head), table_row(["---"] * len(head))]
    for i, (prompt, answer, right) in enumerate(zip(prompts, answers, expected, strict=True)):
        verdict = "" if right is None else "yes" if answer.strip() == right.strip() else f"no: {text_cell(right)}"
        earlier = [text_cell(before[i])] if before else []
        lines.append(table_row([text_cell(prompt), *earlier, text_cell(answer), verdict]))
    return lines
