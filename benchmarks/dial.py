"""What `--input FILE --minutes N` chooses, beside runs of the same time that a person would choose.

    python benchmarks/dial.py --texts books.txt code.txt chats.jsonl --minutes 5

For each text: how close the run came to its time, whether its loss lies in the interval that was forecast, and how far
it is from the best of HAND_CHOSEN. A finished run is not trained again. All evaluate the whole validation split.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, add_result_flags, describe_machine, markdown_table, write_results
from common.errors import DataError, UserError
from common.files import read_json, write_json
from common.flags import Parser
from common.script import script
from training.reports.records import read_metrics

HAND_CHOSEN = (
    "--config small_modern.json --vocab_size 2048 --embed_dim 64 --num_heads 1",
    "--config small_modern.json --vocab_size 2048 --embed_dim 128 --num_heads 2",
    "--config small_modern.json --vocab_size 2048 --embed_dim 128 --num_heads 2 --batch_size 4 --dropout 0.1",
    "--config small_modern.json --vocab_size 4096",
    "--config small_modern.json --vocab_size 4096 --batch_size 8 --beta2 0.99",
    "--config medium_modern.json --vocab_size 4096 --batch_size 8",
)


def train(words: Sequence[str], run: Path) -> dict[str, Any]:
    """Train in `run`, unless that is done: its seconds, its lowest loss in bits per byte, and what was forecast."""
    done = run / "benchmark.json"
    if done.exists():
        return read_json(done, DataError)
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "train_colab_mmap.py"), *words, "--output_dir", str(run)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if finished.returncode:
        raise UserError(f"{' '.join(words)} failed: {finished.stderr.strip()}")
    curve = [row["val_bits_per_byte"] for row in read_metrics(run) if "val_bits_per_byte" in row]
    forecast = re.search(r"Expected +([\d.]+) bits per byte \(([\d.]+) to ([\d.]+)\)", finished.stdout)
    chosen = re.search(r"Choice +(.*?):", finished.stdout)
    result = {"seconds": seconds, "lowest": min(curve), "last": curve[-1]}
    if forecast and chosen:
        result |= {"forecast": [float(number) for number in forecast.groups()], "chosen": chosen[1]}
    write_json(done, result)
    return result


def table(results: dict[str, list[dict[str, Any]]], minutes: float) -> str:
    rows = []
    for text, (dial, *others) in results.items():
        expected, low, high = dial["forecast"]
        best = min(others, key=lambda run: run["lowest"])
        late = dial["seconds"] / (60 * minutes) - 1
        inside = "inside" if low <= dial["lowest"] <= high else "outside"
        forecast = f"{expected:.2f} ({low:.2f} to {high:.2f}), {inside}"
        rows.append(
            [text, dial["chosen"], f"{late:+.1%}", f"{dial['lowest']:.3f}", forecast, f"{best['lowest']:.3f}",
             f"{dial['lowest'] - best['lowest']:+.3f}", f"`{best['flags']}`"]
        )  # fmt: skip
    columns = ["text", "chosen", "time", "bits per byte", "forecast", "best by hand", "difference", "which"]
    return markdown_table(columns, rows)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/dial.py", description=__doc__.split("\n")[0])
    parser.add_argument("--texts", nargs="+", required=True, metavar="FILE", help="to train on")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="X", help="of each run [5]")
    parser.add_argument("--hand_chosen", nargs="+", default=HAND_CHOSEN, metavar='"FLAGS"', help="of the other runs")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/dial", help="[runs/dial]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = {}
    for text in flags.texts:
        name = Path(text).name
        for number, chosen in enumerate(("", *flags.hand_chosen)):
            evaluated = ["--eval_batches", "0", "--eval_interval", "100"] if chosen else ["--eval_batches", "0"]
            words = ["--input", text, "--minutes", str(flags.minutes), "--device", flags.device, *chosen.split()]
            run = train([*words, *evaluated], Path(flags.runs_dir) / f"{name}-{number}") | {"flags": chosen}
            results.setdefault(name, []).append(run)
            print(f"{run['lowest']:.4f} bits per byte in {run['seconds']:.0f} s: {name} {chosen}", flush=True)
    body = table(results, flags.minutes)
    write_results(
        Path(flags.output_dir) / "dial", "The dial", {"machine": describe_machine(flags.device), "runs": results}, body
    )
    print(body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
