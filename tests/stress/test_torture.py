"""The stress tool kills for real, notices a loss, and says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.helpers import ROOT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_few_kills_lose_nothing_and_are_written_down(tmp_path: Path) -> None:
    torture = Forked(["--output_dir", tmp_path, "--kills", "4"], script=ROOT / "tests" / "stress" / "torture.py")
    out, err = torture.communicate(timeout=240)
    assert torture.returncode == 0, out + err
    (written,) = tmp_path.glob("torture-*.json")
    counts = json.loads(written.read_text())
    assert counts["losses"] == []
    assert sum(count for name, count in counts.items() if name.startswith("SIGKILL")) >= 4
    assert "| **losses** | **0** |" in written.with_suffix(".md").read_text()
