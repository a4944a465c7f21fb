"""Other ways to run the trainer's step, each measured beside the step as it is: start-up, time, memory, loss."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Spread
from benchmarks.workload import Training, time_steps

ROUNDS = 3  # of a variant and ours, alternating
HAS_CHUNKED_LOSS = hasattr(torch.nn, "LinearCrossEntropyOptions")

StepModel = Callable[..., torch.Tensor]
Build = Callable[[Training], StepModel]


class Variant(NamedTuple):
    name: str
    preset: str
    build: Build
    on_any_device: bool = False  # the others are about CUDA, or take too long elsewhere


def compiled(mode: str) -> Build:
    return lambda training: torch.compile(training.model, dynamic=False, mode=mode)


def eager(training: Training) -> StepModel:
    return training.model


def per_block(training: Training) -> StepModel:
    for block in training.model.blocks:
        block.compile(dynamic=False)
    return training.model


def cudnn_attention(training: Training) -> StepModel:
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    model = torch.compile(training.model, dynamic=False)

    def step_model(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([*backends, SDPBackend.MATH], set_priority=True):
            return model(inputs, targets)

    return step_model


def chunked_loss(training: Training) -> StepModel:
    model = training.model
    options = torch.nn.LinearCrossEntropyOptions()
    hidden = torch.compile(model.hidden, dynamic=False) if training.hardware.compiles else model.hidden

    def step_model(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(
            hidden(inputs).flatten(0, 1),  # (B * T, C)
            model.head.weight,
            targets.flatten(),
            options=options,
        )

    return step_model


VARIANTS = [
    Variant("not compiled", "gpt2_small", eager, on_any_device=True),
    Variant("chunked linear cross-entropy", "gpt2_small", chunked_loss, on_any_device=True),
    Variant("compiled block by block", "gpt2_small", per_block),
    Variant("cuDNN attention first", "gpt2_small", cudnn_attention),
    Variant("CUDA graphs, small model", "quickstart", compiled(mode="reduce-overhead")),
    Variant("mode reduce-overhead", "gpt2_small", compiled(mode="reduce-overhead")),
    Variant("mode max-autotune-no-cudagraphs", "gpt2_small", compiled(mode="max-autotune-no-cudagraphs")),
]


def unshare_caches() -> None:
    """Two models and all their blocks share code; and traces must be made anew, for the attention kernels that are
    preferred are not part of the key under which a trace is cached."""
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.enable_autograd_cache = False


def against_ours(flags: Sequence[str], build: Build, seconds: float) -> dict[str, Any]:
    """Step times of a variant and of ours, both in this process and alternating; below a ratio of 1 it is faster."""

    def opened(build: Build | None) -> tuple[Training, dict[str, Any]]:
        started = time.perf_counter()
        training = Training.open(flags if build is None else [*flags, "--compile", "off"])
        if build is not None:
            training.hardware = dataclasses.replace(training.hardware, compiles=ours.hardware.compiles)
            training.step_model = build(training)
        hardware = training.hardware
        training.step()
        hardware.synchronize()
        about = {"startup_seconds": time.perf_counter() - started}
        if hardware.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        training.step()
        if hardware.is_cuda:
            about["gb_of_a_step"] = (torch.cuda.max_memory_allocated() - held) / 1e9  # the other model's weights aside
        return training, {**about, "loss_of_step_2": training.loss.item()}

    ours, about_ours = opened(None)
    variant, about_variant = opened(build)
    pairs = []
    for _ in range(ROUNDS):
        pairs.append([1000 * time_steps(t.step, t.hardware.synchronize, seconds)[0] for t in (ours, variant)])
    return {
        "time_ratio": dataclasses.asdict(Spread.of([theirs / own for own, theirs in pairs])),
        "variant": {"ms_per_step": [theirs for _, theirs in pairs], **about_variant},
        "ours": {"ms_per_step": [own for own, _ in pairs], **about_ours},
    }
