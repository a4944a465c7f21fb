"""The learning rate and the length of a run: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from training.config import Config


def cosine(progress: float) -> float:
    """Decay by half a cosine: Loshchilov & Hutter 2017, eq. 5."""
    return (1.0 + math.cos(math.pi * progress)) / 2


# The choices of `use_lr_scheduler`. Progress, from 0 at the peak to 1 at the last step -> the factor, from 1 to 0, of
# the peak's distance to `min_lr`. None: no decay.
DECAYS: dict[str, Callable[[float], float] | None] = {
    "cosine": cosine,
    "linear": lambda progress: 1.0 - progress,
    "constant": None,
}
COOLDOWN_OF_MINUTES = 0.6  # with `minutes`, where the configuration has none below 1; that of the *_modern configs


def learning_rate(step: int, max_steps: int, config: Config, fall: tuple[int, float] | None = None) -> float:
    """Return the learning rate of `step` (from 0): linear warmup to the peak, then one of DECAYS down to `min_lr` at
    the last step. `cooldown` below 1 is the share of the steps that decay; before it, the peak is held (Hägele et al.
    2024). `fall`: its first step, and its progress at `step`, if the clock has chosen them; a warmup that is not over
    ends there."""
    start = fall[0] if fall else decay_start(max_steps, config)
    warmed = min(step, start) + 1
    peak = config.learning_rate
    if warmed <= config.warmup_steps:
        peak = config.learning_rate * warmed / config.warmup_steps
    decay = DECAYS[config.use_lr_scheduler]
    if decay is None or step < min(start, config.warmup_steps):
        return peak
    progress = fall[1] if fall else min(1.0, max(0, step - start) / max(1, max_steps - 1 - start))
    return config.min_lr + decay(progress) * (peak - config.min_lr)


def decay_start(max_steps: int, config: Config) -> int:
    """Return the step (from 0) that the decay begins with in a run of `max_steps`."""
    return max(config.warmup_steps, round((1 - decay_share(config)) * max_steps))


def decay_share(config: Config) -> float:
    """Return the share of a run that decays: of its steps, or with `minutes` of its time."""
    return COOLDOWN_OF_MINUTES if config.minutes and config.cooldown == 1 else config.cooldown


def epoch_sequences(windows: int, config: Config) -> int:
    """Return the sequences in an epoch: all training windows, or fewer with `max_steps_per_epoch`."""
    if config.max_steps_per_epoch:
        return min(windows, config.max_steps_per_epoch * config.sequences_per_step)
    return windows


def last_step(step: int, sequences_seen: int, windows: int, config: Config) -> int:
    """Return the steps of the whole run, from the steps and sequences done so far: the batch size may have changed on
    the way."""
    if config.max_steps:
        return config.max_steps
    if epoch_sequences(windows, config) < windows:
        return max(step, config.epochs * config.max_steps_per_epoch)
    remaining = config.epochs * epoch_sequences(windows, config) - sequences_seen
    return step + max(0, math.ceil(remaining / config.sequences_per_step))


def has_stopped_early(worse: int, config: Config) -> bool:
    """Return whether `worse` evaluations in a row without a lower validation loss end the run."""
    return 0 < config.stop_after_worse <= worse


def repetition(windows: int, config: Config) -> str:
    """Return a note if a step takes more sequences than there are training windows; else nothing."""
    sequences = config.sequences_per_step
    if sequences <= windows:
        return ""
    return (
        f"\nNote       a step takes {sequences:,} sequences and the text has {windows:,}: each step is "
        f"{sequences / windows:.1f} epochs, whatever --epochs says. For several steps per epoch, try --batch_size "
        f"{max(1, windows // config.gradient_accumulation_steps // 10)}"
    )
