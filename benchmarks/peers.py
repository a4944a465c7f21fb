"""Training speed beside a plain PyTorch loop, Hugging Face transformers and nanoGPT: same shapes, batch and machine.

    python benchmarks/peers.py
    python benchmarks/peers.py --nanogpt PATH_OF_A_CHECKOUT
    python benchmarks/peers.py --update_readme

The contestants take turns; each measurement is a new process. Results go to docs/benchmarks/, one file for each kind of
machine, and from there into the table of docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import STARTED
from benchmarks.contestants import CONTESTANTS, Case, cases, measure
from benchmarks.measure import (
    RESULTS,
    Measured,
    Spread,
    add_result_flags,
    describe_machine,
    machine_kind,
    markdown_table,
    measure_in_turn,
    require_known,
    write_random_tokens,
    write_results,
)
from common.errors import ConfigError
from common.flags import Parser
from common.machine import pick_device
from common.output import si
from common.script import script

TOKENS = 2_000_000
README_SECTION = re.compile(r"(<!-- performance: [^\n]*-->\n).*?(<!-- /performance -->)", re.DOTALL)


def speedup(measured: Measured, name: str) -> Spread:
    """Ours against one contestant, round by round: a machine that changes its speed slows both alike."""
    pairs = zip(measured["ours"], measured[name], strict=False)
    return Spread.of([ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs])


def case_table(measured: Measured) -> str:
    table = [
        [
            name,
            f"{rows[0]['parameters']:,}",
            Spread.of_key(rows, "tokens_per_second").text(",.0f"),
            Spread.of_key(rows, "ms_per_step").text(",.1f"),
            "" if name == "ours" else speedup(measured, name).text(".2f"),
            f"{max(row['peak_memory_gb'] or 0 for row in rows):.2f}",
            Spread.of_key(rows, "startup_seconds").text(".1f"),
        ]
        for name, rows in measured.items()
    ]
    columns = ["", "parameters", "tokens/s", "ms a step", "ours: times as fast", "peak GB", "s to the first step"]
    return markdown_table(columns, table)


def document(results: Mapping[str, Any]) -> str:
    """The results as Markdown, without title and command."""
    parts = [
        "Median of the rounds (lowest to highest). Speeds are compared round by round. Memory is what is allocated on "
        "a GPU, else resident in the process. The time to the first step starts with the process and includes imports "
        "and compilation; the speed does not include the first steps.\n"
    ]
    for name, result in results["cases"].items():
        ours, case = result["measured"]["ours"][0], Case(**result["case"])
        parts.append(
            f"## {name}: {case}, vocabulary {case.vocab_size:,}\n\n{case_table(result['measured'])}\n\n"
            f"Ours chose {ours['precision']}{', compiled' if ours['compiled'] else ''}, for a run of "
            f"{case.max_steps:,} steps.\n"
        )
    present = {name for result in results["cases"].values() for name in result["measured"]}
    return "\n".join([*parts, *(f"- {name}: {about}." for name, about in CONTESTANTS.items() if name in present)])


def performance_table(folder: Path = RESULTS) -> str:
    """The performance table: the last case, the largest, of each machine in `folder`, with a link to the rest."""
    peers = [name for name in CONTESTANTS if name != "ours"]
    table = []
    for path in sorted(folder.glob("training-*.json")):
        results = json.loads(path.read_text())
        name, result = list(results["cases"].items())[-1]
        measured = result["measured"]
        speed = Spread.of_key(measured["ours"], "tokens_per_second").median
        ratios = [f"{speedup(measured, peer).median:.2f}x" if peer in measured else "" for peer in peers]
        device = f"[{results['machine']['device']}]({path.stem}.md), {results['machine']['date']}"
        size = si(measured["ours"][0]["parameters"])
        table.append([device, f"{name} ({size})", f"{speed:,.0f}", *ratios])
    return markdown_table(["machine", "model (parameters)", "tokens/s", *(f"against {peer}" for peer in peers)], table)


def with_table(readme: str, table: str) -> str:
    """The README's text with its performance table replaced. Raises ValueError unless the markers are there, once."""
    text, count = README_SECTION.subn(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", readme)
    if count != 1:
        raise ValueError(
            "docs/benchmarks/README.md should hold <!-- performance: ... --> and <!-- /performance --> once"
        )
    return text


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/peers.py", description=__doc__.split("\n")[0])
    names = list(cases(False))
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=names[:-1], help=f"of {', '.join(names)} [all]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to measure it too")
    parser.add_argument("--only", nargs="+", metavar="NAME", help='ours and these, as in "plain PyTorch" [all]')
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each [3]")
    parser.add_argument("--seconds", type=float, default=4.0, help="timed in each; at least one step [4]")
    parser.add_argument(
        "--update_readme",
        action="store_true",
        help="only write the table of docs/benchmarks/README.md from the results",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # measure this, in this process
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    if flags.worker:
        spec = json.loads(flags.worker)
        print(json.dumps(measure(**spec | {"case": Case(**spec["case"]), "started": STARTED})))
        return 0
    if flags.update_readme:
        readme = RESULTS / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), performance_table()), encoding="utf-8")
        return 0
    require_known("--cases", flags.cases, names)
    only = ["ours", *(flags.only or [name for name in CONTESTANTS if name != "nanoGPT" or flags.nanogpt])]
    require_known("--only", only, CONTESTANTS)
    if flags.rounds < 1 or flags.seconds <= 0:
        raise ConfigError("--rounds must be at least 1, --seconds more than 0.")
    if flags.nanogpt and not (Path(flags.nanogpt) / "model.py").is_file():
        raise ConfigError(f"--nanogpt {flags.nanogpt} holds no model.py; a checkout of nanoGPT is expected.")
    device = pick_device(flags.device).type
    machine = describe_machine(device)
    results: dict[str, Any] = {"machine": machine, "rounds": flags.rounds, "seconds": flags.seconds, "cases": {}}
    stem = Path(flags.output_dir) / f"training-{machine_kind(machine)}"
    for name in flags.cases:
        case = dataclasses.asdict(cases(device == "cuda")[name])
        print(f"\n{name}: {Case(**case)}", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_random_tokens(Path(temporary) / "tokens", TOKENS, case["vocab_size"])
            spec = {"case": case, "folder": str(folder), "device": device, "checkout": flags.nanogpt}
            workers = {each: json.dumps({"name": each, "seconds": flags.seconds, **spec}) for each in only}
            commands = {each: [sys.executable, __file__, "--worker", worker] for each, worker in workers.items()}
            measured = measure_in_turn(commands, flags.rounds)
        if "ours" not in measured:
            raise RuntimeError("ours failed: there is nothing to compare with")
        print(case_table(measured), flush=True)
        results["cases"][name] = {"case": case, "measured": measured}
        write_results(stem, "Training beside its peers", results, document(results))
    print(f"\nWritten to {stem}.json and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
