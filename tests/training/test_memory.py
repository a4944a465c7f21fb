"""Running out of memory: the micro-batch gives way and the result stays; where nothing helps, what would is said."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import re
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import train_colab_mmap as script
from common.checkpoint import Checkpoint
from model import TransformerLanguageModel
from tests.forked import Forked
from tests.helpers import ALPHABET, CPU, call_before, estimated, rows_of
from tests.training.helpers import checkpoint_of, final_weights, measured, save_at_once, steps_of
from tokenizer import Tokenizer
from training import evaluate as evaluate_module
from training import hardware as hardware_module
from training import memory as memory_module
from training.config import Config, parse_config
from training.data import TokenData
from training.memory import describe_out_of_memory
from training.records import CONFIG, read_metrics
from training.run import Run
from training.saver import Saver
from training.state import read_state

M_ARENA_MAX = -8  # of malloc.h
# A step of 256 sequences at once takes about 255 MB in such a process, one of 128 about 125: what is too much fails at
# a large tensor, and what fits has room. Far from both: once 256 fitted into 230 MB, nobody knows why.
# In fp32: without oneDNN, products in bf16 are several times slower.
LARGE = {"max_seq_len": 64, "embed_dim": 64, "num_layers": 2, "batch_size": 256, "dropout": 0.0, "precision": "fp32"}
# One step: memory may also run out in a second one, and the first would then have taken more rows, rounded differently.
LARGE |= {"max_steps": 1, "eval_interval": 0, "checkpoint_steps": 1}
LIMIT = 170  # MB


class Ended(NamedTuple):
    """How a process ended."""

    returncode: int | None
    stdout: str
    stderr: str


def limit_memory(megabytes: int) -> None:
    """Limit this process to its current memory and some more. Turns off oneDNN, which under such a limit cannot always
    create its primitives on a busy machine, and then keeps failing."""
    import resource

    import training.report  # noqa: F401

    torch.backends.mkldnn.set_flags(False)
    # What a thread has freed counts against this limit, and by default other threads cannot have it.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).zero_grad()  # both import much
    with open("/proc/self/status") as status:
        taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + megabytes * 2**20,) * 2)


def limited(megabytes: int, flags: list[str]) -> Ended:
    process = Forked(flags, first=functools.partial(limit_memory, megabytes))
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


@pytest.mark.quick
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_when_memory_runs_out_the_same_batch_is_taken_in_smaller_parts(
    train_flags: Callable, train: Callable, tmp_path: Path
) -> None:
    """Run in a process with limited memory. The size that fits is kept."""
    flags = train_flags(tmp_path / "run", **LARGE)
    result = limited(LIMIT, flags)
    assert result.returncode == 0, result.stderr
    told = re.findall(r"Out of memory with (\d+) sequences at once. Continuing from step 0 with (\d+)", result.stdout)
    assert told and told[0][0] == "256", result.stdout
    rows = int(told[-1][1])
    assert f"--micro_batch_size {rows}" in result.stdout
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]

    with torch.backends.mkldnn.flags(enabled=False):
        straight = train(tmp_path / "straight", **LARGE, micro_batch_size=rows)
    assert straight.code == 0
    assert final_weights(tmp_path / "run", 1) == final_weights(tmp_path / "straight", 1)

    again = limited(LIMIT, train_flags(tmp_path / "run", **{**LARGE, "max_steps": 2}))
    assert again.returncode == 0, again.stderr
    assert f"micro_batch_size {rows}, which fitted on this device before" in again.stdout
    assert "Out of memory with 256" not in again.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_model_that_does_not_fit_at_all_ends_with_exit_code_5_and_what_would_help(
    train_flags: Callable, tmp_path: Path
) -> None:
    # In fp32, for oneDNN's products in bf16 end with a segmentation fault where there is no memory for their scratch.
    flags = train_flags(tmp_path / "none", **{**LARGE, "embed_dim": 512, "num_heads": 8})
    # It runs out at the model, or in the first step. Not where a thread is started, between the two: if a thread has no
    # memory to begin with, Python 3.11 waits for it forever.
    for megabytes in (10, 60):
        none = limited(megabytes, flags)
        assert none.returncode == 5 and "Traceback" not in none.stderr, none.stderr
        assert "error: Out of memory" in none.stderr and "--" in none.stderr


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")  # as a GPU says it


def out_of_memory_once(patch: pytest.MonkeyPatch, call: int) -> list[int]:
    """Memory runs out in the given forward pass. Returns the rows of each, in a list that grows."""
    calls = list[int]()

    def fails_once(model: TransformerLanguageModel, tokens: torch.Tensor, *_: torch.Tensor, **cached: Any) -> None:
        if not cached:  # the samples at the end
            calls.append(len(tokens))
            if len(calls) == call:
                out_of_memory()

    call_before(patch, TransformerLanguageModel, "forward", fails_once)
    return calls


def test_memory_that_runs_out_later_changes_nothing_about_the_run(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After gradients of a part of the batch have been added up, in the middle of the run."""
    flags = {"dropout": 0.0, "log_interval": 1}
    assert train(tmp_path / "straight", **flags).code == 0
    with monkeypatch.context() as patch:
        calls = out_of_memory_once(patch, 20)  # the second of the two of a step
        result = train(tmp_path / "run", **flags)
    assert result.code == 0 and result.out.count("Out of memory with 4 sequences at once") == 1
    assert set(calls[:19]) == {4} and set(calls[20:30]) == {2}
    rows, straight = measured(tmp_path / "run"), measured(tmp_path / "straight")
    assert [row["step"] for row in rows] == [row["step"] for row in straight]
    for ours, theirs in zip(rows, straight, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
    assert json.loads((tmp_path / "run" / CONFIG).read_text())["config"]["micro_batch_size"] == 2


def test_the_time_before_memory_ran_out_counts(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a continued run, before anything was saved."""
    run = tmp_path / "run"
    assert train(run, max_steps=6, log_interval=1).code == 0
    before = read_state(Checkpoint(checkpoint_of(run, 6))).state.elapsed_seconds
    call_before(monkeypatch, script, "prepare", lambda *_: time.sleep(1.0))
    out_of_memory_once(monkeypatch, 1)
    assert train(run, max_steps=8, log_interval=1).code == 0
    assert read_state(Checkpoint(checkpoint_of(run, 8))).state.elapsed_seconds > before + 2.0


def test_a_run_that_starts_over_keeps_its_new_folder(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path / "run", max_steps=6).code == 0
    out_of_memory_once(monkeypatch, 20)
    result = train(tmp_path / "run", resume="never")
    assert result.code == 0 and "Continuing from step 9 with 2" in result.out
    assert steps_of(tmp_path / "run")[0] == 24
    others = [path for path in tmp_path.iterdir() if (path / CONFIG).exists() and path.name != "run"]
    assert len(others) == 1 and steps_of(others[0]) == [6]


@pytest.mark.parametrize("changed", ["device", "flag", "start over"])
def test_the_size_that_was_found_is_for_this_device_and_this_run(
    changed: str, train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        out_of_memory_once(patch, 2)
        assert train(run, max_steps=6).code == 0
    assert "fitted on this device before" in train(run, max_steps=8).out
    flags: dict[str, Any] = {"flag": {"micro_batch_size": 4}, "start over": {"resume": "never"}}.get(changed, {})
    if changed == "device":
        monkeypatch.setattr(hardware_module, "device_name", lambda device: "another")
    result = train(run, max_steps=10, **flags)
    assert result.code == 0 and "fitted" not in result.out


def test_memory_that_runs_out_in_an_evaluation_costs_nothing(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def fails_once(data: TokenData, first: int, rows: int, of: int) -> None:
        calls.append(rows)
        if len(calls) == 2:
            out_of_memory()

    call_before(monkeypatch, TokenData, "validation_batch", fails_once)
    result = train(tmp_path / "run", micro_batch_size=4, dropout=0.0)
    assert result.code == 0 and "Continuing from step 12 with 2" in result.out
    assert calls[:4] == [4, 4, 2, 2]
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "val_loss" in row] == [12, 24]


def test_memory_that_runs_out_while_prompts_are_answered_costs_no_answer(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are answered at once as sequences are trained at once, and at most three fit."""

    def fails_above_three(
        model: TransformerLanguageModel, tokenizer: Tokenizer, rows: list, *_: Any, **more: Any
    ) -> None:
        if len(rows) > 3:
            out_of_memory()

    prompts = [{"prompt": letter * 3, "answer": "x"} for letter in ALPHABET[:10]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    flags = {"eval_prompts": tmp_path / "prompts.jsonl", "eval_interval": 24, "micro_batch_size": 4}
    assert train(tmp_path / "plain", **flags).code == 0
    call_before(monkeypatch, evaluate_module, "generate", fails_above_three)
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "Out of memory" not in result.out
    assert (tmp_path / "run" / "samples.md").read_bytes() == (tmp_path / "plain" / "samples.md").read_bytes()


def test_texts_that_never_fit_are_left_out_and_the_run_is_finished(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module, "generate", lambda *_: out_of_memory())
    result = train(tmp_path / "run")
    assert result.code == 0 and result.out.count("Warning: out of memory while generating") == 1
    assert (tmp_path / "run" / "summary.md").exists()


# One layer whose activations are far larger than its weights.
MOSTLY_ACTIVATIONS = {"embed_dim": 32, "max_seq_len": 64, "batch_size": 64, "gradient_accumulation_steps": 1}
MOSTLY_ACTIVATIONS |= {"precision": "fp32", "max_steps": 4, "eval_interval": 0, "checkpoint_steps": 2}


def memory_for_compiled_code(flags: list[str]) -> int:
    """Return a memory in which a step of these flags fits compiled, but not uncompiled."""
    config = parse_config(flags)
    with torch.device("meta"):
        model = TransformerLanguageModel(config.shape(len(ALPHABET)))
    uncompiled, compiled = (
        estimated(config, model, dataclasses.replace(CPU, compiles=compiles)) for compiles in (False, True)
    )
    assert compiled < uncompiled
    return int((compiled + uncompiled) / 2 / memory_module.MEMORY_SHARE)


def compiling_fails(patch: pytest.MonkeyPatch) -> None:
    def compiled(*batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler found\nand more lines")

    patch.setattr(torch, "compile", lambda model, **options: compiled)


def test_a_compile_that_fails_fits_the_micro_batch_again(
    train: Callable, train_flags: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled code takes more memory. A run that is resumed after that has the result of --compile off, too."""
    flags = {**MOSTLY_ACTIVATIONS, "compile": "on"}
    enough = memory_for_compiled_code(train_flags(tmp_path / "run", **flags))
    monkeypatch.setattr(hardware_module, "total_ram", lambda: enough)
    with monkeypatch.context() as patch:
        compiling_fails(patch)
        stopped = train(tmp_path / "run", **flags | {"max_steps": 2, "use_lr_scheduler": "constant"})
        result = train(tmp_path / "run", **flags | {"use_lr_scheduler": "constant"})
        dry = train(tmp_path / "dry", ("--dry_run",), **flags)
        given = train(tmp_path / "given", **flags, micro_batch_size=64)
    told = "Memory     64 sequences at once would not fit: micro_batch_size 32"
    for each in (stopped, result, dry):
        assert each.code == 0, each.err
        assert each.out.count("torch.compile failed (no compiler found)") == each.out.count(told) == 1
        assert each.out.index("torch.compile failed") < each.out.index(told)
    assert given.code == 0 and given.out.count("torch.compile failed") == 1 and told not in given.out
    straight = train(tmp_path / "straight", **flags | {"compile": "off", "use_lr_scheduler": "constant"})
    assert straight.code == 0 and told in straight.out
    assert final_weights(tmp_path / "run", 4) == final_weights(tmp_path / "straight", 4)


def test_memory_that_runs_out_in_the_compiler_is_freed_before_the_next_attempt(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler raises an error of its own. Behind it is the allocator's, whose frames hold tensors."""
    held: list[weakref.ref] = []

    def lowers() -> None:
        activations = torch.zeros(1000)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(f"CUDA out of memory beside {len(activations)}")

    def compiled(*batch: torch.Tensor) -> torch.Tensor:
        if len(batch[0]) < 4:
            raise RuntimeError("no compiler found")
        try:
            lowers()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"backend failed: {error}") from error
        raise AssertionError

    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled)
    built = list[weakref.ref]()

    def building(*_: Any, **__: Any) -> None:
        assert all(tensor() is None for tensor in (*held, *built)), "the next model has no room yet"

    def noted(run: Run, previous: Any) -> None:
        built.append(weakref.ref(run.model))

    call_before(monkeypatch, script, "TransformerLanguageModel", building)
    call_before(monkeypatch, script, "start_or_resume", noted)
    result = train(tmp_path / "run", compile="on", max_steps=2, eval_interval=0)
    assert result.code == 0 and "Continuing from step 0 with 2" in result.out, result
    assert len(held) == 1 and len(built) == 2


def test_a_dry_run_gives_way_as_the_training_would(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory_once(monkeypatch, 1)
    result = train(tmp_path / "run", extra=("--dry_run",))
    assert result.code == 0 and "Continuing from step 0 with 2" in result.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("fails", "saved"), [(1, []), (4, [18, 12])], ids=["first", "last"])
def test_memory_that_runs_out_in_a_save_ends_the_training(
    fails: int, saved: list[int], train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller micro-batch would not help, and nothing would save this step again."""
    saves = list[int]()

    def write(*_: Any) -> None:
        saves.append(len(saves) + 1)
        if len(saves) == fails:
            raise MemoryError

    save_at_once(monkeypatch)
    call_before(monkeypatch, Saver, "write", write)
    result = train(tmp_path / "run", eval_interval=0)
    assert result.code == 5 and "sequences at once" not in result.out
    assert steps_of(tmp_path / "run") == saved
    assert train(tmp_path / "run", eval_interval=0).code == 0
    assert steps_of(tmp_path / "run")[0] == 24


def test_memory_that_runs_out_in_an_update_saves_no_half_of_it(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(run: Run, loss: torch.Tensor, lr: float) -> None:
        if run.state.step == 8:
            raise MemoryError

    with monkeypatch.context() as patch:
        call_before(patch, script, "update", fail)
        assert train(tmp_path / "run").code == 5
    assert steps_of(tmp_path / "run") == [6]
    assert train(tmp_path / "run").code == 0


def test_memory_that_runs_out_in_an_evaluation_loses_no_step(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with one sequence at a time."""

    def fail(run: Run) -> None:
        if run.state.step == 8:
            raise MemoryError

    with monkeypatch.context() as patch:
        call_before(patch, script, "evaluate", fail)
        result = train(tmp_path / "run", eval_interval=8)
    assert result.code == 5 and re.findall(r"step 8 with (\d)", result.out) == ["2", "1"]
    assert steps_of(tmp_path / "run") == [8, 6]
    assert train(tmp_path / "run", eval_interval=8).code == 0


def test_memory_of_other_processes_and_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(embed_dim=768, num_heads=12, num_layers=12, max_seq_len=512, batch_size=8)
    said = describe_out_of_memory(
        config, config.shape(32_000), dataclasses.replace(CPU, memory_bytes=10**15), rows_of(config)
    )
    assert "--micro_batch_size 1, then --activation_checkpointing, then a new run with --max_seq_len 256" in said
    assert not re.search("[Rr]estart|process", said)
    monkeypatch.setattr(memory_module, "available_ram", lambda: 1)
    said = describe_out_of_memory(config, config.shape(32_000), dataclasses.replace(CPU, memory_bytes=10**9), 1)
    assert "Other processes hold " in said and "--micro_batch_size 1" not in said
