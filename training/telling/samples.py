"""Answers to `--eval_prompts`: samples.jsonl holds one object per evaluation, and samples.md is drawn from it.

This module needs no torch: tools that only show a run read it too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from common.formatting import cell, table_row
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


def tables(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples grouped into tables: a new table begins where the prompts or the expected answers change."""
    columns = [(sample["prompts"], sample["expected"]) for sample in samples]
    starts = [i for i in range(1, len(samples)) if columns[i - 1] != columns[i]]
    return [list(samples[a:b]) for a, b in itertools.pairwise([0, *starts, len(samples)]) if a < b]


def head(sample: Sample) -> list[str]:
    """The first lines of a table of samples.md."""
    columns = ["step", "exactly right", *map(cell, sample["prompts"])]
    lines = [table_row(columns), table_row(["---"] * len(columns))]
    if any(text is not None for text in sample["expected"]):
        lines.append(table_row(["expected", "", *(cell(text or "") for text in sample["expected"])]))
    return lines


def score(sample: Sample) -> str:
    return f"{sample['right']} of {sample['judged']}" if sample["judged"] else ""


def drawn(samples: Sequence[Sample]) -> str:
    """The text of samples.md: one column per prompt, one row per evaluation."""

    def row(sample: Sample) -> str:
        return table_row([str(sample["step"]), score(sample), *map(cell, sample["answers"])])

    return "\n".join("".join(f"{line}\n" for line in [*head(table[0]), *map(row, table)]) for table in tables(samples))
