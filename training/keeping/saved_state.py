"""The training state of a checkpoint, checked: its hash says that it is what was written, not that we wrote it."""

from __future__ import annotations

import sys
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError

MOST_STEPS = 10**8  # a checkpoint's name has eight digits
MOST_SEQUENCES_SEEN = 2**32  # the order of an epoch is drawn from its number, which has to be below it
SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
REQUIRED = (
    "step", "sequences_seen", "tokens", "best_val_loss", "elapsed_seconds", "resumed_from", "scaler", "data", "config",
)  # fmt: skip


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that `Run.restore` needs is there and of its type; what only newer states have may be missing.

    Raises CheckpointError listing what is not.
    """
    state = checkpoint.training_state()
    row, scaler = state.get("unevaluated"), state.get("scaler")
    checks = {
        "step": (is_count(state.get("step"), MOST_STEPS), "a whole number"),
        "sequences_seen": (is_count(state.get("sequences_seen"), MOST_SEQUENCES_SEEN), "a whole number"),
        "tokens": (is_count(state.get("tokens"), 2**63), "a whole number"),
        "skipped_updates": (is_count(state.get("skipped_updates"), MOST_STEPS), "a whole number"),
        "best_windows": (is_count(state.get("best_windows") or 0, 2**63), "a whole number"),
        "best_val_loss": (state.get("best_val_loss") is None or is_number(state["best_val_loss"]), "a number"),
        "elapsed_seconds": (is_number(state.get("elapsed_seconds")) and state["elapsed_seconds"] >= 0, "a number"),
        "lowest_val_loss": (state.get("lowest_val_loss") is None or is_number(state["lowest_val_loss"]), "a number"),
        "worse": (is_count(state.get("worse"), MOST_STEPS), "a whole number"),
        "base": (state.get("base") is None or is_base(state["base"]), "a validation loss and answers"),
        "unevaluated": (
            row is None or (is_row(row) and row.get("step") == state.get("step")),
            "a row of metrics of its step",
        ),
        "scaler": (
            isinstance(scaler, dict) and (not scaler or all(is_number(scaler.get(key)) for key in SCALER)),
            "the state of a gradient scaler",
        ),
        **{key: (isinstance(state.get(key), dict), "an object {...}") for key in ("data", "config")},
        **{
            key: (isinstance(state.get(key), str | None), "a text")
            for key in ("run_id", "resumed_from", "initialized_from")
        },
    }
    problems = [f"{key} is missing" for key in REQUIRED if key not in state]
    problems += [
        f"{key} is {state[key]!r:.100}; {needed} is needed"
        for key, (holds, needed) in checks.items()
        if key in state and not holds
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint.path / 'training_state.json'} is not the state of a training: {'; '.join(problems)}. "
            f"--init_from {checkpoint.path} starts a new run from the weights."
        )
    return state


def is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # which NaN is not


def is_base(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and sorted(value) == ["answers", "prompts", "val_loss"]
        and is_number(value["val_loss"])
        and all(isinstance(value[key], list) for key in ("answers", "prompts"))
        and all(isinstance(text, str) for text in [*value["answers"], *value["prompts"]])
    )


def is_row(value: Any) -> bool:
    return isinstance(value, dict) and all(number is None or is_number(number) for number in value.values())
