"""Other ways to run the trainer's step, each in its own process: start-up, time, memory, and the loss."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import model
from benchmarks.measure import Spread
from benchmarks.workload import Training, figures, time_steps
from training.config import parse_config
from training.machine.hardware import detect_hardware

ROUNDS = 3  # timed parts of a measurement, for the spread
HAS_CHUNKED_LOSS = hasattr(torch.nn, "LinearCrossEntropyOptions")

StepModel = Callable[..., torch.Tensor]


class Variant(NamedTuple):
    """A change: flags of the trainer, a change of this process before the training is set up, or another step model."""

    name: str
    preset: str = "gpt2_small"
    flags: tuple[tuple[str, object], ...] = ()
    prepare: Callable[[], None] | None = None
    build: Callable[[Training], StepModel] | None = None
    needs: str = ""  # "a GPU" or "compiling", which a toy lacks


def fp32_residual() -> None:
    model.residual_dtype = lambda x: x.dtype


def per_block(training: Training) -> StepModel:
    if not training.hardware.compiles:
        return training.model
    torch._dynamo.config.recompile_limit = 64  # the blocks share their code
    for block in training.model.blocks:
        block.compile(dynamic=False)
    return lambda inputs, targets: training.model(inputs, targets)  # the model itself would count as not compiled


def cuda_graphs(training: Training) -> StepModel:
    return torch.compile(training.model, dynamic=False, mode="reduce-overhead")


def chunked_loss(training: Training) -> StepModel:
    """The head and the loss in one operation. torch does not compile it, so autocast needs explicit casts here."""
    whole, device = training.model, training.hardware.device.type
    options = torch.nn.LinearCrossEntropyOptions()
    hidden = torch.compile(whole.hidden, dynamic=False) if training.hardware.compiles else whole.hidden

    def step_model(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = hidden(inputs).flatten(0, 1)  # (B * T, C)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        head = whole.head.weight.to(dtype)
        return F.linear_cross_entropy(x.to(dtype), head, targets.flatten(), options=options).float()

    return step_model


OURS = Variant("ours")
# First those that may lead to a change of the trainer; last the one that compiles longest: a limit cuts off no other.
VARIANTS = [
    Variant("flash attention first", flags=(("attention", "flash"),), needs="a GPU"),
    Variant("fp32 residual stream", prepare=fp32_residual),
    Variant("no biases", flags=(("bias", "false"),)),
    Variant("not compiled", flags=(("compile", "off"),)),
    Variant("compiled block by block", build=per_block, needs="compiling"),
    Variant("activation checkpointing", flags=(("activation_checkpointing", "true"),)),
    Variant("CUDA graphs", preset="quickstart", build=cuda_graphs, needs="a GPU"),
    Variant("chunked linear cross-entropy", build=chunked_loss),
    Variant("coordinate descent", flags=(("compile_mode", "coordinate_descent"),), needs="compiling"),
]


def measure_variant(variant: Variant, flags: Sequence[str], seconds: float) -> dict[str, Any]:
    """Call it once in a process: it does not undo the change."""
    if variant.build is chunked_loss and not HAS_CHUNKED_LOSS:
        return {"skipped": f"torch {torch.__version__} has no chunked loss"}
    if variant.prepare:
        variant.prepare()
    started = time.perf_counter()
    training = opened(flags, variant.build)
    training.first_step(started)
    training.step()
    loss = training.loss.item()
    part = seconds / ROUNDS
    rounds = [1000 * time_steps(training.step, training.hardware.synchronize, part)[0] for _ in range(ROUNDS)]
    spread = dataclasses.asdict(Spread.of(rounds))
    return {**figures(training, part), "ms_spread": spread, "loss_of_step_2": loss}


def opened(flags: Sequence[str], build: Callable[[Training], StepModel] | None) -> Training:
    if build is None:
        return Training.open(flags)
    compiles = detect_hardware(parse_config(flags)).compiles
    training = Training.open([*flags, "--compile", "off"])  # `build` compiles
    training.hardware = dataclasses.replace(training.hardware, compiles=compiles)
    training.step_model = build(training)
    return training
