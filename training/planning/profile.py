"""--profile: how long each part of a training step takes, and what to do about the part that limits it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from common.formatting import si
from model import TransformerLanguageModel
from training.config import TrainConfig
from training.keeping.run import Run
from training.machine.hardware import Hardware
from training.numbers.step import StepResult, part_of_step, smallest_part, train_step
from training.parts import Parts
from training.planning.memory import compile_step_model
from training.telling.report import Report
from training.telling.timer import Timer

STEP_PARTS = ("data", "forward", "backward", "optimizer")  # as train_step announces them
PARTS = (*STEP_PARTS, "logging", "idle")
NOTICEABLE = 0.15  # of a step: below this share, a part other than the computation is not worth a change
PROFILE_SECONDS = 10.0
MAX_STEPS = 50
PRODUCT_SECONDS = 0.1  # each matrix product is repeated this long
PRODUCT_TOKENS = 2048  # the most tokens in a product on a CPU: more do not make it faster
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Mark(NamedTuple):
    """The moment at which a part begins."""

    part: str
    host: float  # seconds by the wall clock
    cpu: float  # CPU seconds of all threads of this process
    device: torch.cuda.Event | None  # happens when the GPU has finished everything queued before


class Stopwatch:
    """train_step calls `begin`; afterwards `sums` gives the totals over all steps."""

    def __init__(self, on_device: bool = False):
        self.on_device = on_device
        self.marks: list[Mark] = []

    def begin(self, part: str) -> None:
        event = None
        if self.on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append(Mark(part, time.perf_counter(), time.process_time(), event))

    def sums(self, between: Callable[[Mark, Mark], float]) -> dict[str, float]:
        """The total of `between` (a part's mark, the next mark) for each part."""
        totals = dict.fromkeys(STEP_PARTS, 0.0)
        for mark, following in itertools.pairwise(self.marks):
            if mark.part in totals:
                totals[mark.part] += between(mark, following)
        return totals


def split_on_cpu(wall: Mapping[str, float], cpu: Mapping[str, float], threads: int) -> dict[str, float]:
    """Time in which cores wait is "idle", except while the data are read: then they wait for the data.

    `wall` and `cpu` are seconds by part; `cpu` is the sum over all threads. A thread that spins while it waits
    counts as busy, so "idle" is a lower bound.
    """
    busy = {part: min(wall[part], cpu[part] / threads) for part in STEP_PARTS}
    busy["data"] = wall["data"]
    return {**busy, "idle": sum(wall[part] - busy[part] for part in STEP_PARTS)}


def split_on_gpu(wall: float, device: Mapping[str, float], reading: float) -> dict[str, float]:
    """Seconds of a step by what the GPU does: it computes a part, waits for data, or is idle.

    `device`: seconds of each part if the GPU never waits for the host. `reading`: the host's seconds for the data.
    Without them the step would be that much shorter, but never shorter than the sum of `device`.
    """
    waiting = max(0.0, wall - sum(device.values()))
    for_data = min(waiting, reading)
    return {**device, "data": device["data"] + for_data, "idle": waiting - for_data}


def measure(step: Callable[[Stopwatch], object], steps: int, hardware: Hardware) -> dict[str, float]:
    """Seconds by part of one step, the mean over `steps`. Their sum is the wall-clock time on a CPU, and on a GPU too,
    unless another program changes its speed between the two measurements."""
    watch = Stopwatch()
    hardware.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step(watch)
        watch.begin("end")
    hardware.synchronize()
    elapsed = time.perf_counter() - started
    wall = watch.sums(lambda one, other: other.host - one.host)
    if not hardware.is_cuda:
        cpu = watch.sums(lambda one, other: other.cpu - one.cpu)
        parts = split_on_cpu(wall, cpu, torch.get_num_threads())
        return {part: seconds / steps for part, seconds in parts.items()}

    # The GPU sleeps while the host queues a whole step, so that it then runs the step without gaps.
    device_watch = Stopwatch(on_device=True)
    cycles = int(cycles_per_second() * elapsed / steps)
    device_steps = min(steps, 10)
    for _ in range(device_steps):
        torch.cuda._sleep(cycles)
        step(device_watch)
        device_watch.begin("end")
        torch.cuda.synchronize()
    device = device_watch.sums(device_seconds)
    device = {part: seconds / device_steps for part, seconds in device.items()}
    return split_on_gpu(elapsed / steps, device, wall["data"] / steps)


def device_seconds(one: Mark, other: Mark) -> float:
    assert one.device is not None and other.device is not None, "the stopwatch records events"
    return one.device.elapsed_time(other.device) / 1000


def cycles_per_second() -> float:
    """Speed of the clock that torch.cuda._sleep counts, in Hz."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(10**7)
    end.record()
    torch.cuda.synchronize()
    return 10**7 / (start.elapsed_time(end) / 1000)


def profile(run: Run) -> None:
    """Time the parts of real steps for a few seconds; print them and what limits the run. Writes no run."""
    training, model, data = run.parts, run.parts.model, run.parts.data
    compile_step_model(training, lambda: data.batch(0, training.config.rows_at_once))
    config, hardware = training.config, training.hardware
    sequences = itertools.count()

    def step(rows: int, watch: Stopwatch) -> StepResult:
        part = dataclasses.replace(training, config=part_of_step(config, rows))
        return train_step(part, 0, next(sequences) * rows, 0.0, watch.begin)  # other data each time, as in training

    def timed(rows: int) -> float:
        hardware.synchronize()
        started = time.perf_counter()
        step(rows, Stopwatch())
        hardware.synchronize()
        return time.perf_counter() - started

    # A long step is measured on some of its sequences.
    whole = config.sequences_per_step
    least = smallest_part(config, hardware)
    timed(least)  # first use of every kernel
    seconds = timed(least) / least  # a sequence
    rows = min(whole, max(least, int(PROFILE_SECONDS / seconds)))
    if rows > config.rows_at_once and rows < whole:
        rows -= rows % config.rows_at_once
    timed(rows)
    steps = min(MAX_STEPS, max(1, int(PROFILE_SECONDS / (seconds * rows))))

    parts = measure(lambda watch: step(rows, watch), steps, hardware)
    for part in ("data", "forward", "backward", "idle"):  # the optimizer takes as long for any batch
        parts[part] *= whole / rows
    parts["logging"] = 0.0
    if config.log_interval:
        parts["logging"] = time_report(step(least, Stopwatch()), training) / config.log_interval

    total = sum(parts.values())
    speed = config.tokens_per_step / total
    mfu = speed * model.flops_per_token() / hardware.peak_flops if hardware.peak_flops else None
    on_part = "" if rows == whole else f", each timed on {rows} of its {whole} sequences"
    print(f"Profile    {steps} step{'s' * (steps > 1)} of {config.tokens_per_step:,} tokens{on_part}; seconds a step:")
    for part in PARTS:
        print(f"  {part:<10}{parts[part]:>9.4f}{parts[part] / total:>6.0%}")
    print(f"  {'in all':<10}{total:>9.4f}  {si(speed)} tokens/s{f', MFU {mfu:.0%}' if mfu else ''}")
    floor, product_flops = matrix_products(model, config, hardware)
    print(
        f"Floor      {floor:.4f} s: the layers' matrix products alone, at {si(product_flops)}FLOP/s; the step reaches "
        f"{si(speed * model.flops_per_token())}FLOP/s"
    )
    print(f"Limit      {limit(parts, config, hardware, data.placement, mfu)}")
    print("Profile: no run was written. Leave --profile out to train.")


def matrix_products(model: TransformerLanguageModel, config: TrainConfig, hardware: Hardware) -> tuple[float, float]:
    """Seconds of the matrix products of a step's layers alone, forward and backward, and their FLOP/s: a lower bound of
    the step's time on this machine. Attention's products are not included."""
    tokens = config.rows_at_once * config.max_seq_len
    tokens = tokens if hardware.is_cuda else min(tokens, PRODUCT_TOKENS)
    layers = (layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    seconds = flops = 0.0
    for (out, into, trains), count in Counter((*weight.shape, weight.requires_grad) for weight in layers).items():
        shapes = ((tokens, into), (out, into), (tokens, out))
        x, weight, gradient = (
            torch.empty(shape, device=hardware.device, dtype=DTYPES[hardware.precision]).normal_() for shape in shapes
        )
        pairs = [(x, weight.T), (gradient, weight), (gradient.T, x)][: 2 + trains]
        seconds += count * sum(least_seconds(one, other, hardware) for one, other in pairs)
        flops += count * len(pairs) * 2 * tokens * out * into
    return seconds * config.tokens_per_step / tokens, flops / seconds


def least_seconds(one: torch.Tensor, other: torch.Tensor, hardware: Hardware) -> float:
    """Seconds of the product of two matrices: the fastest of several."""
    times: list[float] = []
    ends = time.perf_counter() + PRODUCT_SECONDS
    while len(times) < 2 or time.perf_counter() <= ends:
        hardware.synchronize()
        started = time.perf_counter()
        one @ other
        hardware.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def time_report(result: StepResult, parts: Parts) -> float:
    """Seconds of a step's report, on the local disk: reading two numbers, a progress line and a row of metrics.jsonl.

    Does not include the wait for the device to finish the step.
    """
    config, hardware = parts.config, parts.hardware
    unseen = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(unseen),
        contextlib.redirect_stderr(unseen),
    ):
        timer = Timer(hardware, 0.0, hardware.units_per_hour(config))
        report = Report(Path(folder), timer, 0, max_steps=2)
        report.step_done(config.tokens_per_step)
        hardware.synchronize()
        started = time.perf_counter()
        row = {"step": 1, **timer.training_row(result.loss, result.grad_norm, 0.0, parts.model.flops_per_token())}
        report.progress(row)
        report.write(row)
        return time.perf_counter() - started


def limit(
    parts: Mapping[str, float], config: TrainConfig, hardware: Hardware, placement: str, mfu: float | None = None
) -> str:
    """One sentence: what limits the run, and what to do about it. `parts`: seconds of a step by part; `placement`:
    where the tokens are."""
    shares = {part: parts[part] / sum(parts.values()) for part in PARTS}
    part = max(("data", "optimizer", "logging", "idle"), key=lambda part: shares[part])
    share = f"{shares[part]:.0%} of a step"
    if shares[part] < NOTICEABLE:
        return computing(shares["forward"] + shares["backward"], hardware, mfu)
    if part == "data":
        return f"Reading data takes {share}: {faster_data(hardware, placement)}."
    if part == "optimizer":
        return (
            f"The optimizer takes {share}, as long for any batch: a larger --batch_size or "
            "--gradient_accumulation_steps spreads its time over more tokens."
        )
    if part == "logging":
        return f"Reporting takes {share}: raise --log_interval, now {config.log_interval}."
    if hardware.is_cuda:
        return f"The host cannot keep the GPU busy; it is idle {share}: {more_work_at_once(config, hardware)}."
    return (
        f"The cores are idle {share}: stop other programs, check that the container may use all cores, or give the "
        "cores more work at once with a larger --batch_size or model."
    )


def computing(share: float, hardware: Hardware, mfu: float | None) -> str:
    at = f" at {mfu:.0%} of the GPU's peak" if mfu else ""
    if hardware.is_cuda and hardware.precision == "fp32":
        advice = "leave --precision on auto"
    elif hardware.is_cuda and not hardware.compiles:
        advice = "--compile on fuses its smaller operations"
    elif hardware.is_cuda:
        advice = "a smaller model, a shorter --max_seq_len or a faster GPU shortens it"
    else:
        advice = "a GPU, a smaller model or a shorter --max_seq_len shortens it"
    return (
        f"The computation is the limit, as it should be: forward and backward take {share:.0%} of a step{at}; {advice}."
    )


def faster_data(hardware: Hardware, placement: str) -> str:
    if placement == "mmap":
        return "they are read from disk, so copy the token file to a local disk, or try --placement ram if it fits"
    if placement == "ram" and hardware.is_cuda:
        return "they come from the host's memory, so try --placement gpu"
    return "they are in the fastest memory already, so only a larger model makes this share smaller"


def more_work_at_once(config: TrainConfig, hardware: Hardware) -> str:
    if not hardware.compiles:
        return "--compile on gives it fewer kernels to start"
    if config.rows_at_once < config.sequences_per_step:
        return f"a larger --micro_batch_size, now {config.rows_at_once}, gives it more work at once"
    return f"a larger --batch_size, now {config.batch_size}, or a larger model gives it more work at once"
