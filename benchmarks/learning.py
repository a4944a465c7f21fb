"""How well runs of the trainer learn beside each other: each variant is flags of the trainer, as one types them.

    python benchmarks/learning.py --runs "--config small_modern.json" "--position learned" "--optimizer adamw"
    python benchmarks/learning.py --runs "--input my_text.txt --minutes 5" "--config small_modern.json"
    python benchmarks/learning.py --law books.txt.gz

The flags of the first run count for all of them; the later ones change it. Losses are in bits per byte of the
validation split: the lowest of each run, and the last. With --at_once, several train beside each other, one thread
each. --law trains the runs behind the dial's forecasts (docs/choosing.md) on passages of many books, and fits the law
to all but every sixth of them, which judge it. A finished run is not trained again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import ROOT, add_result_flags, describe_machine, flag_words, markdown_table, write_results
from common.errors import ConfigError, UserError
from common.flags import Parser
from common.script import script
from common.tensors import meta_model
from tokenization.corpus import find_sources
from tokenization.documents import read_pieces
from training.config import parse_config
from training.law import Law
from training.plan import find_or_tokenize
from training.recipe import HEAD_WIDTH, Shape, choose_context, choose_sequences, choose_settings, read_recipe
from training.records import read_metrics
from training.state import Previous
from training.text import TRAIN_SHARE, choose_vocabulary

LEAST_CHARACTERS = 20_000  # of a book
FIT_STEPS = 3_000
JUDGED = 6  # every sixth run, in order, is not fitted


LAW_RUNS = [  # megabytes of text, width of 4 layers, passes
    *((0.1, width, passes) for width, passes in ((64, 4), (64, 16), (128, 8), (128, 24), (192, 16))),
    *((0.3, width, passes) for width, passes in ((64, 4), (64, 16), (128, 2), (128, 8), (192, 12), (256, 4))),
    (0.3, 256, 10),
    *((1, width, passes) for width, passes in ((64, 4), (128, 1), (128, 4), (128, 8), (192, 4), (256, 1), (256, 3))),
    *((3, width, passes) for width, passes in ((64, 1), (64, 4), (128, 1), (128, 2), (256, 1))),
    *((10, width, 1) for width in (64, 128)),
]


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
    formats = {"tokens": ",.0f", "seconds": ".0f", "lowest": ".4f", "at_epoch": ".1f", "last": ".4f"}
    rows = [
        [
            f"`{name}`",
            *(", ".join(f"{run[key]:{digits}}" for run in seeds.values()) for key, digits in formats.items()),
            f"{means[name]:.4f}",
            "" if name == first else f"{means[name] - means[first]:+.4f}",
        ]
        for name, seeds in results.items()
    ]
    columns = ["flags", "tokens", "seconds", "lowest, by seed", "at epoch", "last", "mean of the lowest", "difference"]
    return markdown_table(columns, rows)


def law_runs(books: str, folder: Path) -> dict[str, list[str]]:
    """By name, the flags of the runs that the law is fitted to, with the dial's recipe, on passages of all books."""
    texts = [""]
    for piece in read_pieces(find_sources([books])):
        texts[-1] += piece.text
        texts += [""] * piece.ends_document
    texts = [text for text in texts if len(text) > LEAST_CHARACTERS]
    folder.mkdir(parents=True, exist_ok=True)
    variants = {}
    for megabytes, width, passes in LAW_RUNS:
        text, share = folder / f"books_{megabytes:g}.txt", round(megabytes * 1e6) // len(texts)
        text.write_text("\n\n".join(each[len(each) // 3 :][:share] for each in texts), encoding="utf-8")
        vocabulary = choose_vocabulary(megabytes * 1e6)
        tokens = passes * TRAIN_SHARE * megabytes * 1e6 / vocabulary.letters_per_token
        length = choose_context(Shape(4, width, 256), tokens)
        sequences = choose_sequences(tokens, length)
        keys = read_recipe() | choose_settings(width, sequences * length, passes)
        keys |= {
            "input": text, "vocab_size": vocabulary.size, "num_layers": 4, "embed_dim": width,
            "num_heads": width // HEAD_WIDTH, "max_seq_len": length, "batch_size": sequences, "epochs": passes,
            "compile": "off", "eval_batches": 0, "eval_interval": max(1, int(tokens / length / sequences / 3)),
        }  # fmt: skip
        variants[f"{megabytes:g} MB, 4 x {width}, {passes}"] = flag_words(keys)
    return variants


def sizes_of(words: Sequence[str]) -> dict[str, Any]:
    """What the law is a function of."""
    config = parse_config(words)
    blocks = meta_model(config.shape(config.vocab_size)).blocks
    parameters = sum(parameter.numel() for parameter in blocks.parameters())
    size = TRAIN_SHARE * Path(config.input or "").stat().st_size
    return {"parameters": parameters, "bytes": size, "passes": config.epochs, "width": config.embed_dim}


def fit(runs: Sequence[Mapping[str, Any]]) -> Law:
    """The law nearest to the runs: Adam on Huber's loss, of the logarithms of its constants, from several starts."""
    of_runs = [torch.tensor([float(run[key]) for run in runs]) for key in ("parameters", "bytes", "passes")]
    measured = torch.tensor([run["lowest"] for run in runs])
    starts = [
        [floor, 6.0, power, 30.0, power, 4.0, 0.3] for floor in (0.5, 0.9, 1.2) for power in (0.2, 0.35)
    ]  # which are fitted together
    logs = torch.tensor(starts).log().requires_grad_()  # (starts, constants)
    optimizer = torch.optim.Adam([logs], lr=0.01)
    for _ in range(FIT_STEPS):
        optimizer.zero_grad()
        expected = Law(*logs.exp().T.unsqueeze(-1)).loss(*of_runs)  # (starts, runs)
        losses = torch.nn.functional.huber_loss(expected, measured.expand_as(expected), delta=0.03, reduction="none")
        losses.mean(1).sum().backward()
        optimizer.step()
    return Law(*logs[losses.mean(1).argmin()].exp().tolist())


def judged(runs: Sequence[Mapping[str, Any]]) -> str:
    """What a law says of each run, also of some that it was not fitted to."""
    unseen = runs[JUDGED // 2 :: JUDGED]
    law = fit([run for run in runs if run not in unseen])
    rows = []
    for run in runs:
        said = law.loss(run["parameters"], run["bytes"], run["passes"])
        shape = [f"{run['bytes'] / 1e6:.2g} MB", f"4 x {run['width']}", str(run["passes"])]
        numbers = [f"{run['lowest']:.3f}", f"{said:.3f}", f"{said - run['lowest']:+.3f}"]
        rows.append([*shape, *numbers, "not fitted" if run in unseen else ""])
    return f"{markdown_table(['text', 'blocks', 'passes', 'lowest', 'by the law', 'apart', ''], rows)}\n\n{law}"


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/learning.py", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", metavar='"FLAGS"', default=[], help="flags of the trainer, quoted")
    parser.add_argument("--law", metavar="BOOKS", help="text of many books, a document each, in place of --runs")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", default=[1337], help="[1337]")
    parser.add_argument("--at_once", type=int, metavar="N", default=1, help="runs beside each other [1]")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/learning", help="[runs/learning]")
    parser.add_argument("--name", default="learning", help="of the result's files [learning]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    if bool(flags.runs) == bool(flags.law):
        raise ConfigError("Give --runs, or --law with a text of many books.")
    runs_dir, stem = Path(flags.runs_dir), Path(flags.output_dir) / flags.name
    if flags.law:
        variants = law_runs(flags.law, runs_dir)
        for words in variants.values():  # not by two runs at once
            find_or_tokenize(parse_config(words), Previous())
    else:
        first = flags.runs[0]
        variants = {run: shlex.split(run if run == first else f"{first} {run}") for run in flags.runs}
    tasks = [(name, seed, [*words, "--seed", str(seed)]) for seed in flags.seeds for name, words in variants.items()]

    def result_of(task: tuple[str, int, list[str]]) -> dict[str, Any]:
        words = [*task[2], "--device", flags.device]
        flags_of_run = " ".join(words)  # longer than a file's name may be
        readable = re.sub(r"[^\w.]+", "_", flags_of_run).strip("_")[-100:]
        run_dir = runs_dir / f"{readable}_{zlib.crc32(flags_of_run.encode()):08x}"
        return train(words, run_dir, threads=1 if flags.at_once > 1 else None)

    results: dict[str, dict[int, dict[str, Any]]] = {}
    with ThreadPoolExecutor(flags.at_once) as pool:
        for (name, seed, _), result in zip(tasks, pool.map(result_of, tasks), strict=True):
            results.setdefault(name, {})[seed] = result
            values = {"machine": describe_machine(flags.device), "runs": results}
            write_results(stem, "Learning", values, table(results))
    if flags.law:
        runs = [run | sizes_of(variants[name]) for name, seeds in results.items() for run in seeds.values()]
        write_results(stem, "The law", values | {"runs": runs}, judged(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
