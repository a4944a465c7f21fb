"""Everything that needs a GPU, in one command and under nine minutes: tests, speeds, memory, variants; into one JSON.

    python benchmarks/gpu_suite.py
    python benchmarks/gpu_suite.py --parts presets variants
    python benchmarks/gpu_suite.py --toy          # tiny models on a CPU, to see that it works

Each part is a process with a time limit of its own. It reports row by row and the file is written after every part:
what fails, hangs or is cut off takes nothing else with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESETS = {  # vocabulary of the tokens each is measured on
    "quickstart": 2_048,
    "shakespeare_char": 65,
    "gpt2_small": 32_000,
    "gpt2_small_modern": 32_000,
    "gpt2_medium": 32_000,
}
TOKENS = 5_000_000
MEMORY_BATCHES = (8, 32, 128)
RESUMED_STEPS = 20
ERROR_LINES = 15

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a part runs: at toy size on the CPU, or for real; with room for its files in `folder`."""

    toy: bool
    folder: Path
    nanogpt: str | None = None

    @property
    def results(self) -> Path:
        """Where scripts write: the JSON files found here when the part ends, or is ended, belong to its rows."""
        return self.folder / "results"

    @property
    def seconds(self) -> float:
        return 0.1 if self.toy else 2.0

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "auto"

    def tokens(self, vocab_size: int) -> Path:
        from benchmarks.workload import write_random_tokens

        folder = self.folder / f"tokens_{vocab_size}"
        return folder if folder.exists() else write_random_tokens(folder, 10_000 if self.toy else TOKENS, vocab_size)

    def flags(self, preset: str, batch_size: int | None = None, **changes: object) -> list[str]:
        """The trainer's flags for a config of ours on random tokens."""
        values = {"config": f"{preset}.json", "device": self.device, "max_steps": 20_000, **changes}
        if batch_size:
            values["batch_size"] = batch_size
        if self.toy:
            shape = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_seq_len": 16}
            values |= shape | {"batch_size": min(4, batch_size or 4)}
        values["data_dir"] = self.tokens(65 if self.toy else PRESETS[preset])
        return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def attempt(name: str, measure: Callable[[], Row]) -> Row:
    """A row, or what went wrong with it: the rows that follow should still be measured."""
    from benchmarks.workload import release_memory

    try:
        return {"name": name, **measure()}
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        release_memory()


def timed_training(flags: Sequence[str], seconds: float) -> Row:
    from benchmarks.workload import measure_training

    return measure_training(flags, seconds, time.perf_counter())


def tests(setting: Setting) -> Iterator[Row]:
    files = ["tests/test_cuda.py", "tests/generation/test_cuda_graph.py"]
    # One at a time: some of them measure the GPU's memory.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "cuda", "-q", "-rfE", "--durations=5", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    yield {"exit_code": run.returncode, "output": run.stdout.splitlines()[-40:]}
    if run.returncode:
        raise SystemExit(run.returncode)


def presets(setting: Setting) -> Iterator[Row]:
    """Speed, MFU and memory of the configs as they are."""
    for preset in PRESETS:
        if (ROOT / "configs" / f"{preset}.json").exists():
            flags = setting.flags(preset)
            yield attempt(preset, functools.partial(timed_training, flags, setting.seconds))


def peers(setting: Setting) -> Iterable[Row]:
    """Its script leaves a file of results, which becomes a row."""
    case = "toy" if setting.toy else "gpt2_small"
    flags = ["--cases", case, "--rounds", "1", "--seconds", str(setting.seconds), "--device", setting.device]
    flags += ["--nanogpt", setting.nanogpt] if setting.nanogpt else []
    run_script("benchmarks/peers.py", [*flags, "--output_dir", str(setting.results)])
    return []


def ladder(setting: Setting) -> Iterable[Row]:
    """As `peers`."""
    flags = setting.flags("gpt2_small", output_dir=setting.results)
    run_script("tools/speed_ladder.py", [*flags, "--rounds", "1", "--steps", "1" if setting.toy else "3"])
    return []


