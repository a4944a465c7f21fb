"""The loss that a model, a text and passes over it come to, before anything is trained: docs/choosing.md."""

from __future__ import annotations

import itertools
import lzma
import math
from typing import Any, NamedTuple

BOOKS, DIFFICULTY_POWER = 0.312, 0.4  # what LZMA packs English books to; how the loss follows that of other texts


class Law(NamedTuple):
    """Bits per byte on English books, after Muennighoff et al. 2023 ("Scaling Data-Constrained Language Models"): a
    floor, a part that falls with the parameters of the blocks, and one that falls with the bytes of text, of which each
    further pass is worth less. `kappa` 1 adds the two parts; the larger it is, the more the larger part counts alone
    (as in Kaplan et al. 2020, eq. 1.5)."""

    floor: float
    of_size: float
    size_power: float
    of_text: float
    text_power: float
    worth: float  # first passes that all passes are worth at most, with a byte of text for each parameter
    worth_power: float  # how that grows with the bytes for each parameter
    kappa: float = 1.0

    def loss(self, parameters: Any, text_bytes: Any, passes: Any) -> Any:
        """Return the bits per byte, for numbers or tensors of them."""
        worth = self.passes_worth(parameters, text_bytes)
        seen = text_bytes * worth * (1 - math.e ** (-passes / worth))
        size, text = self.of_size * parameters**-self.size_power, self.of_text * seen**-self.text_power
        return self.floor + (size**self.kappa + text**self.kappa) ** (1 / self.kappa)

    def passes_worth(self, parameters: Any, text_bytes: Any) -> Any:
        return self.worth * (text_bytes / parameters) ** self.worth_power


OURS = Law(1.095, 13.17, 0.3582, 19.41, 0.2251, 2.174, 0.01316)  # small runs on CPUs: docs/benchmarks/law.md
PUBLIC = Law(0.2187, 6.270, 0.1286, 7.921, 0.1102, 2.848, 0.2773, 2.714)  # docs/benchmarks/public_losses.md
# Up to here the first is measured and nearer, and beyond the second.
MAX_PARAMETERS, MIN_BYTES, MAX_BYTES = 3.3e6, 9e4, 9e6
LEAST_GAIN = 0.003
ERROR = 0.04  # that nine of ten of our runs stay below
BEYOND = 2  # times that error, where no run of ours was: nine of ten public losses of each kind of text stay below


def expected_loss(parameters: float, text_bytes: float, passes: float) -> float:
    """Return the bits per byte on English books. Half of a text is a text of half the size. Beyond our runs, take our
    law at the last of them, and as much less as the public law falls from there."""
    text_bytes, passes = text_bytes * min(1.0, passes), max(1.0, passes)
    corner = min(parameters, MAX_PARAMETERS), min(text_bytes, MAX_BYTES), passes
    loss: float = OURS.loss(*corner) + PUBLIC.loss(parameters, text_bytes, passes) - PUBLIC.loss(*corner)
    return loss


def useful_passes(parameters: float, text_bytes: float) -> int:
    """Return the number of passes after which another one brings less than LEAST_GAIN."""
    losses = (expected_loss(parameters, text_bytes, passes) for passes in itertools.count(1))
    return next(number for number, (now, then) in enumerate(itertools.pairwise(losses), 1) if now - then < LEAST_GAIN)


def expected_error(parameters: float, text_bytes: float, difficulty: float) -> float:
    """Return how far the loss may be from `difficulty * expected_loss`, in nine of ten runs."""
    is_beyond = parameters > MAX_PARAMETERS or not MIN_BYTES <= text_bytes <= 1.1 * MAX_BYTES
    return ERROR * (BEYOND if is_beyond else 1) + abs(1 - difficulty)


def difficulty(sample: bytes) -> float:
    """Return how much harder a text is to predict than English books: by how far LZMA packs the second half
    of a sample once it knows the first, for a model has read such text."""
    half = len(sample) // 2
    packed = len(lzma.compress(sample)) - len(lzma.compress(sample[:half]))
    return float((packed / (len(sample) - half) / BOOKS) ** DIFFICULTY_POWER)
