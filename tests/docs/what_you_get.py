"""Write docs/what_you_get.md: what `--input TEXT --minutes N` chooses and expects, by text, machine and time.

python tests/docs/what_you_get.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.files import atomic_write
from common.output import byte_size, duration, table_row
from common.script import script
from tests.training.pretended import MACHINES, MINUTES, SIZES, Pretended, Specs, Trained, dial_of, text_of, trained
from training.companion import forecast_own
from training.config import REPOSITORY
from training.dial import Choice

DOCUMENT = REPOSITORY / "docs" / "what_you_get.md"
HEAD = """\
# What you get, for which text, machine and time

The model that `--minutes` chooses for a text of books, and its expected loss in bits per byte. **Calculated, not
measured**: from a table of machines (`tests/training/pretended.py`) and [a law](choosing.md#the-law). The text is of
many different books; one kind of text is easier, and a novel alone has about 0.83 of these losses.
`python tests/docs/what_you_get.py` writes this page.

Each cell has layers x width and the loss. A time means that the run ends early, and more text would use the rest. An L4
or RTX 3060 takes 0.4 to 0.6 of a T4's time, an H100 0.4 of an A100's. Times of optimizer updates are those that an H200
took without `--compile`.
"""
SHOWN = {name: specs for name, specs in MACHINES.items() if name not in ("RTX 3060", "L4", "A100 80 GB", "H100")}
HEAD_OF_COMPANION = """\
## 1 MB of your own, with 1 GB of other text

With [`--companion`](recipes.md#a-small-text-on-a-broad-base), by the same law and [a trial](benchmarks/companion.md).
Alone, the loss is 1.89 or more.
"""


def cell_of(choice: Choice, run: Trained) -> str:
    shape = choice.shape
    used = f", {duration(run.seconds)}" if choice.reads_all else ""
    return f"{shape.num_layers} x {shape.embed_dim}: {run.loss:.2f}{used}"


def companion_cell(specs: Specs, minutes: float) -> str:
    """Plan 1 MB of one's own with a companion of 1 GB."""
    own, companion = text_of(1e6), text_of(1e9)
    dial = dial_of(Pretended(specs), 1e9, minutes)
    dial.own_text = own
    choice = dial.find_best()
    loss, _ = forecast_own(own, companion, choice, ratio=1.1)
    return f"{choice.shape.num_layers} x {choice.shape.embed_dim}: {loss:.2f}"


def companion_table() -> str:
    head = ["", *(f"{minutes} minutes" for minutes in MINUTES)]
    rows = [[name, *(companion_cell(specs, minutes) for minutes in MINUTES)] for name, specs in SHOWN.items()]
    return "\n".join(map(table_row, [head, ["---"] * len(head), *rows]))


def table_of(name: str, rows: Mapping[float, Sequence[str]]) -> str:
    head = [name, *(f"{minutes} minutes" for minutes in MINUTES)]
    lines = [table_row(head), table_row(["---"] * len(head))]
    lines += [table_row([byte_size(int(size)), *cells]) for size, cells in rows.items()]
    return "\n".join(lines)


@script
def main(argv: Sequence[str] | None = None) -> int:
    tables = [HEAD.rstrip()]
    for name, specs in SHOWN.items():
        rows: dict[float, list[str]] = {size: [] for size in SIZES[1:]}
        for size, cells in rows.items():
            for minutes in MINUTES:
                machine = Pretended(specs)
                dial = dial_of(machine, size, minutes)
                choice = dial.find_best()
                cells.append(cell_of(choice, trained(dial, choice, machine.clock)))
        tables.append(table_of(name, rows))
    tables += [HEAD_OF_COMPANION.rstrip(), companion_table()]
    with atomic_write(DOCUMENT) as file:
        file.write("\n\n".join(tables).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
