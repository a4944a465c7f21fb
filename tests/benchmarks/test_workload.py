"""The benchmark scripts measure what the trainer does: its steps, on tokens it accepts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import benchmarks.workload
from benchmarks.contestants import Case, measure
from benchmarks.measure import CPU_LIMITS, machine_kind, measure_in_turn, this_command, write_random_tokens
from benchmarks.workload import Training, time_steps


def test_a_step_is_a_step_of_the_trainer(tmp_path: Path, train: Callable, train_flags: Callable) -> None:
    """The same losses, to the last digit that is logged, dropout and accumulated gradients included."""
    flags = train_flags(tmp_path / "run", max_steps=4)
    assert train(tmp_path / "run", max_steps=4).code == 0
    logged = [json.loads(line)["train_loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    training = Training.open(flags)
    losses = []
    for _ in range(4):
        training.step()
        losses.append(training.loss.item())
    assert losses == pytest.approx(logged, rel=2e-6)


def test_random_tokens_are_what_the_trainer_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash and the range of the ids are checked on opening; here a block of ids comes two and a half times."""
    monkeypatch.setattr("benchmarks.measure.BLOCK_TOKENS", 1_000)
    folder = write_random_tokens(tmp_path / "tokens", 2_500, 300)
    case = Case(1, 16, 1, 8, 300, 2, max_steps=9)
    measured = measure("ours", case, str(folder), "cpu", None, seconds=0.01, started=0.0)
    tokens = np.fromfile(folder / "tokens.bin", "<u2")
    assert len(tokens) == 2_500 and tokens.max() < 300 and len(np.unique(tokens)) > 250
    assert (tokens[:500] == tokens[2_000:]).all() and (tokens[:1_000] == tokens[1_000:2_000]).all()
    assert measured["parameters"] == 300 * 16 * 2 + 8 * 16 + 12 * 16 * 16 + (4 + 9) * 16 + 2 * 16
    assert measured["tokens_per_second"] == pytest.approx(16 / measured["ms_per_step"] * 1000)


@pytest.mark.parametrize(
    ("step_seconds", "seconds", "timed"),
    [(10.0, 4.0, 1), (4.0, 4.0, 1), (3.0, 4.0, 3), (0.5, 4.0, 8), (0.01, 4.0, 400)],
)
def test_a_measurement_takes_the_time_it_is_given(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, seconds: float, timed: int
) -> None:
    """As many steps as fit, at least three unless one alone takes longer; those before them do not count."""
    clock, calls, waits = 0.0, 0, 0

    def step() -> None:
        nonlocal clock, calls
        clock += step_seconds
        calls += 1

    def synchronize() -> None:
        nonlocal waits
        waits += 1

    monkeypatch.setattr(benchmarks.workload.time, "perf_counter", lambda: clock)
    mean, steps = time_steps(step, synchronize, seconds)
    assert steps == timed and mean == pytest.approx(step_seconds)
    assert waits == 6  # before and after the first call, the warm-up and the measurement, never in between
    assert timed < calls <= 1 + 1.3 * timed


def test_the_command_on_record_says_what_limited_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CPU_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmarks/peers.py", "--rounds", "1"])
    assert this_command() == "python benchmarks/peers.py --rounds 1"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert this_command() == "ATEN_CPU_CAPABILITY=avx2 python benchmarks/peers.py --rounds 1"


def test_what_is_measured_is_told_at_once() -> None:
    """In turn; what fails is told as that, and is in no report."""
    told: list[dict] = []
    failures: list[tuple[str, str]] = []
    commands = {
        "a": [sys.executable, "-S", "-c", "print('not this'); print('{\"x\": 1}')"],
        "b": [sys.executable, "-S", "-c", "raise SystemExit('no')"],
        "c": [sys.executable, "-S", "-c", "print('{\"x\": 3}')"],
    }
    measured = measure_in_turn(
        commands,
        2,
        lambda name, reason: failures.append((name, reason)),
        lambda so_far: told.append(json.loads(json.dumps(so_far))),
    )
    assert measured == told[-1] == {"a": [{"x": 1}, {"x": 1}], "c": [{"x": 3}, {"x": 3}]}
    assert told[:2] == [{"a": [{"x": 1}]}, {"a": [{"x": 1}], "c": [{"x": 3}]}] and len(told) == 4
    assert failures == [("b", "no")]


@pytest.mark.parametrize(
    ("device", "cuda", "kind"),
    [
        ("NVIDIA H200", True, "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", True, "nvidia-a100-sxm4-80gb"),
        ("Tesla T4", True, "tesla-t4"),
        ("Intel(R) Xeon(R) Processor (2 cores)", False, "cpu-2core-xeon"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz (2 cores)", False, "cpu-2core-xeon"),
        ("AMD EPYC 7B12 (2 cores)", False, "cpu-2core-epyc-7b12"),
    ],
)
def test_results_are_named_after_the_kind_of_machine(device: str, cuda: bool, kind: str) -> None:
    assert machine_kind({"device": device, "cuda": cuda, "cores": 2}) == kind
