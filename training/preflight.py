"""What can be known before the first step: memory, speed, time, cost."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from common.errors import MemoryExhausted, is_out_of_memory
from common.formatting import clock, si
from model import TransformerLanguageModel
from training.compilation import compile_model
from training.config import TrainConfig
from training.data import TokenData
from training.hardware import Hardware
from training.optimizer import hidden_matrices
from training.run import Run
from training.step import part_of_step, smallest_part, train_step

MEMORY_SHARE = 0.8  # of the memory there is; the rest is for tokens, kernels' workspaces and fragmentation
DROPOUT_ASIDE = " but for the draws of dropout"  # which go through a micro-batch at a time
PROCESS_BYTES = 350_000_000  # resident in a process that has imported torch
TIMED_SECONDS = 8.0  # a step that takes longer than this is timed on a part of its sequences


def estimate_memory(config: TrainConfig, model: TransformerLanguageModel, precision: str) -> int:
    """Peak bytes of a training step: weights, gradients and AdamW's two moments in fp32 (16 bytes a parameter; 12 with
    the one momentum of Muon), and what the backward pass needs of one micro-batch."""
    c = model.config
    half = 2 if precision != "fp32" else 4
    # A block keeps, per token: two norms' inputs (fp32) and outputs, q, k, v, the attention's output, the residual
    # branch, and both sides of the activation.
    per_block = 2 * 4 * c.embed_dim + half * (2 + 3 + 1 + 1) * c.embed_dim + half * 2 * c.ff_dim
    per_head = (half + 4 + 4) * c.vocab_size  # logits, the same in fp32, and their gradient
    per_token = c.num_layers * per_block + per_head
    weight_copies = half * model.num_parameters() if precision != "fp32" else 0  # autocast keeps its casts for backward
    backward = weight_copies + per_token * config.rows_at_once * c.max_seq_len
    state = 16 * model.num_parameters()
    if config.optimizer == "muon":
        hidden = sum(matrix.numel() for matrix in hidden_matrices(model).values())
        state -= 4 * hidden
        backward = max(backward, 12 * hidden)  # the update and Newton-Schulz, once the activations are gone
    return state + backward


def held_memory(data: TokenData, hardware: Hardware) -> int:
    """Bytes in the same memory beside what training takes: the tokens, and on a CPU Python and torch themselves."""
    tokens = data.tokens.nbytes if data.tokens.device.type == hardware.device.type and data.placement != "mmap" else 0
    return tokens if hardware.is_cuda else tokens + PROCESS_BYTES


def fit_micro_batch(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> TrainConfig:
    """Halve the micro-batch until the step is expected to fit. The result of training does not depend on it, so this
    is done without asking unless `micro_batch_size` was given. Raises MemoryExhausted if one sequence does not fit."""
    if hardware.memory_bytes is None or config.micro_batch_size is not None:
        return config
    limit = MEMORY_SHARE * hardware.memory_bytes
    rows = config.rows_at_once
    fitted = config
    while estimate_memory(fitted, model, hardware.precision) > limit:
        if rows == 1:
            needed = estimate_memory(fitted, model, hardware.precision)
            raise MemoryExhausted(
                f"Training this model takes about {needed / 1e9:.1f} GB even with one sequence at a time; "
                f"there are {hardware.memory_bytes / 1e9:.1f} GB. Choose a smaller --model_size or --max_seq_len; "
                "--micro_batch_size 1 tries it anyway."
            )
        rows = rows // 2
        sources = {**config.sources, "micro_batch_size": "memory"}
        fitted = dataclasses.replace(config, micro_batch_size=rows, sources=sources)
    if fitted is not config:
        print(
            f"Memory     a step of {config.rows_at_once} sequences at once would not fit: micro_batch_size {rows}, "
            f"with the same result{DROPOUT_ASIDE if config.dropout else ''}"
        )
    return fitted


@contextlib.contextmanager
def memory_advice(config: TrainConfig) -> Iterator[None]:
    """Turn running out of memory into a sentence that says what to type."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        rows = config.rows_at_once
        advice = (
            f"Run the same command with --micro_batch_size {rows // 2}: the result stays the same"
            f"{DROPOUT_ASIDE if config.dropout else ''}"
            if rows > 1
            else "Choose a smaller --model_size or --max_seq_len"
        )
        raise MemoryExhausted(
            f"Out of memory with {rows} sequences of {config.max_seq_len} tokens at once. {advice}."
        ) from error


