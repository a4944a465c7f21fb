"""The first hour on a GPU, at toy size on the CPU: it runs, and tells what fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu


def test_steps_run_as_a_user_types_them_and_fill_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.md"
    assert gpu.main(["--toy", "--output", str(report), "--only", "train"]) == 0
    told = report.read_text()
    assert "## train" in told and "gpt2_small: " in told and "--prompt" in told
    assert "exit code 130" in told and "ms_per_step" in told and "Failed: nothing" in told
    monkeypatch.setitem(gpu.STEPS, "tests", lambda report: report.run("-c 'raise SystemExit(7)'", 60))
    assert gpu.main(["--toy", "--output", str(report), "--only", "tests"]) == 1
    assert "exit code 7, **0 was expected**" in report.read_text() and report.read_text().startswith(told)
    assert gpu.main(["--only", "tets"]) == 2 and "Did you mean tests?" in capsys.readouterr().err
