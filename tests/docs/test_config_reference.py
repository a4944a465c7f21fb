"""docs/configuration.md says what the scripts know now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tests.docs.config_reference
from common.flags import meant
from common.validation import check, kind_of
from tests.docs.config_reference import DOCUMENT, main, reference
from tests.helpers import columns
from training.config import SCHEMA, Config


def test_the_committed_document_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.docs.config_reference, "DOCUMENT", tmp_path / "configuration.md")
    assert main([]) == 0
    written = (tmp_path / "configuration.md").read_text(encoding="utf-8")
    said = (
        "a key, a flag or a config has changed: run `python tests/docs/config_reference.py` and commit what it writes"
    )
    assert DOCUMENT.read_text(encoding="utf-8") == written, said


def test_every_key_stands_in_it_once_with_values_that_are_taken() -> None:
    """Defaults and what a key may be can be typed; beyond a limit nothing is accepted."""
    trainer = reference().partition("### What the configs set")[0]
    rows = {row[0].strip("`"): row for row in map(columns, trainer.splitlines()) if row and row[0].startswith("`")}
    assert sorted(rows) == sorted(SCHEMA)
    for key, (_, default, allowed, text) in rows.items():
        assert text
        if SCHEMA[key].default not in (None, ()):
            assert problems_with(key, meant(default.strip("`"), SCHEMA[key])) == []
        for word in re.findall(r"`([^`]+)`", allowed):
            assert problems_with(key, meant(word, SCHEMA[key])) == []
        for inside, limit in re.findall(r"(at least|at most|more than|less than) ([\d.,]*\d)", allowed):
            number = float(limit.replace(",", ""))
            outside = {"at least": number - 1, "at most": number + 1}.get(inside, number)
            whole = int(outside) if kind_of(SCHEMA[key]) is int else outside
            assert any(f"{inside} " in problem for problem in problems_with(key, whole))


def problems_with(key: str, value: object) -> list[str]:
    """What is wrong with the value itself, whatever it would need beside it."""
    problems: list[str] = []
    check(Config, {key: value, **({"num_heads": 1} if key == "embed_dim" else {})}, problems)
    return [problem for problem in problems if problem.startswith(f"{key} is {json.dumps(value)};")]
