"""One optimizer update over an effective batch, sliced into micro-batches that fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from model import IGNORE_INDEX, TransformerLanguageModel
from model_config import ModelConfig
from training.config import MODEL_KEYS, Config
from training.machine import processes
from training.machine.hardware import Hardware
from training.numbers.data import TokenData
from training.numbers.optimizer import Optimizer, apply_hyperparameters, gradient_norm, update
from training.numbers.prompts import Prompt
from training.numbers.stability import not_finite

OUT_OF_MEMORY = "out of memory"  # source of a micro-batch that was halved after such an error


@dataclass
class Trainer:
    """What a step works on. Three fields change during a training: `step_model` when the model is compiled, `hardware`
    when that fails, and `micro_batch_size` when that fails or memory runs out."""

    config: Config  # what was asked
    hardware: Hardware
    data: TokenData
    prompts: list[Prompt]  # answered at each evaluation
    model: TransformerLanguageModel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    step_model: Callable[..., torch.Tensor]  # the model as it trains: compiled, data-parallel, or just the model
    micro_batch_size: int
    micro_batch_source: str  # where it comes from: as in Config.sources, or "memory", or OUT_OF_MEMORY

    @property
    def shape(self) -> ModelConfig:
        return self.model.config

    @property
    def tokens_per_step(self) -> int:
        return self.config.sequences_per_step * self.shape.max_seq_len

    @property
    def rows_at_once(self) -> int:
        """Sequences per forward pass."""
        return self.config.rows_at_once(self.micro_batch_size)

    def resolved(self) -> dict[str, Any]:
        """What was asked, with the shape and the micro-batch that were found for it."""
        found = {key: getattr(self.shape, key) for key in MODEL_KEYS}
        if self.micro_batch_source != "default":
            found["micro_batch_size"] = self.micro_batch_size
        return self.config.values() | found


class StepResult(NamedTuple):
    """Numbers on the device: the host does not wait for them."""

    loss: torch.Tensor  # the mean over the whole effective batch
    grad_norm: torch.Tensor  # before clipping
    skipped: torch.Tensor  # 1.0 if one of them is not finite, so that the update was skipped; else 0.0


Batch = tuple[torch.Tensor, ...]  # what TokenData.batch returns


def train_step(trainer: Trainer, step: int, sequences_seen: int, lr: float, sequences: int | None = None) -> StepResult:
    """Update the model with the `sequences` (None: all of a step) that follow the first `sequences_seen`, at AdamW's
    learning rate `lr`. Each process takes its share of the sequences, and all make the same update."""
    sequences = sequences or trainer.config.sequences_per_step
    batch = read_batch(trainer, sequences_seen, sequences)
    return apply_gradients(trainer, accumulate(trainer, batch, step, sequences), lr)


def read_batch(trainer: Trainer, sequences_seen: int, sequences: int) -> Batch:
    """This process's share of the `sequences` that follow the first `sequences_seen`."""
    first, own = processes.own_rows(sequences)
    return trainer.data.batch(sequences_seen + first, own)


def accumulate(trainer: Trainer, batch: Batch, step: int, sequences: int) -> torch.Tensor:
    """Forward and backward of a batch, this process's share of `sequences`, in micro-batches. Returns the mean loss
    over all of them, (). If it fails, it can be done again: only gradients have changed, and it draws the same numbers.

    Dropout's random stream depends on (seed, step, rank) only, so a resumed run needs no saved random state.
    """
    config, scaler = trainer.config, trainer.scaler
    rows = min(trainer.rows_at_once, math.ceil(sequences / config.processes))
    if config.dropout:  # without it nothing is drawn, and seeding takes up to half a millisecond
        torch.manual_seed(config.seed * 1_000_003 + step + (processes.rank() << 53))
    own = len(batch[0])
    total = torch.zeros((), device=trainer.data.device)
    weights = shares(batch[1], rows, trainer.data.layout.has_mask, sequences)
    micro_batches = list(zip(*(part.split(rows) for part in batch), strict=True))
    if config.is_sharded:  # every pass gathers weights, so all processes take equally many
        spare = math.ceil(math.ceil(sequences / config.processes) / rows) - len(weights)
        micro_batches, weights = micro_batches + micro_batches[:spare], weights + [0.0] * spare
    for number, (micro_batch, share) in enumerate(zip(micro_batches, weights, strict=True), 1):
        with processes.no_sync(trainer.step_model, number * rows < own):
            with trainer.hardware.autocast():
                loss = trainer.step_model(*pad_rows(micro_batch, rows))
            loss = loss * share
            scaler.scale(loss).backward()
        total += loss.detach()
    return processes.all_reduce_sum(total) / processes.count()


def apply_gradients(trainer: Trainer, loss: torch.Tensor, lr: float) -> StepResult:
    """Update the model by the gradients that it has, unless they or the loss are not finite."""
    optimizer, scaler = trainer.optimizer, trainer.scaler
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    apply_hyperparameters(optimizer, lr, trainer.config)
    grad_norm = gradient_norm(optimizer)
    skipped = not_finite(loss, grad_norm)
    update(optimizer, grad_norm, trainer.config.grad_clip, skipped)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, grad_norm, skipped)


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


def smallest_part(trainer: Trainer) -> int:
    """The fewest sequences to time a step on: a compiled model takes one shape only, and a GPU is slow on less."""
    hardware, config = trainer.hardware, trainer.config
    at_once = trainer.rows_at_once if hardware.is_cuda or hardware.compiles else 1
    return min(at_once * config.processes, config.sequences_per_step)
