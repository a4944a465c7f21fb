"""The models that the dial chooses from, and their settings: those of configs/small_modern.json, with what fits few
steps (docs/benchmarks/recipe.md)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from common.errors import ConfigError
from common.files import read_json
from training.config import REPOSITORY

FORM = "small_modern"  # the config
FOR_FEW_STEPS = {"muon_momentum": 0.9, "learning_rate": 3e-3, "muon_learning_rate": 0.03, "cooldown": 0.75}
HEAD_WIDTH = 64

STEP_TOKENS, RUN_TOKENS = 2048, 2e6  # the step of a run of so many tokens; it grows with the root of the run's
GOOD_STEPS = 300  # a larger step never leaves fewer
SLOWEST_BETA2, FASTEST_BETA2 = 0.995, 0.95  # AdamW's averages over the same number of tokens, within these limits
SHORT_CONTEXT, FEW_TOKENS = 128, 7e5  # for runs of fewer tokens


class Shape(NamedTuple):
    num_layers: int
    embed_dim: int
    max_seq_len: int


LADDER = (
    Shape(4, 64, 256),
    Shape(4, 128, 256),
    Shape(4, 192, 256),
    Shape(4, 256, 256),
    Shape(6, 384, 256),
    Shape(8, 512, 512),
    Shape(12, 768, 1024),
    Shape(24, 1024, 1024),
)


def context_for(shape: Shape, tokens: float) -> int:
    """Return the context for a run of so many tokens; with a long one, a short run would have too few steps."""
    return min(shape.max_seq_len, SHORT_CONTEXT) if tokens <= FEW_TOKENS else shape.max_seq_len


def sequences_for(tokens: float, max_seq_len: int, busy: float = 0.0) -> int:
    """Return the sequences of a step in a run of so many tokens: a power of two, with at least `busy` tokens
    (docs/benchmarks/recipe.md)."""
    wanted = max(busy, STEP_TOKENS * math.sqrt(tokens / RUN_TOKENS)) / max_seq_len
    most = tokens / (GOOD_STEPS * max_seq_len)
    return 2 ** max(0, min(round(math.log2(wanted)), math.floor(math.log2(most))))


def beta2_for(step_tokens: float) -> float:
    """Return AdamW's beta2 for steps of so many tokens."""
    return max(FASTEST_BETA2, min(SLOWEST_BETA2, 1 - (1 - SLOWEST_BETA2) * step_tokens / STEP_TOKENS))


def dropout_for(passes: float) -> float:
    """Return the dropout: many epochs overfit without."""
    return 0.2 if passes > 6 else 0.0


def recipe() -> dict[str, Any]:
    return read_json(REPOSITORY / "configs" / f"{FORM}.json", ConfigError) | FOR_FEW_STEPS
