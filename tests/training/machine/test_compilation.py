"""Compiling changes the speed and nothing else, and a failure to compile stops nothing."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
import torch
from torch._inductor.async_compile import AsyncCompile

from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import CPU
from training.config import COMPILE_MODES
from training.keeping.interruption import Interruption, StopRequested
from training.machine.compilation import cache_name, compile_model, forget_unfinished
from training.telling.records import read_metrics

SHAPE = ModelConfig(11, 8, 2, 1, max_seq_len=4)
COMPILING = dataclasses.replace(CPU, compiles=True)


@pytest.fixture(autouse=True)
def own_tag() -> Iterator[None]:
    """What compiled code is kept under is not left behind."""
    before = torch.compiler.config.cache_key_tag
    yield
    torch.compiler.config.cache_key_tag = before


def example() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return tokens, tokens


def test_compile_off_does_not_try() -> None:
    model = TransformerLanguageModel(SHAPE)

    def tried() -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("tried")

    assert compile_model(model, CPU, tried) is model


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
    assert compile_model(model, COMPILING, example) is model
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
        compile_model(TransformerLanguageModel(SHAPE), COMPILING, example)


def test_bad_data_is_not_taken_for_a_failure_to_compile() -> None:
    def broken() -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("cannot pin")

    with pytest.raises(RuntimeError, match="cannot pin"):
        compile_model(TransformerLanguageModel(SHAPE), COMPILING, broken)


def test_a_compiled_model_has_the_same_loss(capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    model = TransformerLanguageModel(SHAPE)
    compiled = compile_model(model, COMPILING, example)
    assert compiled is not model, capsys.readouterr().out
    assert all(parameter.grad is None for parameter in model.parameters())
    tokens = torch.randint(11, (2, 4))
    assert compiled(tokens, tokens).item() == pytest.approx(model(tokens, tokens).item(), rel=1e-5)
    assert "Compiled in" in capsys.readouterr().out


class Sum(torch.nn.Module):
    """As little as can be compiled."""

    activation_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.weight * tokens).sum()


@torch._inductor.config.patch(compile_threads=2)
def test_a_stop_ends_compiling_at_once_and_the_next_attempt_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a notebook it begins in the same process, where the compiler's threads still hold what was dropped."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, interruption, released = cast(TransformerLanguageModel, Sum()), Interruption(), threading.Event()
    forget_unfinished()
    busy = [AsyncCompile.pool().submit(released.wait, 300) for _ in range(2)]  # what is to be compiled has to wait
    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "wait", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with interruption.awaited(), pytest.raises(StopRequested), interruption.compiling():
            compile_model(model, COMPILING, example)
    try:
        assert "Stopping now." in capfd.readouterr().err
        assert compile_model(model, COMPILING, example) is not model, capfd.readouterr().out
        assert not any(thread.done() for thread in busy)
    finally:
        released.set()


def test_a_compiled_training_compiles_at_its_start_alone_and_learns_the_same(
    tmp_path: Path, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shape for training, one for evaluation, though the last micro-batch and the last validation batch are
    smaller, and answers are generated in between. The checkpoint knows nothing of it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    shape = {"batch_size": 7, "micro_batch_size": 3, "gradient_accumulation_steps": 1, "eval_batches": 3, "dropout": 0}
    flags = {**shape, "compile": "on", "max_steps": 6, "eval_interval": 3, "eval_prompts": prompts}
    result = train(tmp_path / "run", compile_cache_dir=tmp_path / "drive", **flags)
    assert result.code == 0 and "Compiled in" in result.out, result
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert len(list((tmp_path / "drive").glob("compiled-*.bin"))) == 1

    eager = {**flags, "compile": "off"}
    assert train(tmp_path / "eager", **eager).code == 0
    for ours, theirs in zip(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "eager"), strict=True):
        assert set(ours) == set(theirs)
        for key in {"train_loss", "val_loss", "grad_norm"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3)
    weights = safetensors.torch.load_file(tmp_path / "run/checkpoints/step_00000006/model.safetensors")
    assert not any("_orig_mod" in name for name in weights)
    assert train(tmp_path / "run", **{**eager, "max_steps": 7}).code == 0

    # Another machine, another day: what was compiled comes back from Drive.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert train(tmp_path / "again", **flags, compile_cache_dir=tmp_path / "drive").code == 0
    counters = torch._dynamo.utils.counters
    assert counters["aot_autograd"]["autograd_cache_hit"] == 2 and not counters["aot_autograd"]["autograd_cache_miss"]


def test_compiled_code_that_cannot_be_read_is_compiled_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, hardware = TransformerLanguageModel(SHAPE), COMPILING
    cache = tmp_path / cache_name(model, hardware, example())
    cache.mkdir()  # reading it is an error of the system, as on a Drive that is gone
    assert compile_model(model, hardware, example, cache_dir=tmp_path) is not model
    printed = capsys.readouterr().out
    assert "it is compiled again" in printed and "Compiled in" in printed


def test_compiled_code_is_kept_apart_by_all_that_it_depends_on() -> None:
    """PyTorch's own caches hold the attention kernels no more than ours would by itself."""
    model, names = TransformerLanguageModel(SHAPE), set()
    modes = [dataclasses.replace(COMPILING, compile_mode=mode) for mode in COMPILE_MODES]
    names |= {cache_name(model, hardware, example()) for hardware in modes}
    model.activation_checkpointing = True
    names.add(cache_name(model, COMPILING, example()))
    model.activation_checkpointing = False
    tags = set()
    for enabled in (True, False):
        torch.backends.cuda.enable_flash_sdp(enabled)
        try:
            compile_model(model, COMPILING, example)
            tags.add(torch.compiler.config.cache_key_tag)
            names.add(cache_name(model, COMPILING, example()))
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
    assert len(tags) == 2 and len(names) == 5


def test_adapters_compile_to_the_same_numbers_and_are_kept_apart() -> None:
    """Forward and backward, with as much as the compiler leaves out for what is frozen."""
    from common.lora import LoRA, adapters_of, add_adapters

    lora = LoRA(2, 16.0, ("attention", "feed_forward"), "base", "0" * 64)
    model, names = TransformerLanguageModel(SHAPE), set()
    names.add(cache_name(model, COMPILING, example()))
    add_adapters(model, lora)
    with torch.no_grad():
        for adapter in adapters_of(model).values():
            adapter.normal_(std=0.3)
    names.add(cache_name(model, COMPILING, example()))
    assert len(names) == 2
    compiled = compile_model(model, COMPILING, example, evaluates=True)
    assert compiled is not model
    tokens = torch.arange(8).view(2, 4)
    results = []
    for step_model in (model, compiled):
        loss = step_model(tokens, tokens.flip(1))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad(set_to_none=True)
    assert len(results[0]) == len(results[1]) == 1 + 8
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4)


def test_a_mode_is_one_that_torch_compile_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options) or model)
    for mode in COMPILE_MODES:
        compile_model(TransformerLanguageModel(SHAPE), dataclasses.replace(COMPILING, compile_mode=mode), example)
    assert [{**options} for options in asked] == [
        {"dynamic": False},
        {"dynamic": False, "options": {"coordinate_descent_tuning": True}},
        {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
    ]
    assert "coordinate_descent_tuning" in torch._inductor.list_options()
    assert "max-autotune-no-cudagraphs" in torch._inductor.list_mode_options()
