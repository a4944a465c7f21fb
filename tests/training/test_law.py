"""The law behind the dial's forecasts, against the runs and the public losses that it was fitted to."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median

import pytest

from tests.helpers import ROOT
from training.law import (
    MAX_LETTERS,
    MAX_PARAMETERS,
    MEASURED_ERROR,
    MEASURED_LAW,
    UNMEASURED_ERROR_FACTOR,
    expected_error,
    expected_loss,
    useful_passes,
)


@pytest.mark.parametrize("letters", [1e5, 1e6, 1e7, 1e8, 1e10])
@pytest.mark.parametrize("parameters", [2e5, 3e6, 1e8])
def test_text_passes_and_parameters_lower_the_loss(parameters: float, letters: float) -> None:
    loss = expected_loss(parameters, letters, 2)
    assert loss > expected_loss(4 * parameters, letters, 1.5) - 0.2 and loss > expected_loss(parameters, 2 * letters, 2)
    assert loss >= expected_loss(parameters, letters, 3) - 1e-3
    assert expected_loss(parameters, letters, 3) > expected_loss(parameters, 2 * letters, 1.5)  # new text
    assert 0.5 < loss < 4 and 1 <= useful_passes(parameters, letters) <= 20


def test_the_two_laws_meet_where_our_runs_end() -> None:
    for letters, passes in ((MAX_LETTERS, 1), (MAX_LETTERS / 4, 4)):
        here = expected_loss(MAX_PARAMETERS, letters, passes)
        assert here == pytest.approx(MEASURED_LAW.loss(MAX_PARAMETERS, letters, passes), abs=1e-3)
        assert here == pytest.approx(expected_loss(1.001 * MAX_PARAMETERS, 1.001 * letters, passes), abs=1e-3)


@pytest.mark.parametrize("letters", [3e5, 3e6, 2e7, 9e8])
@pytest.mark.parametrize("parameters", [2e5, 3e6, 8.5e7, 3e8])
def test_more_passes_never_raise_the_loss(parameters: float, letters: float) -> None:
    losses = [expected_loss(parameters, letters, passes) for passes in (0.5, 1, 1.5, 2, 4, 8, 16, 30, 100)]
    assert losses == sorted(losses, reverse=True)
    useful = useful_passes(parameters, letters)
    assert expected_loss(parameters, letters, useful) - losses[-1] <= 0.01
    assert useful == 1 or expected_loss(parameters, letters, useful - 1) - losses[-1] > 0.0099


def test_the_law_is_that_of_the_runs_on_record() -> None:
    """Whole books are easier than their difficulty says; the interval that the dial prints has room for that."""
    runs = json.loads((ROOT / "docs/benchmarks/law.json").read_text())["runs"]
    inside = []
    for run in runs:
        difficulty = run.get("difficulty", 1)
        said = difficulty * expected_loss(run["parameters"], run["bytes"], run["passes"])
        inside.append(abs(said - run["lowest"]) <= expected_error(run["parameters"], run["bytes"], abs(1 - difficulty)))
    assert len(inside) > 30 and all(inside)


def test_nine_of_ten_public_losses_of_each_kind_of_text_are_in_the_interval() -> None:
    """The text's difficulty is known: the dial measures it."""
    of_text = defaultdict(list)
    for point in json.loads((ROOT / "docs/benchmarks/public_losses.json").read_text())["points"]:
        said = expected_loss(point["parameters"], point["bytes"], point["passes"])
        of_text[point["text"]].append((said, point["bits_per_byte"]))
    assert sum(map(len, of_text.values())) > 150
    for text, losses in of_text.items():
        difficulty = median(loss / said for said, loss in losses)
        inside = [abs(difficulty * said - loss) <= UNMEASURED_ERROR_FACTOR * MEASURED_ERROR for said, loss in losses]
        assert sum(inside) >= 0.9 * len(inside), text
    assert expected_error(1e8, 1e9, 0.0) == UNMEASURED_ERROR_FACTOR * MEASURED_ERROR > expected_error(1e6, 1e6, 0.0)
