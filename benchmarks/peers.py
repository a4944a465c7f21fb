"""Training speed beside a plain PyTorch loop, Hugging Face transformers and nanoGPT: same shapes, batch and machine.

    python benchmarks/peers.py
    python benchmarks/peers.py --nanogpt PATH_OF_A_CHECKOUT
    python benchmarks/peers.py --update_readme

The contestants take turns; each measurement is a new process. Results go to docs/benchmarks/, one file for each kind of
machine, and from there into the README's table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import STARTED, generation
from benchmarks.measure import (
    CONTESTANTS,
    RESULTS,
    ROOT,
    Case,
    Measured,
    Spread,
    add_measuring_flags,
    cases,
    describe_machine,
    machine_kind,
    markdown_table,
    measure_in_turn,
    require_known,
    require_measurable,
    worker_command,
    write_random_tokens,
    write_results,
)
from common.errors import ConfigError, script
from common.flags import Parser
from common.formatting import si

TOKENS = 2_000_000
README_SECTION = re.compile(r"(<!-- performance: [^\n]*-->\n).*?(<!-- /performance -->)", re.DOTALL)


def compare(
    case: Case,
    names: Sequence[str],
    device: str,
    checkout: str | None,
    rounds: int,
    seconds: float,
    so_far: Callable[[Measured], None],
) -> Measured:
    """Measurements of each contestant, in turn; `so_far` gets them all after each one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_random_tokens(Path(temporary) / "tokens", TOKENS, case.vocab_size)
        spec: dict[str, Any] = {"case": dataclasses.asdict(case), "folder": str(folder), "device": device}
        spec |= {"checkout": checkout, "seconds": seconds}
        commands = {name: worker_command(__file__, name=name, **spec) for name in names}
        results = measure_in_turn(commands, rounds, so_far=so_far)
    if "ours" not in results:
        raise RuntimeError("ours failed: there is nothing to compare with")
    tied = case.vocab_size * case.embed_dim
    for name, rows in results.items():
        expected = results["ours"][0]["parameters"] - (tied if name == "nanoGPT" else 0)
        assert rows[0]["parameters"] == expected, f"{name} has {rows[0]['parameters']:,} parameters, not {expected:,}"
    return results


def speedup(measured: Measured, name: str) -> Spread:
    """Ours against one contestant, round by round: a machine that changes its speed slows both alike."""
    pairs = zip(measured["ours"], measured[name], strict=False)
    return Spread.of([ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs])


def case_table(measured: Measured) -> str:
    def spread(rows: Sequence[Mapping[str, Any]], key: str, digits: str) -> str:
        values = [row[key] for row in rows]
        return "unknown" if None in values else Spread.of(values).text(digits)

    table = [
        [
            name,
            f"{rows[0]['parameters']:,}",
            spread(rows, "tokens_per_second", ",.0f"),
            spread(rows, "ms_per_step", ",.1f"),
            "" if name == "ours" else speedup(measured, name).text(".2f"),
            spread(rows, "peak_memory_gb", ".2f"),
            spread(rows, "startup_seconds", ".1f"),
        ]
        for name, rows in measured.items()
    ]
    columns = ["", "parameters", "tokens/s", "ms a step", "ours: times as fast", "peak GB", "s to the first step"]
    return markdown_table(columns, table)


def document(results: Mapping[str, Any]) -> str:
    """The results as Markdown, without title and command."""
    memory = "allocated on the GPU" if results["machine"]["cuda"] else "resident in the process"
    parts = [
        "Median of the rounds (lowest to highest). Speeds are compared round by round. Memory is what is "
        f"{memory}. The time to the first step starts with the process and includes imports and compilation; the speed "
        "does not include the first steps.\n"
    ]
    for name, result in results["cases"].items():
        ours = result["measured"]["ours"][0]
        compiled = "compiled" if ours["compiled"] else "not compiled"
        parts.append(
            f"## {name}: {Case(**result['case'])}, vocabulary {result['case']['vocab_size']:,}\n\n"
            f"{case_table(result['measured'])}\n\n"
            f"Ours chose {ours['precision']}, {compiled}, for a run of {result['case']['max_steps']:,} steps.\n"
        )
    present = {name for result in results["cases"].values() for name in result["measured"]}
    parts += [f"- {name}: {about}." for name, about in CONTESTANTS.items() if name in present]
    parts += [f"- {name} was left out: {reason}." for name, reason in results["left_out"].items()]
    return "\n".join(parts)


