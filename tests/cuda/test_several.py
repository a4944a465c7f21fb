"""Two GPUs over NCCL: the losses of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cuda.helpers import DEVICE, losses_of
from tests.training.launching import trained

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL has no two processes on one"),
]


@pytest.mark.parametrize("choice", ["off", "on"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_gpus_have_the_losses_of_one(
    tmp_path: Path, train: Callable, train_flags: Callable, optimizer: str, choice: str
) -> None:
    flags = {"device": DEVICE, "precision": "fp32", "dropout": 0, "optimizer": optimizer, "compile": choice}
    assert train(tmp_path / "one", **flags).code == 0
    processes = trained(2, *train_flags(tmp_path / "two", **flags))
    told = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-2)
