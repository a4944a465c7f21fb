"""Memory: estimate that of a step, fit the micro-batch, recover when memory runs out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from common.errors import MemoryExhausted, is_out_of_memory
from common.lora import add_adapters
from common.machine import available_ram, total_ram
from common.output import byte_size, log
from common.tensors import Uninitialized, meta_model
from model import TransformerLanguageModel
from model_config import ModelConfig
from training.config import Config
from training.data import TokenData
from training.hardware import Hardware
from training.optimizer import RULES, group_by_rule
from training.parallel import max_over_processes
from training.run import Run
from training.state import Fitted

MEMORY_SHARE = 0.8  # share of all memory; tokens, kernels' workspaces and fragmentation need the rest
EXCEPT_DROPOUT = " except for dropout's random draws"  # dropout draws per micro-batch
PROCESS_BYTES = 350_000_000  # resident size of a process that has imported torch
REPORTED_OTHERS_SHARE = 0.1  # share of all memory; if other processes hold more, the error says so


def fit_micro_batch(
    config: Config, model: TransformerLanguageModel, hardware: Hardware, held: int = 0, fitted: Fitted | None = None
) -> int:
    """Return `micro_batch_size`: as given, else what fitted before in this run on this device, else the
    batch, halved until the estimate fits beside `held` bytes of tokens. Training results do not depend on it.

    Raises MemoryExhausted if one sequence does not fit.
    """
    if config.micro_batch_size:
        return config.micro_batch_size
    if fitted is not None and fitted.device == hardware.name and fitted.rows < config.rows_at_once(config.batch_size):
        print(
            f"Memory     micro_batch_size {fitted.rows}, which fitted on this device before (--micro_batch_size "
            "overrides it)"
        )
        return fitted.rows
    return estimate_micro_batch(config, model, hardware, held)


def estimate_micro_batch(config: Config, model: TransformerLanguageModel, hardware: Hardware, held: int = 0) -> int:
    """Return the micro-batch that fits by the estimate. See `fit_micro_batch`."""
    whole = rows = config.rows_at_once(config.batch_size)
    if hardware.memory_bytes is None:
        return config.batch_size
    while (needed := estimate_memory(config, model, hardware, config.rows_at_once(rows))) > (
        MEMORY_SHARE * hardware.memory_bytes - held
    ):
        if rows == 1:
            raise MemoryExhausted(
                f"Training this model takes about {byte_size(needed)} even with one sequence at a time, and this "
                f"device has {byte_size(hardware.memory_bytes)}. Choose a smaller --model_size or --max_seq_len, or "
                "try it anyway with --micro_batch_size 1."
            )
        rows //= 2
    if rows == whole:
        return config.batch_size
    print(
        f"Memory     {whole} sequences at once would not fit: micro_batch_size {rows}; the result is the same"
        f"{EXCEPT_DROPOUT if config.dropout else ''}"
    )
    return rows


def smallest_rows(rows: int) -> int:
    """Return the smallest micro-batch of all processes."""
    (negative,) = max_over_processes(-rows)
    return -int(negative)


def estimate_memory(config: Config, model: TransformerLanguageModel, hardware: Hardware, rows: int) -> int:
    """Estimate the peak bytes of a training step with `rows` sequences per forward pass: weights, gradients and
    optimizer state in fp32 (16 bytes per parameter with AdamW, 12 with Muon, 4 if frozen), and the activations of one
    micro-batch.

    Counts the tensors that autograd keeps, or that the compiled graphs keep (docs/benchmarks/gpu_forecast.md).
    """
    state, update = 4 * model.num_parameters(), 0
    for rule, parameters in group_by_rule(model, config).items():
        count = sum(parameter.numel() for parameter in parameters.values())
        state += RULES[rule].state_bytes * count
        update += RULES[rule].update_bytes * count  # the activations are freed by then
    gradients = 4 * model.num_parameters(trained_only=True)
    # Autocast keeps its casts of the weights for the backward pass.
    weight_copies = 2 * model.num_parameters() if hardware.precision != "fp32" else 0
    activations = bytes_per_token(config, model, hardware) * rows * model.config.max_seq_len
    accumulated = gradients if rows < config.sequences_per_process else 0  # those of earlier micro-batches
    during_backward = weight_copies + activations + accumulated
    returned = accumulated if hardware.compiles else 0  # a compiled model returns all gradients together
    return state + max(during_backward, gradients + max(update, returned))


def bytes_per_token(config: Config, model: TransformerLanguageModel, hardware: Hardware) -> int:
    """Return the bytes per token that the forward pass keeps for the backward pass, including the logits and their
    gradient."""
    c = model.config
    half = 4 if hardware.precision == "fp32" else 2
    residual = {"fp32": 4, "fp16": 4, "bf16": 2}[hardware.precision]
    queries, keys, _ = c.qkv_rows
    feed_forward = (4 if c.is_gated else 2) * c.ff_dim  # SwiGLU: gate, up, the gate's activation, the product
    if hardware.compiles:
        # Per block: two norms' inputs and outputs, q, k, v, the attention's output, the activation's input and output.
        if c.is_gated:
            feed_forward -= c.ff_dim  # recomputed from the gate
        block = 2 * residual * c.embed_dim
        head = half * c.vocab_size  # the gradient replaces the logits
    else:
        # The same, but norms keep their input in fp32, and the head its softmax and both gradients.
        block = 2 * 4 * c.embed_dim
        if c.qk_norm and half == 2:
            block += 4 * (queries + keys)
        if c.norm_gain:  # the gains keep their inputs
            block += 4 * 2 * c.embed_dim
        if c.norm_gain and c.qk_norm:
            block += 4 * (queries + keys)
        head = 3 * 4 * c.vocab_size
    block += half * (2 * c.embed_dim + 2 * queries + 2 * keys + feed_forward)
    if config.lora_rank and "feed_forward" not in config.lora_targets:  # frozen layers keep no input
        block -= half * (c.embed_dim + c.ff_dim)
    if config.lora_rank and "attention" not in config.lora_targets:
        block -= half * c.embed_dim
    if c.position == "rope" or c.qk_norm:
        block += half * (queries + keys)  # q and k as attention reads them
    if c.dropout:
        mask = 1 if hardware.is_cuda else residual  # bytes per element
        block += half * keys + 2 * mask * c.embed_dim  # the values after dropout, and the masks of two sums
    if config.activation_checkpointing:  # inputs of all blocks; one block or the head at a time
        return c.num_layers * residual * c.embed_dim + max(head, 2 * block)
    return c.num_layers * block + head


def count_held_bytes(data: TokenData, hardware: Hardware) -> int:
    """Return the bytes of what shares the memory: the tokens and, on a CPU, Python and torch."""
    texts = [text for text in (data, data.companion) if text is not None and text.placement != "mmap"]
    tokens = sum(text.tokens.nbytes for text in texts if text.tokens.device.type == hardware.device.type)
    return tokens if hardware.is_cuda else tokens + PROCESS_BYTES


def describe_out_of_memory(config: Config, shape: ModelConfig, hardware: Hardware, rows: int) -> str:
    """Return the error message for a step that does not fit, with what would help."""
    if hardware.processes > 1 and rows > 1:
        return (
            f"One of {hardware.processes} processes ran out of memory with {rows} sequences at once. Add "
            f"--micro_batch_size {rows // 2} to the same command; the result is the same"
            f"{EXCEPT_DROPOUT if config.dropout else ''}. Saved checkpoints are intact."
        )
    others = ""
    with contextlib.suppress(Exception):  # memory may run out here, too
        if (held := _measure_others_memory(hardware) or 0) > REPORTED_OTHERS_SHARE * (
            hardware.memory_bytes or math.inf
        ):
            tool = "nvidia-smi" if hardware.is_cuda else "top"
            others = (
                f" Other processes hold {byte_size(held)} of this memory ({tool} lists them). End those you do not "
                "need (in a notebook, unused sessions) and run the same command again."
            )
    smaller = "" if config.activation_checkpointing else "--activation_checkpointing, then "
    fewer = "--micro_batch_size 1, then " if rows > 1 else ""
    return (
        f"Out of memory with {rows} x {shape.max_seq_len} tokens at once (--micro_batch_size x --max_seq_len).{others} "
        f"What helps: {fewer}{smaller}a new run with --max_seq_len {max(1, shape.max_seq_len // 2)} or a smaller "
        "--model_size.\nSaved checkpoints are intact."
    )


def build_on_meta(config: Config, shape: ModelConfig) -> TransformerLanguageModel:
    """Build the model with its adapters on the meta device: shapes without memory."""
    model = meta_model(shape)
    if config.lora_rank:
        with Uninitialized(), torch.device("meta"):
            add_adapters(model, config.lora())
    return model


def _measure_others_memory(hardware: Hardware) -> int | None:
    """Return the bytes of this memory that other processes hold; None if the system does not tell."""
    if hardware.is_cuda:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
    total_bytes, available, used = total_ram(), available_ram(), hardware.peak_memory()
    return None if not (total_bytes and available and used) else total_bytes - available - used


@contextlib.contextmanager
def memory_advice(run: Run) -> Iterator[None]:
    """Turn an out-of-memory error inside into MemoryExhausted with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExhausted(describe_out_of_memory(run.config, run.shape, run.hardware, run.rows_at_once)) from error


