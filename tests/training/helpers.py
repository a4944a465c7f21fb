"""What the tests of a run share: a process that dies at a given step, and what a run folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import step_folders
from tests.helpers import Killed
from training import loop
from training.checkpoints.run import Saver
from training.reports.records import read_metrics

TIMES = {"ms_per_step", "tokens_per_second", "peak_memory_gb", "elapsed_seconds"}  # what differs between two runs


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Do `action` in the middle of the step that follows `step` finished ones."""
    original = loop.accumulate

    def accumulate(*args: Any) -> torch.Tensor:
        result = original(*args)
        if args[2] == step:
            action()
        return result

    patch.setattr(loop, "accumulate", accumulate)


def save_at_once(patch: pytest.MonkeyPatch) -> None:
    """Each save is on the disk before the next step begins, however busy the machine is."""
    original = Saver.save

    def save(saver: Saver, *args: Any) -> None:
        original(saver, *args)
        saver.finish()

    patch.setattr(Saver, "save", save)


def die() -> None:
    raise Killed


def steps_of(run_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in step_folders(run_dir / "checkpoints")]


def final_weights(run_dir: Path, step: int = 24) -> bytes:
    return (run_dir / "checkpoints" / f"step_{step:08d}" / "model.safetensors").read_bytes()


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the clock's fields."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(run_dir)]
