"""Shared by the tests of runs: a process that dies at a given step, and the files of a run folder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import train_colab_mmap as script
from common.checkpoint import step_folders, step_of
from tests.helpers import Killed
from training import saver
from training.records import read_metrics
from training.run import Run

TIMES = {"ms_per_step", "tokens_per_second", "peak_memory_gb", "elapsed_seconds"}  # what differs between two runs


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Do `action` in the middle of the step that follows `step` finished ones."""
    original = script.forward_backward

    def forward_backward(run: Run) -> torch.Tensor:
        loss = original(run)
        if run.state.step == step:
            action()
        return loss

    patch.setattr(script, "forward_backward", forward_backward)


class AtOnce(ThreadPoolExecutor):
    """Each save is on the disk before the next step begins, however busy the machine is."""

    def submit(self, *args: Any, **options: Any) -> Future:
        future = super().submit(*args, **options)
        wait([future])
        return future


def save_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saver, "ThreadPoolExecutor", AtOnce)


def die() -> None:
    raise Killed


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a run folder or a mirror."""
    return [step_of(path) for path in step_folders(folder / "checkpoints", folder)]


def checkpoint_of(folder: Path, step: int = 24) -> Path:
    """Return the checkpoint of a step in a run folder or a mirror."""
    return next(path for path in step_folders(folder / "checkpoints", folder) if step_of(path) == step)


def final_weights(folder: Path, step: int = 24) -> bytes:
    return (checkpoint_of(folder, step) / "model.safetensors").read_bytes()


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the clock's fields."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(run_dir)]
