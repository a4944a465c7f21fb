"""One optimizer update over an effective batch, sliced into micro-batches that fit in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from common.errors import ConfigError
from common.script import world
from model import IGNORE_INDEX
from training import parallel
from training.optimizer import apply_hyperparameters, gradient_norm, update
from training.run import Run

Batch = tuple[torch.Tensor, ...]  # what TokenData.batch returns
MAX_SKIPS_IN_A_ROW = 5  # more skipped updates in a row stop the run
MAX_SKIPS_IN_A_ROW_SCALED = 25  # in fp16: the gradient scaler starts at 65,536 and halves its factor at each skip


class StepResult(NamedTuple):
    """Tensors are on the device: the host does not wait for them."""

    loss: torch.Tensor  # the mean over the whole effective batch
    grad_norm: torch.Tensor  # before clipping
    skipped: torch.Tensor  # 1.0 if one of them is not finite, so that the update was skipped; else 0.0
    lr: float | torch.Tensor  # AdamW's; a tensor only while the update is recorded


def train_step(run: Run) -> StepResult:
    """Update the model with the sequences of the next step. Each process takes its share of them, and all make the same
    update."""
    return apply_update(run, forward_backward(run))


def forward_backward(run: Run) -> torch.Tensor:
    """Forward and backward of the sequences of a step. Returns their mean loss, (). If it fails, it can be done again:
    only gradients have changed. For the same slices, dropout draws the same numbers."""
    return accumulate(run, read_batch(run))


def read_batch(run: Run) -> Batch:
    """Read this process's share of the sequences of the next step."""
    first, own = parallel.own_rows(run.config.sequences_per_step)
    return run.data.batch(run.state.sequences_seen + first, own)


def accumulate(run: Run, batch: Batch) -> torch.Tensor:
    """Forward and backward of a batch, this process's share of a step, in micro-batches. Returns the mean loss over the
    whole step, ().

    Dropout's random stream depends on (seed, step, rank) only, so a resumed run needs no saved random state.
    """
    config, scaler = run.config, run.scaler
    rows = run.rows_at_once
    if config.dropout:  # without it nothing is drawn, and seeding takes up to half a millisecond
        torch.manual_seed(config.seed * 1_000_003 + run.state.step + (world().rank << 53))
    own = len(batch[0])
    total = torch.zeros((), device=run.data.device)
    weights = loss_weights(batch[1], rows, run.data.layout.has_mask, config.sequences_per_step)
    micro_batches = zip(*(part.split(rows) for part in batch), strict=True)
    if run.recorded is not None:
        return run.recorded.accumulate((pad_rows(part, run.recorded.rows) for part in micro_batches), weights)
    for number, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True), 1):
        with parallel.no_sync(run.step_model, number * rows < own):
            with run.hardware.autocast():
                loss = run.step_model(*pad_rows(micro_batch, rows))
            loss = loss * weight
            scaler.scale(loss).backward()
        total += loss.detach()
    return parallel.all_reduce_sum(total) / world().size


def loss_weights(targets: torch.Tensor, rows: int, has_mask: bool, sequences: int) -> list[float | torch.Tensor]:
    """Return the weight of each micro-batch's mean loss in the mean loss of all `sequences` of a step, so that the size
    of micro-batches does not matter. targets: (B, T), this process's; with a mask, micro-batches differ in their number
    of targets.

    The weights are multiplied by the number of processes, because the all-reduce takes the mean over processes.
    """
    if not has_mask:
        own = len(targets)
        return [world().size * min(rows, own - first) / sequences for first in range(0, own, rows)]
    counts = torch.stack([(part != IGNORE_INDEX).sum() for part in targets.split(rows)])
    return list(world().size * counts / parallel.all_reduce_sum(counts.sum()))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Pad a batch of `TokenData.batch`, each (at most rows, T), to (rows, T). The added rows do not count in the mean
    loss. So a compiled model sees one shape only."""
    missing = rows - len(batch[0])
    if not missing:
        return batch
    inputs, targets, *starts = (torch.cat([part, part[:1].expand(missing, -1)]) for part in batch)
    targets[-missing:] = IGNORE_INDEX
    return inputs, targets, *starts


def apply_update(run: Run, loss: torch.Tensor) -> StepResult:
    """Update the model by the gradients that it has, unless they or the loss are not finite."""
    lr = run.learning_rate
    if run.recorded is not None:
        return run.recorded.apply_update(lr)
    result = compute_update(run, loss, lr)
    run.optimizer.zero_grad(set_to_none=True)
    return result


def compute_update(run: Run, loss: torch.Tensor, lr: float | torch.Tensor) -> StepResult:
    """`apply_update` with a learning rate that may be on the device. Keeps the gradients."""
    optimizer, scaler = run.optimizer, run.scaler
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    apply_hyperparameters(optimizer, lr, run.config)
    grad_norm = gradient_norm(optimizer)
    skipped = not_finite(loss, grad_norm)
    update(optimizer, grad_norm, run.config.grad_clip, skipped)
    scaler.update()
    run.skips.copy_(count_skip(run.skips, skipped))
    return StepResult(loss, grad_norm, skipped, lr)


def not_finite(loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
    """Return 1.0 on the device if the update must be skipped, else 0.0. The host does not wait for it."""
    return (~torch.isfinite(loss + grad_norm)).float()


def count_skip(skips: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Count the updates skipped in all, in a row up to now, and in a row at most; (3,) -> (3,). `skipped`: whether the
    last one was, 1.0 or 0.0. The counts stay on the device, so the host does not wait."""
    total, in_a_row, longest = skips
    in_a_row = (in_a_row + 1) * skipped
    return torch.stack([total + skipped, in_a_row, torch.maximum(longest, in_a_row)])


def require_stable(run: Run) -> None:
    """Raise ConfigError after too many skipped updates in a row. Waits for the device."""
    longest = int(run.skips[2])
    if longest >= (MAX_SKIPS_IN_A_ROW_SCALED if run.scaler.is_enabled() else MAX_SKIPS_IN_A_ROW):
        raise diverged(run, f"{longest} updates in a row had a loss or gradient that is not finite")


def diverged(run: Run, what: str) -> ConfigError:
    """Return the error that ends a run whose training diverged."""
    restart = "No checkpoint was saved before, so the same command starts from the beginning."
    if run.saved_step:
        restart = f"Checkpoints saved before are whole, and the same command continues from step {run.saved_step:,}."
    return ConfigError(
        f"The training diverged at step {run.state.step:,}: {what}. {restart} What helps, most likely first: a lower "
        f"--learning_rate (a third of it), more --warmup_steps, a lower --grad_clip (0.5), or --precision fp32."
    )
