"""The ablation script: its runs are the trainer's, are not repeated, and end in a table and a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ablation
from tests.forked import fork_what_is_measured
from training.config import parse_config


@pytest.mark.parametrize("name", ablation.VARIANTS)
def test_every_variant_is_a_configuration_that_holds(name: str) -> None:
    parse_config([word for key, value in ablation.flags_of(name).items() for word in (f"--{key}", str(value))])


def test_pieces_are_compared_at_the_same_tokens_and_not_trained_twice(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fork_what_is_measured(monkeypatch)
    monkeypatch.setattr(ablation, "STEPS", 4)
    tiny = {"num_layers": 1, "embed_dim": 32, "max_seq_len": 16, "batch_size": 4, "eval_batches": 2, "log_interval": 1}
    monkeypatch.setattr(ablation, "SHAPE", tiny)
    argv = ["--data_dir", str(token_folder), "--variants", "modern", "no_rope", "--device", "cpu"]
    argv += ["--runs_dir", str(tmp_path / "runs"), "--output_dir", str(tmp_path)]
    assert ablation.main(argv) == 0
    first = capsys.readouterr().out
    assert first.count(" ...\n") == 2 and "| - RoPE (learned positions) |" in first
    runs = json.loads((tmp_path / "ablation.json").read_text())["runs"]
    assert {run["1337"]["tokens"] for run in runs.values()} == {4 * 4 * 16}
    assert (tmp_path / "ablation.png").stat().st_size > 1000 and "ablation.png" in (
        tmp_path / "ablation.md"
    ).read_text()
    assert ablation.main(argv) == 0
    assert json.loads((tmp_path / "ablation.json").read_text())["runs"] == runs
    rows = [(tmp_path / "runs" / f"{name}_1337" / "metrics.jsonl").read_text().splitlines() for name in runs]
    assert [len(lines) for lines in rows] == [4, 4]
    assert ablation.main([*argv, "--variants", "no_ropes"]) == 2
    assert "Did you mean no_rope?" in capsys.readouterr().err
