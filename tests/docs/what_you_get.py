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
from tests.training.pretended import MACHINES, MINUTES, SIZES, Pretended, Trained, dial_of, trained
from training.config import REPOSITORY
from training.dial import Choice

DOCUMENT = REPOSITORY / "docs" / "what_you_get.md"
HEAD = """\
# What you get, for which text, machine and time

What `train_colab_mmap.py --input my_text.txt --minutes 60` and the like choose, and the expected loss on books, in
bits per byte. **No GPU was there**: the machines are a table of memory, FLOP/s, bandwidth and seconds for each
operation (`tests/training/pretended.py`), and the losses come from [a law](choosing.md#the-law).
`python tests/docs/what_you_get.py` writes this page, and a test compares it with what is chosen.

Each cell has layers x width, the expected loss, and the time if it is less than was given: then the text is used up,
and only more text brings more.
"""


def cell_of(choice: Choice, run: Trained) -> str:
    shape = choice.shape
    used = f", {duration(run.seconds)}" if choice.reads_all else ""
    return f"{shape.num_layers} x {shape.embed_dim}: {run.loss:.2f}{used}"


def table_of(name: str, rows: Mapping[float, Sequence[str]]) -> str:
    head = [name, *(f"{minutes} minutes" for minutes in MINUTES)]
    lines = [table_row(head), table_row(["---"] * len(head))]
    lines += [table_row([byte_size(int(size)), *cells]) for size, cells in rows.items()]
    return "\n".join(lines)


@script
def main(argv: Sequence[str] | None = None) -> int:
    tables = [HEAD.rstrip()]
    for name, specs in MACHINES.items():
        rows: dict[float, list[str]] = {size: [] for size in SIZES}
        for size, cells in rows.items():
            for minutes in MINUTES:
                machine = Pretended(specs)
                dial = dial_of(machine, size, minutes)
                choice = dial.choice()
                cells.append(cell_of(choice, trained(dial, choice, machine.clock)))
        tables.append(table_of(name, rows))
    with atomic_write(DOCUMENT) as file:
        file.write("\n\n".join(tables).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