def generation(setting: Setting) -> Iterator[Row]:
    """Its script writes under docs/benchmarks/ itself; what it wrote there becomes a row."""
    from benchmarks.measure import describe_machine, machine_kind

    flags = ["--held", "16", "512", "--batches", "1", "16", "--rounds", "2"]
    if setting.toy:
        shape = ["--num_layers", "1", "--embed_dim", "32", "--num_heads", "2", "--vocab_size", "300"]
        run_script("benchmarks/generation.py", [*shape, *flags])
        return
    kind = machine_kind(describe_machine())
    run_script("benchmarks/generation.py", ["--write", kind, *flags])
    written = ROOT / "docs" / "benchmarks" / f"generation-{kind}.json"
    yield {"name": written.stem, "results": json.loads(written.read_text())}


def run_script(script: str, flags: Sequence[str]) -> None:
    """Run another script of this project. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, str(ROOT / script), *flags], check=True, stdout=subprocess.DEVNULL)


def memory(setting: Setting) -> Iterator[Row]:
    """What --dry_run estimates against what a run takes, by batch size."""
    for rows in (2, 4) if setting.toy else MEMORY_BATCHES:
        flags = setting.flags("gpt2_small", batch_size=rows)
        row = attempt(f"batch {rows}", functools.partial(timed_training, flags, 0.1))
        if row.get("peak_memory_gb"):
            row["estimate_over_peak"] = row["estimated_memory_gb"] / row["peak_memory_gb"]
        yield row


def placements(setting: Setting) -> Iterator[Row]:
    """Speed with the tokens on the GPU, in RAM, and mapped; in a small model, which waits for its batches soonest."""
    for place in ("ram", "mmap") if setting.toy else ("gpu", "ram", "mmap"):
        flags = setting.flags("shakespeare_char", placement=place)
        yield attempt(place, functools.partial(timed_training, flags, setting.seconds))


def resume(setting: Setting) -> Iterator[Row]:
    """A run that is taken up half way against one that is not interrupted."""
    half = RESUMED_STEPS // 2

    def train(name: str, max_steps: int) -> dict[int, float]:
        flags = setting.flags(
            "shakespeare_char",
            max_steps=max_steps,
            use_lr_scheduler="constant",
            warmup_steps=0,
            log_interval=1,
            eval_interval=0,
            output_dir=setting.folder / name,
        )
        command = [sys.executable, str(ROOT / "train_colab_mmap.py"), *flags]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=setting.folder)
        rows = map(json.loads, (setting.folder / name / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["train_loss"] for row in rows}

    straight = train("straight", RESUMED_STEPS)
    train("resumed", half)
    resumed = train("resumed", RESUMED_STEPS)
    difference = max(abs(straight[step] - resumed[step]) for step in range(1, RESUMED_STEPS + 1))
    yield {"straight": straight, "resumed": resumed, "largest_difference": difference}


def variants(setting: Setting) -> Iterator[Row]:
    """Other ways to run the same step, each against ours."""
    from benchmarks.variants import HAS_CHUNKED_LOSS, VARIANTS, against_ours, chunked_loss, unshare_caches

    unshare_caches()
    for variant in VARIANTS:
        if variant.build is chunked_loss and not HAS_CHUNKED_LOSS:
            yield {"name": variant.name, "skipped": "this torch has none"}
        elif variant.on_any_device or not setting.toy:
            measure = functools.partial(against_ours, setting.flags(variant.preset), variant.build, setting.seconds / 2)
            yield attempt(variant.name, measure)


# In the order they run, each with its limit in seconds; --minutes limits all of them together.
PARTS: dict[str, tuple[Callable[[Setting], Iterable[Row]], float]] = {
    "tests": (tests, 110),
    "presets": (presets, 130),
    "resume": (resume, 60),
    "placements": (placements, 45),
    "peers": (peers, 110),
    "ladder": (ladder, 180),
    "memory": (memory, 70),
    "generation": (generation, 60),
    "variants": (variants, 150),
}


def run_part(name: str, toy: bool, nanogpt: str | None, limit: float) -> dict[str, Any]:
    """Run one part in a process of its own. Whatever it has reported by the time it ends, or is ended, is kept."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        setting = Setting(toy, Path(folder), nanogpt)
        worker = {"part": name, "toy": toy, "folder": folder, "nanogpt": nanogpt}
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(worker)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit)
            status = "failed" if process.returncode else "done"
        except subprocess.TimeoutExpired:
            status = "out of time"
            os.killpg(process.pid, signal.SIGKILL)  # with all the processes it started
            out, err = process.communicate()
        rows = []
        for line in out.splitlines():  # what the trainer prints stands between them
            if line.startswith("{"):
                with contextlib.suppress(json.JSONDecodeError):
                    rows.append(json.loads(line))
        for path in sorted(setting.results.rglob("*.json")):
            with contextlib.suppress(json.JSONDecodeError):
                rows.append({"name": path.stem, "results": json.loads(path.read_text())})
    result = {"status": status, "seconds": round(time.monotonic() - started, 1), "rows": rows}
    if status != "done":
        result["stderr"] = err.splitlines()[-ERROR_LINES:]
    return result


