"""A step on a GPU: the numbers of the CPU whatever the shapes, no waiting, nothing compiled twice, no update made of
numbers that are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import workload
from benchmarks.workload import TimedRun
from model import TransformerLanguageModel
from tests.cuda.helpers import DEVICE, opened, waiting_forbidden
from tests.helpers import write_chat_tokens
from training.evaluate import validation_loss
from training.step import train_step

pytestmark = pytest.mark.cuda


def test_logits_are_bf16_and_gradients_fp32(tokens: Path) -> None:
    training = opened(tokens, "--compile", "off")
    if training.hardware.precision != "bf16":
        pytest.skip("a GPU without bf16")
    inputs, targets = training.data.batch(0, 4)
    with training.hardware.autocast():
        assert training.model(inputs).dtype == torch.bfloat16
        loss = training.model(inputs, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in training.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_fp32_is_fp32_during_a_training_and_after_it(tokens: Path, precision: str) -> None:
    """TF32 would have errors of 1e-3, whatever the process allowed before."""
    torch.set_float32_matmul_precision("high")
    training = opened(tokens, "--compile", "off", "--precision", precision)
    training.step()
    one, other = (torch.randn(512, 512, device=DEVICE) for _ in range(2))
    exact = one.double() @ other.double()
    assert ((one @ other).double() - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("precision", ["fp32", "auto"])
@pytest.mark.parametrize(("length", "choice"), [(65, "off"), (100, "off"), (100, "on"), (129, "off")])
def test_a_length_that_is_no_multiple_of_64_has_the_gradients_of_the_cpu(
    tokens: Path, length: int, choice: str, precision: str
) -> None:
    """Heads of 64, for which there are kernels in half precision that work on blocks of 64 or 128 positions."""
    shape = ("--max_seq_len", str(length), "--embed_dim", "128", "--batch_size", "4", "--dropout", "0")
    training = opened(tokens, *shape, "--compile", choice, "--precision", precision)
    assert training.hardware.compiles == (choice == "on"), "the model was not compiled"
    reference = TransformerLanguageModel(training.model.config)
    reference.load_state_dict(training.model.state_dict())
    inputs, targets = training.data.batch(0, 4)
    expected = reference(inputs.cpu(), targets.cpu())
    expected.backward()
    with training.hardware.autocast():
        loss = training.step_model(inputs, targets)
    loss.backward()
    exact = training.hardware.precision == "fp32"
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if exact else 2e-3)
    for (name, ours), theirs in zip(training.model.named_parameters(), reference.parameters(), strict=True):
        error = (ours.grad.cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert error < (1e-4 if exact else 0.03), name


@pytest.mark.parametrize("choice", ["on", "off"])
def test_micro_batches_that_are_filled_up_are_a_whole_batch(tokens: Path, choice: str) -> None:
    """8 sequences in threes: the last micro-batch holds a row that does not count."""
    flags = ["--compile", choice, "--precision", "fp32", "--dropout", "0"]
    whole, parts = opened(tokens, *flags), opened(tokens, *flags, "--micro_batch_size", "3")
    for _ in range(3):
        whole.step()
        parts.step()
        assert parts.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()


def test_placements_give_the_same_batches(tokens: Path) -> None:
    placed = {place: opened(tokens, "--placement", place, "--compile", "off").data for place in ("gpu", "ram", "mmap")}
    assert placed["gpu"].tokens.is_cuda and not placed["ram"].tokens.is_cuda
    windows = placed["gpu"].windows
    for seen in (0, 8, windows - 3, windows + 5):  # across the end of an epoch too
        expected = placed["mmap"].batch(seen, 8)
        for place in ("gpu", "ram"):
            batch = placed[place].batch(seen, 8)
            assert all(tensor.is_cuda for tensor in batch)
            assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True)), place


@pytest.mark.parametrize(
    "flags",
    [
        "--placement gpu --compile on",
        "--placement gpu --compile off",
        "--placement ram --compile on",
        "--placement ram --compile off",
        "--precision fp16 --compile on",
        "--optimizer muon --compile off",
        "--optimizer muon --precision fp16 --compile off",
    ],
)
def test_a_step_that_does_not_report_waits_for_nothing(tokens: Path, flags: str) -> None:
    """This includes fp16, where only the device knows whether a gradient overflowed."""
    training = opened(tokens, *flags.split(), "--gradient_accumulation_steps", "2")
    for _ in range(3):
        training.step()
    with waiting_forbidden():
        for _ in range(3):
            training.step()
    assert torch.isfinite(training.loss)


def test_nothing_is_compiled_after_the_first_evaluation(tokens: Path) -> None:
    """One shape for training, one for evaluation: not for a last batch that is not full, nor for another epoch."""
    training = opened(tokens, "--compile", "on", "--gradient_accumulation_steps", "2", "--eval_batches", "0")
    data, config = training.data, training.config
    assert training.hardware.compiles, "the model was not compiled"
    assert data.val_windows % training.rows_at_once, "the last batch should be a part of one"

    def evaluate() -> float:
        return validation_loss(training)

    training.step()
    evaluate()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(data.windows // config.sequences_per_step + 2):
            training.step()
        assert evaluate() > 0
        training.step()


either_optimizer = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def state_of(training: TimedRun) -> list[torch.Tensor]:
    """Copies of the weights and of all that the optimizer holds."""
    tensors = [*training.model.state_dict().values()]
    held = training.optimizer.state_dict()["state"]
    tensors += [tensor for values in held.values() for tensor in values.values()]
    return [tensor.clone() for tensor in tensors]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Record for each step, on the device, 1.0 if its update was skipped, else 0.0."""
    told = []

    def noted(run: TimedRun) -> tuple[torch.Tensor, torch.Tensor]:
        before = run.skips[0].clone()
        result = train_step(run)
        told.append(run.skips[0] - before)
        return result

    monkeypatch.setattr(workload, "train_step", noted)
    return told


