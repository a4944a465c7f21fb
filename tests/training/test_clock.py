"""--minutes: on a clock that only steps, evaluations and writes move, so that nothing depends on the machine."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.forked import Forked
from tests.helpers import Killed
from tests.training.helpers import at_step, die, final_weights, measured, save_at_once, steps_of
from tests.training.launching import trained
from training import inspections, loop, report
from training import saver as saver_module
from training.clock import Costs
from training.config import Config
from training.records import read_metrics
from training.schedule import decay_start, last_step

MINUTES = 10.0
# A run of ten minutes with a step every four seconds, and more text than it can read.
LONG: dict[str, Any] = {"max_steps": None, "epochs": 1000, "minutes": MINUTES, "eval_interval": 25, "min_lr": 1e-4}
LONG |= {"checkpoint_steps": 0, "use_lr_scheduler": "linear", "cooldown": 0.5}


class Machine:
    """Moves the clock: how long a step takes may depend on its number."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 1000.0
        self.step: Callable[[int], float] = lambda step: 4.0
        self.evaluation, self.write = 5.0, 2.0
        patch.setattr(time, "perf_counter", lambda: self.now)
        for module, name, seconds in (
            (loop, "forward_backward", lambda args: self.step(args[0].state.step)),
            (loop, "evaluate", lambda _: self.evaluation),
            (saver_module, "write_checkpoint", lambda _: self.write),
        ):
            patch.setattr(module, name, self.taking(getattr(module, name), seconds))
        save_at_once(patch)
        patch.setattr(report, "CURVE_SECONDS", 1e9)  # of this clock: it would be drawn all the time

    def taking(self, work: Callable[..., Any], seconds: Callable[[tuple[Any, ...]], float]) -> Callable[..., Any]:
        def moved(*args: Any) -> Any:
            self.now += seconds(args)
            return work(*args)

        return moved


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def planned(result: Result, run: Path) -> tuple[int, int]:
    """The step that the rate falls from, as it was said, and the last."""
    said = re.search(r"^Step ([\d,]+): the learning rate falls from here on", result.out, re.M)
    assert said, result
    return int(said[1].replace(",", "")), steps_of(run)[0]


def is_in_time(seconds: float) -> bool:
    """Within three percent of the minutes."""
    return abs(seconds - 60 * MINUTES) <= 0.03 * 60 * MINUTES


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in read_metrics(folder)]


def require_a_plan_that_was_kept(folder: Path, first: int, last: int) -> None:
    lr = rates(folder)
    assert len(lr) == last == steps_of(folder)[0]
    assert set(lr[: first + 1]) == {0.005}, "the rate is constant before"
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[first:]))
    assert lr[-1] == pytest.approx(1e-4)


# The length


@pytest.mark.parametrize("seconds", [2.0, 7.0])
def test_the_rate_has_fallen_when_the_minutes_are_over(
    seconds: float, machine: Machine, train: Callable, tmp_path: Path
) -> None:
    machine.step = lambda _: seconds
    began = machine.now
    result = train(tmp_path / "run", **LONG)
    assert result.code == 0, result
    assert is_in_time(machine.now - began)
    first, last = planned(result, tmp_path / "run")
    require_a_plan_that_was_kept(tmp_path / "run", first, last)
    fall = read_metrics(tmp_path / "run")[first - 1]["elapsed_seconds"]
    assert fall == pytest.approx(30 * MINUTES, abs=0.03 * 60 * MINUTES), "half of the time, as cooldown says"
    assert "Forecast" in result.out


def test_a_first_step_that_takes_long_is_no_measure(machine: Machine, train: Callable, tmp_path: Path) -> None:
    machine.step = lambda step: 4.0 if step else 60.0
    began = machine.now
    assert train(tmp_path / "run", **LONG).code == 0
    assert is_in_time(machine.now - began)


