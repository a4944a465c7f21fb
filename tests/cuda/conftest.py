"""Each test begins on a device that knows nothing of the others."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from benchmarks.random_tokens import write_random_tokens


@pytest.fixture(autouse=True)
def fresh_device() -> None:
    """No compiled code or memory of another test."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random tokens. Not to be changed by a test."""
    return write_random_tokens(tmp_path_factory.mktemp("tokens") / "small", 20_000, 300)
