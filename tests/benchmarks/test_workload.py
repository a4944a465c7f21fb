"""The benchmark scripts measure what the trainer does: its steps, on tokens it accepts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contestants import Case, measure
from benchmarks.measure import measure_in_turn, write_random_tokens
from benchmarks.workload import Training


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
