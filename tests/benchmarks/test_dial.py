"""The dial beside runs that were chosen by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dial
from tests.forked import fork_what_is_measured
from tests.helpers import generated_text


def test_the_choice_is_compared_with_that_of_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fork_what_is_measured(monkeypatch, dial)
    Path("mine.txt").write_text(generated_text(20_000))
    tiny = "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 32 --batch_size 4 --compile off"
    argv = ["--texts", "mine.txt", "--minutes", "0.1", "--device", "cpu", "--output_dir", "."]
    assert dial.main([*argv, "--hand_chosen", tiny, f"{tiny} --learning_rate 1e-2"]) == 0
    runs = json.loads(Path("dial.json").read_text())["runs"]["mine.txt"]
    assert [run["flags"] for run in runs] == ["", tiny, f"{tiny} --learning_rate 1e-2"]
    low, high = runs[0]["forecast"][1:]
    assert 0 < low < high and "layers x" in runs[0]["chosen"]
    (row,) = [line for line in Path("dial.md").read_text().splitlines() if line.startswith("| mine.txt")]
    assert ("inside" in row) == (low <= runs[0]["lowest"] <= high)
