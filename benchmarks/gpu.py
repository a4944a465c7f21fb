"""Measure this project on a GPU: GPT-2 small on books, the loop, one's own text, generation, the law, memory.

python tokenize_local_bpe.py --input books.txt.gz --output_dir runs/gpu/datasets_cache   # for GPT-2 small
python benchmarks/gpu.py --books few_books.txt.gz --seconds 570
python benchmarks/gpu.py --only loop memory                 # some parts; a later call adds to the figures
python benchmarks/gpu.py --only card                        # minutes: a line about your card, to be sent in
python benchmarks/gpu.py --toy --books few_books.txt.gz     # tiny models on a CPU, to check that it works

Each part is a process. When its time is over, it ends with all that it started. Its figures are in the JSON file at
once, and what it prints is in a text file beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, describe_machine, markdown_table, write_random_tokens
from common.errors import DataError
from common.files import read_json, write_json
from common.flags import Parser
from common.script import script
from tokenization.corpus import find_sources
from tokenization.documents import read_pieces
from tokenization.metadata import TokenMetadata, find_metadata
from training.config import parse_config
from training.records import CURVE, SAMPLES_TABLE, SUMMARY, read_metrics

if TYPE_CHECKING:
    from benchmarks.workload import TimedRun

QUESTION = "What is the capital of France?"
PROMPTS = (QUESTION, "Once upon a time", "The old house")
TOY = (
    "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --gradient_accumulation_steps 1 "
    "--max_steps 30 --compile off"
)
LOOPS = [(4, 128, 256, 16), (4, 256, 256, 8), (12, 768, 1024, 4)]  # layers, width, context, sequences
LAW_RUNS = [(4, 6, 384, 7), (4, 8, 512, 7), (4, 12, 768, 7), (4, 12, 768, 12), (20, 10, 640, 7)]  # see learning.py


class Bench(NamedTuple):
    """What a part is given, and how it reports figures. Its runs and tokens are in the current folder."""

    results: Path  # the folder of the figures
    toy: bool
    books: str

    @property
    def words(self) -> str:
        """Flags of every training."""
        return f"--device {'cpu' if self.toy else 'cuda'} --resume never {TOY if self.toy else ''}"

    def note(self, name: str, **figures: Any) -> None:
        """Print figures on a line that `main` reads."""
        print("FIGURES", json.dumps({name: figures}), flush=True)

    def start(self, command: str) -> Popen[str]:
        words = [str(ROOT / word) if word.endswith(".py") else word for word in shlex.split(command)]
        return Popen([sys.executable, "-u", *words], stdout=PIPE, stderr=STDOUT, text=True)

    def run(self, command: str) -> str:
        """Run one of our commands; print its output as it comes, and return it. Raises DataError if it fails."""
        lines = []
        with self.start(command) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        if process.returncode:
            raise DataError(f"{command}: exit code {process.returncode}")
        return "".join(lines)

    def train(self, run: str, flags: str) -> tuple[str, list[dict[str, Any]]]:
        """Train a run. Return what was printed, and the rows of metrics.jsonl."""
        output = self.run(f"train_colab_mmap.py --output_dir {run} {flags}")
        return output, read_metrics(Path(run))

    def random_tokens(self, vocab_size: int) -> Path:
        folder = Path(f"tokens_{vocab_size}")
        if not folder.exists():
            write_random_tokens(folder, 20_000 if self.toy else 8_000_000, vocab_size)
        return folder

    def open(self, flags: str) -> TimedRun:
        from benchmarks.workload import TimedRun

        return TimedRun.open(shlex.split(f"{flags} {self.words}"))

    def time(self, work: Callable[[], object], seconds: float = 0.7) -> float:
        """Return the milliseconds per call."""
        import torch

        from benchmarks.workload import time_steps

        work()
        return 1000 * time_steps(work, int if self.toy else torch.cuda.synchronize, 0.01 if self.toy else seconds)[0]


def median_of(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Return the median of a field of metrics.jsonl, without the first report, which includes starting."""
    return statistics.median([row[key] for row in rows if key in row][1:] or [math.nan])


