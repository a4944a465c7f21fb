"""Reports and records: no torn rows, no broken tables, no plot that stops a training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.output import cell, table_row
from model import TransformerLanguageModel
from tests.helpers import ROOT, columns, hardware_of
from training import report as report_module
from training.clock import Clock
from training.config import Config, Forecast, parse_config
from training.data import TokenData
from training.evaluate import Answer
from training.hardware import Hardware
from training.records import read_metrics, read_samples, rewind
from training.report import Report
from training.run import Prompt, Run
from training.summary import compare_with_forecast

CONTRACT_FIELDS = {
    "step", "epoch", "tokens", "train_loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "ms_per_step",
    "tokens_per_second", "mfu", "peak_memory_gb", "elapsed_seconds", "compute_units",
}  # fmt: skip


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return hardware_of(parse_config(["--device", "cpu"]))


RESULT = torch.tensor(2.5), torch.tensor(0.7), 1e-3  # loss, norm of the gradients, learning rate


def report_of(run_dir: Path, hardware: Hardware, elapsed: float = 0.0, **config: Any) -> Report:
    """Build the report of a run of 100 steps of 512 tokens."""
    config = Config(
        embed_dim=16,
        num_heads=1,
        num_layers=1,
        max_seq_len=64,
        batch_size=8,
        output_dir=str(run_dir),
        max_steps=100,
        gradient_accumulation_steps=1,
        **config,
    )
    data = cast(TokenData, SimpleNamespace(windows=1000))
    run = Run(config, hardware, data, [], TransformerLanguageModel(config.shape(10)), 8)
    run.state.elapsed_seconds = elapsed
    return Report(run, Clock(run, time.perf_counter()))


@pytest.fixture
def report(tmp_path: Path, hardware: Hardware) -> Report:
    return report_of(tmp_path, hardware)


def samples_at(report: Report, step: int, answers: list[Answer]) -> None:
    report.run.state.step = step
    report.add_samples(answers)


@pytest.mark.parametrize(
    ("device", "interval", "due"), [("cuda", None, [100]), ("cpu", None, [10, 20, 100]), ("cuda", 20, [20, 100])]
)
def test_on_a_gpu_short_steps_are_reported_by_time(
    tmp_path: Path, hardware: Hardware, device: str, interval: int | None, due: list[int]
) -> None:
    """Unless an interval was asked for. The last step always is."""
    report, seen = report_of(tmp_path, hardware, log_interval=interval), []
    report.run.hardware = dataclasses.replace(hardware, device=torch.device(device))
    for step in (5, 10, 20, 100):
        report.run.state.step, report.run.state.sequences_seen = step, 8 * step
        seen += [step] * report.is_due
    assert seen == due


def take_step(report: Report) -> None:
    report.run.advance()
    report.bar.update()


def test_rewind_forgets_later_and_torn_rows_and_keeps_the_rest_as_it_is(report: Report, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"step": step, "train_loss": 1 / step}) + "\n" for step in range(1, 8))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 3, "train_lo')
    samples_at(report, 2, [Answer(Prompt("a 12", "9"), "x")])
    samples, table = ((tmp_path / name).read_text() for name in ("samples.jsonl", "samples.md"))
    samples_at(report, 6, [Answer(Prompt("a 12", "9"), "9")])
    for name, torn in (("samples.jsonl", '{"step": 2, "ri'), ("samples.md", "| 1")):
        with open(tmp_path / name, "a") as file:
            file.write(torn)
    rewind(tmp_path, 5, 5)
    assert read_metrics(tmp_path) == [json.loads(line) for line in rows.splitlines()[:5]]
    assert (tmp_path / "samples.jsonl").read_text() == samples
    assert (tmp_path / "samples.md").read_text() == table
    rows = ["| prompt | answer | exactly right |", "| --- | --- | --- |", "| a 12 | x | no: 9 |"]
    assert table.splitlines() == ["## Step 2, 0 of 1 exactly right", "", *rows, ""]
    report.write({"step": 6, "train_loss": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    rewind(tmp_path, 0, 0)
    assert read_metrics(tmp_path) == []


def test_a_field_that_was_not_measured_is_absent(report: Report, tmp_path: Path, hardware: Hardware) -> None:
    take_step(report)
    report.write(report.measure(*RESULT) | {"val_loss": 2.0, "val_bits_per_byte": None})
    (row,) = read_metrics(tmp_path)
    assert set(row) == CONTRACT_FIELDS - {"mfu", "compute_units", "val_bits_per_byte"}
    assert row["train_loss"] == 2.5

    paid = report_of(tmp_path, dataclasses.replace(hardware, peak_flops=1e12), 3600.0, units_per_hour=8.0)
    take_step(paid)
    row = paid.measure(*RESULT)
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * paid.run.model.flops_per_token() / 1e12)
    assert row["compute_units"] == pytest.approx(8.0, abs=0.1)
    assert row["elapsed_seconds"] >= 3600  # the clock of the run goes on where the last session stopped it


@pytest.mark.parametrize("fails", [False, True])
def test_speed_leaves_out_what_happens_while_paused(
    fails: bool, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that runs out of memory counts, too; training continues after it."""
    now = [report.clock.run_started + report.first.seconds]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for _ in range(4):
        now[0] += 0.5
        take_step(report)
    with contextlib.suppress(MemoryError), report.clock.paused("saving"):
        now[0] += 1000.0
        if fails:
            raise MemoryError
    row = report.measure(*RESULT)
    assert row["ms_per_step"] == pytest.approx(500.0)
    assert row["tokens_per_second"] == pytest.approx(1024.0)


