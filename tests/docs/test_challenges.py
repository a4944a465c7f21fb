"""Each of the eleven challenges of docs/challenges.md, and the table before them, names tests that are there."""

from __future__ import annotations

import re

from tests.helpers import ROOT


def test_every_challenge_names_tests_that_are_there() -> None:
    chapters = re.split(
        r"^## \d+\. ", (ROOT / "docs" / "challenges.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    there = {
        name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    named = [set(re.findall(r"`(test_\w+)`", chapter)) for chapter in chapters]
    assert len(named) == 12 and all(named) and set().union(*named) <= there
