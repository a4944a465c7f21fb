"""Compare models on text that none of them was trained on: how well each predicts it, with the error of the difference,
what they cost, and what they write.

    python tools/compare.py runs/small runs/medium
    python tools/compare.py runs/small runs/medium --html comparison.html
    python tools/compare.py runs/small smollm2

Models with different vocabularies can be compared, because losses are per byte. --html writes a page that opens
offline, with the curves of the runs.
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
from common.validation import STRICT, NonEmptyText, option
from serving.run_reader import RunReader
from serving.watch_page import html_file, name_runs, write_page
from training.records import find_records, read_metrics


@dataclass(frozen=True, config=STRICT)
class Options:
    """Compare models on text that none of them was trained on."""

    runs: tuple[str, ...] = option((), "", "run folders or checkpoints", word="RUN")
    html: NonEmptyText | None = option(None, "page", "also write a page with the curves", metavar="FILE")
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "how", "where to compute")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/compare.py").settings(argv, Options)
    if len(options.runs) < 2:
        raise ConfigError("Name two runs or more: tools/compare.py RUN RUN ...")
    from common.checkpoint import open_checkpoint  # imported here, because --help should not wait for torch
    from generation.comparison import Comparison

    html = html_file(options.html)
    folders = name_runs([Path(run) for run in options.runs])
    checkpoints = {name: open_checkpoint(folder) for folder, name in folders.items()}
    metrics = {name: read_metrics(find_records_of(each.path)) for name, each in checkpoints.items()}
    comparison = Comparison.of(checkpoints, metrics, options.device)
    said, tables = comparison.describe_verdict(), comparison.build_tables()
    print(*said, sep="\n")
    for head, *rows in tables:
        print("", table_row(head), table_row(["---"] * len(head)), *map(table_row, rows), sep="\n")
    if html:
        readers = [RunReader(folder, name) for folder, name in folders.items() if metrics[name]]
        write_page(html, readers, {"said": said, "tables": tables})
    return 0


def find_records_of(checkpoint: Path) -> Path:
    """Return the folder with the records of a checkpoint's run."""
    return find_records(checkpoint.parents[checkpoint.parent.name == "checkpoints"])


if __name__ == "__main__":
    sys.exit(main())
