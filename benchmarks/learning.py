"""How well runs of the trainer learn beside each other: each variant is flags of the trainer, as one types them.

    python benchmarks/learning.py --runs "--config small_modern.json" "--position learned" "--optimizer adamw"

The flags of the first run count for all of them; the later ones change it. A finished run is not trained again. Losses
are in bits per byte of the validation split: the lowest of each run, and the last. With --at_once, several train beside
each other, one thread each.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, add_result_flags, describe_machine, markdown_table, write_results
from common.errors import ConfigError, UserError
from common.flags import Parser
from common.script import script
from training.reports.records import read_metrics


def train(words: Sequence[str], run_dir: Path, threads: int | None) -> dict[str, Any]:
    """Train in `run_dir`, and return what its metrics say. Raises UserError with the trainer's message."""
    command = [sys.executable, str(ROOT / "train_colab_mmap.py"), *words, "--output_dir", str(run_dir)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"{shlex.join(words)} failed: {done.stderr.strip()}")
    rows = read_metrics(run_dir)
    curve = [(row["epoch"], row["val_bits_per_byte"]) for row in rows if "val_bits_per_byte" in row]
    if not curve:
        raise ConfigError(f"{shlex.join(words)} evaluated nothing: give an --eval_interval.")
    epoch, lowest = min(curve, key=lambda point: point[1])
    last = {"tokens": rows[-1]["tokens"], "seconds": rows[-1]["elapsed_seconds"], "last": curve[-1][1]}
    return last | {"lowest": lowest, "at_epoch": epoch, "curve": curve}


def table(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """A row for each variant: the lowest loss by seed, its mean, and how far that is from the first variant's."""
    means = {name: fmean(run["lowest"] for run in seeds.values()) for name, seeds in results.items()}
    first = next(iter(means))
    rows = []
    for name, seeds in results.items():
        runs = list(seeds.values())
        rows.append(
            [
                f"`{name}`",
                f"{runs[0]['tokens'] / 1e6:.2f}M",
                ", ".join(f"{run['lowest']:.4f}" for run in runs),
                ", ".join(f"{run['at_epoch']:.1f}" for run in runs),
                ", ".join(f"{run['last']:.4f}" for run in runs),
                f"{means[name]:.4f}",
                "" if name == first else f"{means[name] - means[first]:+.4f}",
            ]
        )
    columns = ["flags", "tokens", "lowest, by seed", "at epoch", "last", "mean of the lowest", "against the first"]
    return markdown_table(columns, rows)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/learning.py", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar='"FLAGS"', help="flags of the trainer, quoted")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", default=[1337], help="[1337]")
    parser.add_argument("--at_once", type=int, metavar="N", default=1, help="runs beside each other [1]")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/learning", help="[runs/learning]")
    parser.add_argument("--name", default="learning", help="of the result's files [learning]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    tasks = [(run, seed) for seed in flags.seeds for run in flags.runs]

    def result_of(task: tuple[str, int]) -> dict[str, Any]:
        run, seed = task
        words = shlex.split(f"{flags.runs[0]} {run if run != flags.runs[0] else ''}")
        words += ["--seed", str(seed), "--device", flags.device]
        run_dir = Path(flags.runs_dir) / re.sub(r"[^\w.]+", "_", " ".join(words)).strip("_")[-200:]
        return train(words, run_dir, threads=1 if flags.at_once > 1 else None)

    with ThreadPoolExecutor(flags.at_once) as pool:
        for (run, seed), result in zip(tasks, pool.map(result_of, tasks), strict=True):
            results.setdefault(run, {})[seed] = result
            print(f"{result['lowest']:.4f} bits per byte: {run}, seed {seed}", flush=True)
            values = {"machine": describe_machine(flags.device), "runs": results}
            write_results(Path(flags.output_dir) / flags.name, "Learning", values, table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