def train_on_books(bench: Bench, name: str) -> None:
    """Train a config on the books in datasets_cache/, evaluated after each pass. Write a page with the losses, the
    summary and the answers to PROMPTS, and the curve."""
    if not find_metadata(Path("datasets_cache")):
        bench.run(f"tokenize_local_bpe.py --input {shlex.quote(bench.books)} {'--vocab_size 300' if bench.toy else ''}")
    (path,) = find_metadata(Path("datasets_cache"))
    tokens, config = TokenMetadata.read(path).train_split_index, parse_config(["--config", f"{name}.json"])
    assert tokens and config.max_seq_len
    interval = 10 if bench.toy else tokens // (config.sequences_per_step * config.max_seq_len)
    run, prompts = Path(name), "prompts.jsonl"
    Path(prompts).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = f"--config {name}.json --eval_prompts {prompts} --eval_interval {interval} {bench.words}"
    _, rows = bench.train(name, flags)
    losses = [[f"{row['epoch']:.2f}", f"{row['val_bits_per_byte']:.4f}"] for row in rows if "val_loss" in row]
    peak = median_of(rows, "peak_memory_gb")
    bench.note(name, steps=rows[-1]["step"], losses=losses, ms=median_of(rows, "ms_per_step"), peak_gb=peak)
    parts = [f"    python train_colab_mmap.py {flags}", markdown_table(["passes", "bits per byte"], losses)]
    parts += [(run / file).read_text(encoding="utf-8") for file in (SUMMARY, SAMPLES_TABLE)]
    (bench.results / f"{name}.md").write_text("\n\n".join(parts), encoding="utf-8")
    shutil.copy(run / CURVE, bench.results / f"{name}_loss.png")


def tests(bench: Bench) -> None:
    files = (f"tests/cuda/test_{name}.py" for name in ("graphs", "generation", "memory", "run"))
    bench.run(f"-m pytest -q -rfE -m cuda {'-n 0 --collect-only' if bench.toy else '-n 8'} {' '.join(files)}")


def loop(bench: Bench) -> None:
    """Time steps with the dial's optimizer: alone, in the trainer's loop, and how long the host takes for them."""
    for layers, width, context, rows in LOOPS[:1] if bench.toy else LOOPS:
        flags = (
            f"--config small_modern.json --num_layers {layers} --embed_dim {width} --num_heads {width // 64} "
            f"--max_seq_len {context} --batch_size {rows} --compile on --dropout 0.1 --max_steps 600 "
            f"--eval_interval 0 --checkpoint_minutes 0 --data_dir {bench.random_tokens(65 if bench.toy else 4096)}"
        )
        training = bench.open(flags)
        figures = {"alone": bench.time(training.step)}
        began, some = time.perf_counter(), range(50)  # so few that the queue is never full
        for _ in some:
            training.step()
        figures["host"] = 1000 * (time.perf_counter() - began) / len(some)
        training.hardware.synchronize()
        if training.captured is not None:
            figures["update"] = bench.time(training.captured.replay_update)
        _, measured = bench.train(f"loop_{layers}x{width}", f"{flags} {bench.words}")
        figures["in the loop"] = median_of(measured, "ms_per_step")
        bench.note(f"{layers} x {width}, {rows} x {context}, ms a step", **figures)


def quickstart(bench: Bench, name: str = "quickstart", more: str = "") -> dict[str, Any]:
    """Time the two commands of README's quickstart."""
    began = time.perf_counter()
    output, rows = bench.train(name, f"--config quickstart.json {bench.words} {more}")
    figures: dict[str, Any] = {"seconds": time.perf_counter() - began, "ms": median_of(rows, "ms_per_step")}
    figures |= {"right": re.findall(r"(\d+ of \d+) answers", output)[-1:], "loss": rows[-1]["val_loss"]}
    began = time.perf_counter()
    bench.run(f"generate.py --checkpoint {name} --prompt {shlex.quote(QUESTION)}")
    bench.note(name, **figures, answer_seconds=time.perf_counter() - began)
    return figures


