"""The benchmark of the page: a toy of it, from the random model to the table."""

from __future__ import annotations

import re

import pytest

from benchmarks import page
from tests.helpers import run_script


@pytest.mark.extras("playwright")
def test_a_toy_is_measured() -> None:
    done = run_script(page.main, "--toy", "--rounds", "1")
    if "needs Chromium" in done.err:
        pytest.skip("needs Chromium: apt-get install chromium")
    assert done.code == 0, done.err
    rows = re.findall(r"^\| (int8|f16) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| (\d+) \|  \|$", done.out, re.MULTILINE)
    assert [kind for kind, *_ in rows] == ["int8", "f16"]
    assert float(rows[0][1]) < float(rows[1][1]) and all(int(speed) > 0 for *_, speed in rows)


def test_no_rounds_are_refused() -> None:
    done = run_script(page.main, "--rounds", "0")
    assert done.code == 2 and "--rounds must be at least 1" in done.err
