"""Time training steps and generation on a GPU for ten minutes, and compare with nanoGPT.

python benchmarks/gpu.py --books books.txt --nanogpt PATH_OF_A_CHECKOUT
python benchmarks/gpu.py --only machine tests steps       # some parts; a later call adds to the figures
python benchmarks/gpu.py --toy                            # tiny models on a CPU, to check that it works

Each part is a process with a time limit. Its figures are written to the JSON file, its output to --folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, ROOT, describe_machine, write_random_tokens
from common.errors import DataError
from common.files import read_json, write_json
from common.flags import Parser, add_debug
from common.script import script
from training.records import read_metrics

if TYPE_CHECKING:
    from benchmarks.workload import TimedRun

QUESTION = "What is the capital of France?"
TOY = "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --eval_interval 0"
SHAPES = [(4, 128, 256, 16), (6, 384, 512, 8), (12, 768, 1024, 16)]  # layers, width, context, sequences


class Bench(NamedTuple):
    """The folders and flags of a part, and how it reports figures."""

    folder: Path
    toy: bool
    books: str | None
    nanogpt: Path

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "cuda"

    def note(self, name: str, **figures: Any) -> None:
        """Print figures on a line that `main` reads."""
        print("FIGURES", json.dumps({name: figures}), flush=True)

    def run(self, command: str) -> str:
        """Run one of our commands; print and return its output. Raises DataError if it fails."""
        words = [sys.executable, "-u", *shlex.split(command)]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            raise DataError(f"{command}: exit code {done.returncode}")
        return done.stdout

    def tokens(self, vocab_size: int) -> Path:
        folder = self.folder / f"tokens_{vocab_size}"
        if not folder.exists():
            write_random_tokens(folder, 20_000 if self.toy else 8_000_000, vocab_size)
        return folder

    def open(self, flags: str, vocab_size: int) -> TimedRun:
        from benchmarks.workload import TimedRun

        data = f"--data_dir {self.tokens(65 if self.toy else vocab_size)} --device {self.device} --resume never"
        return TimedRun.open(shlex.split(f"{flags} {data} {TOY if self.toy else ''}"))

    def synchronize(self) -> None:
        import torch

        if not self.toy:
            torch.cuda.synchronize()

    def time(self, work: Callable[[], object], seconds: float = 0.7) -> float:
        """Return the milliseconds per call."""
        from benchmarks.workload import time_steps

        work()
        return 1000 * time_steps(work, self.synchronize, 0.01 if self.toy else seconds)[0]


def machine(bench: Bench) -> None:
    """Measure the limits of host and GPU."""
    import torch

    bench.note("machine", **describe_machine(bench.device), cudnn=torch.backends.cudnn.version())
    if bench.toy:
        return
    one = torch.zeros(1, device="cuda")
    large, other = (torch.randn(2**30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bench.note(
        "limits",
        us_of_an_operation=1000 * bench.time(lambda: one.add_(1), 0.1),
        copied_tb_per_second=4 * large.numel() / bench.time(lambda: large.copy_(other), 0.1) / 1e9,
        product_tflops=2 * 8192**3 / bench.time(lambda: a @ b, 0.1) / 1e9,
    )


def tests(bench: Bench) -> None:
    bench.run(f"-m pytest -q -rfE -m cuda -n {0 if bench.toy else 8} tests/cuda/")


def quickstart(bench: Bench) -> None:
    """Time the two commands of README's quickstart."""
    run, began = bench.folder / "quickstart", time.perf_counter()
    few = f"--max_steps 3 --vocab_size 300 --data_dir {bench.folder / 'questions'}" if bench.toy else ""
    words = f"--config quickstart.json --device {bench.device} --resume never --output_dir {run} {few}"
    output = bench.run(f"train_colab_mmap.py {words}")
    seconds, ms = time.perf_counter() - began, [row.get("ms_per_step") for row in read_metrics(run)[1:]]
    right = re.findall(r"(\d+) of (\d+) answers", output)
    bench.note("quickstart", seconds=seconds, right=right, ms=statistics.median(filter(None, ms)))
    began = time.perf_counter()
    bench.run(f"generate.py --checkpoint {run} --prompt {shlex.quote(QUESTION)}")
    bench.note("quickstart", answer_seconds=time.perf_counter() - began)


def steps(bench: Bench) -> None:
    """Time steps with the dial's optimizer: plain, captured, compiled, both."""
    import torch

    for layers, width, context, rows in SHAPES[:1] if bench.toy else SHAPES:
        for compiles in (False, True)[: 1 if bench.toy else 2]:
            training = bench.open(
                f"--config small_modern.json --num_layers {layers} --embed_dim {width} --num_heads {width // 64} "
                f"--max_seq_len {context} --batch_size {rows} --compile {'on' if compiles else 'off'}",
                4096,
            )
            form, figures = "compiled" if compiles else "plain", dict[str, float]()
            if training.captured is not None:
                figures[f"{form}, captured"] = bench.time(training.step)
                figures["update, captured"] = bench.time(training.captured.replay_update)
                training.captured = None
                training.optimizer.zero_grad(set_to_none=True)
            bench.note(f"{layers} x {width}, {rows} x {context}, ms", **figures, **{form: bench.time(training.step)})
            del training
            torch.compiler.reset()
            torch.cuda.empty_cache()


