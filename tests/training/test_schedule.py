"""The learning rate and the length of a run, both pure functions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.config import Config
from training.schedule import DECAYS as TABLE
from training.schedule import epoch_sequences, learning_rate, progress, total_steps
from training.state import TrainState

DECAYS = [name for name, decay in TABLE.items() if decay is not None]


def config_of(**values: Any) -> Config:
    return Config(**{"learning_rate": 1e-2, "min_lr": 1e-4, "warmup_steps": 10, **values})


def rate(step: int, max_steps: int, config: Config) -> float:
    return learning_rate(TrainState(step=step), 1, dataclasses.replace(config, max_steps=max_steps))


def rates(max_steps: int, config: Config) -> list[float]:
    return [rate(step, max_steps, config) for step in range(max_steps)]


def length(windows: int, config: Config, step: int = 0, sequences_seen: int = 0) -> int:
    return total_steps(TrainState(step=step, sequences_seen=sequences_seen), windows, config)


@pytest.mark.parametrize("decay", [*DECAYS, "constant"])
def test_warmup_rises_in_equal_parts_to_the_peak(decay: str) -> None:
    lr = rates(100, config_of(use_lr_scheduler=decay))
    assert lr[:10] == pytest.approx([1e-2 * (step + 1) / 10 for step in range(10)])
    assert max(lr) == pytest.approx(1e-2)
    assert lr[0] > 0  # the first step is not wasted


@pytest.mark.parametrize("decay", DECAYS)
def test_decay_goes_from_the_peak_down_to_min_lr_at_the_last_step(decay: str) -> None:
    lr = rates(100, config_of(use_lr_scheduler=decay))
    assert lr[10] == pytest.approx(1e-2)
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[10:]))
    assert lr[-1] == pytest.approx(1e-4)
    assert lr[-2] > 1e-4


def test_cosine_is_torchs_cosine() -> None:
    config = config_of(warmup_steps=0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=199, eta_min=config.min_lr)
    for ours in rates(200, config):
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


@given(
    decay=st.sampled_from([*DECAYS, "constant"]),
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0.0, 1.0),
    warmup_steps=st.integers(0, 500),
    decay_steps=st.integers(2, 2000),
    data=st.data(),
)
def test_rates_are_bounded_and_end_at_min_lr(
    decay: str, peak: float, share: float, warmup_steps: int, decay_steps: int, data: st.DataObject
) -> None:
    config = config_of(learning_rate=peak, min_lr=share * peak, warmup_steps=warmup_steps, use_lr_scheduler=decay)
    max_steps = warmup_steps + decay_steps
    step = data.draw(st.integers(0, max_steps - 1))
    lr = rate(step, max_steps, config)
    assert 0 <= lr <= peak * (1 + 1e-9)
    if step >= warmup_steps:
        assert lr >= config.min_lr * (1 - 1e-9)
    last = rate(max_steps - 1, max_steps, config)
    assert last == pytest.approx(peak if decay == "constant" else config.min_lr, abs=peak * 1e-9)
    assert rate(max_steps + 5, max_steps, config) == pytest.approx(last)  # a run that was cut shorter


# The length of a run


def test_an_epoch_is_every_window_or_what_the_cap_leaves_of_it() -> None:
    config = config_of(batch_size=8, gradient_accumulation_steps=2, max_steps_per_epoch=5)
    assert epoch_sequences(1000, config) == 80
    assert epoch_sequences(50, config) == 50
    assert epoch_sequences(1000, config_of(batch_size=8)) == 1000


def test_epochs_count_every_window_the_last_step_rounded_up() -> None:
    config = config_of(epochs=3, batch_size=8)
    assert length(100, config) == math.ceil(300 / 8)


def test_max_steps_per_epoch_limits_each_epoch() -> None:
    config = config_of(epochs=3, batch_size=8, gradient_accumulation_steps=2, max_steps_per_epoch=5)
    assert length(1000, config) == 15


@given(
    windows=st.integers(1, 5000),
    epochs=st.integers(1, 10),
    cap=st.integers(0, 50),
    batch_size=st.integers(1, 64),
    data=st.data(),
)
def test_the_end_of_a_run_does_not_move_while_it_runs(
    windows: int, epochs: int, cap: int, batch_size: int, data: st.DataObject
) -> None:
    config = config_of(epochs=epochs, max_steps_per_epoch=cap, batch_size=batch_size)
    end = length(windows, config)
    assert end >= 1
    step = data.draw(st.integers(0, end))
    assert length(windows, config, step, step * batch_size) == end
    assert length(windows, config, end + 3, (end + 3) * batch_size) == end + 3  # it never asks for steps back


def test_another_batch_size_midway_still_sees_every_window() -> None:
    before, after = config_of(epochs=2, batch_size=10), config_of(epochs=2, batch_size=4)
    assert length(1000, before) == 200
    step, seen = 60, 600
    end = length(1000, after, step, seen)
    assert seen + (end - step) * 4 == 2000


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cooldown", [0.1, 0.4, 0.9])
def test_the_peak_is_held_until_the_cooldown_begins(decay: str, cooldown: float) -> None:
    lr = rates(200, config_of(use_lr_scheduler=decay, cooldown=cooldown))
    start = max(10, round(200 * (1 - cooldown)))
    assert lr[10 : start + 1] == pytest.approx([1e-2] * (start - 9))
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[start:]))
    assert lr[-1] == pytest.approx(1e-4)


# By the clock


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("seconds_a_step", [0.1, 1.0, 20.0])
def test_with_minutes_the_rate_is_held_and_falls_with_the_time(decay: str, seconds_a_step: float) -> None:
    config = config_of(use_lr_scheduler=decay, minutes=10, warmup_steps=0, cooldown=0.25, epochs=10**6)
    state = TrainState(ending_seconds=seconds_a_step)
    lr = []
    while progress(state, 1000, config) < 1:
        lr.append(learning_rate(state, 1000, config))
        state.step += 1
        state.elapsed_seconds += seconds_a_step
    assert 600 - 2 * seconds_a_step <= state.elapsed_seconds <= 600
    held = int(0.75 * 600 / seconds_a_step) - 1
    assert lr[:held] == pytest.approx([1e-2] * held)
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[held + 2 :]))
    assert 1e-4 <= lr[-1] <= 1e-4 + 1e-2 * 2 * seconds_a_step / 150


def test_a_text_that_is_read_before_the_minutes_are_over_ends_the_run() -> None:
    config = config_of(minutes=10, epochs=2, batch_size=10, warmup_steps=0)
    assert progress(TrainState(step=10, sequences_seen=100, elapsed_seconds=60), 100, config) == 0.5
    assert progress(TrainState(step=20, sequences_seen=200, elapsed_seconds=60), 100, config) == 1
    assert progress(TrainState(step=10, sequences_seen=100, elapsed_seconds=540), 100, config) == 0.9
    assert learning_rate(TrainState(step=19, sequences_seen=190), 100, config) == config.min_lr


def test_a_warmup_that_the_minutes_cut_short_falls_from_where_it_is() -> None:
    config = config_of(minutes=10, warmup_steps=1000)
    lr = [learning_rate(TrainState(step=step, elapsed_seconds=6 * step), 10**6, config) for step in range(100)]
    assert max(lr) < 1e-2 * 0.06 and lr[-1] < 2e-4