def own_text(bench: Bench, name: str = "own_text", texts: str = "") -> None:
    """Run README's command for one's own text."""
    minutes, began = 0.2 if bench.toy else 2, time.perf_counter()
    flags = "--device cpu --compile off --epochs 1" if bench.toy else "--device cuda"
    _, rows = bench.train(
        name, f"{texts or f'--input {shlex.quote(bench.books)}'} --minutes {minutes} --resume never {flags}"
    )
    scored = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
    figures = {"steps": rows[-1]["step"], "scored": scored, "ms": median_of(rows, "ms_per_step")}
    bench.note(name, minutes=minutes, used=(time.perf_counter() - began) / 60, **figures)


def companion(bench: Bench) -> None:
    """The same with the first megabyte of the books as one's own text, beside the others."""
    pieces = read_pieces(find_sources([bench.books]))
    text = "".join(piece.text + "\n<|endoftext|>\n" * piece.ends_document for piece in pieces)
    cut = min(1_000_000, len(text) // 4)
    for name, part in (("own.txt", text[:cut]), ("others.txt", text[cut:])):
        Path(name).write_text(part, encoding="utf-8")
    own_text(bench, "companion", "--input own.txt --companion others.txt")


def generation(bench: Bench) -> None:
    """Time generation per token."""
    output = bench.run(f"benchmarks/peers.py --generation --output_dir . {'--toy' if bench.toy else ''}")
    bench.note("generation", table=re.findall(r"(?m)^\| .*", output))


def law(bench: Bench) -> None:
    """Train larger sizes than the dial chooses for a text, and compare with its law."""
    from benchmarks.learning import build_law_runs, measure_sizes
    from training.law import expected_loss

    runs = build_law_runs(bench.books, Path(), [(0.05, 2, 64, 1)] if bench.toy else LAW_RUNS)
    for name, words in runs.items():
        began, sizes = time.perf_counter(), measure_sizes(words)
        flags = f"--resume never --device {'cpu' if bench.toy else 'cuda --compile auto'}"
        _, rows = bench.train(f"law_{zlib.crc32(name.encode())}", f"{shlex.join(words)} {flags}")
        scored = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
        expected = expected_loss(sizes["parameters"], sizes["bytes"], sizes["passes"])
        bench.note(f"law, {name}", seconds=time.perf_counter() - began, expected=expected, scored=scored)


def memory(bench: Bench) -> None:
    """Measure the memory that the process holds after texts of different lengths, and the seconds of each."""
    import torch

    from benchmarks.workload import time_tokens

    model, held = bench.open(f"--config gpt2_small.json --data_dir {bench.random_tokens(65)}").model.bfloat16(), []
    for number in range(40):
        began = time.perf_counter()
        time_tokens(model.eval(), 1, 4 + number % 5, 8 if bench.toy else 100 + 10 * (number % 4))
        held.append([torch.cuda.memory_reserved() / 1e6, time.perf_counter() - began])
    bench.note("memory", mb_and_seconds=held[:2] + held[9::10])


def card(bench: Bench) -> None:
    """Print a line about this card: the quickstart, killed and continued from its mirror; GPT-2 small; generation."""
    from benchmarks.workload import time_tokens
    from common.checkpoint import step_folders
    from generation.loading import convert, generation_dtype

    first = quickstart(bench)
    for folder in ("killed", "mirror"):
        shutil.rmtree(folder, ignore_errors=True)
    saving = f"--checkpoint_dir mirror --checkpoint_steps {5 if bench.toy else 100}"
    flags = f"--config quickstart.json {bench.words} {saving}"
    with bench.start(f"train_colab_mmap.py --output_dir killed {flags}") as process:
        while not step_folders(Path("mirror/killed")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    shutil.rmtree("killed")  # as when Colab takes the machine away
    again = quickstart(bench, "killed", f"{saving} --resume auto")
    training = bench.open(f"--config gpt2_small.json --data_dir {bench.random_tokens(65 if bench.toy else 32_000)}")
    ms, peak = bench.time(training.step, 3.0), (training.hardware.peak_memory() or 0) / 1e9
    convert(training.model, training.model.device, generation_dtype(training.shape, training.model.device))
    token = statistics.median(time_tokens(training.model.eval(), 1, 4, 8 if bench.toy else 50))
    about = describe_machine()
    row = {
        "card": about["device"],
        "torch": about["torch"],
        "quickstart": f"{first['seconds']:.0f} s, {first['ms']:.1f} ms a step, {', '.join(first['right'])} right",
        "its loss; killed, and continued from the mirror": f"{first['loss']:.4f}; {again['loss']:.4f}",
        "GPT-2 small": f"{ms:,.0f} ms a step, {peak:.1f} GB",
        "tokens/s": f"{1 / token:,.0f}",
        "date": about["date"],
    }
    bench.note("card", **row)
    print("\n" + markdown_table(list(row), [list(row.values())]))


# name: (function, expected seconds on an H200). A part is cut off after twice as many.
PARTS: dict[str, tuple[Callable[[Bench], object], float]] = {
    "machine": (lambda bench: bench.note("machine", **describe_machine()), 15),
    "gpt2_small": (lambda bench: train_on_books(bench, "gpt2_small"), 200),
    "gpt2_small_modern": (lambda bench: train_on_books(bench, "gpt2_small_modern"), 215),
    "tests": (tests, 110),
    "loop": (loop, 90),
    "quickstart": (quickstart, 30),
    "own_text": (own_text, 130),
    "companion": (companion, 140),
    "generation": (generation, 35),
    "law": (law, 240),
    "memory": (memory, 30),
    "card": (card, 150),
}


def run_part(command: Sequence[str], limit: float, take: Callable[[str], None]) -> int:
    """Run a part, and give each line that it prints to `take`. Kill it after `limit` seconds. Return the exit code."""
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", start_new_session=True) as process:
        # What it started ends with it, except on Windows, which has no process groups.
        end_all = functools.partial(os.killpg, process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill
        (late := threading.Timer(limit, end_all)).start()
        try:
            for line in process.stdout or ():
                take(line)
            return process.wait()
        finally:
            late.cancel()
            with contextlib.suppress(ProcessLookupError):
                end_all()


def add_figures(path: Path, new: dict[str, dict[str, Any]]) -> None:
    figures: dict[str, Any] = read_json(path, DataError) if path.exists() else {}
    write_json(path, figures | {key: figures.get(key, {}) | values for key, values in new.items()})


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} [all but card]"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out parts that end later [no limit]")
    parser.add_argument("--output", metavar="FILE", default="runs/gpu/gpu.json", help="figures of all calls")
    parser.add_argument("--folder", metavar="DIR", default="runs/gpu", help="runs, tokens and caches [runs/gpu]")
    parser.add_argument("--books", metavar="FILE", help="a text of some books, for own_text, companion and law")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in this process
    flags = parser.parse_args(argv)
    path, folder = Path(flags.output).absolute(), Path(flags.folder).absolute()
    books = str(Path(flags.books).absolute()) if flags.books else ""
    for each in (path.parent, folder):
        each.mkdir(parents=True, exist_ok=True)
    if flags.part:
        os.chdir(folder)
        PARTS[flags.part][0](Bench(path.parent, flags.toy, books))
        return 0
    words = [sys.executable, "-u", __file__, "--folder", str(folder), "--output", str(path), "--books", books]
    words += ["--toy"] * flags.toy
    failed, ends = list[str](), time.perf_counter() + flags.seconds
    with open(path.with_suffix(".txt"), "a", encoding="utf-8") as log:

        def take(line: str) -> None:
            for file in (sys.stdout, log):
                print(line, end="", flush=True, file=file)
            if line.startswith("FIGURES "):
                add_figures(path, json.loads(line.removeprefix("FIGURES ")))

        for name in flags.only or [part for part in PARTS if part != "card"]:
            began, expected = time.perf_counter(), PARTS[name][1]
            if expected > ends - began:
                take(f"{name}: left out, because it takes {expected:.0f} s, and {ends - began:.0f} s are left\n")
                continue
            take(f"\n{name}: about {expected:.0f} s\n")
            limit = min(2 * expected, ends - began)
            code = run_part([*words, "--part", name], limit, take)
            seconds = time.perf_counter() - began
            add_figures(path, {"parts": {name: {"seconds": round(seconds, 1), "exit_code": code}}})
            if code:
                failed.append(name)
                take(f"{name}: cut off after {seconds:.0f} s\n" if seconds >= limit else f"{name}: failed\n")
    print(f"Failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
