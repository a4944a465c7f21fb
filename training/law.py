"""Scaling laws: forecast the loss of a model before it is trained (docs/choosing.md)."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple


class Law(NamedTuple):
    """Bits per letter on English books, after Muennighoff et al. 2023 ("Scaling Data-Constrained Language Models").

    loss = floor + (size ** kappa + text ** kappa) ** (1 / kappa). `size` falls with the parameters of the blocks,
    `text` with the letters of text; each further pass over the text is worth less. With kappa 1 the two parts add up; a
    larger kappa lets the larger part dominate, as in Kaplan et al. 2020, eq. 1.5.
    """

    floor: float
    size_factor: float
    size_power: float
    text_factor: float
    text_power: float
    worth: float  # infinitely many passes equal this many first ones, at one letter of text per parameter
    worth_power: float  # growth of `worth` with the letters per parameter
    kappa: float = 1.0

    def loss(self, parameters: Any, letters: Any, passes: Any) -> Any:
        """Return the bits per letter. Takes and returns numbers or tensors."""
        worth = self.passes_worth(parameters, letters)
        seen = letters * worth * (1 - math.e ** (-passes / worth))
        size, text = self.size_factor * parameters**-self.size_power, self.text_factor * seen**-self.text_power
        return self.floor + (size**self.kappa + text**self.kappa) ** (1 / self.kappa)

    def passes_worth(self, parameters: Any, letters: Any) -> Any:
        return self.worth * (letters / parameters) ** self.worth_power


MEASURED_LAW = Law(0.9591, 19.92, 0.39, 15.68, 0.198, 2.488, 0.0135)  # small runs on CPUs: docs/benchmarks/law.md
PUBLIC_LAW = Law(0.2187, 6.270, 0.1286, 7.921, 0.1102, 2.848, 0.2773, 2.714)  # docs/benchmarks/law.md
# The range of our own runs. Within it MEASURED_LAW is more accurate, beyond it PUBLIC_LAW.
MAX_PARAMETERS, MIN_LETTERS, MAX_LETTERS = 3.3e6, 9e4, 9e6
MIN_PASSES_GAIN = 0.01  # bits per letter
MEASURED_ERROR = 0.04  # bits per letter; nine of ten of our runs are closer
UNMEASURED_ERROR_FACTOR = 2  # beyond our range; nine of ten public losses of each kind of text are closer


def expected_loss(parameters: float, letters: float, passes: float) -> float:
    """Return the expected bits per letter on English books.

    Half a pass equals one pass over half of the text; several passes equal one over a longer text. Beyond the range of
    our runs, start from MEASURED_LAW at its edge and subtract what PUBLIC_LAW falls from there. Parameters beyond
    MAX_PARAMETERS count up to one per letter.
    """
    letters, passes = letters * min(1.0, passes), max(1.0, passes)
    worth = MEASURED_LAW.passes_worth(parameters, letters)
    once = letters * (1 - math.exp(-passes / worth)) / (1 - math.exp(-1 / worth))
    parameters = min(parameters, max(MAX_PARAMETERS, once))
    corner = min(parameters, MAX_PARAMETERS), min(once, MAX_LETTERS), 1
    loss: float = MEASURED_LAW.loss(*corner) + PUBLIC_LAW.loss(parameters, once, 1) - PUBLIC_LAW.loss(*corner)
    return loss


def useful_passes(parameters: float, letters: float) -> int:
    """Return the number of passes after which all further ones together gain less than MIN_PASSES_GAIN."""
    best = expected_loss(parameters, letters, math.inf)
    return next(
        passes for passes in itertools.count(1) if expected_loss(parameters, letters, passes) < best + MIN_PASSES_GAIN
    )


def is_measured(parameters: float, letters: float) -> bool:
    """Return whether a run is within the range of our own."""
    return parameters <= MAX_PARAMETERS and MIN_LETTERS <= letters <= 1.1 * MAX_LETTERS


def expected_error(parameters: float, letters: float, doubt: float) -> float:
    """Return the error of the forecast in bits per letter; nine of ten runs are closer. `doubt`: the part
    that is due to the text."""
    return MEASURED_ERROR * (1 if is_measured(parameters, letters) else UNMEASURED_ERROR_FACTOR) + doubt
