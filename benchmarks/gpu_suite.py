"""Everything that needs a GPU, in three calls of less than nine minutes: runs, speeds, kernels, memory, tests, losses.

    python benchmarks/gpu_suite.py --parts train step tests fp16 --output 1.json  # the default
    python benchmarks/gpu_suite.py --parts variants memory --output 2.json
    python benchmarks/gpu_suite.py --parts losses resume presets placements generation peers --output 3.json
    python benchmarks/gpu_suite.py --report 1.jsonl 2.jsonl 3.jsonl --output all.json  # one report, measuring nothing
    python benchmarks/gpu_suite.py --parts ladder --output 4.json                      # if there is time for a fourth
    python benchmarks/gpu_suite.py --toy                # tiny models on a CPU, to see that it works

The parts run in the given order. Each is a process with its own time limit, and --minutes limits all of them. Each row
goes to a file as soon as it is measured, so a part that fails, hangs or is killed loses no others; a later command with
the same --output adds to the file. Compiled code stays in --cache_dir for the next command.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, machine_kind, require_known, this_command
from benchmarks.suite_rows import append, collect, read, require_one_machine, summary, write_report
from common.errors import ConfigError, script
from common.flags import Parser, add_debug

MINUTES = 8.75  # of a call of nine; Python needs the rest to start and to end
MACHINE_SECONDS = 40.0  # for the driver to say what the GPU is
# Part -> its time limit in seconds. The most useful first; the limits of each call add up to less than nine minutes.
CALLS: tuple[dict[str, float], ...] = (
    {"train": 190, "step": 95, "tests": 175, "fp16": 65},
    {"variants": 385, "memory": 140},
    {"losses": 75, "resume": 40, "presets": 190, "placements": 35, "generation": 55, "peers": 130},
    {"ladder": 235},
)
PARTS = {name: limit for call in CALLS for name, limit in call.items()}


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu_suite.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="PART",
        default=list(CALLS[0]),
        help=f"of {', '.join(PARTS)} [{' '.join(CALLS[0])}]",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"limit of all parts together [{MINUTES}]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to measure it too")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--output", metavar="FILE", help="[docs/benchmarks/gpu_suite-MACHINE.json]")
    report = "measure nothing; make one report of these files of rows, into --output [beside the first]"
    parser.add_argument("--report", metavar="FILE", nargs="+", help=report)
    kept = Path(tempfile.gettempdir()) / f"gpu_suite_{getpass.getuser()}"
    parser.add_argument("--cache_dir", metavar="DIR", default=str(kept), help=f"keeps compiled code [{kept}]")
    add_debug(parser)
    started = time.monotonic()
    flags = parser.parse_args(argv)
    if flags.report:
        files = [Path(file) for file in flags.report]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"--report {file} is not there; name the .jsonl files that the commands wrote.")
        write_report(files, Path(flags.output or files[0]).with_suffix(""))
        return 0
    require_known("--parts", flags.parts, PARTS)
    from benchmarks.suite_parts import Setting  # here, because --help must not import torch
    from benchmarks.suite_process import run_part

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        asked = Path(folder) / "machine.jsonl"
        setting = Setting(flags.toy, Path(folder), Path(flags.cache_dir))
        ended: dict[str, Any] = run_part("machine", setting, MACHINE_SECONDS, asked)
        if ended["status"] != "done":
            why = (ended.get("log") or ["no answer"])[-1]
            raise ConfigError(f"The machine could not be described in {MACHINE_SECONDS:g} s ({ended['status']}): {why}")
        machine = {key: value for key, value in read(asked)[0]["row"].items() if key != "name"}
    output = Path(flags.output or RESULTS / f"gpu_suite-{machine_kind(machine)}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = output.with_suffix(".jsonl")
    run = {"run": {"command": this_command(), "machine": machine}}
    require_one_machine({rows: [*(read(rows) if rows.exists() else []), run]})
    append(rows, run)
    statuses = []
    for name in flags.parts:
        append(rows, {"part": name})
        left = 60 * flags.minutes - (time.monotonic() - started)
        ended = {"status": "no time left"}
        if left > 0:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                setting = Setting(flags.toy, Path(folder), Path(flags.cache_dir), flags.nanogpt)
                ended = run_part(name, setting, min(PARTS[name], left), rows)
        append(rows, {"part": name, "end": ended})
        write_report([rows], output.with_suffix(""))
        statuses.append(ended["status"])
        print(f"{name}: {ended['status']}" + (f", {ended['seconds']} s" if "seconds" in ended else ""))
        for row in collect(read(rows))["parts"][name]["rows"]:
            print(f"  {summary(row)}")
        for line in ended.get("log", [])[-3:]:
            print(f"  | {line}", flush=True)
    print(f"Written to {output}, {output.with_suffix('.md').name} and, row by row, {rows.name}")
    return 0 if set(statuses) == {"done"} else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # sys.exit would wait, without a limit, for a part that even a kill did not end
