"""--tune and --micro_batch_size auto: what is tried, what is kept, and that later runs take it and say so."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train_colab_mmap
from model import TransformerLanguageModel
from tests.helpers import ALPHABET, CPU, columns, generated_text, write_tokens
from tests.training.helpers import final_weights, measured, steps_of
from training.config import TrainConfig, parse_config
from training.machine import hardware as hardware_module
from training.planning import tuning
from training.planning.estimate import estimate_memory
from training.planning.memory import MEMORY_SHARE
from training.planning.tuning import candidates, sizes, tuning_file, use_tuning


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short trials, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.0)


def kept() -> dict[str, Any]:
    (file,) = Path("runs/tuned").glob("*.json")
    return json.loads(file.read_text())


def settings(**changes: object) -> dict[str, object]:
    untouched = {"cpu_threads": 0, "compile": "auto", "attention": "auto", "compile_mode": "default"}
    return {**untouched, "micro_batch_size": 4, **changes}


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
    result = train(tmp_path / "runs" / "x", extra=("--tune",), compile="off", cpu_threads=1)
    assert result.code == 0, result.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1 and files[0].parent == tmp_path / "runs" / "tuned"
    rows = [columns(line) for line in result.out.splitlines() if line.startswith("|")][2:]
    assert rows[0][0] == "no change" and all(float(row[1]) > 0 for row in rows)
    assert {row[0].split()[-1] for row in rows[1:] if "micro_batch_size" in row[0]} == {"1", "2", "8"}
    found = kept()
    assert found["of_steps"] == 24
    assert found["settings"] == settings(
        compile="off", cpu_threads=1, micro_batch_size=found["settings"]["micro_batch_size"]
    )
    later = train(tmp_path / "runs" / "x", compile="off", cpu_threads=1)
    assert later.code == 0 and later.out.startswith("Tuned      --cpu_threads 1 --compile off --micro_batch_size")
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
    assert kept()["settings"] == settings(compile="off", cpu_threads=1, micro_batch_size=2)
    assert "Fastest    --micro_batch_size 2, kept in" in result.out and "24 steps" in result.out


def test_each_trial_runs_with_its_own_threads_and_the_last_ones_do_not_stay(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(tuning, "DEFAULT_THREADS", 2)
    monkeypatch.setattr(hardware_module, "DEFAULT_THREADS", 2)
    before = torch.get_num_threads()
    slow_unless(monkeypatch, lambda rows: threads.append(torch.get_num_threads()) or 1.0 + len(threads))
    try:
        assert train(tmp_path / "x", extra=("--tune",), compile="off").code == 0
        assert threads == [2, 1, 4, 2, 2, 2]  # as it is, two counts, three sizes
        assert train(tmp_path / "x", max_steps=2, compile="off").code == 0 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_gain_that_does_not_repay_its_start_is_not_taken(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes seconds, and 24 steps of a tenth of a millisecond do not."""
    monkeypatch.setattr(tuning, "compile_model", lambda model, hardware, example: lambda *args: model(*args))
    calls = iter([1e-4, 1e-5, *[1.0] * 10])
    slow_unless(monkeypatch, lambda rows: next(calls))
    clock = itertools.count(step=30)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    assert train(tmp_path / "x", extra=("--tune",), cpu_threads=1, micro_batch_size=4).code == 0
    assert kept()["settings"] == settings(cpu_threads=1)


def test_nothing_that_works_is_an_error(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: int) -> float:
        raise RuntimeError("no kernel image is available")

    slow_unless(monkeypatch, fail)
    result = train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1)
    assert result.code == 2 and "no kernel image is available" in result.err
    assert not (tmp_path / "runs" / "tuned").exists()


