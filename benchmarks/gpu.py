"""The first hour on a GPU: what a user types, step by step, each with a time limit, and forecasts beside what came.

python benchmarks/gpu.py                                  # all of it
python benchmarks/gpu.py --only machine quickstart train  # in parts: a later call adds to the report
python benchmarks/gpu.py --toy                            # tiny models on a CPU, to see that it works

Beside the report: its figures as JSON, and a folder with the whole output of each command.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, ROOT, describe_machine, markdown_table, require_known, write_random_tokens
from common.errors import DataError
from common.files import read_json, write_json
from common.flags import Parser, add_debug
from common.script import script
from training.records import read_metrics

QUESTION = "What is the capital of France?"
TOY = "--device cpu --num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --eval_interval 0"
SHOWN_LINES = 12  # of a command's output in the report
TEXT_BYTES = 20_000_000
FEW_CORES = 4  # of the host: there, compiling takes twice as long
CLOCKS = "clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu,memory.used,memory.total"
MACHINE = """
import torch, torch.nn.functional as F
print("torch", torch.__version__, "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
kernels = torch.nn.attention.SDPBackend.__members__
q = torch.zeros(8, 12, 512, 64, device="cuda", dtype=torch.bfloat16)
mask = torch.ones(512, 512, device="cuda", dtype=torch.bool)
cases = {"causal": (q, {"is_causal": True}), "masked": (q, {"attn_mask": mask}), "one token": (q[:, :, :1], {})}
for name, (queries, options) in cases.items():
    chosen = torch._fused_sdp_choice(queries, q, q, **options)
    print("attention,", name, [kernel for kernel in kernels if int(kernels[kernel]) == chosen])
"""
# Of docs/benchmarks/gpu_forecast.md: milliseconds of a step of gpt2_small.json.
STEP_MS = {"T4": 1350, "L4": 600, "A100-SXM4-40GB": 138, "A100-SXM4-80GB": 130, "H100": 58, "H200": 53}
# Programs instead of the script: one that prints more kernels, and one without cuDNN's attention.
KERNELS = (
    "import training.inspections as i; i.OPERATIONS = 40; "
    "from train_colab_mmap import main; raise SystemExit(main({words!r}))"
)
WITHOUT_CUDNN = (
    "import torch; set_to = torch.backends.cuda.enable_cudnn_sdp; "
    "torch.backends.cuda.enable_cudnn_sdp = lambda enabled: set_to(False); "
    "from train_colab_mmap import main; raise SystemExit(main({words!r}))"
)
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "as it is": ("", {}),
    "coordinate descent": ("", {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}),
    "max-autotune": ("", {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    "no biases": ("--bias false", {}),
    "no cuDNN attention": ("", {}),
}


@dataclass
class Report:
    """What is written while the commands run; `folder` holds their runs."""

    path: Path
    folder: Path
    toy: bool
    failed: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> Path:
        return self.path.with_suffix("")

    @property
    def figures(self) -> dict[str, Any]:
        path = self.path.with_suffix(".json")
        return read_json(path, DataError) if path.exists() else {}

    def note(self, name: str, **figures: Any) -> None:
        """Write figures down at once: what follows may fail."""
        known = self.figures
        write_json(self.path.with_suffix(".json"), known | {name: known.get(name, {}) | figures})

    def say(self, text: str) -> None:
        print(text, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def run(
        self, name: str, command: str, limit: float, code: int = 0, stop: tuple[str, float] | None = None, **env: str
    ) -> str:
        """Run a command of ours, stream its output to a file, and return it. `stop` is a line's beginning, and how many
        seconds after it Ctrl-C is sent. Another exit code than `code` is a failure; so are more than `limit` seconds,
        or twice as many on a host of few cores."""
        limit *= 2 if (os.cpu_count() or 1) <= FEW_CORES else 1
        words = [sys.executable, "-u", *shlex.split(command)]
        began, lines, timers = time.perf_counter(), list[str](), list[threading.Timer]()
        self.outputs.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env
        )

        def after(seconds: float, work: Callable[..., object], *arguments: Any) -> None:
            timers.append(threading.Timer(seconds, work, arguments))
            timers[-1].start()

        after(limit, process.send_signal, signal.SIGINT)  # a run saves itself
        after(limit + 60, process.kill)
        assert process.stdout is not None
        with open(self.outputs / f"{name.replace(' ', '_')}.txt", "w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                lines.append(re.sub(r".*\r", "", line.rstrip()))
                if stop and line.startswith(stop[0]):
                    after(stop[1], process.send_signal, signal.SIGINT)
                    stop = None
        ended, seconds = process.wait(), time.perf_counter() - began
        for timer in timers:
            timer.cancel()
        if ended != code:
            self.failed.append(name)
        verdict = "" if ended == code else f", **{code} was expected**"
        shown, asked = "\n".join(lines[-SHOWN_LINES:]), command if len(command) < 300 else name
        self.note(name, exit_code=ended, seconds=round(seconds, 1))
        self.say(f"\n`{asked}`: exit code {ended}{verdict}, {seconds:.1f} s\n\n```\n{shown}\n```")
        return "\n".join(lines)

    def train(self, name: str, flags: str, limit: float, form: str = "train_colab_mmap.py {words}", **how: Any) -> str:
        """Train in the folder `name`, and tell the speed of its steps after the first report."""
        run_dir = self.folder / name.replace(" ", "_")
        resume = "" if "--resume" in flags else " --resume never"
        toy = f" {TOY}" if self.toy and "--device" not in flags else ""
        words = f"{flags}{toy}{resume} --output_dir {run_dir}"
        if form.startswith("import"):  # a program instead of the script
            command = f"-c {shlex.quote(form.format(words=shlex.split(words)))}"
        else:
            command = form.format(words=words)
        output = self.run(name, command, limit, **how)
        rows = read_metrics(run_dir) if run_dir.is_dir() else []
        keys = ("ms_per_step", "tokens_per_second", "mfu", "peak_memory_gb")
        values = {key: [row[key] for row in rows[1:] if key in row] for key in keys}
        figures: dict[str, Any] = {key: statistics.median(each) for key, each in values.items() if each}
        if took := re.search(r"Compiled in (\d+) s", output):
            figures["compile_seconds"] = int(took[1])
        if rows:
            figures["steps"] = rows[-1]["step"]
            figures |= {key: rows[-1][key] for key in ("val_bits_per_byte",) if key in rows[-1]}
        self.note(name, **figures)
        self.say(f"\n{name}: {', '.join(f'{key} {value:,.4g}' for key, value in figures.items())}")
        return output

    @property
    def data(self) -> str:
        """Flags for random tokens of GPT-2 small's vocabulary."""
        folder = self.folder / "tokens"
        if not folder.exists():
            write_random_tokens(folder, 20_000 if self.toy else 20_000_000, 65 if self.toy else 32_000)
        return f"--config gpt2_small.json --data_dir {folder}"

    @property
    def nothing_compiled(self) -> dict[str, str]:
        """Environment with an empty cache of the compiler."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"compiled_{time.time():.0f}")}


@contextmanager
def clocks(report: Report, name: str) -> Iterator[None]:
    """Ask the GPU for its clocks and power every five seconds."""
    asked = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits", "--loop=5"]
    try:
        process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:  # there is no such program
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        told = process.communicate()[0]
        rows = [line.split(", ") for line in told.splitlines() if "," in line]
        columns = zip(CLOCKS.split(","), zip(*rows, strict=True), strict=True) if rows else []
        report.note(name, **{key: list(values) for key, values in columns})


def machine(report: Report) -> None:
    report.note("machine", **describe_machine("cpu" if report.toy else "cuda"))
    report.say(f"\n{report.figures['machine']}")
    if not report.toy:
        report.run("attention", f"-c {shlex.quote(MACHINE)}", 60)


def quickstart(report: Report) -> None:
    """README's two commands. The answer is "The capital of France is Paris."."""
    changes = f" --max_steps 3 --vocab_size 300 --data_dir {report.folder / 'questions'}" if report.toy else ""
    report.train("quickstart", f"--config quickstart.json{changes}", 300)
    run = report.folder / "quickstart"
    report.run("answer", f"generate.py --checkpoint {run} --prompt {shlex.quote(QUESTION)}", 60)
    longer = f"Tell me, for I have forgotten it. {QUESTION}"
    report.run("answer again", f"generate.py --checkpoint {run} --prompt {shlex.quote(longer)}", 60)


def train(report: Report) -> None:
    """GPT-2 small for a minute, stopped by Ctrl-C; then text from it, and its kernels."""
    stop = ("First step", 0.5 if report.toy else 60.0)
    with clocks(report, "gpt2_small"):
        report.train("gpt2_small", report.data, 360, code=130, stop=stop, **report.nothing_compiled)
    checkpoint = report.folder / "gpt2_small"
    report.run("generate", f"generate.py --checkpoint {checkpoint} --prompt '\u0100' --max_new_tokens 200 --json", 90)
    report.train("profile", f"{report.data} --profile", 240, KERNELS)


def own_text(report: Report) -> None:
    """README's command for one's own text: the sources of Python's library."""
    text, minutes = report.folder / "text.txt", 0.5 if report.toy else 10
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_bytes(b"\n".join(map(Path.read_bytes, sources))[: 30_000 if report.toy else TEXT_BYTES])
    began = time.perf_counter()
    name = "own text"
    cpu = " --device cpu --compile off --epochs 1" if report.toy else ""
    output = report.train(name, f"--input {text} --minutes {minutes}{cpu}", 60 * minutes + 120)
    told = re.search(r"Expected +([\d.]+) bits per byte", output)
    config = report.folder / "own_text" / "config.json"
    forecast = read_json(config, DataError).get("forecast", {}) if config.exists() else {}
    expected = {"expected_bits_per_byte": float(told[1])} if told else {}
    speed = {"expected_tokens_per_second": forecast["tokens_per_second"]} if forecast else {}
    report.note(name, minutes=minutes, used=(time.perf_counter() - began) / 60, **expected, **speed)


def modern(report: Report) -> None:
    data = report.data.replace("gpt2_small.json", "gpt2_small_modern.json")
    report.train("modern", data, 360, code=130, stop=("First step", 0.5 if report.toy else 40.0))
    small = report.data.replace("gpt2_small.json", "small_modern.json")
    report.train("small modern", f"{small} --max_steps {5 if report.toy else 1000}", 180)


def variants(report: Report) -> None:
    """150 steps each: what another setting of the compiler, or of attention, brings."""
    for name, (flags, environment) in VARIANTS.items():
        words = f"{report.data} --max_steps {3 if report.toy else 150} --checkpoint_minutes 0 {flags}"
        form = {"form": WITHOUT_CUDNN} if "cuDNN" in name else {}
        report.train(f"variant {name}", words, 400, **form, **environment)


def ladder(report: Report) -> None:
    """Rows that an A100 of 40 GB has room for without flash attention."""
    of = f"{TOY} --only baseline" if report.toy else "--micro_batch_size 32"
    flags = f"--config gpt2_small.json {of} --rounds 1 --output_dir {report.outputs}"
    report.run("ladder", f"benchmarks/speed_ladder.py {flags}", 900)
    for path in report.outputs.glob("speed_ladder-*.json"):
        rungs = read_json(path, DataError)["rungs"]
        report.note("ladder", **{name: rows[0]["seconds"] for name, rows in rungs.items()})


def forecast(report: Report) -> None:
    """--dry_run, to be held against what `train` measures."""
    report.train("forecast", f"{report.data} --dry_run", 240)


def minutes(report: Report) -> None:
    """A run of three minutes, stopped after 40% of them and resumed: it ends in time."""
    least = 0.3 if report.toy else 3
    flags = f"{report.data} --minutes {least}"
    report.train("minutes", flags, 300, code=130, stop=("First step", 0.4 * 60 * least))
    report.train("minutes", f"{flags} --resume auto", 300)


def compiling(report: Report) -> None:
    """Ctrl-C while the model is compiled."""
    stop = ("Training ", 0.2 if report.toy else 5.0)
    report.train("compiling", f"{report.data} --compile on", 120, code=130, stop=stop, **report.nothing_compiled)


def tests(report: Report) -> None:
    report.run("tests", "-m pytest -rA --durations=15 -m cuda -n 0 tests/cuda", 1500)


def peers(report: Report) -> None:
    chosen = "--cases toy --rounds 1 --seconds 0.02 --device cpu" if report.toy else "--rounds 2"
    report.run("peers", f"benchmarks/peers.py {chosen} --output_dir {report.outputs}", 500)
    if not report.toy:
        report.run("generation", f"benchmarks/generation.py --output_dir {report.outputs}", 300)


def processes(report: Report) -> None:
    """With two GPUs: torchrun."""
    import torch

    if torch.cuda.device_count() < 2:
        report.say("\nLeft out: one GPU.")
        return
    flags = f"{report.data} --max_steps 100 --output_dir {report.folder / 'ddp'}"
    report.run("ddp", f"-m torch.distributed.run --nproc_per_node=2 train_colab_mmap.py {flags}", 300)


STEPS: dict[str, Callable[[Report], None]] = {
    each.__name__: each
    for each in (
        machine, quickstart, train, own_text, modern, variants, ladder, forecast, minutes, compiling, tests, peers,
        processes,
    )
}  # fmt: skip


def verdict(figures: Mapping[str, Any]) -> str:
    """Forecasts beside what was measured."""
    device = str(figures.get("machine", {}).get("device", ""))
    of_card = next((ms for part, ms in STEP_MS.items() if part in device), None)
    own, small = figures.get("own text", {}), figures.get("gpt2_small", {})
    rows = [
        ("gpt2_small.json, ms a step", of_card, small.get("ms_per_step")),
        ("gpt2_small.json, GB at the peak", 13.6, small.get("peak_memory_gb")),
        ("own text, minutes", own.get("minutes"), own.get("used")),
        ("own text, bits per byte", own.get("expected_bits_per_byte"), own.get("val_bits_per_byte")),
        ("own text, tokens a second", own.get("expected_tokens_per_second"), own.get("tokens_per_second")),
    ]
    cells = [[what, f"{said:,.4g}", f"{got:,.4g}", f"{got / said:.2f}"] for what, said, got in rows if said and got]
    return markdown_table(["what", "forecast", "measured", "ratio"], cells)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="STEP", default=list(STEPS), help=f"of {', '.join(STEPS)} [all]")
    parser.add_argument("--output", metavar="FILE", default=str(RESULTS / "gpu.md"), help="[docs/benchmarks/gpu.md]")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/gpu", help="kept [runs/gpu]")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    add_debug(parser)
    flags = parser.parse_args(argv)
    require_known("--only", flags.only, STEPS)
    path = Path(flags.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = Report(path, Path(flags.runs_dir).absolute(), flags.toy)
    report.folder.mkdir(parents=True, exist_ok=True)
    report.say("# On a GPU" if not path.exists() else "")
    for name in flags.only:
        report.say(f"\n## {name}")
        try:
            STEPS[name](report)
        except Exception:  # the next step may work
            report.failed.append(name)
            report.say(f"\n```\n{traceback.format_exc()}```")
    report.say(f"\n{verdict(report.figures)}\n\nFailed: {', '.join(report.failed) or 'nothing'}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