def dry_run(config: TrainConfig, run: Run, hardware: Hardware) -> None:
    """Print everything known before the first step, one timed step and a forecast. Writes no run."""
    run.require_own_folders()
    found = run.find()
    model, data = run.model, run.data
    estimate = estimate_memory(config, model, hardware.precision) + held_memory(data, hardware)
    there_is = f" of {hardware.memory_bytes / 1e9:.1f} GB" if hardware.memory_bytes else ""
    print(
        f"Steps      {run.max_steps:,} of {config.tokens_per_step:,} tokens ({config.sequences_per_step} sequences, "
        f"{config.rows_at_once} at once), {run.max_steps * config.tokens_per_step / 1e6:,.1f}M tokens in all\n"
        f"Memory     about {estimate / 1e9:.1f} GB{there_is} (an estimate)\n"
        f"Disk       about {4 * 12 * model.num_parameters() / 1e9:.1f} GB in {config.run_dir} (two checkpoints, the "
        "best, and the one that is being written)"
    )
    step_model = compile_model(model, hardware, lambda: data.batch(0, config.rows_at_once))
    seconds, rows = time_step(step_model, run, config, hardware)
    whole = config.sequences_per_step
    part = "" if rows == whole else f" (timed on {rows} of its {whole} sequences)"
    total = seconds * run.max_steps
    speed = config.tokens_per_step / seconds
    mfu = ""
    if hardware.peak_flops:
        mfu = f", MFU {speed * model.flops_per_token() / hardware.peak_flops:.0%}"
    print(
        f"Speed      {seconds:.3g} s a step{part}, {si(speed)} tokens/s{mfu}\n"
        f"Time       about {clock(total)} for {run.max_steps:,} steps, evaluation and checkpoints aside"
    )
    units = hardware.units_per_hour(config)
    if units:
        print(f"Cost       about {total / 3600 * units:.1f} compute units at {units:g} an hour")
    if hardware.is_cuda and (peak := hardware.peak_memory()):
        print(f"Peak       {peak / 1e9:.2f} GB of GPU memory in the timed step")
    if found is not None:
        print(f"Resume     {found.checkpoint.path} is whole and fits; training would continue from it")
    print("Dry run: no run was written. Leave --dry_run out to train.")


def time_step(
    step_model: Callable[..., torch.Tensor], run: Run, config: TrainConfig, hardware: Hardware
) -> tuple[float, int]:
    """Seconds of a training step, and the number of sequences that was measured on (then scaled to the step)."""

    def timed(rows: int) -> float:
        part = part_of_step(config, rows)
        hardware.synchronize()
        started = time.perf_counter()
        train_step(step_model, run.optimizer, run.scaler, run.data, 0, 0, 0.0, part, hardware)
        hardware.synchronize()
        return time.perf_counter() - started

    whole = config.sequences_per_step
    unit = smallest_part(config, hardware)
    timed(unit)  # first use of every kernel
    seconds = timed(unit)
    rows = unit
    if hardware.is_cuda or seconds * whole <= TIMED_SECONDS * unit:
        rows = whole
    elif unit == 1:
        rows = min(config.rows_at_once, max(1, int(TIMED_SECONDS / seconds)))
    if rows > unit:
        timed(rows)  # takes the memory that the steps after it find there
        seconds = timed(rows)
    return seconds * whole / rows, rows