def performance_table(folder: Path = RESULTS) -> str:
    """The README's table: the last case, the largest, of each machine in `folder`, with a link to the rest."""
    peers = [name for name in CONTESTANTS if name != "ours"]
    table = []
    for path in sorted(folder.glob("training-*.json")):
        results = json.loads(path.read_text())
        name, result = list(results["cases"].items())[-1]
        measured = result["measured"]
        speed = Spread.of_key(measured["ours"], "tokens_per_second").median
        ratios = [f"{speedup(measured, peer).median:.2f}x" if peer in measured else "" for peer in peers]
        device = f"[{results['machine']['device']}](docs/benchmarks/{path.stem}.md), {results['machine']['date']}"
        size = si(measured["ours"][0]["parameters"])
        table.append([device, f"{name} ({size})", f"{speed:,.0f}", *ratios])
    return markdown_table(["machine", "model (parameters)", "tokens/s", *(f"against {peer}" for peer in peers)], table)


def with_table(readme: str, table: str) -> str:
    """The README's text with its performance table replaced. Raises ValueError unless the markers are there, once."""
    text, count = README_SECTION.subn(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", readme)
    if count != 1:
        raise ValueError("README.md should hold <!-- performance: ... --> and <!-- /performance --> once")
    return text


def update_readme() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), performance_table()), encoding="utf-8")


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/peers.py", description=__doc__.split("\n")[0])
    names = list(cases(False))
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=names[:-1], help=f"of {', '.join(names)} [all]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to measure it too")
    parser.add_argument("--only", nargs="+", metavar="NAME", help='ours and these, as in "plain PyTorch" [all]')
    parser.add_argument("--generation", action="store_true", help="then run benchmarks/generation.py too")
    parser.add_argument("--update_readme", action="store_true", help="only write the README's table from the results")
    add_measuring_flags(parser, rounds=3, seconds=4.0)
    flags = parser.parse_args(argv)
    if flags.update_readme:
        update_readme()
        return 0
    require_known("--cases", flags.cases, names)
    only = ["ours", *(flags.only or CONTESTANTS)]
    require_known("--only", only, CONTESTANTS)
    require_measurable(flags.rounds, flags.seconds)
    if flags.generation and flags.device != "auto":
        raise ConfigError("--generation measures on the device that generate.py chooses; leave --device out.")
    if flags.nanogpt and not (Path(flags.nanogpt) / "model.py").is_file():
        raise ConfigError(f"--nanogpt {flags.nanogpt} holds no model.py; a checkout of nanoGPT is expected.")

    from benchmarks.contestants import measure  # here, because --help must not import torch
    from common.machine import pick_device

    if flags.worker:
        spec = json.loads(flags.worker)
        print(json.dumps(measure(**spec | {"case": Case(**spec["case"]), "started": STARTED})))
        return 0
    device = pick_device(flags.device).type
    left_out = {name: "--only does not name it" for name in CONTESTANTS if name not in only}
    if "transformers" in only and importlib.util.find_spec("transformers") is None:
        left_out["transformers"] = "it is not installed"
    if "nanoGPT" in only and not flags.nanogpt:
        left_out["nanoGPT"] = "--nanogpt names no checkout"
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}.")
    contestants = [name for name in CONTESTANTS if name not in left_out]
    machine = describe_machine(device)
    results = {"machine": machine, "rounds": flags.rounds, "seconds": flags.seconds, "left_out": left_out, "cases": {}}
    stem = Path(flags.output_dir) / f"training-{machine_kind(machine)}"

    def write(name: str, measured: Measured) -> None:
        """Called after each measurement, so that a kill does not lose them."""
        if "ours" in measured:
            case = dataclasses.asdict(cases(device == "cuda")[name])
            results["cases"][name] = {"case": case, "measured": measured}
            write_results(stem, "Training beside its peers", results, document(results))

    for name in flags.cases:
        case = cases(device == "cuda")[name]
        print(f"\n{name}: {case}", flush=True)
        so_far = functools.partial(write, name)
        measured = compare(case, contestants, device, flags.nanogpt, flags.rounds, flags.seconds, so_far)
        left_out |= {peer: f"it failed ({name})" for peer in contestants if peer not in measured}
        print(case_table(measured), flush=True)
        write(name, measured)
    print(f"\nWritten to {stem}.json and .md")
    if flags.generation:
        more = ["--nanogpt", flags.nanogpt] if flags.nanogpt else []
        return generation.main(["--write", machine_kind(machine), *more])
    return 0


if __name__ == "__main__":
    sys.exit(main())