def test_progress_in_a_log_file_is_a_line_now_and_then_and_always_at_the_end(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not report.interactive
    clock_now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock_now[0])
    row = {"train_loss": 2.345678, "tokens_per_second": 12_345.0, "lr": 0.001, "ms_per_step": 1000.0}
    for step in range(1, 101):
        clock_now[0] += 1.0
        report.run.state.step = step
        report.update_progress({"step": step, **row})
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert 100 / report_module.LOG_INTERVAL_SECONDS <= len(lines) <= 100 / report_module.LOG_INTERVAL_SECONDS + 2
    assert "step 100/100" in lines[-1] and "2.346" in lines[-1] and "12.3k tok/s" in lines[-1]
    assert "1:39 left" in lines[0]
    assert "\r" not in captured.out + captured.err and "\x1b" not in captured.out + captured.err
    assert "MFU" not in captured.out and "units" not in captured.out  # neither is known here


def test_what_a_model_makes_up_cannot_break_a_table(report: Report, tmp_path: Path) -> None:
    nasty = ["a | b", "line\nbreak\r\nand\ttab", "\x1b[31mred\x07", "back\\slash \\| pipe", "", "\u2028sep\x85"]
    for text in nasty:
        row = table_row([cell(text), "end"])
        assert len(columns(row)) == 2 and len(row.splitlines()) == 1, repr(text)
        assert all(character.isprintable() for character in row), repr(text)
    answers = [Answer(Prompt(text, text), text) for text in nasty]
    for step in (10, 20):
        samples_at(report, step, answers)
    rows = (tmp_path / "samples.md").read_text(encoding="utf-8").splitlines()
    tables = [row for row in rows if row.startswith("|")]
    assert len(tables) == 2 * (2 + len(nasty))  # header and rule, a row for each prompt
    assert {len(columns(row)) for row in tables} == {3}
    assert [row for row in rows if row.startswith("#")] == [
        f"## Step {step}, {len(nasty)} of {len(nasty)} exactly right" for step in (10, 20)
    ]
    assert [row.answers for row in read_samples(tmp_path)] == [nasty, nasty]
    rewind(tmp_path, 10, 10)
    assert (tmp_path / "samples.md").read_text(encoding="utf-8").splitlines() == rows[: len(rows) // 2]


def test_a_curve_that_cannot_be_drawn_is_reported_and_raises_nothing(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write({"step": 1, "train_loss": 2.0})
    report.write({"step": 2, "train_loss": 1.0, "val_loss": 1.5})
    report.update_curve()
    drawn = (tmp_path / "loss_curve.png").read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    assert capsys.readouterr().out == ""

    def fail(*_: object) -> None:
        raise RuntimeError("no fonts here")

    monkeypatch.setattr(report_module, "draw_curve", fail)
    report.update_curve()
    assert "no fonts here" in capsys.readouterr().out
    monkeypatch.undo()
    with open(tmp_path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 3, "train_lo{"step": 4}\n')
    report.write({"step": 5, "train_loss": 0.5})
    report.update_curve()
    assert capsys.readouterr().out == ""
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 5]  # without the torn line
    assert (tmp_path / "loss_curve.png").read_bytes() != drawn


def test_the_forecast_is_compared_with_the_result() -> None:
    forecast = Forecast(2.02, 0.06, 6000.0)
    for came, speed, said in (
        (2.05, 5000, "got 2.05: within the forecast"),
        (2.48, 1000, "got 2.48: training was 6 times slower"),
        (1.90, 12_000, "got 1.90: training was 2 times faster"),
        (2.48, 6000, "got 2.48: outside the forecast"),
        (1.90, 1000, "got 1.90: better than the forecast"),
    ):
        assert said in compare_with_forecast(forecast, came, speed, 100)
    assert "got 4.24: the run took only 1 step" in compare_with_forecast(forecast, 4.24, None, 1)


def test_a_run_says_at_its_tenth_step_that_other_programs_take_the_cpu(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {"quiet": time.perf_counter, "busy": lambda: 0.0}
    out = {}
    for name, clock in clocks.items():
        monkeypatch.setattr(time, "thread_time", clock)
        out[name] = train(tmp_path / name, log_interval=5, threads=2).out
    assert "Other programs" not in out["quiet"]
    assert out["busy"].count("Other programs leave") == 1 and "--threads 1" in out["busy"]
    assert "--threads 1" not in train(tmp_path / "one", log_interval=5, threads=1).out


def test_the_curve_is_drawn_whatever_backend_the_environment_names(tmp_path: Path) -> None:
    """Colab's !python cells inherit the notebook's, which this environment may lack."""
    code = "import pathlib, sys; from training.records import draw_curve; draw_curve([], pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "MPLBACKEND": "module://a_package_that_is_missing.backend"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.png")], env=environment, cwd=ROOT, check=True)
    assert (tmp_path / "x.png").is_file()
