"""One optimizer update over an effective batch, sliced into micro-batches that fit in memory."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from model import IGNORE_INDEX
from training import parallel
from training.optimizer import apply_hyperparameters, gradient_norm, update_parameters
from training.run import Run

Batch = tuple[torch.Tensor, ...]  # what TokenData.batch returns
MAX_SKIPS_IN_A_ROW = 5  # more skipped updates in a row stop the run
MAX_SKIPS_IN_A_ROW_SCALED = 25  # fp16: the gradient scaler halves its factor, 65,536 at first, at each skip


def train_step(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the model with the sequences of the next step. Return the mean loss and the norm of its gradient, (), on
    the device, so that the host does not wait. Each process takes a share of the sequences, and all make the same
    update."""
    lr = run.learning_rate
    loss = forward_backward(run)
    return loss, update(run, loss, lr)


def forward_backward(run: Run) -> torch.Tensor:
    """Forward and backward pass of a step. Return the mean loss, (). Can be repeated if it fails, because only
    gradients change; for the same slices, dropout draws the same numbers."""
    return accumulate(run, read_batch(run))


def read_batch(run: Run) -> Batch:
    """Return this process's share of the next step's sequences."""
    first, count = parallel.own_rows(run.config.sequences_per_step)
    switch = run.state.switch
    return run.data.batch(run.state.sequences_seen + first, count, switch.sequences if switch else None)


def accumulate(run: Run, batch: Batch) -> torch.Tensor:
    """Forward and backward pass of a batch, this process's share of a step, in micro-batches. Return the mean loss over
    the whole step, ().

    Dropout's random stream depends on seed, step and process only, so a resumed run needs no saved random state.
    """
    config, scaler = run.config, run.scaler
    rows = run.rows_at_once
    if config.dropout:
        _seed_dropout(run.data.device, parallel.own_seed(config.seed * 1_000_003 + run.state.step))
    count = len(batch[0])
    sequences = config.sequences_per_step / run.hardware.processes
    weights = loss_weights(batch[1], rows, run.data.layout.has_mask, sequences)
    micro_batches = zip(*(part.split(rows) for part in batch), strict=True)
    if run.captured is not None:
        return run.captured.accumulate((pad_rows(part, run.captured.rows) for part in micro_batches), weights)
    total = torch.zeros((), device=run.data.device)
    for number, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True), 1):
        with parallel.no_sync(run.step_model, number * rows < count):
            with run.hardware.autocast():
                loss = run.step_model(*pad_rows(micro_batch, rows))
            loss = loss * weight
            scaler.scale(loss).backward()
        total += loss.detach()
    return parallel.mean_over_processes(total)


def _seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the random generator of a device. `torch.manual_seed` seeds those of all kinds of devices and formats a
    stack trace for each missing kind, which takes as long as launching thirty kernels."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def loss_weights(targets: torch.Tensor, rows: int, has_mask: bool, sequences: float) -> list[float | torch.Tensor]:
    """Return the weight of each micro-batch's mean loss in the mean loss of a step, so that the micro-batch size does
    not matter. With a mask, micro-batches differ in their number of targets.

    targets: (B, T), this process's share; `sequences`: the mean of all shares. The mean over processes is the mean loss
    of the step.
    """
    if not has_mask:
        count = len(targets)
        return [min(rows, count - first) / sequences for first in range(0, count, rows)]
    counts = torch.stack([(part != IGNORE_INDEX).sum() for part in targets.split(rows)])
    return list(counts / parallel.mean_over_processes(counts.sum()))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Pad the parts of a batch, each (at most rows, T), to (rows, T), so that a compiled model sees only one shape. The
    added rows do not count in the mean loss."""
    missing = rows - len(batch[0])
    if not missing:
        return batch
    inputs, targets, *starts = (torch.cat([part, part[:1].expand(missing, -1)]) for part in batch)
    targets[-missing:] = IGNORE_INDEX
    return inputs, targets, *starts


def update(run: Run, loss: torch.Tensor, lr: float) -> torch.Tensor:
    """Update the model by its gradients, unless they or the loss are not finite. Clear the gradients. Return their norm
    before clipping, (). `loss`: of `forward_backward`; `lr`: AdamW's."""
    if run.captured is not None:
        return run.captured.update(lr)
    grad_norm = update_keeping_gradients(run, loss, lr)
    run.optimizer.zero_grad(set_to_none=True)
    return grad_norm


def update_keeping_gradients(run: Run, loss: torch.Tensor, lr: float | torch.Tensor) -> torch.Tensor:
    """Apply the update without clearing the gradients, and return their norm. `lr` may be on the device."""
    optimizer, scaler = run.optimizer, run.scaler
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    apply_hyperparameters(optimizer, lr, run.config)
    grad_norm = gradient_norm(optimizer)
    skipped = (~torch.isfinite(loss + grad_norm)).float()  # on the device, so the host does not wait
    update_parameters(optimizer, grad_norm, run.config.grad_clip, skipped)
    scaler.update()
    run.skips.copy_(count_skip(run.skips, skipped))
    return grad_norm


def count_skip(skips: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Update the counts of skipped updates (total, current streak, longest streak), (3,) -> (3,). `skipped`: 1.0 or
    0.0, for the last update. Everything stays on the device, so the host does not wait."""
    total, in_a_row, longest = skips
    in_a_row = (in_a_row + 1) * skipped
    return torch.stack([total + skipped, in_a_row, torch.maximum(longest, in_a_row)])


def require_stable(run: Run) -> None:
    """Raise ConfigError after too many skipped updates in a row. Waits for the device."""
    longest = int(run.skips[2])
    if longest >= (MAX_SKIPS_IN_A_ROW_SCALED if run.scaler.is_enabled() else MAX_SKIPS_IN_A_ROW):
        raise diverged(run, f"{longest} updates in a row had a loss or gradient that is not finite")


def diverged(run: Run, what: str) -> ConfigError:
    """Return the error for a training that diverged. `what` says how it showed."""
    restart = "No checkpoint was saved yet, so the same command starts from the beginning."
    if run.checkpoint_step:
        restart = f"Saved checkpoints are intact, and the same command continues from step {run.checkpoint_step:,}."
    return ConfigError(
        f"The training diverged at step {run.state.step:,}: {what}. {restart} Try, most promising first: a third of "
        "the --learning_rate, more --warmup_steps, --grad_clip 0.5, or --precision fp32."
    )
