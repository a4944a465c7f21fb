"""Capture a run's steps as CUDA graphs, because small models wait for Python, not for the GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from common.graphs import Capture, GraphCapture
from common.output import log
from training.config import Config
from training.hardware import Hardware
from training.memory import estimate_memory, return_freed_memory
from training.run import Run
from training.step import Batch, update_keeping_gradients

MAX_MEMORY_SHARE = 0.4  # a capture keeps its own activations, beside those of uncaptured work


class CapturedStep:
    """The captured parts of a run's steps. What changes from step to step is in tensors at fixed addresses: tokens, the
    weight of a micro-batch, the learning rate, gradients. A replay overwrites the results of the one before."""

    def __init__(self, run: Run, graphs: Capture):
        self.run, device = run, run.data.device
        self.rows = run.rows_at_once
        self.inputs = [part.clone() for part in run.data.batch(0, self.rows)]
        self.weight, self.total, self.rate, self.evaluated = torch.zeros(4, device=device).unbind()
        run.optimizer.tensors()  # allocates them
        self.warm_up(graphs)
        # The first pass of a step writes gradients, later ones add to them.
        self.replay_first, _ = graphs.capture(self.first_pass)
        self.replay_next, _ = graphs.capture(self.next_pass)
        self.replay_update, self.grad_norm = graphs.capture(self.update_pass)
        self.gradients = [parameter.grad for parameter in run.model.parameters()]  # keeps their memory
        run.optimizer.zero_grad(set_to_none=True)
        if run.config.eval_interval:
            run.model.eval()
            graphs.warm_up(self.evaluation_pass)
            self.replay_evaluation, _ = graphs.capture(self.evaluation_pass)
            run.model.train()

    def warm_up(self, graphs: Capture) -> None:
        """Run both passes and a skipped update, and restore the counters."""
        run = self.run
        graphs.warm_up(self.first_pass)
        graphs.warm_up(self.next_pass)
        counts = [run.skips]
        if run.scaler.is_enabled():
            assert run.scaler._scale is not None and run.scaler._growth_tracker is not None  # set by the first pass
            counts += [run.scaler._scale, run.scaler._growth_tracker]
        before = [tensor.clone() for tensor in counts]
        self.total.fill_(torch.nan)
        graphs.warm_up(self.update_pass)
        torch._foreach_copy_(counts, before)
        run.optimizer.zero_grad(set_to_none=True)
        return_freed_memory()  # the captures have their own pool

    # Captured

    def first_pass(self) -> None:
        """Forward and backward pass of a step's first micro-batch."""
        self.total.copy_(self.backward())

    def next_pass(self) -> None:
        self.total += self.backward()

    def update_pass(self) -> torch.Tensor:
        return update_keeping_gradients(self.run, self.total, self.rate)

    def backward(self) -> torch.Tensor:
        run = self.run
        with run.hardware.autocast():
            loss = run.step_model(*self.inputs)
        loss = loss * self.weight
        run.scaler.scale(loss).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluation_pass(self) -> None:
        with self.run.hardware.autocast():
            self.evaluated.copy_(self.run.step_model(*self.inputs))

    # Replayed

    def accumulate(self, micro_batches: Iterable[Batch], weights: Iterable[float | torch.Tensor]) -> torch.Tensor:
        """Forward and backward pass of micro-batches of `rows` sequences. Return the sum of their weighted losses,
        ()."""
        replay = self.replay_first
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            torch._foreach_copy_(self.inputs, micro_batch)
            if isinstance(weight, torch.Tensor):
                self.weight.copy_(weight)
            else:
                self.weight.fill_(weight)
            replay()
            replay = self.replay_next
        return self.total

    def update(self, lr: float) -> torch.Tensor:
        """Update the model, and return the norm of the gradients, ()."""
        self.rate.fill_(lr)
        self.replay_update()
        return self.grad_norm

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch of `rows` sequences, ()."""
        torch._foreach_copy_(self.inputs, batch)
        self.replay_evaluation()
        return self.evaluated


def can_capture(config: Config, hardware: Hardware, needed: int) -> bool:
    """Return whether steps that need `needed` bytes can be captured: on a GPU with memory for two of them, in one
    process, and without activation checkpointing, which reads the random state."""
    if config.graphs == "off" or config.activation_checkpointing or hardware.processes > 1:
        return False
    return hardware.is_cuda and needed <= MAX_MEMORY_SHARE * (hardware.memory_bytes or 0)


def capture_step(run: Run) -> CapturedStep | None:
    """Capture the steps of a run. Return None if they cannot be captured (see `can_capture`), or if that fails."""
    needed = estimate_memory(run.config, run.model, run.hardware, run.rows_at_once)
    if not can_capture(run.config, run.hardware, needed):
        return None
    try:
        return CapturedStep(run, GraphCapture(is_kept=True))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    run.optimizer.zero_grad(set_to_none=True)
    run.model.train()
    return_freed_memory()
    log.info(f"Capturing CUDA graphs failed ({reason}); training continues without them.")
    return None
