"""Progress and learning rate of a run: pure functions of its state and configuration."""

from __future__ import annotations

import math
from collections.abc import Callable

from training.config import Config
from training.state import Switch, TrainState


def cosine(decayed: float) -> float:
    """Decay by half a cosine: Loshchilov & Hutter 2017, eq. 5."""
    return (1.0 + math.cos(math.pi * decayed)) / 2


# The choices of `use_lr_scheduler`. Each maps the share of the decay that is done to a factor from 1 to 0, applied to
# the distance between peak and `min_lr`. None: no decay.
DECAYS: dict[str, Callable[[float], float] | None] = {
    "cosine": cosine,
    "linear": lambda decayed: 1.0 - decayed,
    "constant": None,
}
# The last part of a run with a companion, in which every second sequence is from one's own text
# (docs/benchmarks/companion.md)
OWN_PASSES = 3  # over the own text; many more make the model forget the companion
MAX_LAST_PART = 2 / 3  # share of the run
SWITCH_PEAK = 0.5  # the learning rate at the switch, relative to the peak
DEFAULT_TIMED_COOLDOWN = 0.6  # replaces a cooldown of 1 if `minutes` is set; the same as in the *_modern configs


def progress(state: TrainState, windows: int, config: Config) -> float:
    """Return the progress of a run: 0 at its start, 1 or more at its end. `windows`: training windows per epoch.

    The largest of the shares of steps, epochs and minutes counts. Early stopping ends a run, too, and so do the passes
    over one's own text beside a companion.
    """
    if has_stopped_early(state, config):
        return 1.0
    last = total_steps(state, windows, config)
    done = max(1.0 if state.step >= last else state.step / last, time_progress(state, config))
    if state.switch is None:
        return done
    before = state.switch.progress
    passes = (state.sequences_seen - state.switch.sequences) / (state.switch.end - state.switch.sequences)
    return max(done, before + (1 - before) * passes)


def time_progress(state: TrainState, config: Config) -> float:
    """Return the used share of `minutes`; 0 without `minutes`. It is 1 when the remaining time is needed for the last
    step, its evaluation and saving."""
    if not config.minutes:
        return 0.0
    usable = 60 * config.minutes - state.ending_seconds
    return state.elapsed_seconds / usable if usable > 0 else 1.0


def learning_rate(state: TrainState, windows: int, config: Config) -> float:
    """Return the learning rate of the step that follows `state`: linear warmup to the peak, then one of DECAYS down to
    `min_lr` at the end. `cooldown` below 1 is the share of the run that decays; before it, the peak is held (Hägele et
    al. 2024). With `minutes` the decay follows the clock. From the switch of a run with a companion on, the rate decays
    linearly from SWITCH_PEAK of the peak."""
    if state.switch is not None:
        before = state.switch.progress
        decayed = (progress(state, windows, config) - before) / max(1e-9, 1 - before)
        return config.min_lr + (1 - min(1.0, decayed)) * (SWITCH_PEAK * config.learning_rate - config.min_lr)
    step, peak = state.step, config.learning_rate
    if step < config.warmup_steps:
        peak = config.learning_rate * (step + 1) / config.warmup_steps
    decay = DECAYS[config.use_lr_scheduler]
    if decay is None:
        return peak
    last = total_steps(state, windows, config)
    start = decay_start(last, config)
    decayed = max(0, step - start) / max(1, last - 1 - start)
    if config.minutes:
        decayed = max(decayed, 1 - (1 - time_progress(state, config)) / decay_share(config))
    if step < config.warmup_steps and decayed == 0:  # minutes may end within the warmup
        return peak
    return config.min_lr + decay(min(1.0, decayed)) * (peak - config.min_lr)


def decay_start(steps: int, config: Config) -> int:
    """Return the first step (from 0) of the decay in a run of `steps`."""
    return max(config.warmup_steps, round((1 - decay_share(config)) * steps))


def decay_share(config: Config) -> float:
    """Return the share of a run that decays, of its steps or, with `minutes`, of its time."""
    return DEFAULT_TIMED_COOLDOWN if config.minutes and config.cooldown == 1 else config.cooldown


def epoch_sequences(windows: int, config: Config) -> int:
    """Return the sequences per epoch: all training windows, or fewer with `max_steps_per_epoch`."""
    if config.max_steps_per_epoch:
        return min(windows, config.max_steps_per_epoch * config.sequences_per_step)
    return windows


def total_steps(state: TrainState, windows: int, config: Config) -> int:
    """Return the number of steps of the whole run by `max_steps` or `epochs`; `minutes` may end it earlier. The batch
    size may have changed in between."""
    if config.max_steps:
        return config.max_steps
    if epoch_sequences(windows, config) < windows:
        return max(state.step, config.epochs * config.max_steps_per_epoch)
    remaining = config.epochs * epoch_sequences(windows, config) - state.sequences_seen
    return state.step + max(0, math.ceil(remaining / config.sequences_per_step))


def steps_left(state: TrainState, windows: int, config: Config, step_seconds: float) -> int:
    """Return the steps left in the run, if each takes `step_seconds`; 0: not known."""
    if progress(state, windows, config) >= 1:
        return 0
    left = total_steps(state, windows, config) - state.step
    if config.minutes and step_seconds:
        seconds = 60 * config.minutes - state.ending_seconds - state.elapsed_seconds
        left = min(left, math.ceil(seconds / step_seconds))
    return left


def find_switch(state: TrainState, windows: int, own_windows: int, config: Config, pace: float) -> Switch | None:
    """Return the switch to one's own text if the rest of the run is what OWN_PASSES over its `own_windows` take, else
    None. `pace`: seconds per step, with evaluations and saves; 0 if it is not known."""
    needed = 2 * OWN_PASSES * own_windows  # every second sequence
    left = steps_left(state, windows, config, pace) * config.sequences_per_step
    done = progress(state, windows, config)
    is_due = 0 < left <= needed and done >= 1 - MAX_LAST_PART
    return Switch(state.sequences_seen, state.sequences_seen + needed, done) if is_due else None


def has_stopped_early(state: TrainState, config: Config) -> bool:
    """Return whether `stop_after_worse` has ended the run."""
    return 0 < config.stop_after_worse <= state.worse