def summary(row: Row) -> str:
    """A row in one line."""
    figures = {
        "ms_per_step": "{:.1f} ms a step",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "peak_memory_gb": "peak {:.2f} GB",
        "estimated_memory_gb": "estimated {:.2f} GB",
        "largest_difference": "losses differ by {:.2g} at most",
        "exit_code": "exit code {}",
        "skipped": "skipped: {}",
        "error": "failed: {}",
    }
    said = [text.format(row[key]) for key, text in figures.items() if row.get(key) is not None]
    if "time_ratio" in row:
        said.append(f"{row['time_ratio']['median']:.3f} of the time of ours")
    return f"  {row.get('name', '')}: {', '.join(said)}" if said else f"  {row.get('name', 'results')}"


def main(argv: Sequence[str] | None = None) -> int:
    from common.errors import ConfigError
    from common.flags import Parser, add_debug

    parser = Parser(prog="benchmarks/gpu_suite.py", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", metavar="PART", default=list(PARTS), help=f"of {', '.join(PARTS)} [all]")
    parser.add_argument("--minutes", type=float, default=8.75, help="limit of all parts together [8.75]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT to measure beside")
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--output", metavar="FILE", help="[docs/benchmarks/gpu_suite-MACHINE.json]")
    parser.add_argument("--worker", help="(used by the script itself)")
    add_debug(parser)
    flags = parser.parse_args(argv)
    if flags.worker:
        worker = json.loads(flags.worker)
        part, _ = PARTS[worker["part"]]
        for row in part(Setting(worker["toy"], Path(worker["folder"]), worker["nanogpt"])):
            print(json.dumps(row), flush=True)
        return 0
    unknown = [name for name in flags.parts if name not in PARTS]
    if unknown:
        raise ConfigError(f"--parts {unknown[0]} is not known; there are: {', '.join(PARTS)}.")

    from benchmarks.measure import describe_machine, machine_kind, this_command
    from common.files import write_json

    started = time.monotonic()
    machine = describe_machine("cpu" if flags.toy else "cuda")
    output = Path(flags.output or ROOT / "docs" / "benchmarks" / f"gpu_suite-{machine_kind(machine)}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"command": this_command(), "machine": machine, "parts": {}}
    for name in flags.parts:
        left = 60 * flags.minutes - (time.monotonic() - started)
        limit = min(PARTS[name][1], left)
        result: dict[str, Any] = {"status": "no time left", "rows": []}
        if left > 0:
            result = run_part(name, flags.toy, flags.nanogpt, limit)
        results["parts"][name] = result
        results["seconds"] = round(time.monotonic() - started, 1)
        write_json(output, results)
        took = f", {result['seconds']} s" if "seconds" in result else ""
        print(f"{name}: {result['status']}{took}")
        for row in result["rows"]:
            print(summary(row))
        for line in result.get("stderr", [])[-3:]:
            print(f"  | {line}", flush=True)
    print(f"Written to {output}")
    return 0 if all(part["status"] == "done" for part in results["parts"].values()) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from common.errors import script

    sys.exit(script(main)())
