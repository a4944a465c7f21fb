"""Memory: what a step is expected to take, the micro-batch that fits, and what to do when it runs out all the same."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from common.errors import ConfigError, MemoryExhausted, is_out_of_memory
from common.files import read_json
from common.formatting import byte_size
from model import TransformerLanguageModel
from training.config import TrainConfig, is_resolved
from training.file_names import CONFIG
from training.machine.hardware import Hardware, return_freed_memory
from training.parts import Parts
from training.planning.estimate import estimate_memory, with_rows
from training.planning.memory_advice import no_way_out

MEMORY_SHARE = 0.8  # of the memory there is; the rest is for tokens, kernels' workspaces and fragmentation
GAVE_WAY = "out of memory"  # where a micro-batch came from, if not from an estimate
DROPOUT_ASIDE = " but for the draws of dropout"  # which go through a micro-batch at a time

Made = TypeVar("Made")


def fit_micro_batch(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> TrainConfig:
    """Halve the micro-batch until the step is expected to fit; what was found to fit on this device before is kept. The
    result of training does not depend on it, so this is done without asking unless `micro_batch_size` was given.

    Raises MemoryExhausted if one sequence does not fit.
    """
    if config.micro_batch_size and config.sources.get("micro_batch_size") != "tuned":
        return config  # as it was given
    if (rows := found_before(config, hardware)) is not None:
        print(
            f"Memory     micro_batch_size {rows}, which fitted on this device before (--micro_batch_size tries another)"
        )
        return with_rows(config, rows, GAVE_WAY)
    if hardware.memory_bytes is None:
        return config
    limit = MEMORY_SHARE * hardware.memory_bytes
    rows = config.rows_at_once
    fitted = config
    while estimate_memory(fitted, model, hardware) > limit:
        if rows == 1:
            needed = estimate_memory(fitted, model, hardware)
            raise MemoryExhausted(
                f"Training this model takes about {byte_size(needed)} even with one sequence at a time; "
                f"there are {byte_size(hardware.memory_bytes)}. Choose a smaller --model_size or --max_seq_len; "
                "--micro_batch_size 1 tries it anyway."
            )
        rows = rows // 2
        fitted = with_rows(config, rows)
    if fitted is not config:
        print(
            f"Memory     a step of {config.rows_at_once} sequences at once would not fit: micro_batch_size {rows}, "
            f"with the same result{DROPOUT_ASIDE if config.dropout else ''}"
        )
    return fitted


def found_before(config: TrainConfig, hardware: Hardware) -> int | None:
    """The micro-batch that this run came down to on this device, as its folder tells; None if it did not."""
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
    """What `work` returns. Where memory runs out, halve the micro-batch of `parts` and run `work` again.

    `retrying` is told so in a sentence. `part` says which part of a step `work` had come to, and `failed` is called
    before anything else is done about the error. Raises MemoryExhausted where halving cannot help: one sequence at a
    time is too much, or memory ran out in the update of the weights, which may be half done.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed()
            told = halve_micro_batch(parts, error, part())
        retrying(told)


def halve_micro_batch(parts: Parts, error: Exception, part: str) -> str:
    """Prepare for the same batch once more after `error`, out of memory in a `part` of a step. Returns a sentence on
    it. Raises MemoryExhausted as `until_it_fits` does."""
    config, rows = parts.config, parts.config.rows_at_once
    aside = DROPOUT_ASIDE if config.dropout else ""
    if rows == 1 or part == "optimizer":
        raise MemoryExhausted(no_way_out(config, parts.data.vocab_size, parts.hardware)) from error
    if config.processes > 1:  # which would all have to take the same batch once more
        raise MemoryExhausted(
            f"Out of memory with {rows} sequences at once in one of {config.processes} processes: add "
            f"--micro_batch_size {rows // 2} to the same command, with the same result{aside}. Checkpoints saved "
            f"before are whole."
        ) from error
    traceback.clear_frames(error.__traceback__)  # they hold the activations
    parts.optimizer.zero_grad(set_to_none=True)
    return_freed_memory(parts.hardware.device)
    if parts.hardware.compiles:
        torch.compiler.reset()  # PyTorch compiles code for another shape only so often
    parts.config = with_rows(config, rows // 2, GAVE_WAY)
    less = parts.config.rows_at_once
    return (
        f"Out of memory with {rows} sequences at once: the same batch again with {less}, with the same result{aside}."
    )
