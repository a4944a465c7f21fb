"""Compare how well runs of the trainer learn. Each variant is a string of trainer flags.

    python benchmarks/learning.py --runs "--config small_modern.json" "--position learned" "--optimizer adamw"
    python benchmarks/learning.py --runs "--input my_text.txt --minutes 5" "--config small_modern.json"
    python benchmarks/learning.py --law books.txt.gz

The later variants start from the flags of the first and change them. Results are the lowest validation loss of each
run, in bits per byte. --at_once N trains N runs in parallel, one thread each. --law trains the runs behind the dial's
forecasts (docs/choosing.md) on passages of many books, fits the law to five out of six, and tests it on the others. A
finished run is not trained again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import ROOT, add_result_flags, describe_machine, flag_words, markdown_table, write_results
from common.errors import ConfigError, UserError
from common.flags import Parser
from common.script import script
from common.tensors import meta_model
from tokenization.corpus import find_sources
from tokenization.documents import read_pieces
from train_colab_mmap import tokenize_input
from training.config import parse_config
from training.law import Law
from training.recipe import HEAD_WIDTH, Shape, choose_context, choose_sequences, choose_settings, read_recipe
from training.records import read_metrics
from training.state import Previous
from training.text import TRAIN_SHARE, choose_vocabulary

MIN_BOOK_CHARACTERS = 20_000
FIT_STEPS = 3_000
HOLD_OUT_EVERY = 6  # every sixth run is not fitted


LAW_RUNS = [  # megabytes of text, layers, width, passes
    *((0.1, 4, width, passes) for width, passes in ((64, 4), (64, 16), (128, 8), (128, 24), (192, 16))),
    *((0.3, 4, width, passes) for width, passes in ((64, 4), (64, 16), (128, 2), (128, 8), (192, 12), (256, 4))),
    (0.3, 4, 256, 10),
    *((1, 4, width, passes) for width, passes in ((64, 4), (128, 1), (128, 4), (128, 8), (192, 4), (256, 1), (256, 3))),
    *((3, 4, width, passes) for width, passes in ((64, 1), (64, 4), (128, 1), (128, 2), (256, 1))),
    *((10, 4, width, 1) for width in (64, 128)),
]


def train(words: Sequence[str], run_dir: Path, threads: int | None) -> dict[str, Any]:
    """Train in `run_dir` and return its results. Raises UserError with the trainer's message."""
    command = [sys.executable, str(ROOT / "train_colab_mmap.py"), *words, "--output_dir", str(run_dir)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"{shlex.join(words)} failed: {done.stderr.strip()}")
    rows = read_metrics(run_dir)
    curve = [(row["epoch"], row["val_bits_per_byte"]) for row in rows if "val_bits_per_byte" in row]
    if not curve:
        raise ConfigError(f"{shlex.join(words)} was never evaluated. Set --eval_interval.")
    return {"tokens": rows[-1]["tokens"], "lowest": min(loss for _, loss in curve), "curve": curve}


