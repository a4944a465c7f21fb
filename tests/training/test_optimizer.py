"""The optimizer step: AdamW as PyTorch defines it, and an update that does not depend on how its batch is sliced."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import run_of
from tokenization.metadata import TokenMetadata
from training import optimizer as optimizer_module
from training.config import Config
from training.data import TokenData, layout_of_text
from training.optimizer import (
    Optimizer,
    apply_hyperparameters,
    build_optimizer,
    gradient_norm,
    orthogonalize,
    update_parameters,
)
from training.step import train_step

VOCAB_SIZE = 23
# Without biases: the gradient of a key's bias is zero but for rounding, which Adam would scale up to a whole step.
CONFIG = Config(
    embed_dim=16, num_heads=2, num_layers=2, max_seq_len=8, bias=False, batch_size=6, gradient_accumulation_steps=2,
    learning_rate=1e-2, muon_learning_rate=0.2, use_lr_scheduler="constant",
)  # fmt: skip


def make_data(config: Config) -> TokenData:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 700).astype(np.uint16)
    metadata = TokenMetadata(VOCAB_SIZE, 700, 600, dtype="uint16")
    return TokenData(
        metadata, tokens, None, b"{}", layout_of_text(metadata, config.max_seq_len), config, torch.device("cpu"), "ram"
    )


def make_model(**values: Any) -> TransformerLanguageModel:
    torch.manual_seed(1)
    config = dataclasses.replace(CONFIG, **values)
    model = TransformerLanguageModel(config.shape(VOCAB_SIZE))
    with torch.no_grad():  # with GPT-2's small weights a tiny model's gradients are too even to tell much
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(
    config: Config, steps: int = 3, first_step: int = 0, seen: int | None = None
) -> tuple[torch.Tensor, list[float], list[float]]:
    """Weights after some steps, and each step's loss and gradient norm."""
    model = make_model(dropout=config.dropout)
    run = run_of(model, make_data(config), config)
    losses, norms = [], []
    for step in range(first_step, first_step + steps):
        run.state.step, run.state.sequences_seen = step, step * config.sequences_per_step if seen is None else seen
        loss, norm = train_step(run)
        assert all(parameter.grad is None for parameter in model.parameters())
        losses.append(loss.item())
        norms.append(norm.item())
    return weights(model), losses, norms


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm())


# AdamW


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_matrices_decay_and_vectors_do_not_and_none_is_forgotten(bias: bool, tie_embeddings: bool) -> None:
    model = TransformerLanguageModel(ModelConfig(VOCAB_SIZE, 16, 2, 2, bias=bias, tie_embeddings=tie_embeddings))
    optimizer = build_optimizer(model, dataclasses.replace(CONFIG, weight_decay=0.3))
    decay_of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay_of)  # none twice
    for name, parameter in model.named_parameters():
        is_vector = name.endswith(".bias") or "norm" in name or name.startswith("ln_f")
        assert decay_of[id(parameter)] == (0.0 if is_vector else 0.3), name


def test_updates_are_those_of_plain_adamw() -> None:
    """Against PyTorch's one-tensor-at-a-time implementation, with a rate that changes."""
    config = dataclasses.replace(CONFIG, weight_decay=0.2, beta2=0.9)
    ours = make_model(bias=True)
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, config)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.9), foreach=False, fused=False)
    for step in range(5):
        lr = 1e-2 / (step + 1)
        apply_hyperparameters(optimizer, lr, config)
        for group in reference.param_groups:
            group["lr"] = lr
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
    assert relative_distance(weights(ours), weights(make_model(bias=True))) > 1e-2


def test_hyperparameters_of_the_configuration_are_those_of_each_step() -> None:
    old = dataclasses.replace(CONFIG, weight_decay=0.5, beta2=0.6, learning_rate=1.0)
    optimizer = build_optimizer(make_model(bias=True), old)
    apply_hyperparameters(optimizer, 3e-4, CONFIG)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-4, 3e-4]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, CONFIG.beta2)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [CONFIG.weight_decay, 0.0]


# Clipping


