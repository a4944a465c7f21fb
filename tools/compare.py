"""Compare models on text that none of them was trained on: how well each predicts it, with the error of the difference,
what they cost, and what they write.

    python tools/compare.py runs/small runs/medium
    python tools/compare.py runs/small smollm2

Models with different vocabularies can be compared, because losses are per byte.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.errors import ConfigError
from common.flags import Parser
from common.output import table_row
from common.script import script
from common.validation import STRICT, option
from training.records import find_records, read_metrics


@dataclass(frozen=True, config=STRICT)
class Options:
    """Compare models on text that none of them was trained on."""

    runs: tuple[str, ...] = option((), "", "run folders or checkpoints", word="RUN")
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "how", "where to compute")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/compare.py").settings(argv, Options)
    if len(options.runs) < 2:
        raise ConfigError("Name two runs or more: tools/compare.py RUN RUN ...")
    from common.checkpoint import open_checkpoint  # imported here, because --help should not wait for torch
    from generation.comparison import Comparison

    folders = _name_runs([Path(run) for run in options.runs])
    checkpoints = {name: open_checkpoint(folder) for folder, name in folders.items()}
    metrics = {name: read_metrics(_find_records_of(each.path)) for name, each in checkpoints.items()}
    comparison = Comparison.of(checkpoints, metrics, options.device)
    print(*comparison.describe_verdict(), sep="\n")
    for head, *rows in comparison.build_tables():
        print("", table_row(head), table_row(["---"] * len(head)), *map(table_row, rows), sep="\n")
    return 0


def _name_runs(folders: Sequence[Path]) -> dict[Path, str]:
    """Return {folder: name} without duplicates, with the whole path if several folders have that name."""
    unique = {path.resolve(): path for path in reversed(folders)}
    names = [path.name for path in unique]
    return {unique[path]: path.name if names.count(path.name) == 1 else str(unique[path]) for path in reversed(unique)}


def _find_records_of(checkpoint: Path) -> Path:
    """Return the folder with the records of a checkpoint's run."""
    return find_records(checkpoint.parents[checkpoint.parent.name == "checkpoints"])


if __name__ == "__main__":
    sys.exit(main())
