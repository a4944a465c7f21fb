"""What a cell shows while a training prints: one line in place of another, a chart, the newest answers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")

from notebooks import notebook_view
from notebooks.notebook_view import LiveView, Tables, Until, framed, loss_chart, round_values, view
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
        (tmp_path / "metrics.jsonl").write_text('{"step": 10, "train_loss": 2.5}\n')
        live.write("step 10/1,000, loss 2.5")
        live.write(", 1k tok/s\nstep 10: validation loss 2.4, perplexity 11\n| a | b |\nhalf")
        assert "step 10/1,000, loss 2.5, 1k tok/s" in cell.shown[0] and "training 2.5000" in cell.shown[0]
    assert out.getvalue() == "Training   steps 0 to 1,000\nstep 10: validation loss 2.4, perplexity 11\nhalf"
    assert len(cell.shown) == 3 and "1k tok/s" not in cell.shown[-1] and "training 2.5000" in cell.shown[-1]


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
    run = {"columns": {"step": [1, 20]}, "samples": [{"prompts": [HOSTILE], "expected": [""], "rows": rows}]}
    shown = view(run, HOSTILE)
    assert "<script" not in shown and "<b>" not in shown and shown.count("&lt;script&gt;") >= 3 and " ..." in shown
    assert "After step 20, 0 of 1 exactly right" in shown and "expected</th>" not in shown


def test_answers_stand_beside_what_was_expected() -> None:
    rows = [{"step": 20, "right": "1 of 2", "answers": ["Rome", "4", "and so on"]}]
    table = {"prompts": ["Capital of France?", "2+2", "Once"], "expected": ["Paris", "4", ""], "rows": rows}
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", view({"columns": {}, "samples": [table]}, ""))
    assert cells[:6] == ["prompt", "answer", "expected", "Capital of France?", "Rome", "Paris"]
    assert cells[9:] == ["Once", "and so on", ""]


@pytest.mark.parametrize(
    "columns",
    [
        {"step": [1], "train_loss": [2.0]},
        {"step": [1, 2, 3], "train_loss": [2.0, 2.0, 2.0], "val_loss": [None, None, 2.0]},
        {"step": [1, 1_000_000], "val_loss": [1e-9, 1e9]},
        {"step": [10, 20], "train_loss": [3.0, 1.0], "val_loss": [2.5, None]},
    ],
)
def test_a_chart_is_drawn_of_whatever_was_measured(columns: dict[str, Any]) -> None:
    chart = ElementTree.fromstring(loss_chart({"columns": columns}))
    drawn = [element for element in chart if element.tag == "circle"]
    assert drawn and all(0 <= float(element.get("cx", -1)) <= 720 for element in drawn)
    assert all(0 <= float(element.get("cy", -1)) <= 260 for element in drawn)
    assert {"step", "loss, nats per token"} <= {element.text for element in chart}


def test_steps_are_whole_numbers_and_none_twice() -> None:
    chart = ElementTree.fromstring(loss_chart({"columns": {"step": [1, 2, 3], "train_loss": [3.0, 2.5, 2.0]}}))
    assert [text.text for text in chart if text.get("text-anchor") == "middle"][:3] == ["1", "2", "3"]


def test_without_a_loss_there_is_no_chart() -> None:
    assert loss_chart({"columns": {}}) == "" == loss_chart({"columns": {"step": [1], "lr": [0.1]}})


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.913, 7.65), (1, 650), (1e-9, 3e-9), (5, 5)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    values = round_values(low, high, 5)
    assert 1 <= len(values) <= 6 and all(low * 0.999999 <= value <= high * 1.000001 for value in values)
    assert json.dumps(values)