def clipped(model: TransformerLanguageModel, grad_clip: float) -> torch.Tensor:
    """An update, for what it does to the gradients. Returns their norm before it."""
    optimizer = build_optimizer(model, CONFIG)
    norm = gradient_norm(optimizer)
    update_parameters(optimizer, norm, grad_clip, torch.zeros(()))
    return norm


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("grad_clip", [1e-6, 0.01, 1e6])
def test_clipping_in_the_update_itself_gives_the_weights_of_clipping_before_it(
    grad_clip: float, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CONFIG, grad_clip=grad_clip, optimizer=optimizer)
    steps = 3 if optimizer == "adamw" else 1  # Muon's arithmetic in bf16 makes more of the last digit with each
    before, losses, norms = train(config, steps=steps)
    monkeypatch.setattr(optimizer_module, "folds_clipping", lambda device: True)
    folded, same_losses, same_norms = train(config, steps=steps)
    assert same_losses == pytest.approx(losses, rel=1e-5) and same_norms == pytest.approx(norms, rel=1e-4)
    assert relative_distance(before, folded) < 1e-5


@pytest.mark.parametrize("config", [CONFIG, dataclasses.replace(CONFIG, optimizer="muon")])
def test_the_host_skips_if_the_kernel_cannot(config: Config) -> None:
    model, other = make_model(), make_model()
    start = weights(model)
    for each, skip in ((model, 1.0), (other, 0.0)):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = build_optimizer(each, config)
        for group in optimizer.param_groups:
            group["fused"] = False
        update_parameters(optimizer, torch.tensor(1.0), 1.0, torch.tensor(skip))
    assert torch.equal(weights(model), start) and not torch.equal(weights(other), start)


@pytest.mark.parametrize("grad_clip", [0.5, 1e6])
def test_clipping_is_torchs_clipping(grad_clip: float) -> None:
    ours = make_model()
    theirs = copy.deepcopy(ours)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clipped(ours, grad_clip)
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), grad_clip)))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_clipping_at_zero_only_measures() -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = clipped(model, 0.0)
    assert float(norm) == pytest.approx(model.num_parameters() ** 0.5)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


def test_parameters_without_a_gradient_are_skipped() -> None:
    model = make_model()
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    norm = clipped(model, 1.0)
    assert float(norm) == pytest.approx(3 * model.head.weight.numel() ** 0.5)
    assert float(model.head.weight.grad.norm()) == pytest.approx(1.0, rel=1e-4)


# The step


@pytest.mark.parametrize("micro_batch_size", [1, 3, 5, 12])
def test_the_result_does_not_depend_on_the_micro_batch(micro_batch_size: int) -> None:
    """5 does not divide 12: the last micro-batch is smaller and must count for less."""
    whole, losses, norms = train(CONFIG)
    sliced, sliced_losses, sliced_norms = train(dataclasses.replace(CONFIG, micro_batch_size=micro_batch_size))
    assert sliced_losses == pytest.approx(losses, rel=1e-5)
    assert sliced_norms == pytest.approx(norms, rel=1e-4)
    assert relative_distance(whole, sliced) < 1e-5


def test_the_loss_and_its_gradient_are_means_over_the_whole_effective_batch() -> None:
    model = make_model()
    inputs, targets = make_data(CONFIG).batch(0, CONFIG.sequences_per_step)
    loss = model(inputs, targets)
    loss.backward()
    expected = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    _, losses, norms = train(CONFIG, steps=1)
    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)
    assert norms[0] == pytest.approx(expected.item(), rel=1e-4)


def test_dropout_draws_from_a_stream_of_seed_and_step_alone() -> None:
    config = dataclasses.replace(CONFIG, dropout=0.3)
    torch.manual_seed(5)
    first, losses, _ = train(config, steps=1, first_step=7, seen=0)
    torch.rand(100)
    again, same_losses, _ = train(config, steps=1, first_step=7, seen=0)
    assert losses == same_losses and torch.equal(first, again)
    _, other_step, _ = train(config, steps=1, first_step=8, seen=0)
    assert losses != other_step
    _, without, _ = train(dataclasses.replace(config, dropout=0.0), steps=1, first_step=7, seen=0)
    assert losses != without


# Muon

MUON = dataclasses.replace(CONFIG, optimizer="muon", weight_decay=0.1)
SHAPES = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=4)


