"""A tracker shows what metrics.jsonl holds, as one run after a kill; and a training does not end because it cannot."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import without_packages
from training.records import read_metrics

PROMPTS = '{"prompt": "the cat", "answer": " sat"}\n'


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    reader.Reload()
    assert {"config/text_summary", "answers/text_summary"} <= set(reader.Tags()["tensors"])
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    for name, value in (("TRACKIO_DIR", str(tmp_path / "trackio")), ("WANDB_MODE", "offline"), ("WANDB_SILENT", "1")):
        monkeypatch.setenv(name, value)
    return {"eval_prompts": tmp_path / "prompts.jsonl"}


@pytest.mark.extras("tensorboard")
def test_in_tensorboard_a_run_that_was_cut_off_has_every_step_once(
    interrupt: Callable, train: Callable, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """The steps after the last checkpoint are taken twice, and shown once."""
    run = tmp_path / "run"
    interrupt(run, after=16, tracker="tensorboard", **flags)
    assert train(run, tracker="tensorboard", **flags).code == 0
    shown, rows = scalars(run), read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 25))
    names = {key for row in rows for key in row} - {"step"}
    assert set(shown) == names >= {"train_loss", "val_loss", "lr", "tokens_per_second", "elapsed_seconds"}
    for name in names:
        expected = [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows if name in row]
        assert shown[name] == expected


@pytest.mark.extras("trackio")
def test_in_trackio_a_killed_run_is_one_run(
    interrupt: Callable, train: Callable, tmp_path: Path, flags: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    interrupt(run, after=16, tracker="trackio", **flags)
    assert train(run, tracker="trackio", **flags).code == 0
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        logged = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    assert len({name for name, _, _ in logged}) == 1 and json.loads(config)["max_steps"] == 24
    trained = [step for _, step, values in logged if b"train_loss" in values]
    assert trained == sorted(set(trained)), "a step that is taken again is shown once"
    losses = {step: json.loads(values)["train_loss"] for _, step, values in logged if b"train_loss" in values}
    assert losses == {row["step"]: pytest.approx(row["train_loss"], rel=1e-5) for row in read_metrics(run)}
    assert any(b'"the cat"' in values for _, _, values in logged), "answers"


@pytest.mark.extras("wandb")
def test_in_wandb_a_killed_run_is_one_run(
    interrupt: Callable, train: Callable, tmp_path: Path, flags: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    interrupt(run, after=16, tracker="wandb", **flags)
    assert train(run, tracker="wandb", **flags).code == 0
    run_id = json.loads(next(run.glob("checkpoints/*/training_state.json")).read_text())["run_id"]
    assert len(list(run.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))) == 2
    assert list(run.glob("wandb/offline-run-*/files/media/table/answers_*"))
    sys.modules["wandb"].teardown()  # its service, a process beside this one


def test_a_later_failure_is_reported_once_and_training_continues(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    fake = SimpleNamespace(init=lambda **_: None, log=full, Table=dict, finish=full, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trackio", fake)
    result = train(tmp_path / "run", tracker="trackio")
    assert result.code == 0 and (result.out + result.err).count("trackio failed ([Errno 28] No space left") == 1
    assert len(read_metrics(tmp_path / "run")) == 24


def test_without_the_package_nothing_begins(train: Callable, tmp_path: Path) -> None:
    with without_packages("wandb"):
        result = train(tmp_path / "run", tracker="wandb")
    assert result.code == 2 and "pip install wandb" in result.err
    assert not (tmp_path / "run").exists()
