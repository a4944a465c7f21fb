"""The learning rate and the length of a run, both pure functions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.config import Config
from training.schedule import DECAYS as TABLE
from training.schedule import epoch_sequences, last_step, learning_rate
from training.state import Cooldown

DECAYS = [name for name, decay in TABLE.items() if decay is not None]


def config_of(**values: Any) -> Config:
    return Config(**{"learning_rate": 1e-2, "min_lr": 1e-4, "warmup_steps": 10, **values})


def rates(max_steps: int, config: Config) -> list[float]:
    return [learning_rate(step, max_steps, config) for step in range(max_steps)]


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
    lr = learning_rate(step, max_steps, config)
    assert 0 < lr <= peak * (1 + 1e-9)
    if step >= warmup_steps:
        assert lr >= config.min_lr * (1 - 1e-9)
    last = learning_rate(max_steps - 1, max_steps, config)
    assert last == pytest.approx(peak if decay == "constant" else config.min_lr, abs=peak * 1e-9)
    assert learning_rate(max_steps + 5, max_steps, config) == pytest.approx(last)  # a run that was cut shorter


# The length of a run


def test_an_epoch_is_every_window_or_what_the_cap_leaves_of_it() -> None:
    config = config_of(batch_size=8, gradient_accumulation_steps=2, max_steps_per_epoch=5)
    assert epoch_sequences(1000, config) == 80
    assert epoch_sequences(50, config) == 50
    assert epoch_sequences(1000, config_of(batch_size=8)) == 1000


def test_epochs_count_every_window_the_last_step_rounded_up() -> None:
    config = config_of(epochs=3, batch_size=8)
    assert last_step(0, 0, 100, config) == math.ceil(300 / 8)


def test_max_steps_per_epoch_ends_each_epoch_after_so_many_steps() -> None:
    config = config_of(epochs=3, batch_size=8, gradient_accumulation_steps=2, max_steps_per_epoch=5)
    assert last_step(0, 0, 1000, config) == 15


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
    end = last_step(0, 0, windows, config)
    assert end >= 1
    step = data.draw(st.integers(0, end))
    assert last_step(step, step * batch_size, windows, config) == end
    assert last_step(end + 3, (end + 3) * batch_size, windows, config) == end + 3  # it never asks for steps back


def test_another_batch_size_midway_still_sees_every_window() -> None:
    before, after = config_of(epochs=2, batch_size=10), config_of(epochs=2, batch_size=4)
    assert last_step(0, 0, 1000, before) == 200
    step, seen = 60, 600
    end = last_step(step, seen, 1000, after)
    assert seen + (end - step) * 4 == 2000


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cooldown", [0.1, 0.4, 0.9])
def test_the_peak_is_held_until_the_cooldown_begins(decay: str, cooldown: float) -> None:
    lr = rates(200, config_of(use_lr_scheduler=decay, cooldown=cooldown))
    start = max(10, round(200 * (1 - cooldown)))
    assert lr[10 : start + 1] == pytest.approx([1e-2] * (start - 9))
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[start:]))
    assert lr[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("first", [4, 10, 60])
def test_a_decay_that_the_clock_began_falls_from_the_rate_of_its_first_step(decay: str, first: int) -> None:
    """Also from the middle of the warmup, which ends there."""
    config = config_of(use_lr_scheduler=decay, minutes=1.0)
    before = [learning_rate(step, 10**6, config) for step in range(first + 1)]
    cooldown = Cooldown(minutes=1.0, first=first, last=100, limit=10**6)
    lr = [learning_rate(step, 100, config, cooldown.at(step)) for step in range(100)]
    assert lr[: first + 1] == pytest.approx(before)
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[first:]))
    assert lr[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("last", [61, 72, 300])
def test_a_decay_whose_end_is_moved_goes_on_from_where_it_is(decay: str, last: int) -> None:
    config = config_of(use_lr_scheduler=decay, minutes=1.0)
    planned = Cooldown(minutes=1.0, first=10, last=100, limit=10**6)
    before = planned.moved_to(70, 40)
    moved = before.moved_to(last, 60)
    lr = [learning_rate(step, last, config, moved.at(step)) for step in range(60, last)]
    assert last == 61 or lr[0] == pytest.approx(learning_rate(60, 70, config, before.at(60)))
    assert all(later < earlier for earlier, later in itertools.pairwise(lr))
    assert lr[-1] == pytest.approx(1e-4)


@given(data=st.data())
def test_a_run_can_go_on_from_each_state_of_a_plan(data: st.DataObject) -> None:
    """It asks for the rate of the step before, too. `moved_to` plans at least one more step."""
    first = data.draw(st.integers(0, 20))
    plan = Cooldown(minutes=1.0, first=first, last=first + data.draw(st.integers(1, 20)), limit=10**6)
    before, step = 0.0, 0
    while step < plan.last:
        if first <= step < 30 and data.draw(st.booleans()):
            plan = plan.moved_to(step + data.draw(st.integers(1, 20)), step)
        assert before <= plan.at(step)[1] <= 1.0 and 0.0 <= plan.at(max(0, step - 1))[1] <= 1.0
        before, step = plan.at(step)[1], step + 1
    assert before == 1.0
