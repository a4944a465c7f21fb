"""The models the dial chooses from, and their settings: configs/small_modern.json adjusted to short runs
(docs/benchmarks/recipe.md)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from common.errors import ConfigError
from common.files import read_json
from training.config import REPOSITORY

BASE_CONFIG = "small_modern"
SHORT_RUN_SETTINGS = {"muon_momentum": 0.9, "muon_learning_rate": 0.03, "cooldown": 0.75}
HEAD_WIDTH = 64
# A run of 3M tokens takes 2,048 tokens per step; the step grows with the square root of the run.
STEP_TOKENS, RUN_TOKENS = 2048, 3e6
MIN_STEPS_PER_RUN = 300  # limits the step size
SHORT_CONTEXT, SHORT_RUN_TOKENS = 128, 7e5  # a shorter run with a longer context would have too few steps
MIN_CONTEXT = 16
PASSES_WITHOUT_DROPOUT = 4


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


def choose_context(shape: Shape, tokens: float, held_out: float = math.inf) -> int:
    """Return the context length for a run of `tokens`, no longer than the `held_out` tokens."""
    length = min(shape.max_seq_len, SHORT_CONTEXT) if tokens <= SHORT_RUN_TOKENS else shape.max_seq_len
    while length > max(held_out, MIN_CONTEXT):
        length //= 2
    return length


def choose_sequences(tokens: float, max_seq_len: int, busy: float = 0.0) -> int:
    """Return the sequences per step for a run of `tokens`: a power of two with at least `busy` tokens."""
    target = max(busy, STEP_TOKENS * math.sqrt(tokens / RUN_TOKENS)) / max_seq_len
    limit = tokens / (MIN_STEPS_PER_RUN * max_seq_len)
    return 2 ** max(0, min(round(math.log2(target)), math.floor(math.log2(limit))))


def choose_settings(embed_dim: int, step_tokens: float, passes: float) -> dict[str, Any]:
    """Return the settings that depend on width, step size and passes. With many passes, dropout and a lower learning
    rate of AdamW reduce overfitting. Measured up to a width of 256 (docs/benchmarks/recipe.md)."""
    size = step_tokens / STEP_TOKENS
    rate = min(0.01, math.sqrt(size / max(1, passes)) / embed_dim)
    return {
        "learning_rate": float(f"{rate:.2g}"),
        "beta2": 1 - min(0.05, max(0.0025, 0.005 * size)),  # averages over the same number of tokens
        "dropout": (0.2 if passes > 9 else 0.1)
        if passes > PASSES_WITHOUT_DROPOUT
        else 0.0,  # few values: each is compiled anew
    }


def read_recipe() -> dict[str, Any]:
    return read_json(REPOSITORY / "configs" / f"{BASE_CONFIG}.json", ConfigError) | SHORT_RUN_SETTINGS
