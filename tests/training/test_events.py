"""TensorBoard reads what metrics.jsonl holds, each step once; and a training does not end because it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import without_packages
from training import records, report
from training.records import read_metrics

needs_tensorboard = pytest.mark.extras("tensorboard")


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def require_the_rows(run_dir: Path) -> None:
    rows = read_metrics(run_dir)
    names = {key for row in rows for key in row} - {"step"}
    shown = scalars(run_dir)
    assert set(shown) == names >= {"train_loss", "val_loss", "lr", "tokens_per_second", "elapsed_seconds"}
    for name in names:
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert [step for step, _ in shown[name]] == [step for step, _ in expected]
        values = [value for _, value in expected]
        assert [value for _, value in shown[name]] == pytest.approx(values, rel=1e-5)  # rounded alike, stored as floats


@needs_tensorboard
def test_a_run_that_was_cut_off_has_every_step_once(interrupt: Callable, train: Callable, tmp_path: Path) -> None:
    """The steps after the last checkpoint are taken twice, and shown once."""
    interrupt(tmp_path / "run", after=16, tensorboard="true")
    assert [step for step, _ in scalars(tmp_path / "run")["train_loss"]] == list(range(1, 17))
    assert train(tmp_path / "run", tensorboard="true").code == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, 25))
    require_the_rows(tmp_path / "run")


@needs_tensorboard
def test_rows_without_an_event_file_are_written_anew(train: Callable, copy_of: Path) -> None:
    """Those of before it was asked for, or of another machine."""
    assert not list(copy_of.glob("events*"))
    assert train(copy_of, max_steps=30, tensorboard="true").code == 0
    assert [row["step"] for row in read_metrics(copy_of)] == list(range(1, 31))
    require_the_rows(copy_of)


@needs_tensorboard
def test_a_full_disk_is_told_once_and_the_training_goes_on(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write_event", full)
    monkeypatch.setattr(report, "write_event", full)
    result = train(tmp_path / "run", tensorboard="true")
    told = "TensorBoard's events cannot be written ([Errno 28] No space left on device); the training goes on without"
    assert result.code == 0 and (result.out + result.err).count(told) == 1
    assert len(read_metrics(tmp_path / "run")) == 24


def test_without_the_package_nothing_begins(train: Callable, tmp_path: Path) -> None:
    with without_packages("tensorboard"):
        result = train(tmp_path / "run", tensorboard="true")
    assert result.code == 2 and "--tensorboard needs the package tensorboard: pip install tensorboard" in result.err
    assert not (tmp_path / "run").exists()
