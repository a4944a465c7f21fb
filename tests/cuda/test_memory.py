"""The GPU's memory: as much as was estimated, no more from step to step, and what happens where it is too little."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.measure import write_random_tokens
from benchmarks.workload import TimedRun
from tests.cuda.helpers import DEVICE, ON_GPU, losses_of, memory_limit, opened
from tests.helpers import estimated
from train_colab_mmap import make_run
from training import memory
from training.config import parse_config
from training.hardware import limit_memory
from training.records import read_metrics

pytestmark = pytest.mark.cuda


MODERN = "--position rope --qk_norm --norm rmsnorm --embed_norm --bias false --activation swiglu"


@pytest.mark.parametrize("choice", ["on", "off"])
@pytest.mark.parametrize("form", ["", MODERN], ids=["gpt-2", "modern"])
def test_peak_memory_is_within_a_tenth_of_the_estimate(tmp_path: Path, form: str, choice: str) -> None:
    tokens = write_random_tokens(tmp_path / "tokens", 200_000, 32_000)
    shape = "--num_layers 6 --embed_dim 512 --num_heads 8 --max_seq_len 512 --batch_size 16"
    before = torch.cuda.memory_allocated()
    shape += f" --placement ram --graphs off --compile {choice} {form}"
    flags = [*shape.split(), *ON_GPU, "--data_dir", str(tokens)]
    training = TimedRun.open(flags)
    training.step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    estimate = estimated(training.config, training.model, training.hardware)
    assert training.rows_at_once == 16
    assert estimate == pytest.approx(peak, rel=0.1), f"estimated {estimate / 1e9:.2f} GB, measured {peak / 1e9:.2f} GB"


def test_the_peak_of_a_run_is_its_own(tokens: Path) -> None:
    """The dial, or an earlier run in the same process, does not count."""
    large = torch.empty(1 << 28, device=DEVICE)
    del large
    opened(tokens)
    assert torch.cuda.max_memory_allocated() < 1 << 28


def test_memory_does_not_grow_from_step_to_step(tokens: Path) -> None:
    training = opened(tokens, "--compile", "off")
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(10):
        training.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held


# Activations of some hundred megabytes, far more than the weights: half the sequences take about half the memory.
LARGE = {"max_seq_len": 256, "embed_dim": 256, "num_layers": 2, "batch_size": 64, "gradient_accumulation_steps": 1}
LARGE |= {"device": DEVICE, "precision": "fp32", "dropout": 0.0, "learning_rate": 0.001, "max_steps": 4}
LARGE |= {"graphs": "off"}  # captured steps take their memory before the first of them


@pytest.mark.parametrize("choice", ["on", "off"])
def test_when_memory_runs_out_the_same_batch_is_taken_in_smaller_parts(
    tmp_path: Path, train: Callable, choice: str
) -> None:
    """Memory that really is too little, for a step and for the compiling of one; the losses are the same."""
    flags = {**LARGE, "compile": choice, "eval_interval": 2, "checkpoint_steps": 2}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = train(tmp_path / "whole", **flags)
    assert result.code == 0 and "Out of memory" not in result.out, result
    peak = torch.cuda.max_memory_allocated()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()  # its blocks would not count
    with memory_limit(before + 7 * (peak - before) // 10):
        result = train(tmp_path / "parts", **flags)
    assert result.code == 0, result.err
    told = re.findall(r"Out of memory with (\d+) sequences at once. Continuing from step 0 with (\d+)", result.out)
    assert told and told[0] == ("64", "32"), result.out
    assert [row["step"] for row in read_metrics(tmp_path / "parts")] == [1, 2, 3, 4]
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-4)
    parts, whole = (
        [row["val_loss"] for row in read_metrics(tmp_path / run) if "val_loss" in row] for run in ("parts", "whole")
    )
    assert parts == pytest.approx(whole, rel=1e-4) and len(parts) == 2


def test_a_compile_that_fails_fits_the_micro_batch_again(
    tmp_path: Path, train: Callable, train_flags: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, a step of 64 sequences would not fit."""

    def compiled(*batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler found")

    flags = {**LARGE, "compile": "on", "eval_interval": 0, "checkpoint_steps": 0}
    trainer, _ = make_run(parse_config(train_flags(tmp_path / "run", **flags)))
    needed = [
        estimated(trainer.config, trainer.model, dataclasses.replace(trainer.hardware, compiles=compiles))
        for compiles in (True, False)
    ]
    assert needed[0] < needed[1] and trainer.hardware.memory_bytes
    monkeypatch.setattr(memory, "MEMORY_SHARE", sum(needed) / 2 / trainer.hardware.memory_bytes)
    del trainer
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled)
    result = train(tmp_path / "run", **flags)
    assert result.code == 0, result.err
    assert "64 sequences at once would not fit: micro_batch_size 32" in result.out
    assert result.out.index("torch.compile failed") < result.out.index("micro_batch_size 32")


def test_memory_that_runs_out_in_the_compiler_is_free_at_the_next_attempt(
    tmp_path: Path, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler raises an error of its own. Behind it is the allocator's, whose frames hold tensors."""
    size, reserved = 2**28, []

    def lowers() -> None:
        activations = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        reserved.append(torch.cuda.memory_reserved())
        raise torch.OutOfMemoryError(f"CUDA out of memory beside {len(activations)}")

    def compiled(*batch: torch.Tensor) -> torch.Tensor:
        if reserved:
            reserved.append(torch.cuda.memory_reserved())
            raise RuntimeError("no compiler found")
        try:
            lowers()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"backend failed: {error}") from error
        raise AssertionError

    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled)
    result = train(tmp_path / "run", device=DEVICE, compile="on", max_steps=2, eval_interval=0)
    assert result.code == 0 and "Continuing from step 0 with 2" in result.out, result
    assert reserved[1] <= reserved[0] - size


def test_running_out_is_an_error_if_the_driver_would_take_host_memory() -> None:
    """As on Windows: PyTorch is limited to what is free on the GPU, and to a little less."""
    device = torch.device("cuda", torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info(device)
    limit_memory(device)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.97 * free), dtype=torch.uint8, device=device)
        assert torch.empty(int(0.5 * free), dtype=torch.uint8, device=device).is_cuda
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_model_that_does_not_fit_at_all_ends_with_exit_code_5(tmp_path: Path, train: Callable) -> None:
    with memory_limit(torch.cuda.memory_reserved() + 2 * 2**20):
        result = train(tmp_path / "run", **LARGE, compile="off", eval_interval=0, checkpoint_steps=0)
    assert result.code == 5, result.err
    assert "out of memory" in result.err.lower() and "--model_size" in result.err
