"""The models that the dial chooses from, and their settings: those of configs/small_modern.json, with what fits few
steps (docs/benchmarks/recipe.md)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from common.errors import ConfigError
from common.files import read_json
from training.config import REPOSITORY

FORM = "small_modern"  # the config
FOR_FEW_STEPS = {"muon_momentum": 0.9, "muon_learning_rate": 0.03, "cooldown": 0.75}
HEAD_WIDTH = 64
STEP_TOKENS, RUN_TOKENS = 2048, 3e6  # the step of a run of so many tokens; it grows with the root of the run's
GOOD_STEPS = 300  # a larger step never leaves fewer
SHORT_CONTEXT, FEW_TOKENS = 128, 7e5  # for runs of fewer tokens
SHORTEST_CONTEXT = 16
PASSES_WITHOUT_DROPOUT = 4
# One's own text, after a companion (docs/benchmarks/companion.md)
OWN_PASSES = 2  # with more of them it forgets what the companion taught
OWN_STEP_TOKENS, OWN_STEPS = 2048, 100  # a step; at least so many of them, if the text is small
OWN_START_SHARE = 0.03  # share of --minutes that its run takes besides its steps


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


def context_for(shape: Shape, tokens: float, held_out: float = math.inf) -> int:
    """Return the context for a run of so many tokens; with a long one, a short run would have too few steps. It fits
    into the tokens that are `held_out`."""
    length = min(shape.max_seq_len, SHORT_CONTEXT) if tokens <= FEW_TOKENS else shape.max_seq_len
    while length > max(held_out, SHORTEST_CONTEXT):
        length //= 2
    return length


def sequences_for(tokens: float, max_seq_len: int, busy: float = 0.0) -> int:
    """Return the sequences of a step in a run of so many tokens: a power of two, of at least `busy` tokens."""
    wanted = max(busy, STEP_TOKENS * math.sqrt(tokens / RUN_TOKENS)) / max_seq_len
    most = tokens / (GOOD_STEPS * max_seq_len)
    return 2 ** max(0, min(round(math.log2(wanted)), math.floor(math.log2(most))))


def settings_for(embed_dim: int, step_tokens: float, passes: float) -> dict[str, Any]:
    """Return what follows the width of the model, the tokens of a step, and the passes over the text, of which many
    overfit less with a lower rate of AdamW and dropout. Measured up to a width of 256 (docs/benchmarks/recipe.md)."""
    size = step_tokens / STEP_TOKENS
    rate = min(0.01, math.sqrt(size / max(1, passes)) / embed_dim)
    return {
        "learning_rate": float(f"{rate:.2g}"),
        "beta2": 1 - min(0.05, max(0.0025, 0.005 * size)),  # averages over the same number of tokens
        "dropout": (0.2 if passes > 9 else 0.1) if passes > PASSES_WITHOUT_DROPOUT else 0.0,  # few: compiled for one
    }


def recipe() -> dict[str, Any]:
    return read_json(REPOSITORY / "configs" / f"{FORM}.json", ConfigError) | FOR_FEW_STEPS
