"""Where a training stands, and the file in a checkpoint that holds it.

The file may come from somebody else, with hashes that match: pydantic checks every value when it is read.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import asdict
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from common.checkpoint import STATE, Checkpoint
from common.errors import CheckpointError
from common.validation import Text, build, fields_of

MAX_STEPS = 10**8 - 1  # a checkpoint's name has eight digits
Steps = Annotated[int, Field(strict=True, ge=0, le=MAX_STEPS)]
Sequences = Annotated[int, Field(strict=True, ge=0, lt=2**32)]  # the order of an epoch is drawn from its number
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, ge=0)]
Number = Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)]
OF_A_FILE = ConfigDict(allow_inf_nan=False)

SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@dataclass(config=OF_A_FILE)
class Start:
    """An evaluation of the trained weights that a run started from."""

    val_loss: Number
    prompts: list[str]
    answers: list[str]


@dataclass(config=OF_A_FILE)
class TrainState:
    """Where a training stands. Every checkpoint holds it, and all processes have the same one."""

    run_id: str = Field(default_factory=lambda: uuid.uuid4().hex)  # stays the same if the folder is renamed
    step: Steps = 0
    sequences_seen: Sequences = 0
    tokens: Count = 0
    best_val_loss: Number | None = None  # of the weights in best/
    best_step: Steps = 0
    best_windows: Count | None = None  # validation windows of this loss
    lowest_val_loss: Number | None = None  # up to this step; after a kill, best/ may be of a later step
    worse: Steps = 0  # evaluations in a row without a lower loss
    base: Start | None = None
    evaluated_step: Steps = 0  # the last step that was evaluated
    skipped_updates: Steps = 0
    elapsed_seconds: Seconds = 0.0  # in all sessions
    ending_seconds: Seconds = 0.0  # estimate for the last step, its evaluation and saving it
    compiled: bool | None = None  # on a CPU; None: on a GPU, or no step was taken
    resumed_from: Text | None = None  # --resume_from
    initialized_from: Text | None = None  # the SHA-256 of the weights that it started from


@dataclass(config=OF_A_FILE)
class Saved:
    """The content of a checkpoint's training_state.json: the state, and what it is the state of."""

    state: TrainState
    scaler: dict[str, Number]  # the state of the gradient scaler; empty where there is none
    data: dict[str, Any]  # the fingerprint of the data
    config: dict[str, Any]

    @model_validator(mode="after")
    def checked(self) -> Saved:
        if self.scaler and not self.scaler.keys() >= SCALER:
            raise ValueError("scaler is not the state of a gradient scaler")
        if self.state.evaluated_step > self.state.step:
            raise ValueError(f"evaluated_step is {self.state.evaluated_step}, after step {self.state.step}")
        return self

    def to_json(self) -> dict[str, Any]:
        rest = {"scaler": self.scaler, "data": self.data, "config": self.config, "torch": torch.__version__}
        return asdict(self.state) | rest


def read_state(checkpoint: Checkpoint) -> Saved:
    """Read the state. Raises CheckpointError listing what is missing or wrong, and for weights without a state."""
    path = checkpoint.path / STATE
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint.path} holds weights but no training state (the blog's form): --init_from "
            f"{checkpoint.path} starts a new run from them."
        )
    read = checkpoint.training_state()
    of_state = fields_of(TrainState)
    try:
        if missing := sorted({*of_state, "scaler", "data", "config"} - read.keys()):
            raise ValueError("; ".join(f"{key} is missing" for key in missing))
        rest = {key: read[key] for key in ("scaler", "data", "config")}
        return build(Saved, {"state": {key: read[key] for key in of_state}, **rest})
    except ValueError as problem:
        raise CheckpointError(
            f"{path} is not the state of a training: {problem}. "
            f"--init_from {checkpoint.path} starts a new run from the weights."
        ) from None


@dataclasses.dataclass(frozen=True)
class Previous:
    """What this session builds on. Its files have been verified."""

    checkpoint: Checkpoint | None = None  # to continue from
    saved: Saved | None = None  # its training state
    is_own: bool = True  # the checkpoint is this run's, here or in the mirror
    init: Checkpoint | None = None  # of `init_from`, if a new run starts

    @property
    def source(self) -> Checkpoint | None:
        """Where the weights come from."""
        return self.checkpoint or self.init
