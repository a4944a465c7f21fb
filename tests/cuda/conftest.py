"""Each test begins on a device that knows nothing of the others."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from benchmarks.measure import write_random_tokens


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests here that compile go to the end: they take most of the time, so a limit cuts off the fewest."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent == here and bool(re.search(r"compile on|compiled|\bon\b", item.name)))


@pytest.fixture(autouse=True)
def fresh_device() -> None:
    """No compiled code or memory of another test."""
    torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # they stay, and with them whatever large block they were cut from
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random tokens. Not to be changed by a test."""
    return write_random_tokens(tmp_path_factory.mktemp("tokens") / "small", 20_000, 300)
