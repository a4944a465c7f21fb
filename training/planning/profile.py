"""--profile: how long each part of a training step takes, what to do about it, and the longest operations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

import torch

from common.formatting import si
from training.checkpoints.resume import Old
from training.checkpoints.run import Run
from training.machine.hardware import Hardware
from training.numbers.step import Trainer, accumulate, apply_gradients, read_batch, train_step
from training.planning.memory import compile_step_model
from training.planning.preflight import time_step

PARTS = ("data", "gradients", "update")
NOTICEABLE = 0.15  # of a step: below this share, a part other than the computation is not worth a change
PROFILE_SECONDS = 10.0
MAX_STEPS = 50
OPERATIONS = 10  # that are listed


def profile(run: Run, old: Old) -> None:
    """Time the parts of real steps for a few seconds; print them and what limits the run. Writes no run."""
    trainer, data, hardware, config = run.trainer, run.trainer.data, run.trainer.hardware, run.trainer.config
    compile_step_model(trainer)
    whole_seconds, rows = time_step(trainer)
    whole = config.sequences_per_step
    steps = min(MAX_STEPS, max(1, int(PROFILE_SECONDS * whole / (whole_seconds * rows))))
    spent = dict.fromkeys(PARTS, 0.0)
    for number in range(steps):  # with other data each time, as in training
        for part, took in zip(PARTS, timed_parts(trainer, number * rows, rows), strict=True):
            spent[part] += took
    # The update takes as long for any batch; the other parts are those of a whole step.
    scale = {name: 1.0 if name == "update" else whole / rows for name in PARTS}
    seconds = {name: spent[name] / steps * scale[name] for name in PARTS}
    total = sum(seconds.values())
    speed = trainer.tokens_per_step / total
    mfu = f", MFU {speed * trainer.model.flops_per_token() / hardware.peak_flops:.0%}" if hardware.peak_flops else ""
    on_part = "" if rows == whole else f", each timed on {rows} of its {whole} sequences"
    print(f"Profile    {steps} step{'s' * (steps > 1)} of {trainer.tokens_per_step:,} tokens{on_part}; seconds a step:")
    for name in PARTS:
        print(f"  {name:<10}{seconds[name]:>9.4f}{seconds[name] / total:>6.0%}")
    print(f"  {'in all':<10}{total:>9.4f}  {si(speed)} tokens/s{mfu}")
    print(f"Limit      {limit(seconds, hardware, data.placement)}")
    with torch.profiler.profile() as trace:
        train_step(trainer, 0, 0, 0.0, rows)
        hardware.synchronize()
    print_operations(trace, hardware)
    print("Profile: no run was written. Leave --profile out to train.")


def timed_parts(trainer: Trainer, first: int, rows: int) -> list[float]:
    """Seconds of the PARTS of a step of the `rows` sequences from number `first` on. On a GPU each part waits for the
    one before, so the sum is a little more than a step of the training, whose parts overlap."""

    def now() -> float:
        trainer.hardware.synchronize()
        return time.perf_counter()

    times = [now()]
    batch = read_batch(trainer, first, rows)
    times.append(now())
    loss = accumulate(trainer, batch, 0, rows)
    times.append(now())
    apply_gradients(trainer, loss, 0.0)
    times.append(now())
    return [after - before for before, after in itertools.pairwise(times)]


def print_operations(trace: torch.profiler.profile, hardware: Hardware) -> None:
    own = "self_device_time_total" if hardware.is_cuda else "self_cpu_time_total"  # microseconds
    operations = sorted(trace.key_averages(), key=lambda each: -getattr(each, own))
    total = sum(getattr(each, own) for each in operations) or 1
    print("Operations of one step, without those that they call, by PyTorch's profiler:")
    for each in operations[:OPERATIONS]:
        spent = getattr(each, own)
        print(f"  {spent / 1000:>10.2f} ms {spent / total:>5.0%} {each.count:>6} x {each.key[:60]}")


def limit(seconds: Mapping[str, float], hardware: Hardware, placement: str) -> str:
    """One sentence: what limits the run, and what to do about it. `seconds`: of a step by part; `placement`: where the
    tokens are."""
    shares = {part: seconds[part] / sum(seconds.values()) for part in PARTS}
    part = max(("data", "update"), key=lambda part: shares[part])
    share = f"{shares[part]:.0%} of a step"
    if shares[part] < NOTICEABLE:
        advice = "a smaller model, a shorter --max_seq_len or another machine shortens it"
        if hardware.is_cuda and hardware.precision == "fp32":
            advice = "leave --precision on auto"
        elif hardware.is_cuda and not hardware.compiles:
            advice = "--compile on fuses its smaller operations"
        return f"The computation is the limit, as it should be: {advice}."
    if part == "update":
        return (
            f"The optimizer takes {share}, as long for any batch: a larger --batch_size or "
            "--gradient_accumulation_steps spreads its time over more tokens."
        )
    faster = {
        "mmap": "the tokens are read from disk, so copy them to a local disk, or try --placement ram if they fit",
        "ram": "the tokens come from the host's memory, so try --placement gpu",
    }
    is_fastest = placement == "gpu" or (placement == "ram" and not hardware.is_cuda)
    return f"Reading data takes {share}: {'a larger model makes it less' if is_fastest else faster[placement]}."
