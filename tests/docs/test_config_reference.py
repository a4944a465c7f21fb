"""docs/configuration.md says what the scripts know now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import docs.config_reference
from common.flags import convert
from docs.config_reference import DOCUMENT, main, reference
from tests.helpers import columns
from training.config import SCHEMA


def test_the_committed_document_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs.config_reference, "DOCUMENT", tmp_path / "configuration.md")
    assert main([]) == 0
    written = (tmp_path / "configuration.md").read_text(encoding="utf-8")
    said = "a key, a flag or a config has changed: run `python docs/config_reference.py` and commit what it writes"
    assert DOCUMENT.read_text(encoding="utf-8") == written, said


def test_every_key_stands_in_it_once_with_values_that_are_taken() -> None:
    """Defaults and what a key may be can be typed; beyond a limit nothing is accepted."""
    trainer = reference().partition("### What the configs set")[0]
    rows = {row[0].strip("`"): row for row in map(columns, trainer.splitlines()) if row and row[0].startswith("`")}
    assert list(rows) == list(SCHEMA)
    for key, (_, default, allowed, text) in rows.items():
        assert text
        if SCHEMA[key].default not in (None, ()):
            assert convert(default.strip("`"), SCHEMA[key], from_flag=True) == SCHEMA[key].default
        for word in re.findall(r"`([^`]+)`", allowed):
            convert(word, SCHEMA[key], from_flag=True)
        for inside, limit in re.findall(r"(at least|at most|more than|less than) ([\d.,]*\d)", allowed):
            number = float(limit.replace(",", ""))
            outside = {"at least": number - 1, "at most": number + 1}.get(inside, number)
            with pytest.raises(ValueError, match=f"{inside} "):
                convert(outside, SCHEMA[key], from_flag=False)
