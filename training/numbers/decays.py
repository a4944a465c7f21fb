"""How the learning rate falls after its peak. A new decay is one entry here. This file needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(progress: float) -> float:
    """Loshchilov & Hutter 2017, eq. 5."""
    return (1.0 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    return 1.0 - progress


# Progress, from 0 at the peak to 1 at the last step -> the factor, from 1 to 0, of the peak's distance to `min_lr`.
# None: no decay.
DECAYS: dict[str, Callable[[float], float] | None] = {"cosine": cosine, "linear": linear, "constant": None}
