"""The suite for GPUs, at toy size on the CPU: every part it can run here, and what it leaves when it is cut off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu_suite import PARTS, PRESETS, summary
from common.errors import script
from tests.helpers import ROOT

main = script(gpu_suite.main)


def run(output: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["--toy", "--output", str(output), *flags])
    return code, json.loads(output.read_text())


def test_the_parts_run_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    chosen = ["tests", "presets", "resume", "placements", "memory", "variants"]
    code, results = run(tmp_path / "suite.json", "--parts", *chosen)
    assert code == 0, results
    parts = results["parts"]
    assert list(parts) == chosen and all(part["status"] == "done" for part in parts.values())
    rows = {name: {row.get("name"): row for row in part["rows"]} for name, part in parts.items()}
    assert not [row for named in rows.values() for row in named.values() if "error" in row]
    assert list(rows["presets"]) == [name for name in PRESETS if (ROOT / "configs" / f"{name}.json").exists()]
    assert {row["placement"] for row in rows["placements"].values()} == {"ram", "mmap"}
    assert all(row["estimate_over_peak"] > 0 for row in rows["memory"].values())
    (resumed,) = parts["resume"]["rows"]
    assert len(resumed["straight"]) == 20 and resumed["largest_difference"] == 0
    for row in rows["variants"].values():
        if "skipped" not in row:
            assert row["time_ratio"]["median"] > 0
            assert row["variant"]["loss_of_step_2"] == pytest.approx(row["ours"]["loss_of_step_2"], rel=1e-4)
    out = capsys.readouterr().out
    assert "tokens/s" in out and "losses differ by 0 at most" in out and "of the time of ours" in out


def test_what_is_cut_off_leaves_a_file_that_says_so(tmp_path: Path) -> None:
    code, results = run(tmp_path / "suite.json", "--parts", "presets", "memory", "--minutes", "0.01")
    assert code == 1
    assert [part["status"] for part in results["parts"].values()] == ["out of time", "no time left"]


def test_a_part_that_fails_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fake(name: str, *rest: object) -> dict[str, Any]:
        if name == "presets":
            return {"status": "failed", "seconds": 1.0, "rows": [{"name": "a row"}], "stderr": ["RuntimeError: no"]}
        return {"status": "done", "seconds": 1.0, "rows": [{"name": "quickstart", "error": "OutOfMemoryError: x"}]}

    monkeypatch.setattr(gpu_suite, "run_part", fake)
    code, results = run(tmp_path / "suite.json", "--parts", "presets", "memory")
    assert code == 1 and [part["status"] for part in results["parts"].values()] == ["failed", "done"]
    out = capsys.readouterr().out
    assert "RuntimeError: no" in out and "quickstart: failed: OutOfMemoryError" in out


def test_the_scripts_that_run_on_a_gpu_alone_are_there() -> None:
    started = re.findall(r'run_script\("([^"]+)"', Path(gpu_suite.__file__).read_text(encoding="utf-8"))
    assert len(started) == 4
    assert all((ROOT / script).exists() for script in started)


def test_an_unknown_part_is_explained(capsys: pytest.CaptureFixture) -> None:
    assert main(["--toy", "--parts", "everything"]) == 2
    assert ", ".join(PARTS) in capsys.readouterr().err


def test_a_row_in_one_line_says_what_was_measured() -> None:
    row = {"name": "gpt2_small", "ms_per_step": 12.34, "tokens_per_second": 5000.4, "mfu": None}
    assert summary(row) == "  gpt2_small: 12.3 ms a step, 5,000 tokens/s"
    assert summary({"name": "x", "skipped": "not here"}) == "  x: skipped: not here"