def test_what_is_tuned_changes_the_speed_and_not_what_is_learned(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "seconds_per_sequence", lambda *args: {1: 1.0, 2: 0.1}.get(args[3], 5.0))
    flags = {"compile": "off", "dropout": 0}
    assert train(tmp_path / "before", **flags).code == 0
    assert train(tmp_path / "after", extra=("--tune",), **flags).code == 0
    assert train(tmp_path / "after", **flags).code == 0
    assert kept()["settings"]["micro_batch_size"] == 2
    before, after = ([row["train_loss"] for row in measured(tmp_path / name)] for name in ("before", "after"))
    assert before == pytest.approx(after, rel=1e-4) and len(after) == 24


def test_a_folder_that_cannot_be_written_costs_the_file_alone(train: Callable, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder would be")
    result = train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1)
    assert result.code == 0 and "Fastest" in result.out and "not kept for later runs" in result.out
    result = train(tmp_path / "x", micro_batch_size="auto", max_steps=2)
    assert result.code == 0 and "not kept for later runs" in result.out


def test_a_run_in_the_current_folder_is_tuned_too(train: Callable, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "runs" / "tuned")
    monkeypatch.chdir(tmp_path / "here")
    assert train(Path(), extra=("--tune",), compile="off", cpu_threads=1).code == 0
    assert train(Path(), compile="off", cpu_threads=1, max_steps=2).code == 0


def test_where_memory_is_tight_the_sizes_are_tried_all_the_same(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = slow_unless(monkeypatch, lambda rows: 1.0)
    fitted = lambda config, model, hardware: tuning.with_rows(config, 2)  # noqa: E731 (as fit_micro_batch would)
    monkeypatch.setattr(tuning, "fit_micro_batch", fitted)
    assert train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1).code == 0
    assert tried == [2, 4, 1]


def test_what_is_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(CPU, device=torch.device("cuda"), precision="bf16", compiles=True)
    a100 = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: a100)
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


def test_what_would_have_no_effect_is_not_tried_on_a_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(CPU, device=torch.device("cuda"), precision="fp16", compiles=True)
    t4 = SimpleNamespace(multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: t4)
    config = TrainConfig(batch_size=64, compile="on")
    assert candidates("attention", config, gpu) == []
    assert candidates("compile_mode", config, gpu) == ["coordinate_descent"]


@pytest.mark.parametrize(("taken", "cores", "tried"), [(2, 2, [1]), (4, 8, [2, 8]), (1, 1, []), (8, 8, [4])])
def test_what_is_tried_of_threads_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, taken: int, cores: int, tried: list[int]
) -> None:
    monkeypatch.setattr(tuning, "DEFAULT_THREADS", taken)
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: cores)
    assert candidates("cpu_threads", TrainConfig(), CPU) == tried


# What is kept


def test_a_flag_that_says_otherwise_sets_aside_what_was_found_without_it(capsys: pytest.CaptureFixture) -> None:
    tuning.keep(parse_config([]), settings(micro_batch_size=16, cpu_threads=3))
    used = use_tuning(parse_config([]))
    assert (used.micro_batch_size, used.cpu_threads) == (16, 3)
    assert capsys.readouterr().out.startswith("Tuned      --cpu_threads 3 --micro_batch_size 16: runs/tuned/")
    for flags in (["--micro_batch_size", "4"], ["--compile_mode", "max_autotune"]):
        config = parse_config(flags)
        assert use_tuning(config) is config
        assert f"is not used, because {' '.join(flags)} was given" in capsys.readouterr().out
    same = use_tuning(parse_config(["--cpu_threads", "3"]))
    assert (same.micro_batch_size, same.sources["cpu_threads"]) == (16, "flag")


def test_what_was_tuned_is_for_this_shape_and_batch_alone() -> None:
    config = parse_config([])
    for change in ("--batch_size 8", "--embed_dim 64", "--precision fp32", "--activation_checkpointing"):
        assert tuning_file(parse_config(change.split())) != tuning_file(config)
    for change in ("--epochs 3", "--output_dir x", "--ff_dim 1024", "--learning_rate 0.1"):
        assert tuning_file(parse_config(change.split())) == tuning_file(config)


