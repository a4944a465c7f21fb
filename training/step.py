"""One optimizer update over an effective batch, sliced into micro-batches that fit in memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import ConfigError
from common.script import world
from model import IGNORE_INDEX, TransformerLanguageModel
from model_config import ModelConfig
from training import parallel
from training.config import MODEL_KEYS, Config
from training.data import TokenData
from training.hardware import Hardware
from training.optimizer import Optimizer, apply_hyperparameters, gradient_norm, update
from training.prompts import Prompt

HALVED = "out of memory"  # source of a micro-batch that was halved after such an error
Batch = tuple[torch.Tensor, ...]  # what TokenData.batch returns
MOST_IN_A_ROW = 5  # this many skipped updates in a row stop the run
MOST_IN_A_ROW_SCALED = 25  # in fp16: the gradient scaler starts at 65,536 and halves its factor at each skip
SPIKE_SIGMAS = 6.0
LOSSES = range(20, 101)  # how many of the last reported losses make a mean


@dataclass
class Trainer:
    """What a step works on. Four fields change during a training: `step_model` and `ready_for` when the model is
    compiled, `hardware` when that fails, and `micro_batch_size` when that fails or memory runs out."""

    config: Config  # what was asked
    hardware: Hardware
    data: TokenData
    prompts: list[Prompt]  # answered at each evaluation
    model: TransformerLanguageModel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    step_model: Callable[..., torch.Tensor]  # the model as it trains: compiled, data-parallel, or just the model
    micro_batch_size: int
    micro_batch_source: str  # where it comes from: as in Config.sources, or "memory", or HALVED
    ready_for: int = 0  # sequences at once that `step_model` was made for; 0: not yet

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


def train_step(trainer: Trainer, step: int, sequences_seen: int, lr: float, sequences: int | None = None) -> StepResult:
    """Update the model with the `sequences` (None: all of a step) that follow the first `sequences_seen`, at AdamW's
    learning rate `lr`. Each process takes its share of the sequences, and all make the same update."""
    sequences = sequences or trainer.config.sequences_per_step
    batch = read_batch(trainer, sequences_seen, sequences)
    return apply_gradients(trainer, accumulate(trainer, batch, step, sequences), lr)


def read_batch(trainer: Trainer, sequences_seen: int, sequences: int) -> Batch:
    """This process's share of the `sequences` that follow the first `sequences_seen`."""
    first, own = parallel.own_rows(sequences)
    return trainer.data.batch(sequences_seen + first, own)


def accumulate(trainer: Trainer, batch: Batch, step: int, sequences: int) -> torch.Tensor:
    """Forward and backward of a batch, this process's share of `sequences`, in micro-batches. Returns the mean loss
    over all of them, (). If it fails, it can be done again: only gradients have changed, and it draws the same numbers.

    Dropout's random stream depends on (seed, step, rank) only, so a resumed run needs no saved random state.
    """
    config, scaler = trainer.config, trainer.scaler
    rows = min(trainer.rows_at_once, math.ceil(sequences / world().size))
    if config.dropout:  # without it nothing is drawn, and seeding takes up to half a millisecond
        torch.manual_seed(config.seed * 1_000_003 + step + (world().rank << 53))
    own = len(batch[0])
    total = torch.zeros((), device=trainer.data.device)
    weights = shares(batch[1], rows, trainer.data.layout.has_mask, sequences)
    micro_batches = zip(*(part.split(rows) for part in batch), strict=True)
    for number, (micro_batch, share) in enumerate(zip(micro_batches, weights, strict=True), 1):
        with parallel.no_sync(trainer.step_model, number * rows < own):
            with trainer.hardware.autocast():
                loss = trainer.step_model(*pad_rows(micro_batch, rows))
            loss = loss * share
            scaler.scale(loss).backward()
        total += loss.detach()
    return parallel.all_reduce_sum(total) / world().size


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
        return [world().size * min(rows, own - first) / whole for first in range(0, own, rows)]
    counts = torch.stack([(part != IGNORE_INDEX).sum() for part in targets.split(rows)])
    return list(world().size * counts / parallel.all_reduce_sum(counts.sum()))


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
    return min(at_once * world().size, config.sequences_per_step)


def not_finite(loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
    """1.0 on the device if the update must be skipped, else 0.0. The host does not wait for it."""
    return (~torch.isfinite(loss + grad_norm)).float()


class Stability:
    """Counts skipped updates and warns about them. The counts stay on the device, so the host does not wait."""

    def __init__(self, device: torch.device, scaled: bool = False, skipped: int = 0):
        self.most_in_a_row = MOST_IN_A_ROW_SCALED if scaled else MOST_IN_A_ROW
        self.normal = " A few are normal in fp16." if scaled else ""
        counts = (torch.tensor(float(count), device=device) for count in (skipped, 0, 0))
        self.total, self.in_a_row, self.longest = counts  # in_a_row: up to now; longest: so far
        self.reported = skipped
        self.losses: deque[float] = deque(maxlen=LOSSES.stop - 1)

    def step_done(self, skipped: torch.Tensor) -> None:
        """`skipped` is 1.0 or 0.0."""
        self.total = self.total + skipped
        self.in_a_row = (self.in_a_row + 1) * skipped
        self.longest = torch.maximum(self.longest, self.in_a_row)

    @property
    def skipped(self) -> int:
        """Updates in all sessions. Waits for the device."""
        return int(self.total)

    def row(self) -> dict[str, int]:
        """Its part of a row of metrics; empty if no update was skipped. Waits for the device."""
        return {"skipped_updates": self.skipped} if self.skipped else {}

    @property
    def in_doubt(self) -> bool:
        """Whether the last update was skipped: the weights may be broken. Waits for the device."""
        return bool(self.in_a_row)

    def require_stable(self, step: int, saved_step: int) -> None:
        """Raises ConfigError after too many skipped updates in a row. `saved_step` is that of `diverged`."""
        if self.longest >= self.most_in_a_row:
            what = f"{int(self.longest)} updates in a row had a loss or gradient that is not finite"
            raise diverged(step, saved_step, what)

    def warnings(self, step: int, loss: float) -> list[str]:
        """Warnings about the last steps. `loss` is the one just reported."""
        messages = []
        if (skipped := self.skipped) > self.reported:
            messages.append(
                f"Warning: updates skipped up to step {step:,}, because the loss or its gradient was not finite: "
                f"{skipped - self.reported} ({skipped} in this run).{self.normal}"
            )
            self.reported = skipped
        if len(self.losses) >= LOSSES.start:
            mean, sigma = np.mean(self.losses), np.std(self.losses, ddof=1)
            if loss > mean + SPIKE_SIGMAS * sigma:
                messages.append(
                    f"Warning: the loss jumped to {loss:.3f} at step {step:,}; before it was {mean:.3f} on average "
                    f"(+- {sigma:.3f}). If it stays high, try a lower --learning_rate or more --warmup_steps."
                )
        if math.isfinite(loss):
            self.losses.append(loss)
        return messages


def diverged(step: int, saved_step: int, what: str) -> ConfigError:
    """`saved_step` is that of the newest checkpoint, 0 if there is none."""
    restart = "No checkpoint was saved before, so the same command starts from the beginning."
    if saved_step:
        restart = f"Checkpoints saved before are whole, and the same command continues from step {saved_step:,}."
    return ConfigError(
        f"The training diverged at step {step:,}: {what}. {restart} What helps, most likely first: a lower "
        f"--learning_rate (a third of it), more --warmup_steps, a lower --grad_clip (0.5), or --precision fp32."
    )
