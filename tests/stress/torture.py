"""Kill tokenizations and trainings at random moments, cut the power, damage and delete their files, and check that
nothing is lost.

    python tests/stress/torture.py --kills 1000

Real processes, real signals, real files. A round tokenizes a text and trains a tiny model with a mirror, in as many
sessions as it needs, every third round with a companion. Its result must equal the result of an undisturbed round to
the last bit. Sometimes a second machine, with its own disk and clock, trains the run while the first one sleeps or
works.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure import describe_machine, machine_slug, markdown_table, write_results
from common.flags import Parser
from common.output import duration
from common.script import script


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tests/stress/torture.py", description="Kill, damage and lose, and see that nothing is lost.")
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="SIGKILLs in all (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments (default: 1)")
    parser.add_argument("--output_dir", metavar="FOLDER", help="where the result goes (default: nowhere)")
    flags = parser.parse_args(argv)
    from tests.stress.torture_round import run_rounds  # here, because --help must not import torch

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        rounds, tally = run_rounds(flags.kills, flags.seed, Path(scratch))
    rows = [("rounds, each finished with the right tokens, weights and metrics", rounds), *sorted(tally.counts.items())]
    cells = [*([name, f"{count:,}"] for name, count in rows), ["**losses**", f"**{len(tally.losses)}**"]]
    table = markdown_table(["what", "how often"], cells)
    print(f"\n{table}")
    if flags.output_dir:
        machine = describe_machine("cpu")
        stem = Path(flags.output_dir) / f"torture-{machine_slug(machine)}"
        body = (
            "Each round tokenizes a text and trains a tiny model with dropout and a mirror, in as many sessions as it "
            "needs. Its tokens, weights, optimizer state, best weights and rows of metrics must equal those of an "
            f"undisturbed round to the last bit. {duration(time.monotonic() - began)} in all.\n\n{table}"
        )
        write_results(stem, "Torture", {"machine": machine, **dict(rows), "losses": tally.losses}, body)
        print(f"Files      {stem}.md and .json")
    return 1 if tally.losses else 0


if __name__ == "__main__":
    sys.exit(main())
