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
    fork_what_is_measured(monkeypatch, learning)
    tiny = "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --max_steps 4 --eval_interval 2"
    first = f"{tiny} --eval_batches 2 --data_dir {token_folder}"
    argv = ["--device", "cpu", "--runs_dir", str(tmp_path / "runs"), "--output_dir", str(tmp_path), "--runs", first]
    assert learning.main([*argv, "--position rope"]) == 0
    runs = json.loads((tmp_path / "learning.json").read_text())["runs"]
    lowest = [seeds["1337"]["lowest"] for seeds in runs.values()]
    assert list(runs) == [first, "--position rope"] and len(set(lowest)) == 2 and all(0 < each < 10 for each in lowest)
    assert "| `--position rope` | 0.00M |" in (tmp_path / "learning.md").read_text()
    rows = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/metrics.jsonl")}
    capsys.readouterr()
    assert learning.main([*argv, "--bogus 2"]) != 0  # after the first run, which is finished
    assert "unknown flag --bogus" in capsys.readouterr().err
    assert len(rows) == 2 and all(path.read_bytes() == before for path, before in rows.items())
