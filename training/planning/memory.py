"""The micro-batch that fits into memory, and the retry with a smaller one if memory runs out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from common.errors import ConfigError, MemoryExhausted, is_out_of_memory
from common.files import read_json
from common.formatting import byte_size
from model import TransformerLanguageModel
from training.config import NOT_GIVEN, Config, is_resolved
from training.file_names import CONFIG
from training.machine.compilation import compile_model, uncompiled
from training.machine.hardware import Hardware, clear_frames, return_freed_memory
from training.machine.processes import any_process, on_rank_0
from training.parts import Parts
from training.planning.estimate import estimate_memory, with_rows
from training.planning.memory_advice import no_way_out

MEMORY_SHARE = 0.8  # of all memory; the rest is for tokens, kernels' workspaces and fragmentation
GAVE_WAY = "out of memory"  # source of a micro-batch that was halved after an out-of-memory error
DROPOUT_ASIDE = " except for dropout's random draws"  # which are made per micro-batch

Made = TypeVar("Made")


def fit_micro_batch(config: Config, model: TransformerLanguageModel, hardware: Hardware, held: int = 0) -> Config:
    """Halve the micro-batch until the estimate fits, unless `micro_batch_size` was given: the result does not depend on
    it. If this run found a size on this device before, take that.

    Raises MemoryExhausted if one sequence does not fit.
    """
    if config.micro_batch_size:
        return config
    if (rows := found_before(config, hardware)) is not None:
        print(
            f"Memory     micro_batch_size {rows}, which fitted on this device before (--micro_batch_size tries another)"
        )
        return with_rows(config, rows, GAVE_WAY)
    return halve_until_it_fits(config, model, hardware, held)


def halve_until_it_fits(config: Config, model: TransformerLanguageModel, hardware: Hardware, held: int = 0) -> Config:
    """Halve the micro-batch until the estimate fits beside the `held` bytes of the tokens on a GPU. Raises
    MemoryExhausted if one sequence does not fit."""
    if hardware.memory_bytes is None:
        return config
    rows, fitted = config.rows_at_once, config
    while (needed := estimate_memory(fitted, model, hardware)) > MEMORY_SHARE * hardware.memory_bytes - held:
        if rows == 1:
            raise MemoryExhausted(
                f"Training this model takes about {byte_size(needed)} even with one sequence at a time; "
                f"this device has {byte_size(hardware.memory_bytes)}. Choose a smaller --model_size or --max_seq_len; "
                "--micro_batch_size 1 tries it anyway."
            )
        rows //= 2
        fitted = with_rows(config, rows)
    if fitted is not config:
        print(
            f"Memory     a step of {config.rows_at_once} sequences at once would not fit: micro_batch_size {rows}, "
            f"with the same result{DROPOUT_ASIDE if config.dropout else ''}"
        )
    return fitted


def compile_step_model(parts: Parts, example: Callable[[], tuple[torch.Tensor, ...]], evaluates: bool = False) -> None:
    """Set `parts.step_model` by `compile_model`. If compiling fails in one of the processes, all train uncompiled. That
    takes more memory, so the micro-batch is fitted again, unless it was given.

    Raises MemoryExhausted if one sequence does not fit.
    """
    failures: list[str] = []
    parts.step_model = compile_model(parts.model, parts.hardware, example, evaluates, failures.append)
    if not any_process(bool(failures))[0]:
        return
    if not failures:
        print("torch.compile failed in another process; training continues uncompiled in all of them.")
        # Back to the model inside: for another micro-batch, the first step would compile again.
        parts.step_model = uncompiled(parts.step_model, parts.model)
    reason = f"torch.compile failed ({failures[0] if failures else 'in another process'})"
    parts.hardware = dataclasses.replace(parts.hardware, compiles=False, compile_reason=reason)
    if parts.config.sources.get("micro_batch_size", "default") in NOT_GIVEN:
        parts.config = on_rank_0(
            lambda: halve_until_it_fits(parts.config, parts.model, parts.hardware, parts.data.gpu_bytes)
        )


def found_before(config: Config, hardware: Hardware) -> int | None:
    """The micro-batch that this run was reduced to on this device, from its folder; None if it was not reduced."""
    try:
        kept = read_json(config.run_dir / CONFIG, ConfigError)
    except (ConfigError, OSError):
        return None
    if not is_resolved(kept) or kept["sources"].get("micro_batch_size") != GAVE_WAY or config.resume == "never":
        return None
    rows = kept["config"].get("micro_batch_size")
    same = kept.get("device") == hardware.name and kept["config"].get("max_seq_len") == config.max_seq_len
    return rows if same and isinstance(rows, int) and 0 < rows < config.rows_at_once else None


def until_it_fits(
    parts: Parts,
    work: Callable[[], Made],
    retrying: Callable[[str], None],
    part: Callable[[], str] = lambda: "",
    failed: Callable[[], None] = lambda: None,
) -> Made:
    """Run `work` and return its result. If memory runs out, halve the micro-batch of `parts` and run `work` again.

    Calls `failed` first, then, before the retry, `retrying` with a sentence about it. `part` returns which part of a
    step `work` was in. Raises MemoryExhausted if halving cannot help: one sequence at a time does not fit, or memory
    ran out while the weights were updated, which may be half done.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed()
            message = halve_micro_batch(parts, error, part())
        retrying(message)


def halve_micro_batch(parts: Parts, error: Exception, part: str) -> str:
    """Prepare to retry the batch after `error`, out of memory in a `part` of a step. Returns a sentence about it.
    Raises MemoryExhausted as `until_it_fits` does."""
    config, rows = parts.config, parts.config.rows_at_once
    aside = DROPOUT_ASIDE if config.dropout else ""
    if rows == 1 or part == "optimizer":
        raise MemoryExhausted(no_way_out(config, parts.data.vocab_size, parts.hardware)) from error
    if config.processes > 1:  # all would have to retry together
        raise MemoryExhausted(
            f"Out of memory with {rows} sequences at once in one of {config.processes} processes: add "
            f"--micro_batch_size {rows // 2} to the same command, with the same result{aside}. Checkpoints saved "
            f"before are whole."
        ) from error
    # In this order: frames hold the activations, also those of the compiler, and what it keeps of an attempt would keep
    # memory from being returned.
    clear_frames(error)
    parts.optimizer.zero_grad(set_to_none=True)
    if parts.hardware.compiles:
        torch.compiler.reset()  # also because PyTorch limits how often it compiles for another shape
    return_freed_memory(parts.hardware.device)
    parts.config = with_rows(config, rows // 2, GAVE_WAY)
    less = parts.config.rows_at_once
    return (
        f"Out of memory with {rows} sequences at once: the same batch again with {less}, with the same result{aside}."
    )