# Recovery


class Attempt(NamedTuple):
    """How a session begins."""

    config: Config
    started: float  # time.perf_counter()
    rows: int | None = None  # micro-batch, if memory ran out with a larger one


def halve_rows(run: Run, config: Config, elapsed_seconds: float) -> Attempt:
    """Return how to begin again after memory ran out: from what is saved, with half of the micro-batch, because the
    sum of gradients does not depend on it (dropout's draws do). `elapsed_seconds`: of the run, which go on.

    Raises MemoryExhausted if one sequence at a time does not fit.
    """
    rows = run.rows_at_once
    if rows == 1:
        raise MemoryExhausted(describe_out_of_memory(run.config, run.shape, run.hardware, rows))
    if run.hardware.compiles:
        torch.compiler.reset()  # the compiler holds on to the model
    fewer = run.config.rows_at_once(rows // 2)
    log.info(
        f"Out of memory with {rows} sequences at once. Continuing from step {run.checkpoint_step:,} with {fewer}, as "
        f"with --micro_batch_size {fewer}; the result is the same{EXCEPT_DROPOUT if run.config.dropout else ''}."
    )
    return Attempt(config, time.perf_counter() - elapsed_seconds + run.checkpoint_seconds, fewer)


@contextlib.contextmanager
def suppress_out_of_memory() -> Iterator[None]:
    """Suppress an out-of-memory error inside, so that the code after the context can try another way. Code inside has
    to leave with `return` on success."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise


def return_freed_memory() -> None:
    """Return freed memory to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # musl has no malloc_trim
            library.malloc_trim(0)
