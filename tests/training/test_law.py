"""The law behind the dial's forecasts, against the runs and the public losses that it was fitted to."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median

import pytest

from tests.helpers import ROOT
from training.law import (
    BEYOND,
    ERROR,
    MAX_LETTERS,
    MAX_PARAMETERS,
    OURS,
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


def test_where_our_runs_end_the_laws_meet() -> None:
    for passes in (1, 4):
        here = expected_loss(MAX_PARAMETERS, MAX_LETTERS, passes)
        assert here == pytest.approx(OURS.loss(MAX_PARAMETERS, MAX_LETTERS, passes))
        assert here == pytest.approx(expected_loss(1.001 * MAX_PARAMETERS, 1.001 * MAX_LETTERS, passes), abs=1e-3)


def test_the_law_is_that_of_the_runs_on_record() -> None:
    """As far as the passes over a text pay."""
    runs = json.loads((ROOT / "docs/benchmarks/law.json").read_text())["runs"]
    of = [(run["parameters"], run["bytes"], run["passes"], run["lowest"]) for run in runs]
    apart = [abs(expected_loss(*run[:3]) - run[3]) for run in of if run[2] <= 16]
    assert len(apart) >= 10 and sum(each <= ERROR for each in apart) >= 0.9 * len(apart)


def test_nine_of_ten_public_losses_of_each_kind_of_text_are_in_the_interval() -> None:
    """The text's difficulty is known: the dial measures it."""
    of_text = defaultdict(list)
    for point in json.loads((ROOT / "docs/benchmarks/public_losses.json").read_text())["points"]:
        said = expected_loss(point["parameters"], point["bytes"], point["passes"])
        of_text[point["text"]].append((said, point["bits_per_byte"]))
    assert sum(map(len, of_text.values())) > 150
    for text, losses in of_text.items():
        difficulty = median(loss / said for said, loss in losses)
        inside = [abs(difficulty * said - loss) <= BEYOND * ERROR for said, loss in losses]
        assert sum(inside) >= 0.9 * len(inside), text
    assert expected_error(1e8, 1e9, 0.0) == BEYOND * ERROR > expected_error(1e6, 1e6, 0.0)