def _format_table(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Return a table of the variants: the lowest loss of each seed, the mean, the difference from the first variant."""
    means = {name: fmean(run["lowest"] for run in seeds.values()) for name, seeds in results.items()}
    first, rows = next(iter(means.values())), []
    for name, seeds in results.items():
        lowest = ", ".join(f"{run['lowest']:.4f}" for run in seeds.values())
        rows.append([f"`{name}`", lowest, f"{means[name]:.4f}", f"{means[name] - first:+.4f}"])
    return markdown_table(["flags", "lowest, by seed", "mean", "difference"], rows)


def build_law_runs(
    books: str, folder: Path, runs: Sequence[tuple[float, int, int, int]] = LAW_RUNS
) -> dict[str, list[str]]:
    """Return the flags of runs by name: the dial's recipe on passages of all books. The law is fitted to LAW_RUNS."""
    texts = [""]
    for piece in read_pieces(find_sources([books])):
        texts[-1] += piece.text
        texts += [""] * piece.ends_document
    texts = [text for text in texts if len(text) > MIN_BOOK_CHARACTERS]
    folder.mkdir(parents=True, exist_ok=True)
    variants = {}
    for megabytes, layers, width, passes in runs:
        text, share = folder / f"books_{megabytes:g}.txt", round(megabytes * 1e6) // len(texts)
        text.write_text("\n\n".join(each[len(each) // 3 :][:share] for each in texts), encoding="utf-8")
        vocabulary = choose_vocabulary(megabytes * 1e6)
        tokens = passes * TRAIN_SHARE * megabytes * 1e6 / vocabulary.letters_per_token
        length = choose_context(Shape(layers, width, 256), tokens)
        sequences = choose_sequences(tokens, length)
        keys = read_recipe() | choose_settings(width, sequences * length, passes)
        keys |= {
            "input": text, "vocab_size": vocabulary.size, "num_layers": layers, "embed_dim": width,
            "num_heads": width // HEAD_WIDTH, "max_seq_len": length, "batch_size": sequences, "epochs": passes,
            "compile": "off", "eval_batches": 0, "eval_interval": max(1, int(tokens / length / sequences / 3)),
        }  # fmt: skip
        variants[f"{megabytes:g} MB, {layers} x {width}, {passes}"] = flag_words(keys)
    return variants


def measure_sizes(words: Sequence[str]) -> dict[str, Any]:
    """Return the inputs of the law: parameters in the blocks, bytes of text, passes; and the width."""
    config = parse_config(words)
    blocks = meta_model(config.shape(config.vocab_size)).blocks
    parameters = sum(parameter.numel() for parameter in blocks.parameters())
    size = TRAIN_SHARE * Path(config.input or "").stat().st_size
    return {"parameters": parameters, "bytes": size, "passes": config.epochs, "width": config.embed_dim}


def _fit_law(runs: Sequence[Mapping[str, Any]]) -> Law:
    """Fit the law to runs: Adam on the Huber loss, in the logarithms of its constants, from several starts."""
    inputs = [torch.tensor([float(run[key]) for run in runs]) for key in ("parameters", "bytes", "passes")]
    measured = torch.tensor([run["lowest"] for run in runs])
    # All starts are fitted in one batch.
    starts = [[floor, 6.0, power, 30.0, power, 4.0, 0.3] for floor in (0.5, 0.9, 1.2) for power in (0.2, 0.35)]
    logs = torch.tensor(starts).log().requires_grad_()  # (starts, constants)
    optimizer = torch.optim.Adam([logs], lr=0.01)
    for _ in range(FIT_STEPS):
        optimizer.zero_grad()
        expected = Law(*logs.exp().T.unsqueeze(-1)).loss(*inputs)  # (starts, runs)
        losses = torch.nn.functional.huber_loss(expected, measured.expand_as(expected), delta=0.03, reduction="none")
        losses.mean(1).sum().backward()
        optimizer.step()
    return Law(*logs[losses.mean(1).argmin()].exp().tolist())


def judge_law(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what the law predicts for each run, including the held-out ones, and the law."""
    unseen = runs[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    law = _fit_law([run for run in runs if run not in unseen])
    rows = []
    for run in runs:
        predicted = law.loss(run["parameters"], run["bytes"], run["passes"])
        shape = [f"{run['bytes'] / 1e6:.2g} MB", f"4 x {run['width']}", str(run["passes"])]
        numbers = [f"{run['lowest']:.3f}", f"{predicted:.3f}", f"{predicted - run['lowest']:+.3f}"]
        rows.append([*shape, *numbers, "not fitted" if run in unseen else ""])
    return f"{markdown_table(['text', 'blocks', 'passes', 'lowest', 'by the law', 'difference', ''], rows)}\n\n{law}"


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/learning.py", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", metavar='"FLAGS"', default=[], help="flags of the trainer, quoted")
    parser.add_argument("--law", metavar="BOOKS", help="instead of --runs: a text of many books, one document each")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", default=[1337], help="[1337]")
    parser.add_argument("--at_once", type=int, metavar="N", default=1, help="runs in parallel [1]")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/learning", help="[runs/learning]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    if bool(flags.runs) == bool(flags.law):
        raise ConfigError("Give either --runs or --law.")
    runs_dir, stem = Path(flags.runs_dir), Path(flags.output_dir) / ("law" if flags.law else "learning")
    if flags.law:
        variants = build_law_runs(flags.law, runs_dir)
        for words in variants.values():  # here, so that two runs do not tokenize at once
            tokenize_input(parse_config(words), Previous())
    else:
        first = flags.runs[0]
        variants = {run: shlex.split(run if run == first else f"{first} {run}") for run in flags.runs}
    tasks = [(name, seed, [*words, "--seed", str(seed)]) for seed in flags.seeds for name, words in variants.items()]

    def run_task(task: tuple[str, int, list[str]]) -> dict[str, Any]:
        words = [*task[2], "--device", flags.device]
        run_dir = runs_dir / f"{zlib.crc32(' '.join(words).encode()):08x}"
        return train(words, run_dir, threads=1 if flags.at_once > 1 else None)

    results: dict[str, dict[int, dict[str, Any]]] = {}
    with ThreadPoolExecutor(flags.at_once) as pool:
        for (name, seed, _), result in zip(tasks, pool.map(run_task, tasks), strict=True):
            results.setdefault(name, {})[seed] = result
            values = {"machine": describe_machine(flags.device), "runs": results}
            write_results(stem, "Learning", values, _format_table(results))
    if flags.law:
        runs = [run | measure_sizes(variants[name]) for name, seeds in results.items() for run in seeds.values()]
        write_results(stem, "The law", values | {"runs": runs}, judge_law(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
