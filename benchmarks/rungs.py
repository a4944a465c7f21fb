"""The rungs of `speed_ladder.py`: the trainer's own step, and the simpler ways that its parts replace."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import io
import math
import os
import time
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

import training.machine.hardware
from common.machine import has_fast_bf16
from model import TransformerLanguageModel
from training.config import TrainConfig
from training.machine.compilation import compile_model
from training.machine.hardware import detect_hardware
from training.numbers.data import TokenData
from training.numbers.optimizer import build_optimizer
from training.numbers.step import train_step
from training.parts import Parts

WARM_UP_STEPS = 2  # the first loads every kernel, the second allocates all memory


class Rung(enum.IntEnum):
    """Each adds one technique to the one before."""

    BASELINE = 0  # memory map, a Python loop over rows, fp32, eager, the score matrix in memory, AdamW by the parameter
    RAM = 1
    VECTORIZED = 2
    COMPILE = 3
    MIXED = 4
    FLASH = 5
    OURS = 6  # the unchanged trainer


NAMES = {
    Rung.BASELINE: "baseline",
    Rung.RAM: "+ tokens in RAM",
    Rung.VECTORIZED: "+ vectorized batches",
    Rung.COMPILE: "+ torch.compile",
    Rung.MIXED: "+ mixed precision",
    Rung.FLASH: "+ flash attention",
    Rung.OURS: "this trainer",
}

# The blog's seconds per step on its A100, in its order of techniques, for GPT-2 small and 64 x 512 tokens.
BLOG_SECONDS = dict(zip(Rung, (1.6, 0.8, 0.5, 0.35, 0.225, 0.1), strict=False))  # not OURS
BLOG_STEP = {"num_layers": 12, "embed_dim": 768, "max_seq_len": 512, "sequences_per_step": 64}
BLOG_VOCABULARY = 32_000


def materialized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as in textbooks, with every score in memory. q, k, v: (B, H, T, D) -> (B, H, T, D)."""
    assert is_causal and attn_mask is None and not enable_gqa, "the configs need nothing else"
    T = q.size(-2)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, T)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return F.dropout(weights, dropout_p) @ v


def gather_row_by_row(data: TokenData, starts: np.ndarray) -> torch.Tensor:
    """`TokenData.gather` with a Python loop: one read for each row. (rows, T + 1), in the stored dtype."""
    return torch.stack([data.tokens[start : start + data.seq_len + 1] for start in starts.tolist()])


def climb(rung: Rung, steps: int, config: TrainConfig) -> dict[str, Any]:
    """Measure one rung in this process: mean seconds of `steps` steps after two that do not count.

    `losses` are those of the first and the last step. Raises SystemExit if the rung is torch.compile and that fails.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(config.run_dir / "compiled")  # empty at first: compiling is timed
    if rung < Rung.OURS:
        training.machine.hardware.keep_freed_memory = lambda: None  # only in this process, like the attention below
    hardware = detect_hardware(config)
    if rung < Rung.OURS:
        precision = mixed_precision(hardware.device) if rung >= Rung.MIXED else "fp32"
        hardware = dataclasses.replace(hardware, precision=precision, compiles=rung >= Rung.COMPILE)
        config = dataclasses.replace(config, placement="ram" if rung >= Rung.RAM else "mmap")
    if rung < Rung.FLASH:
        F.scaled_dot_product_attention = cast(Any, materialized_attention)
    data = TokenData.open(config, hardware)
    if rung < Rung.OURS:
        data.reader = None  # nothing is read ahead
    if rung < Rung.VECTORIZED:
        cast(Any, data).gather = functools.partial(gather_row_by_row, data)

    torch.manual_seed(config.seed)
    model = TransformerLanguageModel(config.model_config(data.vocab_size)).to(hardware.device)
    model.activation_checkpointing = config.activation_checkpointing
    optimizer = build_optimizer(model, config)
    if rung < Rung.OURS:
        for group in optimizer.param_groups:
            group["fused"] = False
    scaler = hardware.grad_scaler()
    output, started = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(output):
        step_model = compile_model(model, hardware, lambda: data.batch(0, config.rows_at_once))
    hardware.synchronize()
    compiled = step_model is not model
    compile_seconds = time.perf_counter() - started if compiled else None
    if rung == Rung.COMPILE and not compiled:
        message = output.getvalue().strip()
        raise SystemExit(message if "failed" in message else "torch.compile is switched off (TORCHDYNAMO_DISABLE)")

    parts = Parts(config, hardware, data, [], model, optimizer, scaler, step_model)
    losses = []
    for step in range(WARM_UP_STEPS + steps):
        seen = step * config.sequences_per_step
        result = train_step(parts, step, seen, config.learning_rate)
        losses.append(result.loss if rung == Rung.OURS else result.loss.item())
        if step == WARM_UP_STEPS - 1:
            hardware.synchronize()
            started = time.perf_counter()
    hardware.synchronize()
    seconds = (time.perf_counter() - started) / steps
    return {
        "seconds": seconds,
        "compile_seconds": compile_seconds,
        "peak_memory": hardware.peak_memory(),
        "losses": [float(losses[0]), float(losses[-1])],
        "precision": hardware.precision,
        "compiled": compiled,
        "tokens": data.placement,
    }


def mixed_precision(device: torch.device) -> str:
    """The precision that the machine has units for, even if the trainer would not choose it."""
    if has_fast_bf16(device):
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def left_out(device: torch.device) -> dict[str, str]:
    """The rungs that need units this machine lacks, by name, with the reason."""
    if mixed_precision(device) != "fp32":
        return {}
    return {
        NAMES[Rung.MIXED]: "this CPU has neither AMX nor AVX512-BF16, and without them a step in bf16 takes minutes"
    }