def gpt2_small(bench: Bench) -> None:
    """Time and profile GPT-2 small."""
    import torch

    began = time.perf_counter()
    training = bench.open(f"--config gpt2_small.json --compile {'off' if bench.toy else 'on'}", 32_000)
    training.step()
    bench.synchronize()
    bench.note("gpt2_small", first_step_seconds=time.perf_counter() - began)
    bench.note("gpt2_small", ms=bench.time(training.step, 5.0), peak_gb=(training.hardware.peak_memory() or 0) / 1e9)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
        training.step()
        bench.synchronize()
    column = "self_cpu_time_total" if bench.toy else "self_device_time_total"
    print(trace.key_averages().table(sort_by=column, row_limit=40, max_name_column_width=60))


def generation(bench: Bench) -> None:
    """Time generation per token."""
    toy = "--toy" if bench.toy else ""
    words = f"--generation --device {bench.device} --output_dir {bench.folder} {toy}"
    bench.note("generation", table=re.findall(r"(?m)^\| .*", bench.run(f"benchmarks/peers.py {words}")))


def nanogpt(bench: Bench) -> None:
    """Time nanoGPT's step as its train.py takes it, compiled on a GPU, and ours beside it."""
    shape = TOY if bench.toy else "--config gpt2_small.json"
    words = f"--device {bench.device} --output_dir {bench.folder} --nanogpt {bench.nanogpt}"
    output = bench.run(f"benchmarks/peers.py {shape} {words} --only nanoGPT 'this trainer'")
    bench.note("nanoGPT", table=re.findall(r"(?m)^\| .*", output))


def own_text(bench: Bench) -> None:
    """Run README's command for your own text."""
    run, minutes, began = bench.folder / "own_text", 0.2 if bench.toy else 2, time.perf_counter()
    output = bench.run(
        f"train_colab_mmap.py --input {bench.books} --minutes {minutes} --device {bench.device} --resume never "
        f"--data_dir {bench.folder / 'books'} --output_dir {run} {'--compile off --epochs 1' if bench.toy else ''}"
    )
    rows = read_metrics(run)
    lines = re.findall(r"(?m)^(?:Choice|Expected|Reading|Compile) .*|First step .*", output)
    scored = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
    ms = statistics.median([row["ms_per_step"] for row in rows if "ms_per_step" in row] or [0])
    seconds, taken = time.perf_counter() - began, rows[-1]["step"]
    bench.note("own text", minutes=minutes, used=seconds / 60, lines=lines, steps=taken, scored=scored, ms=ms)


# name: (function, time limit in seconds). Each part has its own cache of compiled code.
PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "machine": (machine, 40),
    "tests": (tests, 200),
    "quickstart": (quickstart, 120),
    "generation": (generation, 80),
    "steps": (steps, 150),
    "gpt2_small": (gpt2_small, 90),
    "nanogpt": (nanogpt, 120),
    "own_text": (own_text, 200),
}


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="[all]")
    parser.add_argument("--output", metavar="FILE", default=str(RESULTS / "gpu.json"), help="figures of all calls")
    parser.add_argument("--folder", metavar="DIR", default="runs/gpu", help="folder for runs and outputs [runs/gpu]")
    parser.add_argument("--books", metavar="FILE", help="a text for own_text")
    parser.add_argument("--nanogpt", metavar="PATH", default=".", help="a checkout of nanoGPT")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--part", help="run this part, in this process")
    add_debug(parser)
    flags = parser.parse_args(argv)
    bench = Bench(Path(flags.folder).absolute(), flags.toy, flags.books, Path(flags.nanogpt).absolute())
    bench.folder.mkdir(parents=True, exist_ok=True)
    if flags.part:
        PARTS[flags.part][0](bench)
        return 0
    words = ["--folder", flags.folder, "--nanogpt", flags.nanogpt, *(["--books", flags.books] if flags.books else [])]
    path, failed = Path(flags.output), list[str]()
    for name in flags.only:
        output, began = bench.folder / f"{name}.txt", time.perf_counter()
        command = [sys.executable, "-u", __file__, *words, *["--toy"] * flags.toy, "--part", name]
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(bench.folder / f"cache_{name}")}
        with open(output, "w", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | cache)
            try:
                code = process.wait(PARTS[name][1])
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        lines = output.read_text(encoding="utf-8").splitlines()
        figures: dict[str, Any] = read_json(path, DataError) if path.exists() else {}
        for line in lines:
            if line.startswith("FIGURES "):
                print(line, flush=True)
                ((key, values),) = json.loads(line.removeprefix("FIGURES ")).items()
                figures[key] = figures.get(key, {}) | values
        seconds = {name: {"seconds": round(time.perf_counter() - began, 1), "exit_code": code}}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures | {"parts": figures.get("parts", {}) | seconds})
        if code:
            failed.append(name)
            print("\n".join([*lines[-25:], f"{name}: exit code {code}"]), flush=True)
    print(f"Failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
