"""Captured steps give the numbers of steps that are not captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.measure import write_random_tokens
from benchmarks.workload import TimedRun
from tests.helpers import write_chat_tokens
from tests.tape import TapeCapture
from training.captured import CapturedStep
from training.evaluate import validation_loss

SHAPE = (
    "--num_layers 2 --embed_dim 64 --num_heads 2 --max_seq_len 32 --batch_size 8 --device cpu --compile off "
    "--max_steps 100 --learning_rate 0.003 --warmup_steps 3 --eval_interval 5 --threads 1"
)
MODERN = "--position rope --qk_norm --norm rmsnorm --embed_norm --bias false --activation swiglu --zero_init"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    return {"text": write_random_tokens(folder / "text", 20_000, 300), "chat": write_chat_tokens(folder)}


class Rounded(TimedRun):
    """A training whose learning rate is fp32, as it is in a tensor."""

    @property
    def learning_rate(self) -> float:
        return torch.tensor(super().learning_rate, dtype=torch.float32).item()


def trained(folder: Path, flags: str, captured: bool, scaled: bool) -> tuple[TimedRun, list[float]]:
    """Six steps and an evaluation. Returns the training and its losses."""
    training = Rounded.open([*SHAPE.split(), "--data_dir", str(folder), *flags.split()])
    if scaled:
        training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    if captured:
        training.captured = CapturedStep(training, TapeCapture())
    losses = []
    for _ in range(6):
        training.step()
        losses.append(training.loss.item())
    return training, [*losses, validation_loss(training)]


def test_a_gradient_that_is_not_finite_changes_nothing(folders: dict[str, Path]) -> None:
    training = Rounded.open([*SHAPE.split(), "--data_dir", str(folders["text"]), "--optimizer", "muon"])
    training.captured = captured = CapturedStep(training, TapeCapture())
    training.step()
    before, replay = [tensor.clone() for tensor in tensors(training)[:-1]], captured.replay_first

    def spoiled() -> None:
        replay()
        captured.gradients[0].fill_(torch.nan)

    captured.replay_first = spoiled
    training.step()
    captured.replay_first = replay
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(training)[:-1], strict=True))
    assert training.skips.tolist() == [1, 1, 1]
    training.step()
    assert training.skips.tolist() == [1, 0, 1] and torch.isfinite(training.loss)


def tensors(training: TimedRun) -> list[torch.Tensor]:
    return [*training.model.parameters(), *training.optimizer.tensors().values(), training.skips]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("text", ""),
        ("text", "--dropout 0.1"),
        ("text", "--micro_batch_size 3 --dropout 0.1"),
        ("text", "--precision bf16"),
        ("text", f"{MODERN} --optimizer muon"),
        ("text", f"{MODERN} --optimizer muon --grad_clip 0 --micro_batch_size 4"),
        ("chat", "--micro_batch_size 3"),
        ("chat", f"{MODERN} --optimizer muon"),
    ],
)
def test_recorded_steps_have_the_numbers_of_uncaptured_ones(
    folders: dict[str, Path], kind: str, flags: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW is equal to the bit; Muon computes with the learning rate in fp32."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # in bf16, Muon's iteration would make much of a rounding
    plain, expected = trained(folders[kind], flags, False, scaled)
    captured, losses = trained(folders[kind], flags, True, scaled)
    exact = "muon" not in flags
    assert losses == (expected if exact else pytest.approx(expected, rel=1e-5))
    assert captured.scaler.state_dict() == plain.scaler.state_dict()
    for ours, theirs in zip(tensors(captured), tensors(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if exact else 1e-5)
