"""--tune and --micro_batch_size auto: what is tried, what is kept, and that later runs take it and say so."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train_colab_mmap
from tests.helpers import CPU, columns
from tests.training.helpers import final_weights, steps_of
from training import tuning
from training.config import TrainConfig, parse_config
from training.tuning import candidates, sizes, tuning_file, use_tuning


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short trials, and the threads of this process as they were."""
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def kept(folder: Path) -> dict[str, Any]:
    (file,) = (folder / "tuned").glob("*.json")
    return json.loads(file.read_text())


def slow_unless(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[int]:
    """A sequence takes `seconds(rows at once)`. Returns the sizes that are tried."""
    tried: list[int] = []

    def measured(step_model: Any, model: Any, data: Any, rows: int, hardware: Any) -> float:
        tried.append(rows)
        return seconds(rows)

    monkeypatch.setattr(tuning, "seconds_per_sequence", measured)
    return tried


# --tune


def test_tune_prints_a_table_writes_no_run_and_keeps_the_best(train: Callable, tmp_path: Path) -> None:
    result = train(tmp_path / "runs" / "x", extra=("--tune",), compile="off")
    assert result.code == 0, result.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1 and files[0].parent == tmp_path / "runs" / "tuned"
    rows = [columns(line) for line in result.out.splitlines() if line.startswith("|")][2:]
    assert rows[0][0] == "as it is" and all(float(row[1]) > 0 for row in rows)
    assert {row[0].split()[-1] for row in rows[1:] if "micro_batch_size" in row[0]} == {"1", "2", "8"}
    found = kept(tmp_path / "runs")
    assert found["of_steps"] == 24 and "compile" not in found["settings"]  # which was given
    later = train(tmp_path / "runs" / "x", compile="off")
    assert later.code == 0 and f"Tuned      {tuning.flags_of(found['settings'])}, found in" in later.out.splitlines()[0]
    assert json.loads((tmp_path / "runs" / "x" / "config.json").read_text())["sources"]["micro_batch_size"] == "tuned"


def test_the_fastest_is_kept_and_what_fails_is_told(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(rows: int) -> float:
        if rows == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return {4: 0.5, 2: 0.1, 1: 0.3}[rows]

    slow_unless(monkeypatch, seconds)
    result = train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1)
    assert result.code == 0 and "failed: CUDA out of memory" in result.out
    assert kept(tmp_path)["settings"] == {"micro_batch_size": 2}
    assert "Fastest    --micro_batch_size 2. Kept in" in result.out and "24 steps" in result.out


def test_a_gain_that_does_not_repay_its_start_is_not_taken(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes seconds, and 24 steps of a tenth of a millisecond do not."""
    monkeypatch.setattr(tuning, "compile_model", lambda model, hardware, example: lambda *args: model(*args))
    calls = iter([1e-4, 1e-5, *[1.0] * 10])
    slow_unless(monkeypatch, lambda rows: next(calls))
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: float(next(clock)))
    assert train(tmp_path / "x", extra=("--tune",), cpu_threads=1, micro_batch_size=4).code == 0
    assert kept(tmp_path)["settings"] == {}


def test_nothing_that_works_is_an_error(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: int) -> float:
        raise RuntimeError("no kernel image is available")

    slow_unless(monkeypatch, fail)
    result = train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1)
    assert result.code == 2 and "no kernel image is available" in result.err
    assert not (tmp_path / "tuned").exists()


def test_tuning_does_not_change_what_a_run_learns(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", extra=("--tune",), compile="off", cpu_threads=1, micro_batch_size=4).code == 0
    assert train(tmp_path / "run").code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)


def test_what_is_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(CPU, device=torch.device("cuda"), compiles=True)
    config = TrainConfig(batch_size=64, compile="on")
    tried = {key: candidates(key, config, gpu) for key in tuning.SETTINGS}
    assert tried == {
        "cpu_threads": [],
        "compile": ["off"],
        "attention": ["flash", "cudnn"],
        "compile_mode": ["coordinate_descent", "max_autotune"],
        "micro_batch_size": [32, 16],
    }
    uncompiled = dataclasses.replace(config, compile="off")
    assert candidates("compile", uncompiled, gpu) == ["on"] and candidates("compile_mode", uncompiled, gpu) == []


# What is kept


def test_a_flag_wins_over_what_was_tuned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = parse_config(["--output_dir", str(tmp_path / "x"), "--micro_batch_size", "4"])
    tuning.keep(config, {"micro_batch_size": 16, "cpu_threads": 3})
    used = use_tuning(config)
    assert used.micro_batch_size == 4 and used.cpu_threads == 3
    assert "--cpu_threads 3" in capsys.readouterr().out


def test_what_was_tuned_is_for_this_shape_and_batch_alone(tmp_path: Path) -> None:
    config = parse_config(["--output_dir", str(tmp_path / "x")])
    for change in ("--batch_size 8", "--embed_dim 64", "--precision fp32", "--activation_checkpointing"):
        assert tuning_file(parse_config(["--output_dir", str(tmp_path / "x"), *change.split()])) != tuning_file(config)
    assert tuning_file(parse_config(["--output_dir", str(tmp_path / "x"), "--epochs", "3"])) == tuning_file(config)


@pytest.mark.parametrize("content", ["{", '{"settings": {"micro_batch_size": "many"}}', '{"settings": 3}', "{}"])
def test_a_file_that_cannot_be_used_stops_no_run(
    content: str, train: Callable, train_flags: Callable, tmp_path: Path
) -> None:
    file = tuning_file(parse_config(train_flags(tmp_path / "run", max_steps=2)))
    file.parent.mkdir()
    file.write_text(content)
    result = train(tmp_path / "run", max_steps=2)
    assert result.code == 0 and "cannot be used" in result.out


# --micro_batch_size auto


def test_auto_takes_the_fastest_size_and_keeps_it(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = slow_unless(monkeypatch, lambda rows: {1: 1.0, 2: 0.5, 4: 0.495, 8: 0.6}[rows])
    first = train(tmp_path / "run", micro_batch_size="auto")
    assert first.code == 0 and "micro_batch_size 2 is the fastest that fits" in first.out
    assert tried == [1, 2, 4, 8]  # and 4 is not faster by enough to be worth its memory
    again = train(tmp_path / "run", micro_batch_size="auto", max_steps=26)
    assert again.code == 0 and "Tuned      --micro_batch_size 2" in again.out
    assert len(tried) == 4 and steps_of(tmp_path / "run")[0] == 26


def test_auto_for_real_gives_the_run_of_any_other_size(train: Callable, tmp_path: Path, unbroken: Path) -> None:
    result = train(tmp_path / "run", micro_batch_size="auto", dropout=0)
    size = int(re.search(r"micro_batch_size (\d+) is the fastest", result.out)[1])
    assert result.code == 0 and size in (1, 2, 4, 8)
    assert train(tmp_path / "same", micro_batch_size=size, dropout=0).code == 0
    assert final_weights(tmp_path / "run") == final_weights(tmp_path / "same")


def test_auto_stops_where_memory_does(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(rows: int) -> float:
        if rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1 / rows

    tried = slow_unless(monkeypatch, seconds)
    assert "micro_batch_size 2 is the fastest" in train(tmp_path / "run", micro_batch_size="auto", max_steps=2).out
    assert tried == [1, 2, 4]


def test_sizes_cut_a_step_into_equal_slices() -> None:
    assert sizes(TrainConfig(batch_size=12, gradient_accumulation_steps=2)) == [1, 2, 4, 8, 12]
    assert sizes(TrainConfig(batch_size=6)) == [1, 2, 3, 6]
    assert all(size == 1 or size <= 7 for size in sizes(TrainConfig(batch_size=7)))


def test_the_words_of_micro_batch_size() -> None:
    assert parse_config(["--micro_batch_size", "auto"]).micro_batch_size == 0
    assert parse_config(["--micro_batch_size", "auto"]).rows_at_once == 32
    for wrong in ("0", "some"):
        assert train_colab_mmap.main(["--micro_batch_size", wrong]) == 2
