"""Shared by the GPU tests: the flags of a small training, and readers of its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.workload import TimedRun
from training import hardware
from training.records import read_metrics

DEVICE = "cuda"
SHAPE = ["--num_layers", "2", "--embed_dim", "64", "--num_heads", "2", "--max_seq_len", "32", "--batch_size", "8"]
ON_GPU = ["--device", DEVICE, "--max_steps", "100", "--learning_rate", "0.003"]


def opened(tokens: Path, *flags: str) -> TimedRun:
    """A small training on the GPU, as the trainer would begin it; `flags` may change any of its own."""
    return TimedRun.open([*SHAPE, *ON_GPU, "--data_dir", str(tokens), *flags])


def losses_of(run_dir: Path) -> list[float]:
    return [row["train_loss"] for row in read_metrics(run_dir)]


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Let the allocator take at most `limit` bytes of the GPU, and the trainer set no limit of its own."""
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardware, "spills_to_host", lambda: False)
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
