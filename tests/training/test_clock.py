"""--minutes: on a clock that only steps, evaluations and writes move, so that nothing depends on the machine."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train_colab_mmap as script
from common.checkpoint import Checkpoint, step_folders
from tests.forked import Forked
from tests.helpers import Killed, wait_until
from tests.training.helpers import at_step, die, save_at_once, steps_of
from tests.training.launching import trained
from training import evaluate, report
from training import step as step_module
from training import store as store_module
from training.records import read_metrics
from training.state import read_state

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
            (script, "forward_backward", lambda args: self.step(args[0].state.step)),
            (script, "evaluate", lambda _: self.evaluation),
            (
                step_module,
                "forward_backward",
                lambda args: self.step(args[0].state.step),
            ),  # a new process imports these
            (evaluate, "evaluate", lambda _: self.evaluation),
            (store_module, "write_files", lambda _: self.write),
        ):
            patch.setattr(module, name, self.taking(getattr(module, name), seconds))
        save_at_once(patch)
        patch.setattr(report, "CURVE_INTERVAL_SECONDS", 1e9)  # of this clock: it would be drawn all the time

    def taking(self, work: Callable[..., Any], seconds: Callable[[tuple[Any, ...]], float]) -> Callable[..., Any]:
        def moved(*args: Any) -> Any:
            self.now += seconds(args)
            return work(*args)

        return moved


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def is_in_time(seconds: float) -> bool:
    """Within three percent of the minutes: a step may take half of that."""
    return abs(seconds - 60 * MINUTES) <= 0.03 * 60 * MINUTES


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in read_metrics(folder)]


def require_a_fall(folder: Path) -> int:
    """The rate is held, and then falls to less than a tenth of its peak. Returns the step that it falls from."""
    lr = rates(folder)
    first = next(step for step, rate in enumerate(lr) if rate < 0.005)
    assert all(later < earlier for earlier, later in itertools.pairwise(lr[first:]))
    assert 1e-4 <= lr[-1] < 0.005 / 10
    return first


# The length


@pytest.mark.parametrize("seconds", [2.0, 7.0])
def test_the_rate_has_fallen_when_the_minutes_are_over(
    seconds: float, machine: Machine, train: Callable, tmp_path: Path
) -> None:
    machine.step = lambda _: seconds
    began = machine.now
    assert train(tmp_path / "run", **LONG).code == 0
    assert is_in_time(machine.now - began)
    fall = read_metrics(tmp_path / "run")[require_a_fall(tmp_path / "run") - 1]["elapsed_seconds"]
    assert fall == pytest.approx(30 * MINUTES, abs=0.02 * 60 * MINUTES), "half of the time, as cooldown says"


@pytest.mark.parametrize(
    "step",
    [
        lambda step: 4.0 if step else 60.0,  # starts slowly
        lambda step: 100.0 if step == 1 else 4.0,  # the first step that is measured
        lambda step: 4.0 if step < 20 else 9.0,  # before the rate falls
        lambda step: 4.0 if step < 85 else 1.5,  # while it does
        lambda step: 4.0 if step < 85 else 9.0,
        lambda step: 100.0 if step in (20, 60) else 4.0,  # stood still
    ],
)
def test_a_machine_that_changes_ends_in_time(
    step: Callable[[int], float], machine: Machine, train: Callable, tmp_path: Path
) -> None:
    machine.step = step
    began = machine.now
    assert train(tmp_path / "run", **LONG).code == 0
    assert is_in_time(machine.now - began)
    require_a_fall(tmp_path / "run")


def test_a_text_that_is_read_before_the_time_is_over_ends_early_and_says_so(
    machine: Machine, train: Callable, tmp_path: Path
) -> None:
    flags = LONG | {"epochs": 2, "max_steps_per_epoch": 30}
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and steps_of(tmp_path / "run")[0] == 60
    assert require_a_fall(tmp_path / "run") == 31
    assert re.search(r"Training .* of 10 minutes, ended by --epochs 2", result.out)
    again = train(tmp_path / "run", **flags)
    assert "This run is finished" in again.out and "--epochs 4" in again.out
    more = train(tmp_path / "run", **flags | {"epochs": 4})
    assert more.code == 0 and steps_of(tmp_path / "run")[0] == 120


# Cut off


def killed(run: Path, after: int, train: Callable, **flags: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, after, die)
        with pytest.raises(Killed):
            train(run, **flags)


@pytest.mark.parametrize("after", [49, 100])
def test_a_run_that_is_cut_off_continues_with_the_time_that_it_has_used(
    after: int, machine: Machine, train: Callable, tmp_path: Path
) -> None:
    flags = LONG | {"checkpoint_steps": 10}
    killed(tmp_path / "run", after, train, **flags)
    newest, *_ = step_folders(tmp_path / "run/checkpoints")
    used = read_state(Checkpoint(newest)).state.elapsed_seconds
    machine.now += 1e6  # a day later
    machine.step = lambda _: 9.0  # and on a slower machine
    began = machine.now
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "Continuing from" in result.out
    assert is_in_time(used + machine.now - began)
    require_a_fall(tmp_path / "run")


def test_a_finished_run_takes_more_minutes(machine: Machine, train: Callable, tmp_path: Path) -> None:
    assert train(tmp_path / "run", **LONG).code == 0
    finished = train(tmp_path / "run", **LONG)
    assert finished.code == 0 and "To continue: --minutes 20" in finished.out
    began = machine.now
    assert train(tmp_path / "run", **LONG | {"minutes": 2 * MINUTES}).code == 0
    assert is_in_time(machine.now - began)
    assert rates(tmp_path / "run")[-1] < 0.005 / 10


# Several processes


def on_machines_of_different_speed() -> None:
    """Called first in a process that torchrun has numbered."""
    machine = Machine(pytest.MonkeyPatch())
    seconds = 4.0 + int(os.environ["RANK"])
    machine.step = lambda _: seconds


def test_processes_on_machines_of_different_speed_end_together(
    machine: Machine, train_flags: Callable, tmp_path: Path
) -> None:
    both = trained(2, *train_flags(tmp_path / "run", **LONG | {"minutes": 1}), first=on_machines_of_different_speed)
    (_, err), _ = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], err
    assert read_metrics(tmp_path / "run")[-1]["elapsed_seconds"] <= 60
    require_a_fall(tmp_path / "run")


# What is said before


def test_a_dry_run_forecasts_the_steps_in_these_minutes(machine: Machine, train: Callable, tmp_path: Path) -> None:
    result = train(tmp_path / "run", extra=("--dry_run",), **LONG)
    assert result.code == 0 and not (tmp_path / "run").exists()
    assert "Steps      of " in result.out
    steps = int(re.search(r"Minutes    10: time for about (\d+) steps .*\. The learning rate decays", result.out)[1])
    assert 140 <= steps <= 150 and f"for {steps} steps" in result.out, "of four seconds"
    short = train(tmp_path / "run", extra=("--dry_run",), **LONG | {"epochs": 1, "max_steps_per_epoch": 9})
    assert "time for the whole epoch, so the run ends before" in short.out


def test_a_real_run_of_seconds(train_flags: Callable, tmp_path: Path) -> None:
    """Through the script, with the clock of the machine; how many steps fit depends on its load."""
    process = Forked(train_flags(tmp_path / "run", **LONG | {"minutes": 0.1, "epochs": 10**6}))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and "Minutes    0.1" in out, err
    assert rates(tmp_path / "run")[-1] < rates(tmp_path / "run")[0]


def test_time_in_which_the_process_stood_still_is_not_used_up(train_flags: Callable, tmp_path: Path) -> None:
    """As with Ctrl-Z, or a laptop whose lid was closed."""
    minutes, stopped = 0.15, 7.0
    process = Forked(train_flags(tmp_path / "run", **LONG | {"minutes": minutes, "epochs": 10**6}))
    began = time.monotonic()
    wait_until(lambda: bool(read_metrics(tmp_path / "run")))
    process.send_signal(signal.SIGSTOP)
    time.sleep(stopped)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and "stood still for 0:0" in out, err
    assert time.monotonic() - began > 60 * minutes + stopped - 2
    assert read_metrics(tmp_path / "run")[-1]["elapsed_seconds"] <= 60 * minutes + 1
