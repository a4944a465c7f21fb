"""Answers to `--eval_prompts`: samples.jsonl holds one object per evaluation, samples.md a table of each.

This module needs no torch: tools that only show a run read it too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from common.formatting import cell, shortened, table_row
from training.file_names import SAMPLES

Sample: TypeAlias = dict[str, Any]  # step, right, judged: int; prompts, answers: list[str]; expected: list[str | None]

LARGEST_COUNT = 10**15


def sample_line(sample: Sample) -> str:
    return json.dumps(sample, ensure_ascii=False) + "\n"


def read_samples(run_dir: Path) -> list[Sample]:
    """The evaluations of a run, in order. Lines that are torn or hold something else are skipped. Raises OSError for a
    file that is there and cannot be read."""
    try:
        lines = (run_dir / SAMPLES).read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return [sample for line in lines if is_sample(sample := parsed(line))]


def parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_sample(value: Any) -> bool:
    """Whether it has the fields of a Sample: the file may come from someone else."""
    if not isinstance(value, dict):
        return False
    counts = [value.get(key) for key in ("step", "right", "judged")]
    lists: list[Any] = [value.get(key) for key in ("prompts", "answers", "expected")]
    return (
        all(type(count) is int and 0 <= count < LARGEST_COUNT for count in counts)
        and all(isinstance(texts, list) and len(texts) == len(lists[0]) for texts in lists)
        and all(isinstance(text, str) for text in lists[0] + lists[1])
        and all(isinstance(text, str | None) for text in lists[2])
    )


def score(sample: Sample) -> str:
    return f"{sample['right']} of {sample['judged']}" if sample["judged"] else ""


def drawn(samples: Sequence[Sample]) -> str:
    """The text of samples.md: a table for each evaluation."""
    return "".join(f"{line}\n" for sample in samples for line in section(sample))


def section(sample: Sample) -> list[str]:
    right = f", {score(sample)} exactly right" if sample["judged"] else ""
    rows = answer_table(sample["prompts"], sample["answers"], sample["expected"])
    return [f"## Step {sample['step']:,}{right}", "", *rows, ""]


def answer_table(
    prompts: Sequence[str],
    answers: Sequence[str],
    expected: Sequence[str | None],
    before: Sequence[str] = (),
    longest: int | None = None,
) -> list[str]:
    """A Markdown table of prompts and answers, wrong ones with what was expected; beside them those `before` the
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
