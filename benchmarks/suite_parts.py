"""The parts of `gpu_suite.py`: each yields its rows one by one, in a process that has not used the GPU before."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import train_colab_mmap
from benchmarks.gpu_facts import machine_facts, under_load
from benchmarks.kernels import kernel_table, profiled
from benchmarks.measure import ROOT, describe_machine, flag_words
from benchmarks.random_tokens import write_random_tokens
from benchmarks.suite_rows import Row
from benchmarks.suite_train import quickstart, short_run
from benchmarks.variants import OURS, VARIANTS, Variant, measure_variant
from benchmarks.workload import Training, figures, measure_training
from common.machine import pick_device
from examples import conversations
from tokenize_local_bpe import tokenize

PRESETS = {  # vocabulary of the tokens each is measured on
    "quickstart": 2_048,
    "shakespeare_char": 65,
    "gpt2_small": 32_000,
    "gpt2_small_modern": 32_000,
    "gpt2_medium": 32_000,
}
TOKENS = 5_000_000
# (sequences at once, compiled): the cheap ones first, because each shape is compiled again.
MEMORY_CASES = ((8, "off"), (32, "off"), (128, "off"), (128, "on"), (32, "on"))
RESUMED_STEPS = 20
QUICKSTART_LIMIT, SHORT_RUN_LIMIT, SHORT_RUN_SECONDS = 70.0, 100.0, 30.0
SILENT_STEPS = 20  # in which the host should not wait for the device
LOSS_STEPS, LOSS_SPAN = 100, 20  # steps in all, and steps of each mean in the row
TOY_LOSS_STEPS, TOY_LOSS_SPAN = 9, 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a part runs: at toy size on the CPU, or at full size; its files go into `folder`."""

    toy: bool
    folder: Path
    cache_dir: Path
    nanogpt: str | None = None

    @property
    def seconds(self) -> float:
        return 0.02 if self.toy else 2.0

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "auto"

    def tokens(self, vocab_size: int) -> Path:
        folder = self.folder / f"tokens_{vocab_size}"
        return folder if folder.exists() else write_random_tokens(folder, 10_000 if self.toy else TOKENS, vocab_size)

    def flags(self, preset: str, **changes: object) -> list[str]:
        """The trainer's flags for one of our configs on random tokens. A toy is not compiled: a CPU is slow at that."""
        values: dict[str, object] = {"config": f"{preset}.json", "device": self.device, "max_steps": 20_000}
        values["output_dir"] = self.folder / "run"  # not the config's: a run there may have left measurements
        if "data_dir" not in changes:
            values["data_dir"] = self.tokens(65 if self.toy else PRESETS[preset])
        if self.toy:
            values |= {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_seq_len": 16, "batch_size": 4}
            changes = {key: value for key, value in changes.items() if key != "compile_mode"} | {"compile": "off"}
        return flag_words(values | changes)


def isolated(measure: Callable[..., Row], *arguments: Any) -> Row:
    """Call `measure` in its own process: after a GPU's error a process cannot go on, and the next one finds the memory
    free. Forked, because imports take long. Raises what `measure` raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, *arguments).result()


def attempt(name: str, measure: Callable[..., Row], *arguments: Any) -> Row:
    """A row, or an error in its place, so that the following rows are still measured."""
    try:
        return {"name": name, **isolated(measure, *arguments)}
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}


def timed_training(flags: Sequence[str], seconds: float) -> Row:
    return measure_training(flags, seconds, time.perf_counter())


def machine(setting: Setting) -> Iterator[Row]:
    """Not a part of the report: the command asks this first, in another process, because the query takes some of the
    GPU's memory, and with a limit, because a driver may not answer."""
    yield {"name": "machine", **describe_machine("cpu" if setting.toy else "cuda")}


def train(setting: Setting) -> Iterator[Row]:
    """The scripts as a user starts them: the quickstart up to an answer, and GPT-2 small for half a minute."""
    compiled = any(setting.cache_dir.rglob("*"))  # by an earlier command
    flags = ["--config", "quickstart.json"]
    if setting.toy:
        text, prompts = setting.folder / "questions.txt", setting.folder / "prompts.jsonl"
        text.write_text("What is the capital of France?\n" * 100)
        prompts.write_text('{"prompt": "What is"}\n')
        changes = {"data_dir": setting.folder / "questions", "vocab_size": 300, "input": text, "eval_prompts": prompts}
        flags = setting.flags("quickstart", max_steps=3, eval_interval=0, **changes)
    else:
        flags += ["--data_dir", str(setting.folder / "conversations")]
    first = attempt("quickstart", quickstart, flags, setting.folder / "quickstart", QUICKSTART_LIMIT)
    yield first
    seconds = 0.5 if setting.toy else SHORT_RUN_SECONDS
    flags, run = setting.flags("gpt2_small"), setting.folder / "gpt2_small"
    row = attempt("gpt2_small", short_run, flags, run, seconds, SHORT_RUN_LIMIT)
    yield row | ({"note": "an earlier command left compiled code"} if compiled else {})
    if "error" in first or "error" in row:
        raise SystemExit(1)  # so that the report shows what the scripts said


def waits(training: Training) -> Row:
    """How often the host waits for the GPU in steps that do not report."""
    if not training.hardware.is_cuda:
        return {"skipped": "it needs a GPU"}
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(SILENT_STEPS):
                training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    return {"steps": SILENT_STEPS, "waits": len(messages), "output": sorted(set(messages))[:5]}


def step(setting: Setting) -> Iterator[Row]:
    """GPT-2 small's step, unchanged: the machine, the speed, the waits, the kernels, the clocks under load. The
    start-up time does not include Python's imports."""
    yield {"name": "machine", **machine_facts(pick_device(setting.device))}
    started = time.perf_counter()
    training = Training.open(setting.flags("gpt2_small"))
    hardware = training.hardware
    training.first_step(started)
    yield {"name": "gpt2_small", **figures(training, setting.seconds)}
    yield {"name": "waits", **waits(training)}
    steps = 2 if setting.toy else 5
    kernels = profiled(training.step, hardware.synchronize, steps, hardware.is_cuda)
    yield {"name": "kernels", **kernel_table(kernels, steps)}
    yield {"name": "under load", **under_load(training.step, hardware.synchronize, setting.seconds)}


def variants(setting: Setting) -> Iterator[Row]:
    """Other ways to run the same step. Ours comes first, for each preset, and again before the
    last, which tunes kernels for minutes, to show the machine's drift."""

    def measure(name: str, variant: Variant, preset: str) -> Row:
        flags = setting.flags(preset, **dict(variant.flags))
        return attempt(name, measure_variant, variant, flags, setting.seconds)

    ours: dict[str, Row] = {}
    for variant in VARIANTS:
        if variant is VARIANTS[-1]:
            yield measure("ours, gpt2_small, again", OURS, "gpt2_small")
        if setting.toy and variant.needs == "a GPU":
            yield {"name": variant.name, "skipped": "it needs a GPU"}
            continue
        preset = variant.preset
        if preset not in ours:
            ours[preset] = measure(f"ours, {preset}", OURS, preset)
            yield ours[preset]
        row = measure(variant.name, variant, preset)
        if "ms_spread" in row and "ms_spread" in ours[preset]:
            row["time_ratio"] = row["ms_spread"]["median"] / ours[preset]["ms_spread"]["median"]
        if setting.toy and variant.needs == "compiling":
            row["note"] = "a toy is not compiled: this tests the code, not the variant"
        yield row


def tests(setting: Setting) -> Iterator[Row]:
    """The tests that need a GPU, one row for each as it ends. tests/cuda/conftest.py moves those that compile back."""
    cuda = [f"tests/cuda/test_{name}.py" for name in ("step", "memory", "generation", "run")]
    files = [*cuda[:2], *cuda[2:]]
    # One at a time: some of them measure the GPU's memory.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "cuda", "-v", "-rfE", "--durations=5", *files]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if outcome := re.match(r"(tests/.+?::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", line):
            yield {"name": outcome[1], "outcome": outcome[2].lower()}
    code = process.wait()
    yield {"name": "pytest", "exit_code": code, "output": lines[-40:]}
    if code:
        raise SystemExit(code)


def scaled_training(flags: Sequence[str], seconds: float) -> Row:
    """A training with a gradient scaler: the scale it reached, and whether the loss is finite."""
    started = time.perf_counter()
    training = Training.open(flags)
    training.first_step(started)
    measured = figures(training, seconds)
    return {**measured, "scale": training.scaler.get_scale(), "loss_is_finite": math.isfinite(measured["loss"])}


def fp16(setting: Setting) -> Iterator[Row]:
    """GPT-2 small with --precision fp16, as on older GPUs; eager first, because compiling may use up all the time."""
    precision = "fp32" if setting.toy else "fp16"
    note = {"note": "a CPU has no fp16: this tests the code, not the precision"} if setting.toy else {}
    for name, compiled in (("eager", "off"), ("compiled", "on")):
        flags = setting.flags("gpt2_small", precision=precision, compile=compiled)
        yield attempt(name, scaled_training, flags, setting.seconds) | note


def curve(flags: Sequence[str], steps: int, span: int) -> Row:
    """The mean loss of every `span` steps, by their last step."""
    training = Training.open(flags)
    losses = []
    for _ in range(steps):
        training.step()
        losses.append(training.loss)
    means = torch.stack(losses).view(-1, span).mean(dim=1).tolist()
    return {
        "device": training.hardware.device.type,
        "precision": training.hardware.precision,
        "compiled": training.step_model is not training.model,
        "first_loss": losses[0].item(),
        "means": {str(span * (number + 1)): mean for number, mean in enumerate(means)},
    }


def losses(setting: Setting) -> Iterator[Row]:
    """The built-in conversations on the CPU and on this device, whose losses should be the same."""
    text, folder = setting.folder / "conversations.txt", setting.folder / "conversations"
    conversations.write(text)
    if setting.toy:
        text.write_text(text.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    tokenize([str(text)], folder, quiet=True, tokenizer="bpe", vocab_size=300 if setting.toy else 2_048)
    steps, span = (TOY_LOSS_STEPS, TOY_LOSS_SPAN) if setting.toy else (LOSS_STEPS, LOSS_SPAN)
    cases = {
        "cpu, fp32": {"device": "cpu", "precision": "fp32", "compile": "off"},
        "fp32": {"device": setting.device, "precision": "fp32", "compile": "off"},
        "automatic, compiled": {"device": setting.device, "compile": "on"},
    }
    reference: dict[str, float] = {}
    for name, changes in cases.items():
        flags = setting.flags("quickstart", data_dir=folder, max_steps=steps, warmup_steps=steps // 6, **changes)
        row = attempt(name, curve, flags, steps, span)
        means = row.get("means", {})
        reference = reference or means
        if reference and means:
            row["largest_relative_difference"] = max(abs(means[at] / reference[at] - 1) for at in reference)
        yield row


def presets(setting: Setting) -> Iterator[Row]:
    """Speed, MFU and memory of the unchanged configs."""
    for preset in PRESETS:
        if (ROOT / "configs" / f"{preset}.json").exists():
            yield attempt(preset, timed_training, setting.flags(preset), setting.seconds)


def peers(setting: Setting) -> Iterator[Row]:
    case = "toy" if setting.toy else "gpt2_small"
    flags = ["--cases", case, "--rounds", "1", "--seconds", str(setting.seconds), "--device", setting.device]
    flags += ["--nanogpt", setting.nanogpt] if setting.nanogpt else []
    flags += ["--only", "ours"] if setting.toy else []
    yield from script_rows("benchmarks/peers.py", flags, setting.folder / "results")


def ladder(setting: Setting) -> Iterator[Row]:
    flags = [*setting.flags("gpt2_small"), "--rounds", "1", "--steps", "1" if setting.toy else "3"]
    flags += ["--only", "this trainer"] if setting.toy else []  # each rung is a process that imports torch
    yield from script_rows("tools/speed_ladder.py", flags, setting.folder / "results")


def generation(setting: Setting) -> Iterator[Row]:
    flags = ["--held", "16", "512", "--batches", "1", "16", "--rounds", "2"]
    if setting.toy:
        flags = ["--num_layers", "1", "--embed_dim", "32", "--num_heads", "2", "--vocab_size", "300"]
        flags += ["--held", "4", "--batches", "1", "--new_tokens", "2", "--rounds", "1", "--only", "ours, fp32"]
    kind = "toy" if setting.toy else "gpu"
    yield from script_rows("benchmarks/generation.py", ["--write", kind, *flags], setting.folder / "results")


def script_rows(script: str, flags: Sequence[str], results: Path) -> Iterator[Row]:
    """Run another script of this project. Each time its results change, they are a row, which replaces the one before.
    Raises CalledProcessError if the script fails."""
    command = [sys.executable, str(ROOT / script), *flags, "--output_dir", str(results)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    yielded: dict[Path, str] = {}
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=0.5)
        for path in sorted(results.glob("*.json")):
            text = path.read_text(encoding="utf-8")
            if text != yielded.get(path):
                with contextlib.suppress(json.JSONDecodeError, OSError):  # it is being written
                    page = path.with_suffix(".md").read_text(encoding="utf-8")
                    yield {"name": path.stem, "results": json.loads(text), "page": page}
                    yielded[path] = text
    if code:
        raise subprocess.CalledProcessError(code, command)


def memory(setting: Setting) -> Iterator[Row]:
    """The estimated memory of a step against its peak, eager and compiled, by the sequences at once."""
    for rows, compiled in ((2, "off"), (4, "off")) if setting.toy else MEMORY_CASES:
        flags = setting.flags("gpt2_small", batch_size=rows, compile=compiled)
        row = attempt(f"batch {rows}, {'compiled' if compiled == 'on' else 'eager'}", timed_training, flags, 0.1)
        if row.get("peak_memory_gb"):
            row["estimate_over_peak"] = row["estimated_memory_gb"] / row["peak_memory_gb"]
        yield row


def placements(setting: Setting) -> Iterator[Row]:
    """Speed with the tokens on the GPU, in RAM, and mapped; with a small model, which is the first to wait for data."""
    for place in ("ram", "mmap") if setting.toy else ("gpu", "ram", "mmap"):
        flags = setting.flags("shakespeare_char", placement=place)
        yield attempt(place, timed_training, flags, setting.seconds)


def run_losses(flags: Sequence[str], run_dir: Path) -> Row:
    """The loss of each step of a run in `run_dir`. Raises RuntimeError if it fails."""
    code = train_colab_mmap.main([*flags, "--output_dir", str(run_dir)])
    if code:
        raise RuntimeError(f"the trainer ended with code {code}")
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {str(row["step"]): row["train_loss"] for row in rows}


def resume(setting: Setting) -> Iterator[Row]:
    """A run that another process resumes half way, against one without interruption."""

    def train(name: str, max_steps: int) -> Row:
        how = {"use_lr_scheduler": "constant", "warmup_steps": 0, "log_interval": 1, "eval_interval": 0}
        flags = setting.flags("shakespeare_char", max_steps=max_steps, **how)
        return isolated(run_losses, flags, setting.folder / name)

    straight = train("straight", RESUMED_STEPS)
    train("resumed", RESUMED_STEPS // 2)
    resumed = train("resumed", RESUMED_STEPS)
    difference = max(abs(straight[at] - resumed[at]) for at in straight)
    yield {"name": "resumed", "straight": straight, "resumed": resumed, "largest_difference": difference}


# By the names in gpu_suite.PARTS, and the machine.
PARTS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        machine, train, step, tests, fp16, variants, memory,
        losses, resume, presets, placements, generation, peers, ladder,
    )
}  # fmt: skip