@either_optimizer
def test_an_overflow_in_fp16_skips_the_update_and_halves_the_scale(
    tokens: Path, optimizer: str, skipped: list[torch.Tensor]
) -> None:
    """A scale at which every gradient overflows comes down by halves until they do not."""
    training = opened(tokens, "--precision", "fp16", "--compile", "off", "--optimizer", optimizer)
    training.step()
    scale = 2.0**32
    training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": scale})
    while len(skipped) < 25 and (len(skipped) == 1 or skipped[-1]):
        before, scale = state_of(training), training.scaler.get_scale()
        training.step()
        assert torch.isfinite(training.loss)
        is_skipped = bool(skipped[-1])
        assert same(before, state_of(training)) == is_skipped
        assert training.scaler.get_scale() == (scale / 2 if is_skipped else scale)
    assert len(skipped) > 4 and not skipped[-1]
    for _ in range(10):
        training.step()
    assert not any(skipped[-10:]) and torch.isfinite(training.loss)


@either_optimizer
def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were(
    tokens: Path, optimizer: str, skipped: list[torch.Tensor]
) -> None:
    """The automatic precision is bf16, which has no gradient scaler to notice it."""
    training = opened(tokens, "--compile", "off", "--graphs", "off", "--optimizer", optimizer)
    training.step()
    before = state_of(training)
    spoiled = next(training.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    training.step()
    spoiled.remove()
    assert same(before, state_of(training))
    training.step()
    assert not same(before, state_of(training))
    assert torch.stack(skipped).tolist() == [0.0, 1.0, 0.0]
    assert all(torch.isfinite(tensor).all() for tensor in state_of(training))


@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_packed_conversations_have_the_gradients_of_the_cpu(tmp_path: Path, precision: str) -> None:
    """Several conversations in a row, each with a mask of its own, and grouped keys and values."""
    flags = ["--compile", "off", "--precision", precision, "--dropout", "0", "--max_seq_len", "64"]
    training = opened(write_chat_tokens(tmp_path, 200), *flags, "--position", "rope", "--num_heads", "4")
    shape = dataclasses.replace(training.model.config, num_kv_heads=2)
    reference = TransformerLanguageModel(shape)
    model = TransformerLanguageModel(shape).to(DEVICE)
    model.load_state_dict(reference.state_dict())
    batch = training.data.batch(0, 4)
    assert len(batch) == 3, "no column says where a conversation starts"
    expected = reference(*(part.cpu() for part in batch))
    expected.backward()
    with training.hardware.autocast():
        loss = model(*batch)
    loss.backward()
    exact = training.hardware.precision == "fp32"
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if exact else 2e-3)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = (ours.grad.cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert error < (1e-4 if exact else 0.03), name
