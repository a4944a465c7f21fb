"""Where a training stands, and the file in a checkpoint that holds it.

The file may come from somebody else, with hashes that match: every value is checked when it is read.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import uuid
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

from common.checkpoint import Checkpoint
from common.errors import CheckpointError

STATE_FILE = "training_state.json"
MOST_STEPS = 10**8 - 1  # a checkpoint's name has eight digits
# Values from 0 up to these limits are allowed.
Steps = Annotated[int, MOST_STEPS + 1]
Sequences = Annotated[int, 2**32]  # the order of an epoch is drawn from its number, which has to be below that
Count = Annotated[int, 2**63]
Planned = Annotated[int, math.inf]  # --max_steps and --epochs have no limit
Seconds = Annotated[float, math.inf]
Row = dict[str, float | None]  # of metrics
Scaler = dict[str, float]

SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@dataclass
class Start:
    """An evaluation of the trained weights that a run started from."""

    val_loss: float
    prompts: list[str]
    answers: list[str]


@dataclass
class Cooldown:
    """The fall of the learning rate, as the clock has fixed it (`minutes`). From here on the rate is a function of the
    step."""

    minutes: Seconds  # that the run was asked to take
    first: Steps  # steps, from 0: the first that decays
    last: Steps  # steps that the run takes in all
    most: Planned  # steps of all epochs

    def is_for(self, minutes: float, most: int) -> bool:
        """Whether it still holds for these minutes and steps of all epochs. What the text has ended, more epochs
        prolong."""
        return self.minutes == minutes and (self.most == most or self.last < min(self.most, most))


@dataclass
class TrainState:
    """Where a training stands. Every checkpoint holds it, and all processes have the same one. Only its methods change
    its fields."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # stays the same if the folder is renamed
    step: Steps = 0
    sequences_seen: Sequences = 0
    tokens: Count = 0
    max_steps: Planned = 0  # the run is finished after them; each session plans them anew
    best_val_loss: float | None = None  # of the weights in best/
    best_step: Steps = 0
    best_windows: Count | None = None  # validation windows of this loss
    lowest_val_loss: float | None = None  # up to this step; after a kill, best/ may be of a later step
    worse: Steps = 0  # evaluations in a row without a lower loss
    base: Start | None = None
    unevaluated: Row | None = None  # metrics of this step, if its evaluation is due and not done
    skipped_updates: Steps = 0
    elapsed_seconds: Seconds = 0.0  # in all sessions
    cooldown: Cooldown | None = None  # with `minutes`, once it has begun
    resumed_from: str | None = None
    initialized_from: str | None = None

    @property
    def finished(self) -> bool:
        return self.step >= self.max_steps

    def due(self, interval: int) -> bool:
        """True every `interval` steps (0: never) and after the last."""
        return bool(interval) and (self.step % interval == 0 or self.finished)

    def advance(self, sequences: int, tokens: int) -> None:
        """One more step is done."""
        self.step += 1
        self.sequences_seen += sequences
        self.tokens += tokens

    def begin_evaluation(self, row: dict[str, Any]) -> None:
        """Keep the metrics of this step until its evaluation is done."""
        self.unevaluated = row

    def evaluated(self, val_loss: float, windows: int) -> bool:
        """Record an evaluation of this step. Returns whether these weights are the best so far."""
        self.unevaluated = None
        is_best = self.best_val_loss is None or val_loss < self.best_val_loss
        if is_best:
            self.best_val_loss, self.best_step, self.best_windows = val_loss, self.step, windows
        is_lower = self.lowest_val_loss is None or val_loss < self.lowest_val_loss
        self.worse = 0 if is_lower else self.worse + 1
        self.lowest_val_loss = val_loss if is_lower else self.lowest_val_loss
        return is_best

    def best_evaluated_again(self, val_loss: float, windows: int) -> None:
        """The best weights have this loss over the validation windows of this session."""
        self.best_val_loss = self.lowest_val_loss = val_loss
        self.best_windows = windows

    def start_evaluated(self, start: Start) -> None:
        self.base = start

    def plan(self, max_steps: int) -> None:
        self.max_steps = max_steps

    def cool_down(self, cooldown: Cooldown) -> None:
        """The learning rate falls from now on."""
        self.cooldown, self.max_steps = cooldown, cooldown.last

    def measured(self, elapsed_seconds: float, skipped_updates: int) -> None:
        """Record what is only measured when a checkpoint is taken."""
        self.elapsed_seconds, self.skipped_updates = elapsed_seconds, skipped_updates


@dataclass
class Saved:
    """The content of a checkpoint's training_state.json."""

    state: TrainState
    scaler: Scaler  # the state of the gradient scaler; empty where there is none
    data: dict[str, Any]  # the fingerprint of the data
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        state = dataclasses.asdict(self.state)
        if state["unevaluated"] is not None:  # JSON has no infinity and no NaN
            row = state["unevaluated"].items()
            state["unevaluated"] = {key: value for key, value in row if value is not None and math.isfinite(value)}
        rest = {"scaler": self.scaler, "data": self.data, "config": self.config, "torch": torch.__version__}
        return state | rest


def read_state(checkpoint: Checkpoint) -> Saved:
    """Raises CheckpointError listing what is missing or not of its type, and for weights without a state."""
    path = checkpoint.path / STATE_FILE
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint.path} holds weights but no training state (the blog's form): --init_from "
            f"{checkpoint.path} starts a new run from them."
        )
    read = checkpoint.training_state()
    hints = get_type_hints(TrainState, include_extras=True)
    rest = {"scaler": Scaler, "data": dict[str, Any], "config": dict[str, Any]}
    problems = [f"{key} is missing" for key in sorted({*hints, *rest} - read.keys())]
    problems += [
        f"{key} is {read[key]!r:.100}; {described(hint)} is needed"
        for key, hint in (hints | rest).items()
        if key in read and not fits(read[key], hint)
    ]
    if not problems:
        if read["scaler"] and not read["scaler"].keys() >= SCALER:
            problems.append("scaler is not the state of a gradient scaler")
        if read.get("unevaluated") is not None and read["unevaluated"].get("step") != read["step"]:
            problems.append(f"unevaluated is a row of metrics of another step than {read['step']}")
    if problems:
        raise CheckpointError(
            f"{path} is not the state of a training: {'; '.join(problems)}. "
            f"--init_from {checkpoint.path} starts a new run from the weights."
        )
    fields = {key: read[key] for key in hints}
    fields["base"] = Start(**fields["base"]) if fields["base"] else None
    fields["cooldown"] = Cooldown(**fields["cooldown"]) if fields["cooldown"] else None
    return Saved(TrainState(**fields), **{key: read[key] for key in rest})


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of the type that an annotation asks for; an int is a float, too."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return fits(value, arguments[0]) and 0 <= value < arguments[1]
    if kind in (Union, UnionType):
        return any(fits(value, each) for each in arguments)
    if kind is list:
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        is_whole = isinstance(value, dict) and value.keys() == hints.keys()
        return is_whole and all(fits(value[key], hints[key]) for key in hints)
    if hint is Any:
        return True
    if hint is float:  # NaN is not below the largest number
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return value is None if hint is type(None) else type(value) is hint


def described(hint: Any) -> str:
    """The type that an annotation asks for, in words."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return "a whole number" if arguments[0] is int else "a number from 0 on"
    if kind in (Union, UnionType):
        return described(arguments[0])
    if kind is dict:
        return "an object {...}"
    return {str: "a text", float: "a number", int: "a whole number"}.get(hint, "an object {...}")
