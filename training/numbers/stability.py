"""Numbers that go wrong: updates skipped because the loss or its gradient is not finite, and losses that jump."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from common.errors import ConfigError

MOST_IN_A_ROW = 5  # skipped updates, then the run stops
MOST_IN_A_ROW_SCALED = 25  # in fp16, where a gradient scaler halves its factor each time, from 65,536
SPIKE_SIGMAS = 6.0
LOSSES = range(20, 101)  # reported ones that a mean is worth taking of, and at the most


def not_finite(loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
    """Whether the update is to be skipped: 1.0 or 0.0, on the device, unread."""
    return (~torch.isfinite(loss + grad_norm)).float()


class Stability:
    """Counts skipped updates on the device, where nothing waits for them, and says what they mean when it is read. On a
    CPU there is nothing to wait for: they are counted in plain numbers, at a tenth of the cost."""

    def __init__(self, device: torch.device, scaled: bool = False, skipped: int = 0):
        self.most_in_a_row = MOST_IN_A_ROW_SCALED if scaled else MOST_IN_A_ROW
        self.normal = " A few are normal in fp16." if scaled else ""
        self.is_read_at_once = device.type == "cpu"
        counts: list[Any] = [float(skipped), 0.0, 0.0]
        if not self.is_read_at_once:
            counts = [torch.tensor(count, device=device) for count in counts]
        self.total, self.in_a_row, self.longest = counts  # the last two: of skipped updates one after another
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
        """What a row of metrics says of it: nothing as long as there is nothing. Waits for the device."""
        return {"skipped_updates": self.skipped} if self.skipped else {}

    @property
    def in_doubt(self) -> bool:
        """Whether the last update was skipped: the weights may be past saving. Waits for the device."""
        return bool(self.in_a_row)

    def require_stable(self, step: int, saved_step: int) -> None:
        """Raises ConfigError after too many skipped updates in a row. `saved_step` is that of `diverged`."""
        if self.longest >= self.most_in_a_row:
            what = f"{int(self.longest)} updates in a row had a loss or gradient that is not finite"
            raise diverged(step, saved_step, what)

    def warnings(self, step: int, loss: float) -> list[str]:
        """What is to be told of the last steps, now that the loss has been read."""
        said = []
        if (skipped := self.skipped) > self.told:
            said.append(
                f"Warning: updates skipped up to step {step:,}, for the loss or its gradient was not finite: "
                f"{skipped - self.told} ({skipped} in this run).{self.normal}"
            )
            self.told = skipped
        if len(self.losses) >= LOSSES.start:
            mean = math.fsum(self.losses) / len(self.losses)
            # Not statistics.stdev, whose exact fractions take ten times as long, at each reported step.
            sigma = math.sqrt(math.fsum((each - mean) ** 2 for each in self.losses) / (len(self.losses) - 1))
            if loss > mean + SPIKE_SIGMAS * sigma:
                said.append(
                    f"Warning: the loss jumped to {loss:.3f} at step {step:,}; it was {mean:.3f} on average, give or "
                    f"take {sigma:.3f}. If it does not come back: a lower --learning_rate, more --warmup_steps."
                )
        if math.isfinite(loss):
            self.losses.append(loss)
        return said


def diverged(step: int, saved_step: int, what: str) -> ConfigError:
    """`saved_step` is that of the newest checkpoint, 0 if there is none."""
    from_there = f"Checkpoints saved before are whole, and the same command continues from step {saved_step:,}."
    return ConfigError(
        f"The training diverged at step {step:,}: {what}. "
        f"{from_there if saved_step else 'No checkpoint was saved before: the same command starts anew.'} What helps, "
        f"most likely first: a lower --learning_rate (a third of it), more --warmup_steps, a lower --grad_clip (0.5), "
        f"or --precision fp32."
    )
