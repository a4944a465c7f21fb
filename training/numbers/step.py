"""One optimizer update over an effective batch, sliced into micro-batches that fit in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from model import IGNORE_INDEX
from training.config import TrainConfig
from training.machine import processes
from training.machine.hardware import Hardware
from training.numbers.optimizer import apply_hyperparameters, gradient_norm, update
from training.numbers.stability import not_finite
from training.parts import Parts


class StepResult(NamedTuple):
    """What a step gives: each a number on the device, unread."""

    loss: torch.Tensor  # the mean over the whole effective batch
    grad_norm: torch.Tensor  # before clipping
    skipped: torch.Tensor  # 1.0 if the update was skipped, for one of them is not finite; else 0.0


def train_step(
    parts: Parts, step: int, sequences_seen: int, lr: float, begin: Callable[[str], None] = lambda part: None
) -> StepResult:
    """Update the model with the sequences that follow the first `sequences_seen`, at AdamW's learning rate `lr`.

    An update with numbers that are not finite is skipped. Of several processes each takes its share of the sequences,
    and all make the same update. Dropout draws from a stream that belongs to (seed, step, rank), so a resumed run needs
    no saved random state. `begin` is told which part begins: "data", "forward", "backward" or "optimizer".
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
    micro_batches = zip(*(part.split(rows) for part in batch), strict=True)
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
    """What the mean loss of each micro-batch of `rows` counts in that of the `whole` batch: the size of the slices does
    not matter. targets: (B, T); where they are masked, slices differ in how many count.

    Of several processes each has its own B of the batch, and the mean over processes is that over the batch: what each
    slice counts is multiplied by their number.
    """
    if not has_mask:
        own = len(targets)
        return [processes.count() * min(rows, own - first) / whole for first in range(0, own, rows)]
    counts = torch.stack([(part != IGNORE_INDEX).sum() for part in targets.split(rows)])
    return list(processes.count() * counts / processes.all_reduce_sum(counts.sum()))


def pad_rows(batch: tuple[torch.Tensor, ...], rows: int) -> tuple[torch.Tensor, ...]:
    """Fill what `TokenData.batch` gives, each (at most rows, T), up to (rows, T) with rows that add nothing to the mean
    loss, so that a compiled model meets one shape only."""
    missing = rows - len(batch[0])
    if not missing:
        return batch
    inputs, targets, *starts = (torch.cat([part, part[:1].expand(missing, -1)]) for part in batch)
    targets[-missing:] = IGNORE_INDEX
    return inputs, targets, *starts


def part_of_step(config: TrainConfig, rows: int) -> TrainConfig:
    """The configuration of a step that takes `rows` sequences, for where a whole one would take too long."""
    return dataclasses.replace(
        config, batch_size=rows, gradient_accumulation_steps=1, micro_batch_size=min(rows, config.rows_at_once)
    )


def smallest_part(config: TrainConfig, hardware: Hardware) -> int:
    """Sequences that such a step has at least: a compiled model knows one shape, and a GPU is not fast on less."""
    at_once = config.rows_at_once if hardware.is_cuda or hardware.compiles else 1
    return min(at_once * config.processes, config.sequences_per_step)
