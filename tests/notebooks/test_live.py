"""What a cell shows while a training prints: one line in place of another, a chart, the newest answers."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")

from notebooks import live
from notebooks.live import Live, shown
from training.reports.records import Sample, sample_line

HOSTILE = "<script>alert(1)</script> & <b>"


class Cell:
    """Where a display is updated."""

    def __init__(self, fails: bool = False):
        self.shown: list[str] = []
        self.fails = fails

    def update(self, content: Any) -> None:
        if self.fails:
            raise RuntimeError("the kernel is gone")
        self.shown.append(content.data)


def make_view(run: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> tuple[Live, io.StringIO]:
    out = io.StringIO()
    monkeypatch.setattr(live.sys, "stdout", out)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: cell)
    return Live(run), out


def test_progress_lines_take_each_others_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    view, out = make_view(tmp_path, monkeypatch, cell)
    with view:
        print("Training   steps 0 to 1,000", file=view)
        (tmp_path / "loss_curve.png").write_bytes(b"drawn")
        view.write("step 10/1,000, loss 2.5")
        view.write(", 1k tok/s\nstep 10: validation loss 2.4, perplexity 11\n| a | b |\nhalf")
        assert "step 10/1,000, loss 2.5, 1k tok/s" in cell.shown[0] and 'base64,ZHJhd24="' in cell.shown[0]
    assert out.getvalue() == "Training   steps 0 to 1,000\nstep 10: validation loss 2.4, perplexity 11\nhalf"
    assert len(cell.shown) == 2 and "1k tok/s" not in cell.shown[-1] and 'base64,ZHJhd24="' in cell.shown[-1]


def test_a_view_that_fails_is_told_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, out = make_view(tmp_path, monkeypatch, Cell(fails=True))
    with view:
        view.write("step 1/2, a\nstep 2/2, b\nDone\n")
    assert out.getvalue() == "The chart is not shown any more: the kernel is gone\nDone\n"


def test_what_a_model_says_is_text_and_stands_beside_what_was_expected(tmp_path: Path) -> None:
    sample = Sample(20, 1, 2, ["Capital of France?", "2+2", HOSTILE], ["Paris", "4", None], ["Rome", "4", HOSTILE * 9])
    (tmp_path / "samples.jsonl").write_text(sample_line(sample), encoding="utf-8")
    drawn = shown(tmp_path, HOSTILE)
    assert "<script" not in drawn and "<b>" not in drawn and drawn.count("&lt;script&gt;") >= 3 and " ..." in drawn
    assert "After step 20, 1 of 2 exactly right" in drawn
    cells = re.findall(r"<td[^>]*>([^<]*)", drawn)
    assert cells[:3] == ["Capital of France?", "Rome", "Paris"] and cells[-1] == ""
