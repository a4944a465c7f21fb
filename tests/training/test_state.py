"""The state of a training as its file holds it: everything comes back, and nothing else is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from training.state import Saved, Start, TrainState, read_state

COUNTS = st.integers(0, 10**8 - 1)
LOSSES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
STATES = st.builds(
    TrainState,
    run_id=st.text(min_size=1),
    step=COUNTS,
    sequences_seen=COUNTS,
    tokens=st.integers(0, 2**63 - 1),
    best_val_loss=LOSSES,
    best_windows=st.none() | COUNTS,
    lowest_val_loss=LOSSES,
    base=st.none() | st.builds(Start, st.floats(0, 100), st.lists(st.text()), st.lists(st.text())),
    elapsed_seconds=st.floats(0, 1e9),
    ending_seconds=st.floats(0, 1e9),
    resumed_from=st.none() | st.text(min_size=1),
)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Saved]:
    folder = tmp_path_factory.mktemp("state")

    def write_and_read(content: dict[str, Any]) -> Saved:
        (folder / "training_state.json").write_text(json.dumps(content))
        return read_state(Checkpoint(folder))

    return write_and_read


def content(state: TrainState) -> dict[str, Any]:
    return json.loads(json.dumps(Saved(state, {}, {"tokens_sha256": "0"}, {"seed": 1}).to_json()))


@given(state=STATES)
def test_everything_comes_back(read: Callable, state: TrainState) -> None:
    state = replace(state, evaluated_step=state.step)
    saved = read(content(state))
    assert saved.state == state and (saved.data, saved.config) == ({"tokens_sha256": "0"}, {"seed": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1), ("step", True), ("step", 1.5), ("step", 10**8), ("sequences_seen", 2**32), ("tokens", "1"),
        ("elapsed_seconds", -1.0), ("elapsed_seconds", None), ("best_val_loss", "nan"), ("worse", None),
        ("run_id", 7), ("start", {}), ("start", {"val_loss": 1, "prompts": [1], "answers": []}), ("evaluated_step", []),
        ("evaluated_step", 3),
        ("scaler", {"scale": 1}), ("data", []), ("config", None), ("resumed_from", 1),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_named(read: Callable, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"is not a valid training state: (state\.)?({key}|scaler)"):
        read(content(TrainState()) | {key: value})


def test_a_field_that_every_version_wrote_has_to_be_there(read: Callable) -> None:
    whole = content(TrainState())
    with pytest.raises(CheckpointError, match="data is missing; step is missing"):
        read({key: value for key, value in whole.items() if key not in ("step", "data")})
