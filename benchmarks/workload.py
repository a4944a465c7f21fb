"""The trainer's own step for the benchmarks: set up as the trainer does it, and timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from training.config import parse_config
from training.numbers.schedule import last_step, learning_rate
from training.numbers.step import train_step
from training.parts import Parts
from training.planning.estimate import estimate_memory, held_memory
from training.planning.memory import compile_step_model
from training.prepare import prepare

WARM_UP_SHARE = 0.2  # of a measurement's time, before it and not counted


@dataclass
class Training(Parts):
    """What the trainer holds when its loop begins. `step_model` may be exchanged to try another one."""

    max_steps: int = 0
    compile_seconds: float | None = None  # None where nothing was compiled
    startup_seconds: float = math.nan
    steps_done: int = 0
    loss: torch.Tensor = field(default_factory=lambda: torch.tensor(math.nan))  # of the last step, on the device

    @classmethod
    def open(cls, flags: Sequence[str]) -> Training:
        """Prepare what `python train_colab_mmap.py FLAGS` would train, with the trainer's automatic choices."""
        # Only the given token folder: a config with its own text would tokenize that into it.
        parts = prepare(dataclasses.replace(parse_config(flags), input=None, eval_prompts=None))
        config, data = parts.config, parts.data
        started = time.perf_counter()
        evaluates = bool(config.eval_interval)
        first_batch = functools.partial(data.batch, 0, config.rows_at_once)
        compile_step_model(parts, first_batch, evaluates)
        compile_seconds = time.perf_counter() - started if parts.step_model is not parts.model else None
        return cls(**vars(parts), max_steps=last_step(0, 0, data.windows, config), compile_seconds=compile_seconds)

    def step(self) -> None:
        """One step of the run, as the trainer's loop takes it where it does not report."""
        seen = self.steps_done * self.config.sequences_per_step
        lr = learning_rate(self.steps_done, self.max_steps, self.config)
        self.loss = train_step(self, self.steps_done, seen, lr).loss
        self.steps_done += 1

    def first_step(self, started: float) -> None:
        """Take it, and note the time since `started`, a time.perf_counter(), as the start-up."""
        self.step()
        self.hardware.synchronize()
        self.startup_seconds = time.perf_counter() - started


def time_steps(step: Callable[[], object], synchronize: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Mean seconds of a call of `step`, and the number of timed calls: as many as take about `seconds`, at least three,
    or one if it alone takes that long.

    Call `step` once before this, for everything that happens only the first time. This function first makes one more
    call and then calls for a share of `seconds`, which do not count. `synchronize` waits for the device, before and
    after the timed calls only.
    """

    def timed(count: int) -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return time.perf_counter() - started

    once = timed(1)
    timed(int(WARM_UP_SHARE * seconds / once))
    count = max(3, round(seconds / once)) if once < seconds else 1
    return timed(count) / count, count


def measure_training(flags: Sequence[str], seconds: float, started: float) -> dict[str, Any]:
    """Train with the trainer's FLAGS for about `seconds`, and return how fast it was.

    The start-up time runs from `started`, a time.perf_counter(), to the end of the first step.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    training = Training.open(flags)
    training.first_step(started)
    return figures(training, seconds)


def figures(training: Training, seconds: float) -> dict[str, Any]:
    """Speed over about `seconds`, and peak memory, of a training that has taken its first step."""
    hardware, model, config = training.hardware, training.model, training.config
    step_seconds, steps = time_steps(training.step, hardware.synchronize, seconds)
    tokens_per_second = config.tokens_per_step / step_seconds
    peak = hardware.peak_memory()
    estimated = estimate_memory(config, model, hardware) + held_memory(training.data, hardware)
    return {
        "parameters": model.num_parameters(),
        "tokens_per_second": tokens_per_second,
        "ms_per_step": 1000 * step_seconds,
        "steps": steps,
        "startup_seconds": training.startup_seconds,
        "compile_seconds": training.compile_seconds,
        "peak_memory_gb": peak and peak / 1e9,
        "reserved_memory_gb": torch.cuda.max_memory_reserved() / 1e9 if hardware.is_cuda else None,
        "estimated_memory_gb": estimated / 1e9,
        "mfu": hardware.peak_flops and tokens_per_second * model.flops_per_token() / hardware.peak_flops,
        "precision": hardware.precision,
        "compiled": training.step_model is not model,
        "placement": training.data.placement,
        "micro_batch_size": config.rows_at_once,
        "loss": training.loss.item(),
    }
