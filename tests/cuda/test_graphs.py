"""Steps captured as CUDA graphs: the losses of uncaptured steps, without waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.workload import TimedRun
from tests.cuda.helpers import opened, waiting_forbidden
from tests.helpers import write_chat_tokens
from training.evaluate import validation_loss

pytestmark = pytest.mark.cuda
MODERN = "--position rope --qk_norm --norm rmsnorm --embed_norm --bias false --activation swiglu --zero_init"


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokens(tmp_path_factory.mktemp("chats"))


def losses(training: TimedRun, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        training.step()
        found.append(training.loss.item())
    return [*found, validation_loss(training)]


@pytest.mark.parametrize("choice", ["off", "on"])
@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize(
    "flags",
    [
        "--dropout 0.1",
        "--micro_batch_size 3 --dropout 0",
        "--precision fp16",
        f"{MODERN} --optimizer muon --dropout 0.1",
        f"{MODERN} --optimizer muon --precision fp16 --micro_batch_size 4",
        "--placement ram",
    ],
)
def test_recorded_steps_have_the_losses_of_uncaptured_ones(
    tokens: Path, chats: Path, kind: str, flags: str, choice: str
) -> None:
    """Draws of dropout included: the first loss is the same."""
    common = [*flags.split(), "--compile", choice, "--warmup_steps", "3"]
    folder = tokens if kind == "text" else chats
    plain = opened(folder, *common, "--graphs", "off")
    captured = opened(folder, *common)
    assert captured.captured is not None and plain.captured is None
    expected, ours = losses(plain, 20), losses(captured, 20)
    assert ours[0] == pytest.approx(expected[0], rel=1e-6)
    assert ours == pytest.approx(expected, rel=5e-3)
    assert captured.skips.tolist() == plain.skips.tolist()


def test_recorded_steps_wait_for_nothing_and_take_no_more_memory(tokens: Path) -> None:
    training = opened(tokens, "--compile", "off", "--dropout", "0.1", "--gradient_accumulation_steps", "2")
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    with waiting_forbidden():
        for _ in range(20):
            training.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held


def test_an_embedding_of_many_tokens_is_recorded_uncompiled(tokens: Path) -> None:
    """Its backward pass takes another way from 3,072 tokens on."""
    flags = ("--compile", "off", "--batch_size", "128", "--dropout", "0")
    expected, ours = (losses(opened(tokens, *flags, *more), 5) for more in (("--graphs", "off"), ()))
    assert ours == pytest.approx(expected, rel=2e-3)
