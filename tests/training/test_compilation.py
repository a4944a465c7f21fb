"""Compiling changes the speed and nothing else, and a failure to compile stops nothing."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
import torch
from torch._inductor.async_compile import AsyncCompile

from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import CPU
from training.compilation import CompiledParts, cancel_compilation, compile_model, undo_compile
from training.records import read_metrics
from training.stop import Abandoned, Stop

SHAPE = ModelConfig(11, 8, 2, 1, max_seq_len=4)
COMPILING = dataclasses.replace(CPU, compiles=True)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return tokens, tokens


def test_a_failure_to_compile_is_reported_once_and_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """torch.compile fails at the first call, and may do so in the backward pass, when gradients are half there."""
    model = TransformerLanguageModel(SHAPE)
    before = copy.deepcopy(model.state_dict())

    def lazy(model: torch.nn.Module, **options: object) -> Callable:
        def compiled(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            model(tokens, targets).backward()
            raise RuntimeError("no compiler found\nand a long tail of lines")

        return compiled

    monkeypatch.setattr(torch, "compile", lazy)
    assert compile_model(model, COMPILING, example()) == (model, "torch.compile failed (no compiler found)")
    printed = capsys.readouterr().out
    assert printed.count("torch.compile failed") == 1 and "no compiler found" in printed
    assert "long tail" not in printed and "--compile off" in printed
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_running_out_of_memory_is_not_taken_for_a_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled)
    with pytest.raises(torch.OutOfMemoryError):
        compile_model(TransformerLanguageModel(SHAPE), COMPILING, example())


class Sum(torch.nn.Module):
    """As little as can be compiled, to code that is in no cache: it holds a number that was drawn."""

    activation_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.factor = random.SystemRandom().random()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.weight * tokens).sum() * self.factor


@torch._inductor.config.patch(compile_threads=2)
def test_a_stop_ends_compiling_at_once_and_the_next_attempt_begins_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A notebook runs again in the same process, where the compiler's threads still hold memory."""
    model, released = cast(TransformerLanguageModel, Sum()), threading.Event()
    cancel_compilation()
    busy = [AsyncCompile.pool().submit(released.wait, 300) for _ in range(2)]  # what is to be compiled has to wait
    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "wait", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with Stop() as stop, pytest.raises(Abandoned), stop.abandonable():
            compile_model(model, COMPILING, example())
    try:
        assert "Stopping now, " in capfd.readouterr().err
        assert compile_model(model, COMPILING, example())[0] is not model, capfd.readouterr().out
        assert not any(thread.done() for thread in busy)
    finally:
        released.set()


def test_compiling_that_takes_too_long_is_abandoned(capsys: pytest.CaptureFixture[str]) -> None:
    model = cast(TransformerLanguageModel, Sum())
    made, failure = compile_model(model, dataclasses.replace(COMPILING, compile_limit=0.01), example())
    assert made is model and "not done after" in failure and "continues uncompiled" in capsys.readouterr().out
    assert compile_model(model, COMPILING, example())[0] is not model  # nothing is left of it


def test_a_run_continues_as_it_was_compiled(tmp_path: Path, train: Callable) -> None:
    """Nothing repays compiling a few steps. More of them might, and would round in another way."""
    few = {"position": "rope", "dropout": 0.0, "eval_interval": 0}
    assert "Compile    off" in train(tmp_path / "run", **few, max_steps=2).out
    result = train(tmp_path / "run", **few, max_steps=4, compile="auto")
    assert result.code == 0 and "off: as in the session before" in result.out


def test_a_compiled_training_compiles_at_its_start_alone_and_learns_the_same(tmp_path: Path, train: Callable) -> None:
    """One shape for training, one for evaluation, though the last micro-batch and the last validation batch are
    smaller, and answers are generated in between. The checkpoint knows nothing of it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    shape = {"batch_size": 7, "micro_batch_size": 3, "gradient_accumulation_steps": 1, "eval_batches": 3, "dropout": 0}
    flags = {**shape, "compile": "on", "max_steps": 6, "eval_interval": 3, "eval_prompts": prompts}
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "Compiled in" in result.out, result
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2

    eager = {**flags, "compile": "off"}
    assert train(tmp_path / "eager", **eager).code == 0
    for ours, theirs in zip(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "eager"), strict=True):
        assert set(ours) == set(theirs)
        for key in {"train_loss", "val_loss", "grad_norm"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3)
    weights = safetensors.torch.load_file(tmp_path / "run/checkpoints/step_00000006/model.safetensors")
    assert not any("_orig_mod" in name for name in weights)
    assert train(tmp_path / "run", **{**eager, "max_steps": 7}).code == 0


@pytest.mark.parametrize("form", [{}, {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "dropout": 0.5}])
def test_blocks_share_one_compiled_function(form: dict) -> None:
    """Compile as on a GPU: the model's loss and gradients, with as many graphs for four layers as for two."""
    graphs = []
    for layers in (2, 4):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = TransformerLanguageModel(dataclasses.replace(SHAPE, num_layers=layers, **form))
        parts, results = CompiledParts(model), []
        parts(*example()).backward()  # with dropout
        with torch.no_grad():
            model.eval()
            torch.testing.assert_close(parts(*example()), model(*example()))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        for is_compiled in (True, False):
            model.zero_grad(set_to_none=True)
            loss = (parts if is_compiled else undo_compile(parts))(*example())
            loss.backward()
            results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(*results)
    assert graphs == [6, 6]  # embeddings, a block and the loss, to train and to evaluate


def test_a_cache_folder_that_is_gone_means_uncompiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TORCHINDUCTOR_CACHE_DIR on a disk that was unmounted."""

    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/mnt/cache")

    model = TransformerLanguageModel(SHAPE)
    monkeypatch.setattr(torch.compiler, "reset", gone)
    assert compile_model(model, COMPILING, example())[0] is model
    assert "/mnt/cache" in capsys.readouterr().out
