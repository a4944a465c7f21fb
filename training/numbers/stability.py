"""Unstable training: updates skipped because the loss or gradient is not finite, and losses that jump."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from common.errors import ConfigError

MOST_IN_A_ROW = 5  # this many skipped updates in a row stop the run
MOST_IN_A_ROW_SCALED = 25  # in fp16: the gradient scaler starts at 65,536 and halves its factor at each skip
SPIKE_SIGMAS = 6.0
LOSSES = range(20, 101)  # how many of the last reported losses make a mean


def not_finite(loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
    """1.0 on the device if the update must be skipped, else 0.0. The host does not wait for it."""
    return (~torch.isfinite(loss + grad_norm)).float()


class Stability:
    """Counts skipped updates and warns about them. On a GPU the counts stay on the device, so the host does not wait.
    On a CPU they are plain numbers, at a tenth of the cost."""

    def __init__(self, device: torch.device, scaled: bool = False, skipped: int = 0):
        self.most_in_a_row = MOST_IN_A_ROW_SCALED if scaled else MOST_IN_A_ROW
        self.normal = " A few are normal in fp16." if scaled else ""
        self.is_read_at_once = device.type == "cpu"
        counts: list[Any] = [float(skipped), 0.0, 0.0]
        if not self.is_read_at_once:
            counts = [torch.tensor(count, device=device) for count in counts]
        self.total, self.in_a_row, self.longest = counts  # in_a_row: up to now; longest: so far
        self.told = skipped
        self.losses: deque[float] = deque(maxlen=LOSSES.stop - 1)

    def step_done(self, skipped: torch.Tensor) -> None:
        """`skipped` is 1.0 or 0.0."""
        last = skipped.item() if self.is_read_at_once else skipped
        self.total = self.total + last
        self.in_a_row = (self.in_a_row + 1) * last
        self.longest = (max if self.is_read_at_once else torch.maximum)(self.longest, self.in_a_row)

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
        if (skipped := self.skipped) > self.told:
            messages.append(
                f"Warning: updates skipped up to step {step:,}, because the loss or its gradient was not finite: "
                f"{skipped - self.told} ({skipped} in this run).{self.normal}"
            )
            self.told = skipped
        if len(self.losses) >= LOSSES.start:
            mean = math.fsum(self.losses) / len(self.losses)
            # Not statistics.stdev, which computes with exact fractions and takes ten times as long.
            sigma = math.sqrt(math.fsum((each - mean) ** 2 for each in self.losses) / (len(self.losses) - 1))
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
