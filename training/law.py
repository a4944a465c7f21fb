"""The loss that a model, a text and passes over it come to, before anything is trained: docs/choosing.md."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple


class Law(NamedTuple):
    """Bits per letter on English books, after Muennighoff et al. 2023 ("Scaling Data-Constrained Language Models"): a
    floor, a part that falls with the parameters of the blocks, and one that falls with the letters of text, of which
    each further pass is worth less. `kappa` 1 adds the two parts; the larger it is, the more the larger part counts
    alone (as in Kaplan et al. 2020, eq. 1.5)."""

    floor: float
    of_size: float
    size_power: float
    of_text: float
    text_power: float
    worth: float  # first passes that all passes are worth at most, with a letter of text for each parameter
    worth_power: float  # how that grows with the letters for each parameter
    kappa: float = 1.0

    def loss(self, parameters: Any, letters: Any, passes: Any) -> Any:
        """Return the bits per letter, for numbers or tensors of them."""
        worth = self.passes_worth(parameters, letters)
        seen = letters * worth * (1 - math.e ** (-passes / worth))
        size, text = self.of_size * parameters**-self.size_power, self.of_text * seen**-self.text_power
        return self.floor + (size**self.kappa + text**self.kappa) ** (1 / self.kappa)

    def passes_worth(self, parameters: Any, letters: Any) -> Any:
        return self.worth * (letters / parameters) ** self.worth_power


OURS = Law(0.9591, 19.92, 0.39, 15.68, 0.198, 2.488, 0.0135)  # small runs on CPUs: docs/benchmarks/law.md
PUBLIC = Law(0.2187, 6.270, 0.1286, 7.921, 0.1102, 2.848, 0.2773, 2.714)  # docs/benchmarks/public_losses.md
# Up to here the first is measured and nearer, and beyond the second.
MAX_PARAMETERS, MIN_LETTERS, MAX_LETTERS = 3.3e6, 9e4, 9e6
LEAST_GAIN = 0.01  # bits per letter that all further passes together would bring
ERROR = 0.04  # that nine of ten of our runs stay below
BEYOND = 2  # times that error, where no run of ours was: nine of ten public losses of each kind of text stay below


def expected_loss(parameters: float, letters: float, passes: float) -> float:
    """Return the bits per letter on English books. Half of a text is a text of half the size; several passes are one
    over a longer text. Beyond our runs, take our law at the last of them, and as much less as the public law falls from
    there. Parameters beyond MAX_PARAMETERS count only as far as there are letters for them."""
    letters, passes = letters * min(1.0, passes), max(1.0, passes)
    worth = OURS.passes_worth(parameters, letters)
    once = letters * (1 - math.exp(-passes / worth)) / (1 - math.exp(-1 / worth))
    parameters = min(parameters, max(MAX_PARAMETERS, once))
    corner = min(parameters, MAX_PARAMETERS), min(once, MAX_LETTERS), 1
    loss: float = OURS.loss(*corner) + PUBLIC.loss(parameters, once, 1) - PUBLIC.loss(*corner)
    return loss


def useful_passes(parameters: float, letters: float) -> int:
    """Return the number of passes after which all others together bring less than LEAST_GAIN."""
    best = expected_loss(parameters, letters, math.inf)
    return next(
        passes for passes in itertools.count(1) if expected_loss(parameters, letters, passes) < best + LEAST_GAIN
    )


def is_measured(parameters: float, letters: float) -> bool:
    """Return whether runs of ours were like this one."""
    return parameters <= MAX_PARAMETERS and MIN_LETTERS <= letters <= 1.1 * MAX_LETTERS


def expected_error(parameters: float, letters: float, doubt: float) -> float:
    """Return how far the loss may be from the expected one in nine of ten runs, in bits per letter. `doubt`: how far it
    may be because of the text."""
    return ERROR * (1 if is_measured(parameters, letters) else BEYOND) + doubt
