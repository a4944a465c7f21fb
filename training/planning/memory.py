"""The micro-batch that fits into memory, and the retry with a smaller one if memory runs out."""

from __future__ import annotations

import dataclasses

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
from training.numbers.step import OUT_OF_MEMORY, Trainer
from training.planning.estimate import estimate_memory
from training.planning.memory_advice import no_way_out

MEMORY_SHARE = 0.8  # of all memory; the rest is for tokens, kernels' workspaces and fragmentation
DROPOUT_ASIDE = " except for dropout's random draws"  # which are made per micro-batch


def fit_micro_batch(
    config: Config, model: TransformerLanguageModel, hardware: Hardware, held: int = 0
) -> tuple[int, str]:
    """`micro_batch_size` and where it comes from: as it was given, else what this run found to fit on this device
    before, else the batch, halved until the estimate fits beside the `held` bytes of the tokens on a GPU. The result of
    the training does not depend on it.

    Raises MemoryExhausted if one sequence does not fit.
    """
    if config.micro_batch_size:
        return config.micro_batch_size, config.sources.get("micro_batch_size", "default")
    if (rows := found_before(config, model.config.max_seq_len, hardware)) is not None:
        print(
            f"Memory     micro_batch_size {rows}, which fitted on this device before (--micro_batch_size tries another)"
        )
        return rows, OUT_OF_MEMORY
    return halve_until_it_fits(config, model, hardware, held)


def halve_until_it_fits(
    config: Config, model: TransformerLanguageModel, hardware: Hardware, held: int = 0
) -> tuple[int, str]:
    """As `fit_micro_batch`, by the estimate alone."""
    whole = rows = config.rows_at_once(config.batch_size)
    if hardware.memory_bytes is None:
        return config.batch_size, "default"
    while (needed := estimate_memory(config, model, hardware, config.rows_at_once(rows))) > (
        MEMORY_SHARE * hardware.memory_bytes - held
    ):
        if rows == 1:
            raise MemoryExhausted(
                f"Training this model takes about {byte_size(needed)} even with one sequence at a time; "
                f"this device has {byte_size(hardware.memory_bytes)}. Choose a smaller --model_size or --max_seq_len; "
                "--micro_batch_size 1 tries it anyway."
            )
        rows //= 2
    if rows == whole:
        return config.batch_size, "default"
    print(
        f"Memory     a step of {whole} sequences at once would not fit: micro_batch_size {rows}, "
        f"with the same result{DROPOUT_ASIDE if config.dropout else ''}"
    )
    return rows, "memory"


def compile_step_model(trainer: Trainer, sequences_seen: int = 0) -> None:
    """Set `trainer.step_model` by `compile_model`, tried on what follows the first `sequences_seen`. If compiling fails
    in one of the processes, all train uncompiled. That takes more memory, so the micro-batch is fitted again, unless it
    was given.

    Raises MemoryExhausted if one sequence does not fit.
    """
    evaluates = bool(trainer.config.eval_interval)
    example = trainer.data.batch(sequences_seen, trainer.rows_at_once) if trainer.hardware.compiles else ()
    trainer.step_model, failure = compile_model(trainer.model, trainer.hardware, example, evaluates)
    if not any_process(bool(failure))[0]:
        return
    if not failure:
        print("torch.compile failed in another process; training continues uncompiled in all of them.")
        # Back to the model inside: for another micro-batch, the first step would compile again.
        trainer.step_model = uncompiled(trainer.step_model, trainer.model)
    reason = f"torch.compile failed ({failure or 'in another process'})"
    trainer.hardware = dataclasses.replace(trainer.hardware, compiles=False, compile_reason=reason)
    if trainer.micro_batch_source in NOT_GIVEN:
        trainer.micro_batch_size, trainer.micro_batch_source = on_rank_0(
            lambda: halve_until_it_fits(trainer.config, trainer.model, trainer.hardware, trainer.data.gpu_bytes)
        )


def found_before(config: Config, seq_len: int, hardware: Hardware) -> int | None:
    """The micro-batch that this run was reduced to on this device, from its folder; None if it was not reduced."""
    try:
        kept = read_json(config.run_dir / CONFIG, ConfigError)
    except (ConfigError, OSError):
        return None
    if not is_resolved(kept) or kept["sources"].get("micro_batch_size") != OUT_OF_MEMORY or config.resume == "never":
        return None
    rows = kept["config"].get("micro_batch_size")
    same = kept.get("device") == hardware.name and kept["config"].get("max_seq_len") == seq_len
    return rows if same and isinstance(rows, int) and 0 < rows < config.rows_at_once(config.batch_size) else None


def halve_micro_batch(trainer: Trainer, error: Exception) -> str:
    """Prepare to do again what `error`, out of memory, has ended. Returns a sentence about it. Raises any other error,
    and MemoryExhausted if halving cannot help."""
    if not is_out_of_memory(error):
        raise error
    config, rows = trainer.config, trainer.rows_at_once
    aside = DROPOUT_ASIDE if config.dropout else ""
    if rows == 1:
        raise MemoryExhausted(no_way_out(config, trainer.shape, trainer.hardware, rows)) from error
    if config.processes > 1:  # all would have to retry together
        raise MemoryExhausted(
            f"Out of memory with {rows} sequences at once in one of {config.processes} processes: add "
            f"--micro_batch_size {rows // 2} to the same command, with the same result{aside}. Checkpoints saved "
            f"before are whole."
        ) from error
    # In this order: frames hold the activations, also those of the compiler, and what it keeps of an attempt would keep
    # memory from being returned.
    clear_frames(error)
    trainer.optimizer.zero_grad(set_to_none=True)
    if trainer.hardware.compiles:
        torch.compiler.reset()  # also because PyTorch limits how often it compiles for another shape
    return_freed_memory(trainer.hardware.device)
    trainer.micro_batch_size, trainer.micro_batch_source = rows // 2, OUT_OF_MEMORY
    less = trainer.rows_at_once
    return (
        f"Out of memory with {rows} sequences at once: the same batch again with {less}, with the same result{aside}."
    )
