"""Runs beside each other: flags as one types them, no run twice, a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning
from tests.forked import fork_what_is_measured


def test_variants_of_the_first_run_are_compared_and_not_trained_twice(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fork_what_is_measured(monkeypatch)
    tiny = "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --max_steps 4 --eval_interval 2"
    first = f"{tiny} --eval_batches 2 --data_dir {token_folder}"
    argv = ["--runs", first, "--position rope", "--device", "cpu", "--seeds", "1", "2"]
    argv += ["--runs_dir", str(tmp_path / "runs"), "--output_dir", str(tmp_path)]
    assert learning.main(argv) == 0
    runs = json.loads((tmp_path / "learning.json").read_text())["runs"]
    assert list(runs) == [first, "--position rope"] and {*runs[first]} == {"1", "2"}
    lowest = [run["lowest"] for seeds in runs.values() for run in seeds.values()]
    assert len(set(lowest)) == 4 and all(0 < each < 10 for each in lowest)
    assert "| `--position rope` | 0.00M |" in (tmp_path / "learning.md").read_text()
    rows = sorted((tmp_path / "runs").glob("*/metrics.jsonl"))
    before = [path.read_bytes() for path in rows]
    assert learning.main(argv) == 0
    assert len(rows) == 4 and [path.read_bytes() for path in rows] == before
    capsys.readouterr()
    assert learning.main([*argv, "--runs", f"{first} --bogus 2"]) != 0
    assert "unknown flag --bogus" in capsys.readouterr().err
