"""The suite for GPUs, at toy size on the CPU: every part, and what it leaves when it is cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import model
from benchmarks import gpu_suite, suite_parts, suite_process, suite_train, variants
from benchmarks.gpu_suite import CALLS, MINUTES, PARTS, main
from benchmarks.suite_parts import PRESETS, RESUMED_STEPS, Setting, attempt, isolated, timed_training
from benchmarks.suite_process import run_part
from benchmarks.suite_rows import append, collect, read, summary
from benchmarks.variants import VARIANTS, Variant, fp32_residual, measure_variant
from benchmarks.workload import Training
from tests.helpers import ROOT, flags_of_a_tiny_run

MACHINE = {"device": "a GPU", "cuda": True, "cores": 2, "torch": "2.13", "python": "3.11", "date": "2026-11-21"}
RUN = {"run": {"command": "python benchmarks/gpu_suite.py", "machine": MACHINE}}


def toy(tmp_path: Path) -> Setting:
    return Setting(True, tmp_path, tmp_path / "cache")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The exit code of the whole suite, and where it wrote."""
    if torch.cuda.is_available():
        pytest.skip("a toy is for a CPU: beside a GPU some parts, and the tests of a GPU, take it")
    folder = tmp_path_factory.mktemp("suite")
    where = ["--output", str(folder / "suite.json"), "--cache_dir", str(folder / "cache")]
    return main(["--toy", "--parts", *PARTS, "--minutes", "20", *where]), folder


@pytest.fixture(scope="module")
def rows(suite: tuple[int, Path]) -> dict[str, dict[str, Any]]:
    """The rows of every part by their names."""
    _, folder = suite
    parts = json.loads((folder / "suite.json").read_text())["parts"]
    return {name: {row["name"]: row for row in part["rows"]} for name, part in parts.items()}


# The whole suite


