"""Compiles the model, and keeps the compiled code for the next machine."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.errors import is_out_of_memory
from common.files import atomic_write
from common.lora import lora_of
from model import TransformerLanguageModel
from training.machine.hardware import Hardware
from training.machine.processes import count, data_parallel, is_collective_error, no_sync, rank
from training.machine.sharding import is_sharded

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "coordinate_descent": {"options": {"coordinate_descent_tuning": True}},
    "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
}


def compile_model(
    model: TransformerLanguageModel,
    hardware: Hardware,
    example: Callable[[], tuple[torch.Tensor, ...]],
    evaluates: bool = False,
    cache_dir: str | Path | None = None,
    failed: Callable[[str], None] = lambda reason: None,
) -> Callable[..., torch.Tensor]:
    """torch.compile, tried on the batch of `example`, forward and backward and, if the run `evaluates`, without
    gradients: so nothing is left to compile after the first step.

    Also keeps the compiled code in `cache_dir` (None: only in torch's own cache, on the local disk), so that a new
    machine need not compile again. The files there are executed. If compiling fails, says so once, calls `failed` with
    the reason and returns the model uncompiled: slower, with the same results. One of several processes may fail alone:
    they exchange nothing here, except with a sharded model, which is compiled in parts: FSDP2 works between them.
    """
    whole = model if is_sharded(model) else data_parallel(model)
    if not hardware.compiles:
        return whole
    batch = example()  # outside the try: bad data is not a compile error
    started = time.perf_counter()
    cache = Path(cache_dir) / cache_name(model, hardware, batch) if cache_dir else None
    if cache:
        load_compiled(cache)
    try:
        torch.compiler.reset()  # an earlier run in this process (a notebook) counts towards PyTorch's limit
        # PyTorch's cache keys lack the attention kernel: without the tag, it would reuse code with another kernel.
        tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
        torch.compiler.config.cache_key_tag = f"{tag} {attention_kernels()}"
        # Splits the graph so that all-reduce overlaps the backward pass; impossible with activation checkpointing.
        torch._dynamo.config.optimize_ddp = not model.activation_checkpointing
        how = {"dynamic": False, **MODES[hardware.compile_mode]}
        compiled = compile_blocks(model, how) if is_sharded(model) else torch.compile(whole, **how)
        with no_sync(whole):
            with hardware.autocast():
                loss = compiled(*batch)
            # This compiles the backward pass. On a GPU, autograd would do that in another thread while this one waits,
            # and only this thread handles signals.
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
        if evaluates:
            model.eval()
            with torch.no_grad(), hardware.autocast():
                compiled(*batch)
    except BaseException as error:
        forget_unfinished()
        uncompiled(whole, model)
        if is_out_of_memory(error) or is_collective_error(error) or not isinstance(error, Exception):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"torch.compile failed ({first_line}); training continues uncompiled. --compile off skips the attempt.")
        failed(first_line)
        return whole
    finally:
        model.train()
        model.zero_grad(set_to_none=True)
    hardware.synchronize()
    print(f"Compiled in {time.perf_counter() - started:.0f} s, a first pass over {len(batch[0])} sequences included.")
    if cache and rank() == 0:
        keep_compiled(cache)
    return compiled


def compile_blocks(model: TransformerLanguageModel, how: dict[str, Any]) -> TransformerLanguageModel:
    """Compile a sharded model in parts, in place: each block, and the head with the loss. Between them FSDP2 gathers
    and frees weights, in Python. Blocks are alike, so they share one compiled code, which takes less time, too."""
    for part, method in [*((block, "forward") for block in model.blocks), (model, "loss")]:
        part.__dict__[method] = torch.compile(getattr(type(part), method).__get__(part), **how)
    return model


def uncompiled(step_model: Callable[..., torch.Tensor], model: TransformerLanguageModel) -> Callable[..., torch.Tensor]:
    """What `compile_model` made of `model`, as it was before."""
    if is_sharded(model):
        for part, method in [*((block, "forward") for block in model.blocks), (model, "loss")]:
            part.__dict__.pop(method, None)
    return getattr(step_model, "_orig_mod", step_model)


def forget_unfinished() -> None:
    """Clean up after an attempt that failed or was stopped. Cancel queued jobs, or the process would wait for them when
    it ends. Clear PyTorch's record of them, or the next attempt in this process (a notebook) would fail too."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import clear_caches

    if AsyncCompile.pool.cache_info().currsize:
        AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
        AsyncCompile.pool.cache_clear()
    clear_caches()


def attention_kernels() -> str:
    """The GPU attention kernels that PyTorch may use."""
    switches = torch.backends.cuda
    enabled = {
        "cudnn": switches.cudnn_sdp_enabled(),
        "flash": switches.flash_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
    }
    return " ".join(name for name, is_enabled in enabled.items() if is_enabled)


def cache_name(model: TransformerLanguageModel, hardware: Hardware, batch: tuple[torch.Tensor, ...]) -> str:
    """A file name from all that compiled code depends on: the file does not record its machine."""
    built_for = [hardware.name, torch.backends.cpu.get_cpu_capability(), torch.__version__, hardware.precision]
    how = [hardware.compile_mode, attention_kernels(), model.activation_checkpointing]
    how += ["sharded" if is_sharded(model) else "shared out"] if count() > 1 else []
    how += ["conversations"] if len(batch) > 2 else []
    lora = lora_of(model)
    adapted = [lora.rank, lora.alpha, lora.targets] if lora else []
    of = [*built_for, *how, model.config.to_dict(), list(batch[0].shape), *adapted]
    return f"compiled-{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]}.bin"


def load_compiled(cache: Path) -> None:
    try:
        if cache.exists():
            torch.compiler.load_cache_artifacts(cache.read_bytes())
    except Exception as problem:  # of any kind: compile again
        print(f"The compiled code in {cache} could not be used ({problem}); it is compiled again.")


def keep_compiled(cache: Path) -> None:
    """Write the compiled code to one file: thousands of small ones would be slow on Drive."""
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(cache) as file:
            file.write(artifacts[0])
    except OSError as problem:
        print(f"Compiled code was not kept in {cache.parent} ({problem}); the next start compiles again.")
