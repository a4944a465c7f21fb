"""How the cost of the trainer's step grows with the data, the context, the model and the batch.

    python benchmarks/scaling.py

One thing changes at a time. Results go to docs/benchmarks/: a table, a plot with a panel for each, and the numbers.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks import STARTED
from benchmarks.measure import (
    Measured,
    Spread,
    add_measuring_flags,
    describe_machine,
    flag_words,
    machine_kind,
    markdown_table,
    measure_in_turn,
    require_known,
    require_measurable,
    worker_command,
    write_results,
)
from benchmarks.random_tokens import write_random_tokens
from common.errors import script
from common.flags import Parser

MEGABYTE = 1_000_000
AXES = {"data": "size of the token file in MB", "context": "context length", "model": "model", "batch": "batch size"}
MODELS = ("tiny", "small", "medium", "large", "xlarge", "gpt2_small", "gpt2_medium")
DATA_MB = 4  # of the tokens where something else grows
# A token file may take this share of free memory and disk: RAM holds it, and the page cache too.
FREE_SHARE = 0.4

Flags = dict[str, Any]


def axes(size: str, data_mb: Sequence[float]) -> dict[str, dict[str, Flags]]:
    """For each axis the flags of every point, by its name. `size` is cpu, cuda or toy.

    `data_mb` and `vocab_size` choose the tokens to train on; the rest are flags of the trainer.
    """
    toy = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_seq_len": 16, "vocab_size": 65, "batch_size": 4}
    char: Flags = {"num_layers": 4, "embed_dim": 256, "num_heads": 4, "max_seq_len": 256, "vocab_size": 65}
    gpt2: Flags = {"config": "gpt2_small.json", "vocab_size": 32_000}
    if size == "toy":
        return {
            "data": {str(mb): {**toy, "data_mb": mb} for mb in data_mb},
            "context": {str(T): {**toy, "max_seq_len": T} for T in (16, 32)},
            "model": {str(width): {**toy, "embed_dim": width} for width in (32, 64)},
            "batch": {str(rows): {**toy, "batch_size": rows} for rows in (2, 4)},
        }
    if size == "cpu":
        small: Flags = {"config": "shakespeare_char.json", "vocab_size": 65}
        tokens, contexts, model_rows, batches = 4096, [64, 128, 256, 512, 1024], 2, [1, 2, 4, 8, 16, 32]
        middle = char
    else:
        small = middle = gpt2
        tokens, contexts, model_rows, batches = 32_768, [128, 256, 512, 1024, 2048, 4096], 32, [2, 4, 8, 16, 32, 64]
    models = {name: {"config": f"{name}.json", "vocab_size": 32_000} for name in MODELS}
    return {
        "data": {f"{mb:g}": {**small, "data_mb": mb} for mb in data_mb},
        "context": {str(T): {**middle, "max_seq_len": T, "batch_size": tokens // T} for T in contexts},
        "model": {name: {**flags, "max_seq_len": 512, "batch_size": model_rows} for name, flags in models.items()},
        "batch": {str(rows): {**middle, "batch_size": rows} for rows in batches},
    }


def data_sizes(size: str, folder: Path, free_ram: int | None) -> tuple[list[int], str]:
    """The sizes of token files in MB that fit here, and a sentence if the largest do not fit."""
    wanted = [1, 2] if size == "toy" else [1, 10, 100, 1_000, 5_000]
    free = min(shutil.disk_usage(folder).free, free_ram or sys.maxsize)
    fitting = [mb for mb in wanted if mb * MEGABYTE <= FREE_SHARE * free]
    if fitting == wanted:
        return fitting, ""
    return fitting, (
        f"Token files above {fitting[-1]:,} MB are left out: {free / 1e9:.1f} GB of memory or disk were free, and one "
        f"file may take {FREE_SHARE:.0%} of that."
    )


def tokens_of(point: Flags, folder: Path) -> Path:
    """The token folder a point trains on, written on first use."""
    data_mb, vocab_size = point.get("data_mb", DATA_MB), point["vocab_size"]
    path = folder / f"{data_mb}mb_{vocab_size}"
    return path if path.exists() else write_random_tokens(path, int(data_mb * MEGABYTE) // 2, vocab_size)


def command(point: Flags, folder: Path, device: str, seconds: float) -> list[str]:
    values = {key: value for key, value in point.items() if key not in ("data_mb", "vocab_size")}
    values |= {"data_dir": tokens_of(point, folder), "device": device, "max_steps": 2_000}
    return worker_command(__file__, flags=flag_words(values), seconds=seconds)


def measure_axes(
    size: str, chosen: Sequence[str], sizes: Sequence[float], device: str, rounds: int, seconds: float, folder: Path
) -> dict[str, Measured]:
    """Measurements of every point of the chosen axes, by axis and name."""
    measured = {}
    for axis in chosen:
        points = axes(size, sizes)[axis]
        print(f"{AXES[axis]}: {', '.join(points)}", flush=True)
        commands = {name: command(point, folder, device, seconds) for name, point in points.items()}
        if results := measure_in_turn(commands, rounds):  # empty if no point fits in memory
            measured[axis] = results
        if axis == "data":
            for path in folder.iterdir():  # the other axes do not need the large files
                shutil.rmtree(path)
    return measured


def table(axis: str, measured: Measured) -> str:
    rows = []
    for name, runs in measured.items():
        speed, startup = (Spread.of_key(runs, key) for key in ("tokens_per_second", "startup_seconds"))
        peaks = [run["peak_memory_gb"] for run in runs]
        first = runs[0]
        rows.append(
            [
                name,
                f"{first['parameters']:,}",
                speed.text(",.0f"),
                f"{Spread.of_key(runs, 'ms_per_step').median:,.1f}",
                startup.text(".1f"),
                "unknown" if None in peaks else f"{max(peaks):.2f}",
                f"{first['precision']}{', compiled' if first['compiled'] else ''}",
                first["placement"],
            ]
        )
    columns = [AXES[axis], "parameters", "tokens/s", "ms a step", "start-up s", "peak GB", "precision", "tokens in"]
    return markdown_table(columns, rows)


def draw(measured: Mapping[str, Measured], machine: str, path: Path) -> None:
    """One panel for each axis: tokens/s, from 0; for the models, on logarithmic scales."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(f"Training speed on {machine}")
    panels = figure.subplots(2, 2).flat
    for panel, (axis, points) in zip(panels, measured.items(), strict=False):
        speeds = [Spread.of_key(runs, "tokens_per_second") for runs in points.values()]
        medians = [speed.median for speed in speeds]
        x = [runs[0]["parameters"] for runs in points.values()] if axis == "model" else [float(name) for name in points]
        errors = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
        panel.errorbar(x, medians, errors, marker="o", capsize=3)
        panel.set_xscale("log", base=10 if axis in ("model", "data") else 2)
        panel.set_xlabel("parameters" if axis == "model" else AXES[axis])
        panel.set_ylabel("tokens/s")
        panel.grid(alpha=0.3)
        if axis == "model":
            panel.set_yscale("log")
            panel.yaxis.set_minor_formatter(NullFormatter())
            for i, (name, parameters, median) in enumerate(zip(points, x, medians, strict=True)):
                place = {"xytext": (6, 5), "ha": "left"} if i % 2 else {"xytext": (-6, -11), "ha": "right"}
                panel.annotate(name, (parameters, median), textcoords="offset points", fontsize=8, **place)
            panel.margins(x=0.25, y=0.15)
        else:
            panel.set_ylim(0, 1.15 * max(speed.high for speed in speeds))
            panel.set_xticks(x, list(points))
            panel.minorticks_off()
        panel.yaxis.set_major_formatter("{x:,.0f}")
    for panel in list(panels)[len(measured) :]:
        panel.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/scaling.py", description=__doc__.split("\n")[0])
    parser.add_argument("--axes", nargs="+", metavar="AXIS", default=list(AXES), help=f"of {', '.join(AXES)} [all]")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it works")
    add_measuring_flags(parser, rounds=2, seconds=1.5)
    flags = parser.parse_args(argv)
    require_known("--axes", flags.axes, AXES)
    require_measurable(flags.rounds, flags.seconds)
    from benchmarks.workload import measure_training  # here, because --help must not import torch
    from common.machine import available_ram, pick_device

    if flags.worker:
        print(json.dumps(measure_training(**json.loads(flags.worker), started=STARTED)))
        return 0
    device = pick_device(flags.device).type
    machine = describe_machine(device)
    stem = Path(flags.output_dir) / f"scaling-{machine_kind(machine)}"
    with tempfile.TemporaryDirectory() as temporary:
        size = "toy" if flags.toy else device
        sizes, left_out = data_sizes(size, Path(temporary), available_ram())
        measured = measure_axes(size, flags.axes, sizes, device, flags.rounds, flags.seconds, Path(temporary))
    body = "\n\n".join(
        [
            "Median of the rounds (lowest to highest). Start-up is the time from the start of the process to the end "
            "of the first step: imports, reading and verifying the tokens, building the model, compiling it if the "
            f"trainer does. By context length, each step has the same number of tokens. {left_out}",
            f"![tokens/s]({stem.name}.png)",
            *(f"## By {AXES[axis]}\n\n{table(axis, points)}" for axis, points in measured.items()),
        ]
    )
    results = {"machine": machine, "rounds": flags.rounds, "seconds": flags.seconds, "axes": measured}
    write_results(stem, "How cost grows", results, body)
    draw(measured, machine["device"], stem.with_suffix(".png"))
    print(f"\n{body}\n\nWritten to {stem}.json, .md and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