def test_every_part_runs_at_toy_size_and_nothing_in_it_fails(suite: tuple[int, Path], rows: dict) -> None:
    code, folder = suite
    parts = json.loads((folder / "suite.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(PARTS, "done"), parts
    assert list(parts) == list(PARTS)
    assert not [row for named in rows.values() for row in named.values() if "error" in row]
    assert code == 0


def test_the_step_leaves_the_machine_the_speed_and_the_kernels(rows: dict) -> None:
    machine, speed, kernels = (rows["step"][name] for name in ("machine", "gpt2_small", "kernels"))
    assert machine["torch"] == torch.__version__ and machine["cores"] == os.cpu_count()
    assert "driver" not in machine and "cuda" not in machine  # nothing is said of a GPU that is not there
    assert speed["startup_seconds"] > 0 and speed["ms_per_step"] > 0 and speed["estimated_memory_gb"] > 0
    assert speed["compile_seconds"] is None
    assert {"matrix products", "attention", "optimizer", "copies"} <= set(kernels["groups"])
    assert sum(group["share"] for group in kernels["groups"].values()) == pytest.approx(1)
    times = [kernel["ms"] for kernel in kernels["kernels"]]
    assert times == sorted(times, reverse=True) and kernels["ms"] >= sum(times) > 0
    assert next(k for k in kernels["kernels"] if k["name"] == "aten::mm")["calls"] >= 5  # whole calls, of one step


def test_the_scripts_run_as_a_user_starts_them(rows: dict) -> None:
    quick, run = rows["train"]["quickstart"], rows["train"]["gpt2_small"]
    assert quick["answer"].startswith("What is the capital of France?")
    assert quick["seconds_to_answer"] > quick["training_seconds"] > 0
    assert run["exit_code"] == 130  # ended by Ctrl-C, saved
    assert run["steps"] > 1 and run["ms_per_step"] > 0 and run["tokens_per_second"] > 0
    assert run["seconds_to_first_step"] >= run["first_step_seconds"] > 0
    assert run["estimate_over_peak"] == pytest.approx(run["estimated_memory_gb"] / run["peak_memory_gb"])
    assert "compile_seconds" not in run


def test_variants_have_the_loss_of_ours(rows: dict) -> None:
    measured = rows["variants"]
    assert set(measured) == {"ours, gpt2_small", "ours, gpt2_small, again", *(variant.name for variant in VARIANTS)}
    ours = measured["ours, gpt2_small"]["loss_of_step_2"]
    for variant in VARIANTS:
        row = measured[variant.name]
        if variant.needs == "a GPU":
            assert "GPU" in row["skipped"]
        elif "skipped" not in row:
            assert row["time_ratio"] > 0
            assert row["loss_of_step_2"] == pytest.approx(ours, rel=1e-2 if variant.name == "no biases" else 1e-4)
            assert ("note" in row) == (variant.needs == "compiling")


def test_the_other_parts_measure_what_they_are_for(rows: dict) -> None:
    assert list(rows["presets"]) == list(PRESETS)
    assert rows["step"]["waits"]["skipped"] == "it needs a GPU"
    assert {row["placement"] for row in rows["placements"].values()} == {"ram", "mmap"}
    assert all(row["estimate_over_peak"] > 0 for row in rows["memory"].values())
    assert list(rows["fp16"]) == ["eager", "compiled"]
    assert all(row["loss_is_finite"] and row["scale"] == 1.0 and "note" in row for row in rows["fp16"].values())
    resumed = rows["resume"]["resumed"]
    assert len(resumed["straight"]) == RESUMED_STEPS and resumed["largest_difference"] == 0
    *tests, whole = rows["tests"].values()
    assert whole["exit_code"] == 0 and f"{len(tests)} skipped" in whole["output"][-1]
    assert {test["outcome"] for test in tests} == {"skipped"}
    assert {test["name"].partition("::")[0] for test in tests} >= {
        "tests/cuda/test_run.py",
        "tests/generation/test_cuda_graph.py",
    }


def test_tests_that_compile_come_last(rows: dict) -> None:
    names = [name for name in rows["tests"] if name != "pytest"]
    assert names[-1].startswith("tests/cuda/test_run.py::") and "compile" in names[-1]
    eager = next(n for n, name in enumerate(names) if "[--placement gpu --compile off]" in name)
    compiled = next(n for n, name in enumerate(names) if "[--placement gpu --compile on]" in name)
    run = next(n for n, name in enumerate(names) if "test_run.py::test_fp32" in name)
    assert eager < run < compiled


def test_the_scripts_leave_their_results(rows: dict) -> None:
    (peers,), (ladder,), (generation,) = (rows[name].values() for name in ("peers", "ladder", "generation"))
    assert list(peers["results"]["cases"]["toy"]["measured"]) == ["ours"]
    assert ["seconds" in rung for rung in ladder["results"]["rungs"]] == [*[False] * 6, True]
    assert list(generation["results"]["ms_per_step"]) == ["ours, fp32"]


def test_losses_are_compared_with_those_of_the_cpu(rows: dict) -> None:
    reference, full, automatic = rows["losses"].values()
    assert list(reference["means"]) == ["3", "6", "9"]
    assert reference["means"]["9"] < reference["means"]["3"] < reference["first_loss"]
    assert full["means"] == reference["means"] and full["largest_relative_difference"] == 0
    assert automatic["largest_relative_difference"] < 0.05


def test_the_page_tells_every_part(suite: tuple[int, Path]) -> None:
    page = (suite[1] / "suite.md").read_text()
    assert [line.split(":")[0] for line in page.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in ("Targets", *PARTS)
    ]
    for words in ("tokens/s", "of the time of ours", "| group | ms a step", "| cpu, fp32 |", "### Speed ladder", "```"):
        assert words in page
    assert "![" not in page  # the pictures stay with the scripts that draw them


def test_the_lines_are_all_the_report_needs(suite: tuple[int, Path], tmp_path: Path) -> None:
    _, folder = suite
    copy = tmp_path / "suite.jsonl"
    copy.write_text((folder / "suite.jsonl").read_text())
    assert main(["--report", str(copy)]) == 0
    for name in ("suite.json", "suite.md"):
        theirs, ours = (folder / name).read_text(), (tmp_path / name).read_text()
        assert ours == theirs


# What goes wrong


def test_the_parts_of_a_call_fit_into_its_minutes() -> None:
    assert {"machine", *PARTS} == set(suite_parts.PARTS)
    for call in CALLS:
        assert sum(call.values()) <= 60 * MINUTES
        assert f"--parts {' '.join(call)} --output" in (gpu_suite.__doc__ or "")


def test_one_report_is_made_of_several_files_of_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def file(name: str, machine: dict[str, Any], *rows: dict[str, Any]) -> str:
        path = tmp_path / f"{name}.jsonl"
        append(path, {"run": {"command": f"python {name}", "machine": machine}})
        for row in rows:
            append(path, {"part": name, "row": row})
        return str(path)

    h200 = {**MACHINE, "device": "NVIDIA H200"}
    speed = {"name": "gpt2_small", "ms_per_step": 50.0, "estimate_over_peak": 1.04}
    files = [file("train", h200, speed), file("step", {**h200, "date": "later"}, {"name": "waits", "waits": 0})]
    assert main(["--report", *files, "--output", str(tmp_path / "all.json")]) == 0
    assert list(json.loads((tmp_path / "all.json").read_text())["parts"]) == ["train", "step"]
    page = (tmp_path / "all.md").read_text()
    assert "python train\n    python step" in page
    for line in (
        "| train, gpt2_small: `ms_per_step` | 0 to 45 (H200) | 50 | no |",
        "| train, gpt2_small: `estimate_over_peak` | 0.9 to 1.1 | 1.04 | yes |",
        "| step, waits: `waits` | 0 to 0 | 0 | yes |",
        "| train, quickstart: `seconds_to_answer` | 0 to 60 | not measured |  |",
    ):
        assert line in page
    other = file("tests", {**MACHINE, "device": "NVIDIA A100"}, {"name": "x"})
    assert main(["--report", *files, other]) == 2
    error = capsys.readouterr().err
    assert "different machines" in error and "H200" in error and "A100" in error
    assert main(["--toy", "--parts", "placements", "--output", str(tmp_path / "tests.json")]) == 2
    assert "different machines" in capsys.readouterr().err and len(read(Path(other))) == 2
    (tmp_path / "empty.jsonl").touch()
    assert main(["--report", str(tmp_path / "empty.jsonl")]) == 2


def test_a_machine_that_does_not_answer_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_suite, "MACHINE_SECONDS", 0.0)
    assert main(["--toy", "--output", str(tmp_path / "suite.json")]) == 2
    assert "could not be described in 0 s (out of time)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_takes_too_long_is_killed_and_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_train, "FORECAST_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="ended with code -9"):
        suite_train.short_run(toy(tmp_path).flags("gpt2_small"), tmp_path / "x", 60, 0.1)


