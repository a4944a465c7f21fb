"""What a cell shows while a training prints: one line in place of another, a chart, the newest answers."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")

from notebooks import notebook_view
from notebooks.notebook_view import LiveView, Tables, Until, framed, view
from tests.serving.demos import CHROMIUM

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


def make_view(run: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    monkeypatch.setattr(notebook_view.sys, "stdout", out)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: cell)
    return LiveView(run), out


def test_progress_lines_take_each_others_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    live, out = make_view(tmp_path, monkeypatch, cell)
    with live:
        print("Training   steps 0 to 1,000", file=live)
        (tmp_path / "loss_curve.png").write_bytes(b"drawn")
        live.write("step 10/1,000, loss 2.5")
        live.write(", 1k tok/s\nstep 10: validation loss 2.4, perplexity 11\n| a | b |\nhalf")
        assert "step 10/1,000, loss 2.5, 1k tok/s" in cell.shown[0] and 'base64,ZHJhd24="' in cell.shown[0]
    assert out.getvalue() == "Training   steps 0 to 1,000\nstep 10: validation loss 2.4, perplexity 11\nhalf"
    assert len(cell.shown) == 3 and "1k tok/s" not in cell.shown[-1] and 'base64,ZHJhd24="' in cell.shown[-1]


def test_tables_are_laid_out_and_what_to_type_in_a_terminal_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = sys.stdout
    monkeypatch.setattr(notebook_view, "show_markdown", lambda text: print(f"<table>{text}</table>", file=cell))
    with Tables() as output, contextlib.redirect_stdout(output):
        print("first\n", "| a |", "| --- |", sep="\n")
        print("| 1 |\nthen")
        print("| b |")
    assert capsys.readouterr().out == "first\n\n<table>| a |\n| --- |\n| 1 |</table>\nthen\n<table>| b |</table>\n"
    with Until("Train on it:") as output, contextlib.redirect_stdout(output):
        print("Files:\n  a.bin")
        print("\nTrain on it:\n  python train_colab_mmap.py --config gpt2_small.json")
    assert capsys.readouterr().out == "Files:\n  a.bin\n\n"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_page_in_a_cell_is_as_high_as_its_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell: list[str] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: cell.append(data["text/html"]))
    framed("<!DOCTYPE html><body style='margin: 0'><div style='height: 2345px'>charts</div>", height=500)
    (tmp_path / "cell.html").write_text(f"<!DOCTYPE html><body>{cell[0]}")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path}/cell.html"]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "height: 2345px; border: 0px" in drawn


def test_a_view_that_fails_is_told_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, out = make_view(tmp_path, monkeypatch, Cell(fails=True))
    with live:
        live.write("step 1/2, a\nstep 2/2, b\nDone\n")
    assert out.getvalue() == "The chart is not shown any more: the kernel is gone\nDone\n"


def test_what_a_model_says_is_text() -> None:
    rows = [{"step": 20, "right": "0 of 1", "answers": [HOSTILE * 9]}]
    run = {"folder": "nowhere", "samples": [{"prompts": [HOSTILE], "expected": [""], "rows": rows}]}
    shown = view(run, HOSTILE)
    assert "<script" not in shown and "<b>" not in shown and shown.count("&lt;script&gt;") >= 3 and " ..." in shown
    assert "After step 20, 0 of 1 exactly right" in shown and "expected</th>" not in shown


def test_answers_stand_beside_what_was_expected() -> None:
    rows = [{"step": 20, "right": "1 of 2", "answers": ["Rome", "4", "and so on"]}]
    table = {"prompts": ["Capital of France?", "2+2", "Once"], "expected": ["Paris", "4", ""], "rows": rows}
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", view({"folder": "nowhere", "samples": [table]}, ""))
    assert cells[:6] == ["prompt", "answer", "expected", "Capital of France?", "Rome", "Paris"]
    assert cells[9:] == ["Once", "and so on", ""]
