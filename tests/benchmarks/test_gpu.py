"""The first hour on a GPU, at toy size on the CPU: it runs, and tells what fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_steps_run_as_a_user_types_them_and_fill_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.md"
    toy = ["--toy", "--output", str(report), "--runs_dir", str(tmp_path / "runs"), "--only"]
    assert gpu.main([*toy, "machine", "own_text", "train"]) == 0
    told, figures = report.read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert "## train" in told and "gpt2_small: " in told and "--prompt" in told
    assert "exit code 130" in told and "Failed: nothing" in told
    assert "| own text, minutes | 0.5 |" in told and "| own text, bits per byte |" in told
    assert figures["gpt2_small"]["ms_per_step"] > 0 and figures["own text"]["expected_bits_per_byte"] > 0
    whole = (tmp_path / "gpu" / "profile.txt").read_text()
    assert "Limit " in whole and len(whole.splitlines()) > 30  # all of it, with its operations

    def tests(report: gpu.Report) -> None:
        report.run("tests", "-c 'raise SystemExit(7)'", 60)

    def peers(report: gpu.Report) -> None:
        raise ValueError("a defect of the benchmark")

    monkeypatch.setattr(gpu, "STEPS", {"peers": peers, "tests": tests})
    assert gpu.main([*toy, "peers", "tests"]) == 1
    told_later = report.read_text()
    assert told_later.startswith(told) and "a defect of the benchmark" in told_later
    assert "exit code 7, **0 was expected**" in told_later and "Failed: peers, tests" in told_later
    assert gpu.main(["--only", "tets"]) == 2 and "Did you mean tests?" in capsys.readouterr().err