def test_a_part_that_takes_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    ended = run_part("tests", toy(tmp_path), 0.2, tmp_path / "rows.jsonl")
    assert ended["status"] == "out of time" and 0.2 <= ended["seconds"] < 10


def test_what_there_is_no_time_for_is_told_as_such(tmp_path: Path) -> None:
    output = tmp_path / "suite.json"
    assert main(["--toy", "--output", str(output), "--parts", "memory", "tests", "--minutes", "0"]) == 1
    parts = json.loads(output.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(["memory", "tests"], "no time left")


def test_a_row_that_fails_leaves_the_rest(tmp_path: Path) -> None:
    flags = toy(tmp_path).flags("quickstart")
    failed = attempt("x", timed_training, [*flags, "--num_heads", "3"], 0.01)
    assert failed["name"] == "x" and failed["error"].startswith("ConfigError")
    died = attempt("y", os._exit, 1)  # as by a signal
    assert died["error"].startswith("BrokenProcessPool")


def test_a_part_that_fails_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fake(name: str, setting: Setting, limit: float, rows: Path) -> dict[str, Any]:
        if name == "machine":
            append(rows, {"part": name, "row": {"name": name, **MACHINE}})
            return {"status": "done"}
        if name == "presets":
            append(rows, {"part": name, "row": {"name": "a row"}})
            return {"status": "failed", "seconds": 1.0, "log": ["RuntimeError: no"]}
        append(rows, {"part": name, "row": {"name": "quickstart", "error": "OutOfMemoryError: x"}})
        return {"status": "done", "seconds": 1.0}

    monkeypatch.setattr(suite_process, "run_part", fake)
    output = tmp_path / "suite.json"
    assert main(["--toy", "--output", str(output), "--parts", "presets", "memory"]) == 1
    parts = json.loads(output.read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["failed", "done"]
    assert parts["presets"]["rows"] == [{"name": "a row"}]
    out = capsys.readouterr().out
    assert "RuntimeError: no" in out and "quickstart: failed: OutOfMemoryError" in out


def test_a_command_that_is_killed_leaves_its_rows_and_no_process(tmp_path: Path) -> None:
    """In the middle of a part, and of a line."""
    rows = tmp_path / "suite.jsonl"
    flags = ["--toy", "--output", str(tmp_path / "suite.json"), "--parts", "placements", "variants"]
    command = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_suite.py"), *flags], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (rows.exists() and '{"part": "variants", "row"' in rows.read_text()):  # of ten, a part of a second each
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    command.kill()
    command.wait()
    time.sleep(0.3)
    with open(rows, "a") as file:
        file.write('{"part": "variants", "row": {"na')
    left = rows.read_text()
    assert main(["--report", str(rows)]) == 0
    page = rows.with_suffix(".md").read_text()
    assert "## placements: done" in page and "## variants: interrupted\n\n- flash attention first: skipped" in page
    time.sleep(1)
    assert rows.read_text() == left


def test_a_line_after_one_that_was_cut_off_is_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"part": "presets", "ro')
    append(rows, {"part": "memory"})
    assert read(rows) == [{"part": "memory"}]


def test_a_part_that_runs_again_replaces_its_rows_one_by_one() -> None:
    def row(name: str, value: float) -> dict[str, Any]:
        return {"part": "presets", "row": {"name": name, "ms_per_step": value}}

    first = [RUN, {"part": "presets"}, row("a", 1.0), row("b", 2.0), {"part": "presets", "end": {"status": "done"}}]
    again = [RUN, {"part": "presets"}, row("a", 3.0)]
    assert collect(first)["parts"]["presets"]["status"] == "done"
    results = collect([*first, *again])
    assert len(results["runs"]) == 2 and results["parts"]["presets"]["status"] == "interrupted"
    assert {row["name"]: row["ms_per_step"] for row in results["parts"]["presets"]["rows"]} == {"a": 3.0, "b": 2.0}


def test_an_unknown_part_is_explained(capsys: pytest.CaptureFixture) -> None:
    assert main(["--toy", "--parts", "everything"]) == 2
    assert ", ".join(PARTS) in capsys.readouterr().err


def test_a_report_of_nothing_is_explained(capsys: pytest.CaptureFixture) -> None:
    assert main(["--report", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl is not there" in capsys.readouterr().err


def test_a_row_in_one_line_says_what_was_measured() -> None:
    row = {"name": "gpt2_small", "ms_per_step": 12.34, "tokens_per_second": 5000.4, "mfu": None}
    assert summary(row) == "gpt2_small: 12.3 ms a step, 5,000 tokens/s"
    assert summary({"name": "x", "skipped": "not here"}) == "x: skipped: not here"


# Variants


def test_what_a_variant_changes_ends_with_its_process(tmp_path: Path) -> None:
    before = model.residual_dtype
    flags = [*toy(tmp_path).flags("gpt2_small"), "--precision", "bf16"]
    losses = [
        isolated(measure_variant, Variant("x", prepare=prepare), flags, 0.01)["loss_of_step_2"]
        for prepare in (None, fp32_residual)
    ]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.01)
    assert model.residual_dtype is before


@pytest.mark.skipif(not variants.HAS_CHUNKED_LOSS, reason="this torch has no chunked loss")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_chunked_loss_is_computed_in_the_precision_of_the_rest(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    training = Training.open(flags_of_a_tiny_run(token_folder, tmp_path, dropout=0.0, precision=precision))
    inputs, targets = training.data.batch(0, 4)
    given, computed = [], torch.nn.functional.linear_cross_entropy

    def noting(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        given.extend([x.dtype, weight.dtype])
        return computed(x, weight, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", noting)
    chunked = variants.chunked_loss(training)
    losses, gradients = [], []
    for step_model in (training.model, chunked):
        with training.hardware.autocast():
            loss = step_model(inputs, targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append(training.model.head.weight.grad)
        training.model.zero_grad(set_to_none=True)
    assert given == [{"fp32": torch.float32, "bf16": torch.bfloat16}[precision]] * 2
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert torch.allclose(gradients[1], gradients[0], atol=tolerance * gradients[0].abs().max())
