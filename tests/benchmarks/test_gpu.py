"""The benchmark for a GPU, at toy size on the CPU: it runs, and tells what fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_parts_run_in_processes_of_their_own_and_fill_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, folder = tmp_path / "gpu.json", tmp_path / "runs"
    toy = ["--toy", "--output", str(figures), "--folder", str(folder), "--only"]
    assert gpu.main([*toy, "generation"]) == 0
    assert gpu.main([*toy, "gpt2_small"]) == 0
    noted = json.loads(figures.read_text())
    assert noted["GPT-2, 32 x 40 tokens, recorded"]["ms"] > 0 and noted["gpt2_small"]["ms"] > 0
    assert {name: part["exit_code"] for name, part in noted["parts"].items()} == {"generation": 0, "gpt2_small": 0}

    monkeypatch.setitem(gpu.PARTS, "machine", (gpu.machine, 0.01))  # less than a process takes to start
    assert gpu.main([*toy, "machine"]) == 1
    assert "Failed: machine" in capsys.readouterr().out
    assert gpu.main(["--only", "machin"]) == 2 and "Did you mean machine?" in capsys.readouterr().err