def test_what_was_tuned_is_for_this_vocabulary_alone(train: Callable, tmp_path: Path) -> None:
    """The head takes memory and time by it. For tokens that are not made yet, the one that is asked for counts."""
    text = generated_text(3_000, seed=1)
    many = write_tokens(tmp_path / "many", text, ALPHABET + "0123456789")
    assert train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1).code == 0
    flags = {"compile": "off", "cpu_threads": 1, "max_steps": 2}
    assert "Tuned" in train(tmp_path / "same", **flags).out
    assert "Tuned" not in train(tmp_path / "other", data_dir=many, **flags).out

    (tmp_path / "text.txt").write_text(text)
    flags |= {"data_dir": None, "input": tmp_path / "text.txt", "tokenizer": "char"}
    assert train(tmp_path / "x", extra=("--tune",), **flags).code == 0
    assert "Tuned" in train(tmp_path / "same_text", **flags).out
    asked = [parse_config(["--input", "none.txt", "--vocab_size", size]) for size in ("300", "400")]
    assert tuning_file(asked[0]) != tuning_file(asked[1])


def test_a_run_that_starts_from_other_weights_is_tuned_in_their_shape(
    train: Callable, unbroken: Path, tmp_path: Path
) -> None:
    start = {"init_from": unbroken, "embed_dim": None, "num_layers": None, "num_heads": None, "max_seq_len": None}
    assert train(tmp_path / "x", extra=("--tune",), compile="off", cpu_threads=1, **start).code == 0
    assert train(tmp_path / "x", compile="off", cpu_threads=1, max_steps=2, **start).out.startswith("Tuned ")


def test_what_was_tuned_is_still_held_against_memory() -> None:
    """It was found with the vocabulary of other data, say."""
    config = tuning.with_settings(TrainConfig(batch_size=32, max_seq_len=64), {"micro_batch_size": 32})
    model = TransformerLanguageModel(config.model_config(1000))
    little = int(estimate_memory(tuning.with_rows(config, 8), model, CPU) / MEMORY_SHARE) + 1
    assert (
        tuning.choose_micro_batch(config, model, None, dataclasses.replace(CPU, memory_bytes=little)).rows_at_once == 8
    )


@pytest.mark.parametrize("content", ["{", '{"settings": {"micro_batch_size": "many"}}', '{"settings": 3}', "{}"])
def test_a_file_that_cannot_be_used_stops_no_run(
    content: str, train: Callable, train_flags: Callable, tmp_path: Path
) -> None:
    file = tuning_file(parse_config(train_flags(tmp_path / "run", max_steps=2)))
    file.parent.mkdir(parents=True)
    file.write_text(content)
    result = train(tmp_path / "run", max_steps=2)
    assert result.code == 0 and "cannot be used" in result.out


# --micro_batch_size auto


def test_auto_takes_the_fastest_size_and_keeps_it(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = slow_unless(monkeypatch, lambda rows: {1: 1.0, 2: 0.5, 4: 0.495, 8: 0.6}[rows])
    first = train(tmp_path / "run", micro_batch_size="auto")
    assert first.code == 0 and "micro_batch_size 2 is the fastest" in first.out
    assert tried == [1, 2, 4, 8]  # and 4 is not faster by enough to be worth its memory
    again = train(tmp_path / "run", micro_batch_size="auto", max_steps=26)
    assert again.code == 0 and "Tuned      --micro_batch_size 2: " in again.out
    assert len(tried) == 4 and steps_of(tmp_path / "run")[0] == 26


def test_auto_leaves_the_other_settings_that_were_found(
    train: Callable, train_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_unless(monkeypatch, lambda rows: 1 / rows)
    tuning.keep(parse_config(train_flags(tmp_path / "run")), {"cpu_threads": 1})
    assert train(tmp_path / "run", micro_batch_size="auto", max_steps=2).code == 0
    assert kept()["settings"] == {"cpu_threads": 1, "micro_batch_size": 8}


def test_auto_for_real_gives_the_run_of_any_other_size(train: Callable, tmp_path: Path) -> None:
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