@given(shapes=SHAPES, pieces=st.sampled_from([1, 3]), seed=st.integers(0, 2**16))
@settings(max_examples=40)
def test_muon_is_pytorchs_on_every_matrix_and_on_every_piece(
    shapes: list[tuple[int, int]], pieces: int, seed: int
) -> None:
    """The reference updates each matrix alone, in bf16 as it always does."""
    generator = torch.Generator().manual_seed(seed)
    stacked = [torch.randn(pieces * rows, columns, generator=generator) for rows, columns in shapes]
    ours = [torch.nn.Parameter(matrix.clone()) for matrix in stacked]
    theirs = [torch.nn.Parameter(piece.clone()) for matrix in stacked for piece in matrix.chunk(pieces)]
    values = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    groups = [
        {"params": [matrix], "rule": "muon", "stacked": (len(matrix) // pieces,) * pieces, **values} for matrix in ours
    ]
    optimizer = Optimizer(groups)
    reference = torch.optim.Muon(theirs, **values)
    with mock.patch("training.optimizer.has_fast_bf16", return_value=True):
        for _ in range(3):
            grads = [torch.randn(p.shape, generator=generator) for p in ours]
            for parameter, grad in zip(ours, grads, strict=True):
                parameter.grad = grad
            for parameter, grad in zip(theirs, [part for g in grads for part in g.chunk(pieces)], strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
            reference.step()
    moved = torch.cat([(p - before).flatten() for p, before in zip(ours, stacked, strict=True)])
    expected = torch.cat([p.flatten() for p in theirs]) - torch.cat([matrix.flatten() for matrix in stacked])
    # bf16 rounds differently in a batch: half a percent is one of its steps.
    assert (moved - expected).norm() <= 0.005 * expected.norm()


def test_a_compiled_update_is_the_plain_one() -> None:
    """As on a GPU; a skipped one, too."""
    start, results = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0)), []
    for compiles in (False, True):
        matrices = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        values = {"rule": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
        optimizer = Optimizer([{"params": matrices, **values}])
        optimizer.compiles = compiles
        with mock.patch("training.optimizer.newton_schulz_dtype", return_value=torch.float32):
            for step, skips in enumerate((0.0, 1.0, 0.0)):
                for matrix in matrices:
                    matrix.grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
                optimizer.step(found_inf=torch.tensor(skips))
        results.append(torch.stack([matrix.detach() for matrix in matrices]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert not torch.equal(results[0], start)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 32, 16), (4, 16, 64)])
def test_orthogonalizing_keeps_the_singular_vectors_and_levels_the_values(shape: tuple[int, int, int]) -> None:
    """Jordan et al. 2024: the coefficients leave every singular value between about 0.7 and 1.2."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with mock.patch("training.optimizer.newton_schulz_dtype", return_value=torch.float32):
        orthogonal = orthogonalize(matrices)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    values = u.mT @ orthogonal @ vh.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert diagonal.min() > 0.3 and diagonal.max() < 1.3
    assert (values - torch.diag_embed(diagonal)).abs().max() < 1e-4


def test_muon_takes_the_matrices_inside_blocks_and_adamw_all_the_rest() -> None:
    model = make_model()
    optimizer = build_optimizer(model, MUON)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(group_of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        group = group_of[id(parameter)]
        if name.startswith("blocks.") and parameter.dim() == 2:
            rows = model.config.qkv_rows if "qkv" in name else ()
            assert (group["rule"], group["stacked"], group["weight_decay"]) == ("muon", rows, 0.1)
        else:
            assert (group["rule"], group["stacked"], group["weight_decay"]) == ("adamw", (), 0.0), name


def test_a_step_with_muon_does_not_depend_on_the_micro_batch() -> None:
    with mock.patch("training.optimizer.has_fast_bf16", return_value=False):  # whose rounding would hide the rest
        whole, losses, _ = train(MUON)
        sliced, sliced_losses, _ = train(dataclasses.replace(MUON, micro_batch_size=1))
    assert losses == pytest.approx(sliced_losses, rel=1e-5)
    assert relative_distance(whole, sliced) < 1e-4


# The state


def two_steps(model: TransformerLanguageModel, optimizer: Optimizer, first: int, config: Config) -> None:
    run = run_of(model, make_data(config), config)
    run.optimizer = optimizer
    for step in (first, first + 1):
        run.state.step, run.state.sequences_seen = step, step * 12
        train_step(run)


@pytest.mark.parametrize("config", [CONFIG, MUON])
def test_a_state_comes_back_exactly(config: Config) -> None:
    """Two steps, saved and loaded, two more: bitwise the same as four."""
    straight = make_model(bias=True)
    optimizer = build_optimizer(straight, config)
    two_steps(straight, optimizer, 0, config)
    resumed = copy.deepcopy(straight)
    state = copy.deepcopy(optimizer.tensors())
    two_steps(straight, optimizer, 2, config)
    fresh = build_optimizer(resumed, config)
    fresh.load_tensors(state)
    two_steps(resumed, fresh, 2, config)
    assert torch.equal(weights(straight), weights(resumed))
