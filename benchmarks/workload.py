"""The trainer's own step for the benchmarks and the tests on a GPU: set up as the trainer does it, and timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from training.compilation import prepare
from training.config import parse_config
from training.plan import make_run
from training.run import Run
from training.step import train_step

WARM_UP_SHARE = 0.2  # of a measurement's time, before it and not counted


class Training(Run):
    """A run when its loop begins. `step_model` may be exchanged to try another one."""

    loss: torch.Tensor  # of the last step, on the device

    @classmethod
    def open(cls, flags: Sequence[str]) -> Training:
        """Prepare what `python train_colab_mmap.py FLAGS` would train, with the trainer's automatic choices."""
        # Only the given token folder: a config with its own text would tokenize that into it.
        run, _ = make_run(dataclasses.replace(parse_config(flags), input=None, eval_prompts=None))
        training = cls(*(getattr(run, field.name) for field in dataclasses.fields(run)))
        prepare(training)
        return training

    def step(self) -> None:
        """One step of the run, as the trainer's loop takes it where it does not report."""
        self.loss = train_step(self).loss
        self.advance()


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
