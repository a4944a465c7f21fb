"""One optimizer update over an effective batch, sliced into micro-batches that fit in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from model import IGNORE_INDEX
from training.config import Config
from training.machine import processes
from training.machine.hardware import Hardware
from training.numbers.optimizer import apply_hyperparameters, gradient_norm, update
from training.numbers.stability import not_finite
from training.parts import Parts


class StepResult(NamedTuple):
    """Numbers on the device: the host does not wait for them."""

    loss: torch.Tensor  # the mean over the whole effective batch
    grad_norm: torch.Tensor  # before clipping
    skipped: torch.Tensor  # 1.0 if one of them is not finite, so that the update was skipped; else 0.0


def train_step(
    parts: Parts, step: int, sequences_seen: int, lr: float, begin: Callable[[str], None] = lambda part: None
) -> StepResult:
    """Update the model with the sequences that follow the first `sequences_seen`, at AdamW's learning rate `lr`.

    Skips an update with numbers that are not finite. Each process takes its share of the sequences, and all make the
    same update. Dropout's random stream depends on (seed, step, rank) only, so a resumed run needs no saved random
    state. Calls `begin` with each part that begins: "data", "forward", "backward" or "optimizer".
    """
    config, data, optimizer, scaler = parts.config, parts.data, parts.optimizer, parts.scaler
    begin("data")
    if config.dropout:  # without it nothing is drawn, and seeding takes up to half a millisecond
        torch.manual_seed(config.seed * 1_000_003 + step + (processes.rank() << 53))
    whole = config.sequences_per_step
    first, own = processes.own_rows(whole)
    batch = data.batch(sequences_seen + first, own)
    total = torch.zeros((), device=data.device)
    rows = config.rows_at_once
    weights = shares(batch[1], rows, data.layout.has_mask, whole)
    micro_batches = list(zip(*(part.split(rows) for part in batch), strict=True))
    if config.is_sharded:  # every pass gathers weights, so all processes take equally many
        spare = math.ceil(config.sequences_per_process / rows) - len(weights)
        micro_batches, weights = micro_batches + micro_batches[:spare], weights + [0.0] * spare
    for number, (micro_batch, share) in enumerate(zip(micro_batches, weights, strict=True), 1):
        with processes.no_sync(parts.step_model, number * rows < own):
            begin("forward")
            with parts.hardware.autocast():
                loss = parts.step_model(*pad_rows(micro_batch, rows))
            loss = loss * share
            begin("backward")
            scaler.scale(loss).backward()
        total += loss.detach()
    begin("optimizer")
    total = processes.all_reduce_sum(total) / processes.count()
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    apply_hyperparameters(optimizer, lr, config)
    grad_norm = gradient_norm(optimizer)
    skipped = not_finite(total, grad_norm)
    update(optimizer, grad_norm, config.grad_clip, skipped)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(total, grad_norm, skipped)


def shares(targets: torch.Tensor, rows: int, has_mask: bool, whole: int) -> list[float | torch.Tensor]:
    """The weight of each micro-batch's mean loss in the mean loss of the `whole` batch, so that the size of
    micro-batches does not matter. targets: (B, T), this process's; with a mask, micro-batches differ in their number of
    targets.

    The weights are multiplied by the number of processes, because the all-reduce takes the mean over processes.
    """
    if not has_mask:
        own = len(targets)
        return [processes.count() * min(rows, own - first) / whole for first in range(0, own, rows)]
    counts = torch.stack([(part != IGNORE_INDEX).sum() for part in targets.split(rows)])
    return list(processes.count() * counts / processes.all_reduce_sum(counts.sum()))


def pad_rows(batch: tuple[torch.Tensor, ...], rows: int) -> tuple[torch.Tensor, ...]:
    """Pad a batch of `TokenData.batch`, each (at most rows, T), to (rows, T). The added rows do not count in the mean
    loss. So a compiled model sees one shape only."""
    missing = rows - len(batch[0])
    if not missing:
        return batch
    inputs, targets, *starts = (torch.cat([part, part[:1].expand(missing, -1)]) for part in batch)
    targets[-missing:] = IGNORE_INDEX
    return inputs, targets, *starts


def part_of_step(config: Config, rows: int) -> Config:
    """The configuration of a step of only `rows` sequences, for timing: a whole step may take too long."""
    return dataclasses.replace(
        config, batch_size=rows, gradient_accumulation_steps=1, micro_batch_size=min(rows, config.rows_at_once)
    )


def smallest_part(config: Config, hardware: Hardware) -> int:
    """The fewest sequences of such a step: a compiled model takes one shape only, and a GPU is slow on less."""
    at_once = config.rows_at_once if hardware.is_cuda or hardware.compiles else 1
    return min(at_once * config.processes, config.sequences_per_step)
