"""The records of a run, in its folder: metrics.jsonl, loss_curve.png, samples.jsonl with the answers to
`--eval_prompts`, and samples.md drawn from it. summary.py has the rest.

This module needs no torch: tools that only show a run read it too.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.files import OF_RUN, atomic_write
from common.output import cell, shortened, table_row
from common.validation import STRICT, build

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SAMPLES_TABLE = "samples.md"  # drawn from SAMPLES, for people
CURVE = "loss_curve.png"
SUMMARY = "summary.md"
RECORDS = (CONFIG, METRICS, SAMPLES, SAMPLES_TABLE, CURVE, SUMMARY)
Count = Annotated[int, Field(ge=0, lt=10**15)]


def records_in(folder: Path) -> Path:
    """Return where the records of a run are: in its run folder, or, in a mirror, in the newest copy."""
    copies = sorted(folder.glob(f"step_*/{OF_RUN}"))
    return copies[-1] if copies and not (folder / CONFIG).exists() else folder


@dataclass(frozen=True, config=STRICT)
class Sample:
    """The answers of an evaluation. `expected`: None where no answer is known; `right`: of the `judged` others."""

    step: Count
    right: Count
    judged: Count
    prompts: list[str]
    expected: list[str | None]
    answers: list[str]

    @model_validator(mode="after")
    def checked(self) -> Sample:
        if not len(self.prompts) == len(self.expected) == len(self.answers):
            raise ValueError("there are not as many answers as prompts")
        return self


def metrics_line(row: dict[str, Any]) -> str:
    """Write one line of metrics.jsonl; leave out a field that was not measured."""
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in finite(row).items()}
    return json.dumps(rounded) + "\n"


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """Drop None, NaN and infinity, which JSON cannot hold."""
    return {key: value for key, value in row.items() if value is not None and math.isfinite(value)}


def rewind(run_dir: Path, step: int, evaluated_step: int) -> None:
    """Forget rows after `step` and evaluations after `evaluated_step`: the steps that a killed session took beyond its
    last checkpoint are taken again. The summary goes too, as it is of a shorter run; samples.md is drawn anew. A record
    that cannot be changed is a warning.
    """
    with contextlib.suppress(OSError):  # the next one that is written warns
        (run_dir / SUMMARY).unlink()
    for name in (METRICS, SAMPLES, SAMPLES_TABLE):
        path = run_dir / name
        if not path.exists():
            continue
        try:
            if not path.is_file():  # a device may have no end
                raise OSError("it is not a regular file")
            content = path.read_bytes()
            if name == SAMPLES_TABLE:  # of what is left of the samples
                kept = drawn(read_samples(run_dir)).encode(errors="replace")
            else:
                lines = content.splitlines(keepends=True)  # bytes: the last may end inside a character
                whole = (line for line in lines if line.endswith(b"\n"))
                last = {line: evaluated_step if name == SAMPLES or b'"val_loss"' in line else step for line in lines}
                kept = b"".join(line for line in whole if step_in(line.decode(errors="replace")) <= last[line])
            if kept != content:
                with atomic_write(path) as file:
                    file.write(kept)
        except OSError as problem:
            print(f"Warning: {path} cannot be brought back to step {step:,} ({reason(problem)}); the training goes on.")


def unwritable(path: Path, problem: Exception) -> str:
    """Return the warning about a record that is given up."""
    return f"Warning: {path} cannot be written ({reason(problem)}); the training goes on without it."


def reason(problem: Exception) -> str:
    """Return what went wrong, without the name of the file."""
    return str(getattr(problem, "strerror", None) or problem)


def step_in(line: str) -> float:
    """Return the step of a line; infinity if the line was cut short."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read what metrics.jsonl says of each step, in order: a step and its evaluation have a row each. Returns none if
    it cannot be read. Skips torn lines: a full disk can leave one."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # of which the run has warned
        lines = lines_of(run_dir / METRICS)
    rows: list[dict[str, Any]] = []
    for row in (json.loads(line) for line in lines if step_in(line) < math.inf):
        if rows and rows[-1]["step"] == row["step"]:
            rows[-1] = row | rows[-1]
        else:
            rows.append(row)
    return rows


def lines_of(path: Path) -> list[str]:
    """Read the lines of a regular file; none if there is none, for a device may have no end. Raises OSError if it
    cannot be read."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []


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


def sample_line(sample: Sample) -> str:
    return json.dumps(asdict(sample), ensure_ascii=False) + "\n"


def read_samples(run_dir: Path) -> list[Sample]:
    """Read the evaluations of a run, in order. Skips lines that are torn or hold something else. Raises OSError for a
    file that is there and cannot be read."""
    samples = []
    for line in lines_of(run_dir / SAMPLES):
        with contextlib.suppress(ValueError, RecursionError):
            samples.append(build(Sample, json.loads(line)))
    return samples


def score(sample: Sample) -> str:
    return f"{sample.right} of {sample.judged}" if sample.judged else ""


def drawn(samples: Sequence[Sample]) -> str:
    """Write the text of samples.md: a table for each evaluation."""
    return "".join(f"{line}\n" for sample in samples for line in section(sample))


def section(sample: Sample) -> list[str]:
    right = f", {score(sample)} exactly right" if sample.judged else ""
    rows = answer_table(sample.prompts, sample.answers, sample.expected)
    return [f"## Step {sample.step:,}{right}", "", *rows, ""]


def answer_table(
    prompts: Sequence[str],
    answers: Sequence[str],
    expected: Sequence[str | None],
    before: Sequence[str] = (),
    longest: int | None = None,
) -> list[str]:
    """Write a Markdown table of prompts and answers, wrong ones with what was expected; beside them those `before` the
    training, of the weights that it started from, if there are any. Texts are cut after `longest` characters (None:
    never)."""

    def text_cell(text: str) -> str:
        return cell(text if longest is None else shortened(text, longest))

    head = ["prompt", *(["before"] if before else []), "answer", "exactly right"]
    lines = [table_row(head), table_row(["---"] * len(head))]
    for i, (prompt, answer, wanted) in enumerate(zip(prompts, answers, expected, strict=True)):
        verdict = "" if wanted is None else "yes" if answer.strip() == wanted.strip() else f"no: {text_cell(wanted)}"
        earlier = [text_cell(before[i])] if before else []
        lines.append(table_row([text_cell(prompt), *earlier, text_cell(answer), verdict]))
    return lines
