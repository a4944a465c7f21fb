"""Set up the trainer's own step and time it, for benchmarks and GPU tests."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from generation.sampling import Sampling
from generation.stream import stream
from model import TransformerLanguageModel
from train_colab_mmap import make_run
from training.compilation import prepare
from training.config import parse_config
from training.run import Run
from training.step import train_step

WARM_UP_SHARE = 0.2  # time before a measurement, relative to the measurement


class TimedRun(Run):
    """A run that is ready for its first step. Replace `step_model` to time another model."""

    loss: torch.Tensor  # the last step's loss, on the device

    @classmethod
    def open(cls, flags: Sequence[str]) -> TimedRun:
        """Prepare the run of `python train_colab_mmap.py FLAGS`, with the trainer's automatic choices."""
        # `input` is None because a config with its own text would be tokenized into the given token folder.
        run, _ = make_run(dataclasses.replace(parse_config(flags), input=None, eval_prompts=None))
        training = cls(*(getattr(run, field.name) for field in dataclasses.fields(run)))
        prepare(training)
        return training

    def step(self) -> None:
        """Take one step as the trainer does when it does not report."""
        self.loss, _ = train_step(self)
        self.advance()


def time_steps(step: Callable[[], object], synchronize: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Time `step` for about `seconds`. Returns the mean seconds per call and the number of timed calls.

    There are at least three timed calls, or one if that takes longer than `seconds`. Call `step` once before, so that
    first-time work is not timed; some more warm-up calls are made here. `synchronize` waits for the device, only before
    and after the timed calls.
    """

    def time_calls(count: int) -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return time.perf_counter() - started

    once = time_calls(1)
    time_calls(int(WARM_UP_SHARE * seconds / once))
    count = max(3, round(seconds / once)) if once < seconds else 1
    return time_calls(count) / count, count


def spread_logits(model: TransformerLanguageModel) -> TransformerLanguageModel:
    """Scale a new model's head, so that its logits spread like a trained model's and top_p removes most tokens."""
    with torch.no_grad():
        model.head.weight.mul_(8)
    return model


def time_tokens(model: TransformerLanguageModel, texts: int, held: int, count: int) -> list[float]:
    """Return the seconds between tokens of `texts` texts at once that continue random prompts of `held` tokens."""
    size = model.config.vocab_size
    prompts, bias = torch.randint(size, (texts, held)).tolist(), torch.zeros(size, device=model.device)
    tokens = stream(model, prompts, Sampling(count, temperature=0.8, top_p=0.9), bias)
    times = [time.perf_counter() for _ in tokens]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
