"""Numbers that go wrong: an update that is not finite is skipped, counted, and too many of them end the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import open_checkpoint
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import call_before, snapshot
from tests.training.helpers import final_weights, measured, steps_of
from training import step as step_module
from training.config import Config
from training.data import TokenData
from training.optimizer import build_optimizer, gradient_norm, update_parameters
from training.records import read_metrics


def spoiled_gradients(patch: pytest.MonkeyPatch, steps: range) -> None:
    """One number of the gradient is not finite in these steps: what an overflow somewhere in the model leaves."""

    def spoiled(optimizer: Any) -> torch.Tensor:
        if drawn[-1] // 8 in steps:
            optimizer.param_groups[0]["params"][0].grad[0, 0] = float("nan" if drawn[-1] % 16 else "inf")
        return gradient_norm(optimizer)

    drawn: list[int] = []
    call_before(patch, TokenData, "batch", lambda data, sequences_seen, *_: drawn.append(sequences_seen))
    patch.setattr(step_module, "gradient_norm", spoiled)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_a_skipped_update_leaves_weights_and_moments_as_they_were(optimizer: str, spoiled: float) -> None:
    torch.manual_seed(0)
    model = TransformerLanguageModel(ModelConfig(13, embed_dim=16, num_heads=2, num_layers=2, max_seq_len=8))
    ours = build_optimizer(model, Config(optimizer=optimizer))
    tokens = torch.arange(16).view(2, 8) % 13

    def backward() -> torch.Tensor:
        model.zero_grad()
        model(tokens, tokens).backward()
        return torch.zeros(())

    def state() -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = [*model.state_dict().values()]
        tensors += [value for values in ours.state_dict()["state"].values() for value in values.values()]
        return [tensor.clone() for tensor in tensors]

    norm = torch.ones(())
    update_parameters(ours, norm, 1.0, backward())
    before = state()
    backward()
    for parameter in model.parameters():
        parameter.grad.view(-1)[0] = spoiled
    update_parameters(ours, torch.tensor(spoiled), 1.0, torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    update_parameters(ours, norm, 1.0, backward())  # and the next one is taken
    assert not any(torch.equal(a, b) for a, b in zip(before, state(), strict=True) if a.numel() > 100)


def test_a_step_that_is_not_finite_is_skipped_counted_and_reported(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spoiled_gradients(patch, range(8, 11))
        result = train(tmp_path / "run")
    assert result.code == 0
    assert len(re.findall(r"Warning: \d+ updates skipped", result.out)) == 3 and "(3 in this run)" in result.out
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert [row["step"] for row in rows if "grad_norm" not in row] == [9, 10, 11]
    assert [row.get("skipped_updates", 0) for row in rows] == [0] * 8 + [1, 2, 3] + [3] * 13
    more = train(tmp_path / "run", max_steps=26)
    assert more.code == 0 and "Warning" not in more.out and read_metrics(tmp_path / "run")[-1]["skipped_updates"] == 3


@pytest.mark.parametrize("log_interval", [1, 0, 7])
def test_five_in_a_row_stop_the_run_with_remedies_and_the_last_good_checkpoint(
    log_interval: int,
    train: Callable,
    interrupt: Callable,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints are due in the middle of them, and are not made."""
    flags = {"log_interval": log_interval, "checkpoint_steps": 1}
    interrupt(tmp_path / "run", after=13, **flags)
    before = snapshot(tmp_path / "run" / "checkpoints")
    with monkeypatch.context() as patch:
        spoiled_gradients(patch, range(13, 24))
        result = train(tmp_path / "run", **flags)
    assert result.code == 2
    assert "step 18: 5 updates in a row" in result.err
    assert all(flag in result.err for flag in ("--learning_rate", "--warmup_steps", "--grad_clip", "--precision fp32"))
    assert snapshot(tmp_path / "run" / "checkpoints") == before
    again = train(tmp_path / "run", log_interval=1, checkpoint_steps=6)
    assert again.code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    if log_interval == 1:
        assert measured(tmp_path / "run") == measured(unbroken)


def test_the_best_weights_of_a_run_that_fails_are_on_disk(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spoiled_gradients(patch, range(13, 24))
        assert train(tmp_path / "run", eval_interval=2, checkpoint_steps=0, checkpoint_interval=0).code == 2
    rows = [row for row in read_metrics(tmp_path / "run") if "val_loss" in row]
    best = open_checkpoint(tmp_path / "run" / "best").training_state()
    assert best["step"] == min(rows, key=lambda row: row["val_loss"])["step"] > 8


def test_a_checkpoint_that_is_due_after_a_skipped_update_waits_for_a_sound_step(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spoiled_gradients(patch, range(16, 19))  # of steps 17 to 19; one is due after 18
        assert train(tmp_path / "run", max_steps=21, checkpoint_steps=9, eval_interval=0).code == 0
    assert steps_of(tmp_path / "run") == [21, 20]
