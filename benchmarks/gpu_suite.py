"""Everything that needs a GPU, in calls of less than nine minutes: speeds, kernels, memory, variants, tests, losses.

    python benchmarks/gpu_suite.py                      # the first call: step variants
    python benchmarks/gpu_suite.py --parts tests fp16 losses memory resume placements generation
    python benchmarks/gpu_suite.py --parts ladder presets peers
    python benchmarks/gpu_suite.py --minutes 27         # all of them at once
    python benchmarks/gpu_suite.py --report FILE.jsonl  # the JSON file and the page again, from rows already measured
    python benchmarks/gpu_suite.py --toy                # tiny models on a CPU, to see that it works

The parts run in the given order; by default the most useful first. Each is a process with its own time limit. Each row
goes to a file as soon as it is measured, so a part that fails, hangs or is killed loses no others; a later command with
the same --output adds to the file. Compiled code stays in --cache_dir for the next command.
"""

from __future__ import annotations

import getpass
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, describe_machine, machine_kind, require_known, this_command
from benchmarks.suite_rows import append, collect, read, summary, write_report
from common.errors import ConfigError, script
from common.flags import Parser, add_debug

MINUTES = 8.75  # of a call of nine; Python needs the rest to start and to end
# Part -> its time limit in seconds. The most useful first; the limits of each call add up to less than nine minutes.
CALLS: tuple[dict[str, float], ...] = (
    {"step": 125, "variants": 395},
    {"tests": 120, "fp16": 55, "losses": 85, "memory": 135, "resume": 40, "placements": 35, "generation": 55},
    {"ladder": 235, "presets": 190, "peers": 100},
)
PARTS = {name: limit for call in CALLS for name, limit in call.items()}


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu_suite.py", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", metavar="PART", default=list(PARTS), help=f"of {', '.join(PARTS)} [all]")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"limit of all parts together [{MINUTES}]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to measure it too")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--output", metavar="FILE", help="[docs/benchmarks/gpu_suite-MACHINE.json]")
    parser.add_argument("--report", metavar="FILE", help="measure nothing; make the report of this file of rows")
    kept = Path(tempfile.gettempdir()) / f"gpu_suite_{getpass.getuser()}"
    parser.add_argument("--cache_dir", metavar="DIR", default=str(kept), help=f"keeps compiled code [{kept}]")
    add_debug(parser)
    flags = parser.parse_args(argv)
    if flags.report:
        if not Path(flags.report).is_file():
            raise ConfigError(f"--report {flags.report} is not there; name the .jsonl file that a command wrote.")
        write_report(Path(flags.report))
        return 0
    require_known("--parts", flags.parts, PARTS)
    from benchmarks.suite_parts import Setting  # here, because --help must not import torch
    from benchmarks.suite_process import fresh_processes, run_part

    started = time.monotonic()
    with ProcessPoolExecutor(1, fresh_processes()) as pool:  # not here: the query takes some of the GPU's memory
        machine = pool.submit(describe_machine, "cpu" if flags.toy else "cuda").result()
    output = Path(flags.output or RESULTS / f"gpu_suite-{machine_kind(machine)}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = output.with_suffix(".jsonl")
    append(rows, {"run": {"command": this_command(), "machine": machine}})
    statuses = []
    for name in flags.parts:
        append(rows, {"part": name})
        left = 60 * flags.minutes - (time.monotonic() - started)
        ended: dict[str, Any] = {"status": "no time left"}
        if left > 0:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                setting = Setting(flags.toy, Path(folder), Path(flags.cache_dir), flags.nanogpt)
                ended = run_part(name, setting, min(PARTS[name], left), rows)
        append(rows, {"part": name, "end": ended})
        write_report(rows)
        statuses.append(ended["status"])
        print(f"{name}: {ended['status']}" + (f", {ended['seconds']} s" if "seconds" in ended else ""))
        for row in collect(read(rows))["parts"][name]["rows"]:
            print(f"  {summary(row)}")
        for line in ended.get("log", [])[-3:]:
            print(f"  | {line}", flush=True)
    print(f"Written to {output}, {output.with_suffix('.md').name} and, row by row, {rows.name}")
    return 0 if set(statuses) == {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
