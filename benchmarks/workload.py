"""The trainer's own step for the benchmarks and the tests on a GPU: set up as the trainer does it, and timed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from training.config import parse_config
from training.memory import compile_step_model
from training.plan import build, make_plan
from training.resume import Old
from training.schedule import last_step, learning_rate
from training.step import Trainer, train_step

WARM_UP_SHARE = 0.2  # of a measurement's time, before it and not counted


@dataclass
class Training(Trainer):
    """What the trainer holds when its loop begins. `step_model` may be exchanged to try another one."""

    max_steps: int = 0
    steps_done: int = 0
    loss: torch.Tensor = field(default_factory=lambda: torch.tensor(math.nan))  # of the last step, on the device

    @classmethod
    def open(cls, flags: Sequence[str]) -> Training:
        """Prepare what `python train_colab_mmap.py FLAGS` would train, with the trainer's automatic choices."""
        # Only the given token folder: a config with its own text would tokenize that into it.
        config = dataclasses.replace(parse_config(flags), input=None, eval_prompts=None)
        trainer = build(make_plan(config, Old()))
        compile_step_model(trainer)
        return cls(**vars(trainer), max_steps=last_step(0, 0, trainer.data.windows, config))

    def step(self) -> None:
        """One step of the run, as the trainer's loop takes it where it does not report."""
        seen = self.steps_done * self.config.sequences_per_step
        lr = learning_rate(self.steps_done, self.max_steps, self.config)
        self.loss = train_step(self, self.steps_done, seen, lr).loss
        self.steps_done += 1


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
