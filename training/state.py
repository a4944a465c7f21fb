"""The state of a training, and the checkpoint file that holds it.

Pydantic checks every value on reading, because a checkpoint with valid hashes may come from somebody else.
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
from common.validation import NonEmptyText, build, fields_of

MAX_STEPS = 10**8 - 1  # a checkpoint's name has eight digits
Steps = Annotated[int, Field(strict=True, ge=0, le=MAX_STEPS)]
Sequences = Annotated[int, Field(strict=True, ge=0, lt=2**32)]  # seeds the order of an epoch
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, ge=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Number = Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)]
FINITE = ConfigDict(allow_inf_nan=False)

SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@dataclass(config=FINITE)
class Start:
    """An evaluation of the weights that a run started from."""

    val_loss: Number
    prompts: list[str]
    answers: list[str]


@dataclass(config=FINITE)
class Switch:
    """The point of a run with a companion from which on every second sequence comes from one's own text."""

    sequences: Sequences  # sequences seen before it
    end: Sequences  # sequences at which the own text has had its passes, which ends the run
    progress: Share  # of the run, so that its last part has a schedule of its own


@dataclass(config=FINITE)
class Fitted:
    """The micro-batch that fits on a device where memory ran out with a larger one."""

    rows: Annotated[int, Field(strict=True, ge=1)]
    device: NonEmptyText


@dataclass(config=FINITE)
class TrainState:
    """The state of a training, saved in every checkpoint and the same in all processes."""

    run_id: str = Field(default_factory=lambda: uuid.uuid4().hex)  # stays the same if the folder is renamed
    step: Steps = 0
    sequences_seen: Sequences = 0
    tokens: Count = 0
    best_val_loss: Number | None = None  # the loss of best/
    best_step: Steps = 0
    best_windows: Count | None = None  # validation windows behind best_val_loss
    lowest_val_loss: Number | None = None  # up to this step; after a kill, best/ may come from a later one
    worse: Steps = 0  # evaluations in a row without a lower loss
    start: Start | None = None
    switch: Switch | None = None  # with a companion, once it is decided
    evaluated_step: Steps = 0  # the last step that was evaluated
    skipped_updates: Steps = 0
    elapsed_seconds: Seconds = 0.0  # over all sessions
    ending_seconds: Seconds = 0.0  # estimate for the last step, its evaluation and saving
    fitted: Fitted | None = None
    compiled: bool | None = None  # in the last session; None if that was on a GPU, and before the first step
    resumed_from: NonEmptyText | None = None  # --resume_from
    initialized_from: NonEmptyText | None = None  # SHA-256 of the initial weights


@dataclass(config=FINITE)
class Saved:
    """The content of a checkpoint's training_state.json."""

    state: TrainState
    scaler: dict[str, Number]  # state of the gradient scaler; empty if there is none
    data: dict[str, Any]  # TokenData.fingerprint
    config: dict[str, Any]

    @model_validator(mode="after")
    def checked(self) -> Saved:
        if self.scaler and not self.scaler.keys() >= SCALER_KEYS:
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
            f"{checkpoint.path} holds weights but no training state (the blog's format). Start a new run from them "
            f"with --init_from {checkpoint.path}."
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
            f"{path} is not a valid training state: {problem}. Start a new run from the weights with --init_from "
            f"{checkpoint.path}."
        ) from None


@dataclasses.dataclass(frozen=True)
class Previous:
    """The verified checkpoints that this session builds on."""

    checkpoint: Checkpoint | None = None  # the one to continue
    saved: Saved | None = None  # its training state
    is_own: bool = True  # the checkpoint belongs to this run
    init: Checkpoint | None = None  # `init_from`, if a new run starts

    @property
    def source(self) -> Checkpoint | None:
        """The checkpoint that the weights come from."""
        return self.checkpoint or self.init
