"""How long a run has taken, and how fast it trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from training.config import Config
from training.machine.hardware import Hardware


class Timer:
    """Evaluating and saving count in the time of a run, not in its speed."""

    def __init__(self, hardware: Hardware, elapsed: float, units_per_hour: float | None):
        self.hardware = hardware
        self.units_per_hour = units_per_hour
        self.earlier = elapsed  # seconds, in the sessions before this one
        self.started = time.perf_counter() - elapsed
        self.interval_started = time.perf_counter()
        self.interval_steps = 0
        self.interval_tokens = 0
        self.last_pause = 0.0  # seconds
        self.paused_seconds = 0.0
        self.training_seconds = 0.0
        self.training_tokens = 0

    @property
    def elapsed(self) -> float:
        """Seconds this run has taken, over all the sessions it was resumed in."""
        return time.perf_counter() - self.started

    @property
    def session_seconds(self) -> float:
        return self.elapsed - self.earlier

    @property
    def compute_units(self) -> float | None:
        """Spent so far; None where the machine's rate is not known."""
        return self.elapsed / 3600 * self.units_per_hour if self.units_per_hour else None

    def limit_reached(self, config: Config) -> str | None:
        """The flag whose limit the run has reached, if it has."""
        if config.max_hours and self.elapsed >= 3600 * config.max_hours:
            return f"--max_hours {config.max_hours:g}"
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Of this session while it trained, up to the last reporting step; None before the first."""
        return self.training_tokens / self.training_seconds if self.training_seconds else None

    def step_done(self, tokens: int) -> None:
        self.interval_steps += 1
        self.interval_tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside (evaluating, saving) out of the training speed. Not to be nested: it would count
        twice."""
        self.hardware.synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.last_pause = time.perf_counter() - began
            self.paused_seconds += self.last_pause
            self.interval_started += self.last_pause

    def training_row(
        self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float, flops_per_token: int
    ) -> dict[str, Any]:
        """What is measured at a reporting step. Reading the loss waits for the device: the one sync of the loop."""
        row = {"train_loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
        now = time.perf_counter()
        seconds = now - self.interval_started
        speed = self.interval_tokens / seconds
        row |= {"ms_per_step": 1000 * seconds / self.interval_steps, "tokens_per_second": speed}
        if self.hardware.peak_flops:
            row["mfu"] = speed * flops_per_token / self.hardware.peak_flops
        if peak := self.hardware.peak_memory():
            row["peak_memory_gb"] = peak / 1e9
        self.training_seconds += seconds
        self.training_tokens += self.interval_tokens
        self.interval_started, self.interval_steps, self.interval_tokens = now, 0, 0
        row["elapsed_seconds"] = self.elapsed
        if (units := self.compute_units) is not None:
            row["compute_units"] = units
        return row
