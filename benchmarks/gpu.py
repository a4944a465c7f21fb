"""The first hour on a GPU: what a user types, step by step, each with a time limit, and one report.

python benchmarks/gpu.py                                # all of it
python benchmarks/gpu.py --only machine quickstart train  # in parts: a later call adds to the report
python benchmarks/gpu.py --toy                          # tiny models on a CPU, to see that it works
"""

from __future__ import annotations

import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, ROOT, describe_machine, require_known, write_random_tokens
from common.flags import Parser, add_debug
from common.script import script
from training.reports.records import read_metrics

QUESTION = "What is the capital of France?"
TOY = "--device cpu --num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --eval_interval 0"
SHOWN_LINES = 12  # of a command's output
MACHINE = """
import torch
from torch._C import _get_sdp_priority_order
print("torch", torch.__version__, "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
print("attention, first to last", _get_sdp_priority_order())
"""


@dataclass
class Report:
    """What is written while the commands run; `folder` holds their runs."""

    path: Path
    folder: Path
    toy: bool
    failed: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(text, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def run(self, command: str, limit: float, stop: tuple[str, float] | None = None, code: int = 0) -> str:
        """Run a command of ours and return its output. `stop` is a line's beginning, and how many seconds after it
        Ctrl-C is sent. Another exit code than `code` is a failure; so are more than `limit` seconds."""
        words = [sys.executable, "-u", *shlex.split(command)]
        began, lines = time.perf_counter(), list[str]()
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        timers = [threading.Timer(limit, process.kill)]
        timers[0].start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(re.sub(r".*\r", "", line.rstrip()))
            if stop and line.startswith(stop[0]):
                timers.append(threading.Timer(stop[1], process.send_signal, [signal.SIGINT]))
                timers[-1].start()
                stop = None
        ended = process.wait()
        for timer in timers:
            timer.cancel()
        if ended != code:
            self.failed.append(command)
        verdict = "" if ended == code else f", **{code} was expected**"
        shown = "\n".join(lines[-SHOWN_LINES:])
        seconds = time.perf_counter() - began
        self.say(f"\n`{command}`: exit code {ended}{verdict}, {seconds:.1f} s\n\n```\n{shown}\n```")
        return "\n".join(lines)

    def train(self, name: str, flags: str, limit: float, stop: tuple[str, float] | None = None, code: int = 0) -> str:
        """Train in the folder `name`, and tell the speed of its steps after the first report."""
        run_dir = self.folder / name
        toy = f" {TOY}" if self.toy else ""
        output = self.run(f"train_colab_mmap.py {flags}{toy} --output_dir {run_dir}", limit, stop, code)
        rows = read_metrics(run_dir) if run_dir.is_dir() else []
        figures = {key: [row[key] for row in rows[1:] if key in row] for key in ("ms_per_step", "tokens_per_second")}
        told = [f"{key} {statistics.median(values):,.1f}" for key, values in figures.items() if values]
        told += [f"mfu {row['mfu']:.3f}" for row in rows[-1:] if "mfu" in row]
        told += [f"peak_memory_gb {max(row.get('peak_memory_gb', 0) for row in rows):.2f}" for _ in rows[:1]]
        self.say(f"\n{name}: {rows[-1]['step'] if rows else 0} steps, {', '.join(told)}")
        return output

    @property
    def data(self) -> str:
        """Flags for random tokens of GPT-2 small's vocabulary."""
        folder = self.folder / "tokens"
        if not folder.exists():
            write_random_tokens(folder, 20_000 if self.toy else 20_000_000, 65 if self.toy else 32_000)
        return f"--config gpt2_small.json --data_dir {folder}"


def machine(report: Report) -> None:
    report.say(f"\n{describe_machine('cpu' if report.toy else 'cuda')}")
    report.run(f"-c {shlex.quote(MACHINE)}", 60)
    if not report.toy:
        fields = "name,driver_version,clocks.sm,clocks.max.sm,power.limit,memory.total,memory.free"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        report.say(subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout)


def quickstart(report: Report) -> None:
    """README's two commands. The answer is "The capital of France is Paris."."""
    changes = f" --max_steps 3 --vocab_size 300 --data_dir {report.folder / 'questions'}" if report.toy else ""
    report.train("quickstart", f"--config quickstart.json{changes}", 300)
    longer = f"Tell me, for I have forgotten it. {QUESTION}"
    report.run(f"generate.py --checkpoint {report.folder / 'quickstart'} --prompt {shlex.quote(QUESTION)}", 60)
    report.run(f"generate.py --checkpoint {report.folder / 'quickstart'} --prompt {shlex.quote(longer)}", 60)


def train(report: Report) -> None:
    """GPT-2 small for a minute, stopped by Ctrl-C. On an A100 a step is forecast to take 125 ms."""
    report.train("gpt2_small", report.data, 240, ("First step", 0.5 if report.toy else 60.0), 130)
    report.run(f"generate.py --checkpoint {report.folder / 'gpt2_small'} --prompt '\u0100' --max_new_tokens 200", 90)


def forecast(report: Report) -> None:
    """--dry_run and --profile, to be held against what `train` measures."""
    report.train("forecast", f"{report.data} --dry_run", 240)
    report.train("profile", f"{report.data} --profile", 240)


def minutes(report: Report) -> None:
    """A run of three minutes, stopped after 40% of them and resumed: it ends in time."""
    least = 0.1 if report.toy else 3
    flags = f"{report.data} --minutes {least}"
    report.train("minutes", flags, 300, ("First step", 0.4 * 60 * least), 130)
    report.train("minutes", flags, 300)


def compiling(report: Report) -> None:
    """Ctrl-C while the model is compiled."""
    report.train("compiling", f"{report.data} --compile on", 120, ("Training ", 0.2 if report.toy else 5.0), 130)


def tests(report: Report) -> None:
    report.run("-m pytest -q -m cuda -n 0 tests/cuda", 1500, code=5 if report.toy else 0)  # 5: no test was chosen


def peers(report: Report) -> None:
    chosen = "--cases toy --rounds 1 --seconds 0.02 --device cpu" if report.toy else "--rounds 2"
    report.run(f"benchmarks/peers.py {chosen} --output_dir {report.folder}", 500)
    if not report.toy:
        report.run("benchmarks/generation.py --rounds 2", 300)


def processes(report: Report) -> None:
    """With two GPUs: torchrun, with whole and with divided weights."""
    import torch

    if torch.cuda.device_count() < 2:
        report.say("\nLeft out: one GPU.")
        return
    for name, shard in (("ddp", ""), ("shard", " --shard")):
        flags = f"{report.data} --max_steps 100 --output_dir {report.folder / name}{shard}"
        report.run(f"-m torch.distributed.run --nproc_per_node=2 train_colab_mmap.py {flags}", 300)


STEPS: dict[str, Callable[[Report], None]] = {
    each.__name__: each for each in (machine, quickstart, train, forecast, minutes, compiling, tests, peers, processes)
}


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="STEP", default=list(STEPS), help=f"of {', '.join(STEPS)} [all]")
    parser.add_argument("--output", metavar="FILE", default=str(RESULTS / "gpu.md"), help="[docs/benchmarks/gpu.md]")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    add_debug(parser)
    flags = parser.parse_args(argv)
    require_known("--only", flags.only, STEPS)
    path = Path(flags.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = Report(path, Path(folder), flags.toy)
        report.say("# On a GPU" if not path.exists() else "")
        for name in flags.only:
            report.say(f"\n## {name}")
            STEPS[name](report)
        report.say(f"\nFailed: {', '.join(report.failed) or 'nothing'}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
