"""Other ways to run the trainer's step, each in a process of its own: start-up, time, memory, and the loss it has."""

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

ROUNDS = 3  # of the time of a measurement, for its spread
HAS_CHUNKED_LOSS = hasattr(torch.nn, "LinearCrossEntropyOptions")

StepModel = Callable[..., torch.Tensor]


class Variant(NamedTuple):
    """What is changed: flags of the trainer, something of this process before it opens, or the model of its steps."""

    name: str
    preset: str = "gpt2_small"
    flags: tuple[tuple[str, object], ...] = ()
    prepare: Callable[[], None] | None = None
    build: Callable[[Training], StepModel] | None = None
    needs: str = ""  # "a GPU", "compiling": what a toy lacks


def fp32_residual() -> None:
    model.residual_dtype = lambda x: x.dtype


def per_block(training: Training) -> StepModel:
    if not training.hardware.compiles:
        return training.model
    torch._dynamo.config.recompile_limit = 64  # the blocks share their code
    for block in training.model.blocks:
        block.compile(dynamic=False)
    return lambda inputs, targets: training.model(inputs, targets)  # not the model itself, which would be called eager


def cuda_graphs(training: Training) -> StepModel:
    return torch.compile(training.model, dynamic=False, mode="reduce-overhead")


def chunked_loss(training: Training) -> StepModel:
    """The head and the loss in one operation, which torch does not compile: what it gets has to be cast for it."""
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
# Those that may change what the trainer does come first.
VARIANTS = [
    Variant("flash attention first", flags=(("attention", "flash"),), needs="a GPU"),
    Variant("fp32 residual stream", prepare=fp32_residual),
    Variant("no biases", flags=(("bias", "false"),)),
    Variant("coordinate descent", flags=(("compile_mode", "coordinate_descent"),), needs="compiling"),
    Variant("not compiled", flags=(("compile", "off"),)),
    Variant("compiled block by block", build=per_block, needs="compiling"),
    Variant("activation checkpointing", flags=(("activation_checkpointing", "true"),)),
    Variant("CUDA graphs", preset="quickstart", build=cuda_graphs, needs="a GPU"),
    Variant("chunked linear cross-entropy", build=chunked_loss),
]


def measure_variant(variant: Variant, flags: Sequence[str], seconds: float) -> dict[str, Any]:
    """To be called once in a process: what a variant changes is not changed back."""
    if variant.build is chunked_loss and not HAS_CHUNKED_LOSS:
        return {"skipped": f"torch {torch.__version__} has none"}
    if variant.prepare:
        variant.prepare()
    started = time.perf_counter()
    training = opened(flags, variant.build)
    training.step()
    training.hardware.synchronize()
    startup = time.perf_counter() - started
    training.step()
    loss = training.loss.item()
    rounds = [
        1000 * time_steps(training.step, training.hardware.synchronize, seconds / ROUNDS)[0] for _ in range(ROUNDS)
    ]
    return {
        **figures(training, seconds / ROUNDS),
        "ms_spread": dataclasses.asdict(Spread.of(rounds)),
        "startup_seconds": startup,
        "loss_of_step_2": loss,
    }


def opened(flags: Sequence[str], build: Callable[[Training], StepModel] | None) -> Training:
    if build is None:
        return Training.open(flags)
    compiles = detect_hardware(parse_config(flags)).compiles
    training = Training.open([*flags, "--compile", "off"])  # what is built compiles for itself
    training.hardware = dataclasses.replace(training.hardware, compiles=compiles)
    training.step_model = build(training)
    return training