def test_a_first_step_that_takes_long_does_not_decide_a_plan_that_is_made_at_once(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    """Nearly all of the time is for the fall, so it begins at the first look."""
    machine.step = lambda step: 4.0 if step else 20.0
    began = machine.now
    assert train(tmp_path / "run", **LONG | {"cooldown": 0.99}).code == 0
    assert is_in_time(machine.now - began)


def test_a_machine_that_changes_before_the_fall_changes_the_plan(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    for name, change in (("slower", 12.0), ("faster", 1.5)):
        machine.step = lambda step, change=change: 4.0 if step < 20 else change
        began = machine.now
        result = train(tmp_path / name, **LONG)
        assert result.code == 0 and "Warning" not in result.out
        assert is_in_time(machine.now - began)


@pytest.mark.parametrize("change", [1.5, 4.5, 12.0])
def test_a_machine_that_changes_in_the_fall_moves_its_end(
    change: float, machine: Machine, train: Callable, tmp_path: Path
) -> None:
    machine.step = lambda step: 4.0 if step < 85 else change
    began = machine.now
    result = train(tmp_path / "run", **LONG)
    assert result.code == 0 and is_in_time(machine.now - began)
    first, last = planned(result, tmp_path / "run")
    assert result.out.count("speed has changed") == 1 and (last > 150) == (change < 4)
    require_a_plan_that_was_kept(tmp_path / "run", first, last)


def test_a_plan_that_was_moved_is_kept_by_who_continues(machine: Machine, train: Callable, tmp_path: Path) -> None:
    machine.step = lambda step: 4.0 if step < 85 else 8.0
    assert train(tmp_path / "unbroken", **LONG).code == 0
    last = steps_of(tmp_path / "unbroken")[0]
    killed(tmp_path / "run", last - 3, train, **LONG)
    machine.step = lambda _: 1.0
    assert train(tmp_path / "run", **LONG).code == 0
    assert final_weights(tmp_path / "run", last) == final_weights(tmp_path / "unbroken", last)
    assert measured(tmp_path / "run") == measured(tmp_path / "unbroken")


def test_a_text_that_is_read_before_the_time_is_over_ends_early_and_says_so(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    flags = LONG | {"epochs": 2, "max_steps_per_epoch": 30}
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and planned(result, tmp_path / "run") == (30, 60)
    require_a_plan_that_was_kept(tmp_path / "run", 30, 60)
    said = [line for line in result.out.splitlines() if "ends early" in line]
    assert said[0].startswith("Forecast") and len(said) == 2 and "--epochs 2" in said[0]
    again = train(tmp_path / "run", **flags)
    assert "This run is finished" in again.out and "--epochs 4" in again.out
    more = train(tmp_path / "run", **flags | {"epochs": 4})
    assert more.code == 0 and steps_of(tmp_path / "run")[0] == 120


def test_minutes_that_leave_no_step_to_fall_stop_saved_and_more_of_them_continue(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    for minutes in (0.03, 0.06):  # less than the first step of four seconds
        folder = tmp_path / f"{minutes}"
        result = train(folder, **LONG | {"minutes": minutes})
        assert result.code == 130 and steps_of(folder) == [1]
        assert f"Stopped after step 1: --minutes {minutes} leaves no time for the learning rate to fall" in result.out
        again = train(folder, **LONG | {"minutes": minutes})
        assert again.code == 130 and steps_of(folder) == [1]
        assert train(folder, **LONG | {"minutes": 2}).code == 0
        assert rates(folder)[-1] == pytest.approx(1e-4)


# Cut off


def killed(run: Path, after: int, train: Callable, **flags: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, after, die)
        with pytest.raises(Killed):
            train(run, **flags)


def test_a_run_that_is_cut_off_while_the_rate_falls_ends_as_if_it_had_not_been(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    flags = LONG | {"checkpoint_steps": 10}
    unbroken = train(tmp_path / "unbroken", **flags)
    first, last = planned(unbroken, tmp_path / "unbroken")
    assert first < 100 < last
    killed(tmp_path / "run", 100, train, **flags)
    machine.now += 1e6  # a day later
    machine.step = lambda _: 18.0  # and on a slower machine
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "Continuing from" in result.out
    assert "Warning: the machine has become slower" in result.out
    assert final_weights(tmp_path / "run", last) == final_weights(tmp_path / "unbroken", last)
    assert measured(tmp_path / "run") == measured(tmp_path / "unbroken")


def test_a_run_that_is_cut_off_in_its_last_step_goes_on(machine: Machine, train: Callable, tmp_path: Path) -> None:
    """The last move of its plan left one step, and was saved."""
    machine.step = lambda step: 4.0 if step < 85 else 250.0
    assert train(tmp_path / "unbroken", **LONG).code == 0
    last = steps_of(tmp_path / "unbroken")[0]
    killed(tmp_path / "run", last - 1, train, **LONG)
    assert steps_of(tmp_path / "run")[0] == last - 1
    assert train(tmp_path / "run", **LONG).code == 0
    assert final_weights(tmp_path / "run", last) == final_weights(tmp_path / "unbroken", last)


def test_a_process_that_stood_still_has_lost_time_and_is_not_slower(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    machine.step = lambda step: 200.0 if step in (40, 100) else 4.0
    began = machine.now
    result = train(tmp_path / "run", **LONG)
    assert result.code == 0 and is_in_time(machine.now - began)
    require_a_plan_that_was_kept(tmp_path / "run", *planned(result, tmp_path / "run"))
    assert re.search(r"^Speed +32 tokens/s", result.out, re.M), "as at each other step"


def test_the_plan_is_saved_as_soon_as_it_is_made(machine: Machine, train: Callable, tmp_path: Path) -> None:
    first, last = planned(train(tmp_path / "unbroken", **LONG), tmp_path / "unbroken")
    killed(tmp_path / "run", first + 1, train, **LONG)
    assert steps_of(tmp_path / "run") == [first]
    machine.step = lambda _: 0.1
    assert train(tmp_path / "run", **LONG).code == 0
    assert steps_of(tmp_path / "run")[0] == last
    assert measured(tmp_path / "run") == measured(tmp_path / "unbroken")


def test_a_run_that_is_cut_off_before_goes_on_with_the_time_that_it_has_used(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    flags = LONG | {"checkpoint_steps": 10}
    killed(tmp_path / "run", 49, train, **flags)
    used = read_metrics(tmp_path / "run")[39]["elapsed_seconds"]  # at the newest checkpoint
    machine.now += 1e6
    began = machine.now
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "step 40" in result.out
    assert is_in_time(used + machine.now - began)
    require_a_plan_that_was_kept(tmp_path / "run", *planned(result, tmp_path / "run"))


def test_a_finished_run_takes_more_minutes(machine: Machine, train: Callable, tmp_path: Path) -> None:
    assert train(tmp_path / "run", **LONG).code == 0
    finished = train(tmp_path / "run", **LONG)
    assert finished.code == 0 and "ask for more: --minutes 20" in finished.out
    began = machine.now
    assert train(tmp_path / "run", **LONG | {"minutes": 2 * MINUTES}).code == 0
    assert is_in_time(machine.now - began)
    assert rates(tmp_path / "run")[-1] == pytest.approx(1e-4)


# Several processes


def on_machines_of_different_speed() -> None:
    """Called first in a process that torchrun has numbered."""
    machine = Machine(pytest.MonkeyPatch())
    seconds = 4.0 + int(os.environ["RANK"])
    machine.step = lambda _: seconds


def test_rank_0_decides_for_all(machine: Machine, train: Callable, train_flags: Callable, tmp_path: Path) -> None:
    flags = LONG | {"minutes": 1, "eval_interval": 10}
    alone = planned(train(tmp_path / "alone", **flags), tmp_path / "alone")
    both = trained(2, *train_flags(tmp_path / "run", **flags), first=on_machines_of_different_speed)
    (out, err), _ = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], err
    assert planned(Result(0, out, err), tmp_path / "run") == alone
    require_a_plan_that_was_kept(tmp_path / "run", *alone)


# What is said before, and parts


def test_a_dry_run_forecasts_the_steps_in_these_minutes(
    machine: Machine, train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspections, "train_step", machine.taking(inspections.train_step, lambda _: 0.5))
    result = train(tmp_path / "run", extra=("--dry_run",), **LONG)
    assert result.code == 0 and not (tmp_path / "run").exists()
    assert "Steps      at most " in result.out
    assert (
        "Minutes    10: about 1,188 steps, 5.6 epochs, fit. The learning rate falls from about step 594" in result.out
    )
    assert "about 9:54 for 1,188 steps" in result.out
    short = train(tmp_path / "run", extra=("--dry_run",), **LONG | {"epochs": 1, "max_steps_per_epoch": 9})
    assert "the epoch fits, and the run ends early" in short.out
    none = train(tmp_path / "run", extra=("--dry_run",), **LONG | {"minutes": 0.004})
    assert none.code == 0 and "Warning: no step fits" in none.out


def test_a_real_run_of_seconds_ends_at_the_floor(train_flags: Callable, tmp_path: Path) -> None:
    """Through the script, with the clock of the machine; how many steps fit depends on its load."""
    flags = LONG | {"minutes": 0.05, "epochs": 10**6, "log_interval": 5}
    process = Forked(train_flags(tmp_path / "run", **flags))
    out, err = process.communicate(timeout=100)
    assert process.returncode in (0, 130), err
    if process.returncode == 130:  # the machine was so busy that no step was left
        assert "leaves no time for the learning rate to fall" in out
        return
    first, last = planned(Result(0, out, err), tmp_path / "run")
    assert first < last
    assert "Minutes    0.05" in out
    if last > first + 1:
        assert rates(tmp_path / "run")[-1] == pytest.approx(1e-4)


def test_costs_count_the_steps_the_evaluations_and_the_end() -> None:
    costs = Costs(step=2.0, evaluation=5.0, ending=3.0)
    assert costs.of(10, 0, 10) == 20 + 5 + 3
    assert costs.of(11, 0, 10) == 22 + 10 + 3  # the last step is evaluated, too
    assert costs.of(5, 15, 10) == 10 + 5 + 3
    for seconds in range(100):
        steps = costs.steps_within(seconds, 3, 1000, 10)
        assert steps == 0 or costs.of(steps, 3, 10) <= seconds
        assert costs.of(steps + 1, 3, 10) > seconds or (steps + 1 + 3) % 10 == 0
    assert costs.steps_within(1e9, 3, 50, 10) == 50
    assert Costs(0.001).steps_within(1e12, 0, 10**30, 10) < 10**8
    assert decay_start(100, Config(minutes=1, cooldown=0.25)) == 75
    assert last_step(0, 0, 100, Config(minutes=1, epochs=3, batch_size=10)) == 30
