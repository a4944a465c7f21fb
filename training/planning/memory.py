"""Memory: what a step is expected to take, the micro-batch that fits, and what to do when it runs out all the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import ConfigError, MemoryExhausted, is_out_of_memory
from common.files import read_json
from common.formatting import byte_size
from common.lora import add_adapters
from common.machine import has_fast_bf16
from model import TransformerLanguageModel
from training.config import MODEL_SIZES, TrainConfig, is_resolved, preset
from training.file_names import CONFIG
from training.machine.hardware import Hardware, return_freed_memory
from training.machine.sharding import largest_share
from training.numbers.data import TokenData
from training.numbers.optimizer import RULES, Optimizer, by_rule

MEMORY_SHARE = 0.8  # of the memory there is; the rest is for tokens, kernels' workspaces and fragmentation
OTHERS_SHARE = 0.1  # of the memory there is, that a process must hold to be named
GAVE_WAY = "out of memory"  # where a micro-batch came from, if not from an estimate
DROPOUT_ASIDE = " but for the draws of dropout"  # which go through a micro-batch at a time
PROCESS_BYTES = 350_000_000  # resident in a process that has imported torch


def estimate_memory(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> int:
    """Peak bytes of a training step: weights, gradients and the optimizer's state in fp32 (16 bytes a parameter with
    AdamW, 12 with Muon, 4 where it is frozen), and what the backward pass needs of one micro-batch. With a sharded
    optimizer, those of the process that keeps most of its state.

    Counted from what autograd keeps where the model runs as it is written, and from what the compiler's graphs keep
    (docs/benchmarks/gpu_forecast.md).
    """
    parameters, trained = model.num_parameters(), model.num_parameters(trained_only=True)
    several = config.rows_at_once < config.sequences_per_process  # the gradients of earlier slices are there already
    sharing = config.processes if config.is_sharded else 1
    state, update = 4 * parameters, 0
    for rule, named in by_rule(model, config).items():
        share = largest_share([parameter.numel() for parameter in named.values()], sharing)
        state += RULES[rule].state_bytes * share
        update += RULES[rule].update_bytes * share  # once the activations are gone
    gradients = 4 * trained
    weight_copies = 2 * parameters if hardware.precision != "fp32" else 0  # autocast keeps its casts for backward
    activations = bytes_per_token(config, model, hardware) * config.rows_at_once * config.max_seq_len
    during_backward = weight_copies + activations + several * gradients
    after_it = gradients + max(update, several * hardware.compiles * gradients)  # which compiled code gives all at once
    return state + max(during_backward, after_it)


def bytes_per_token(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> int:
    """What the forward pass keeps of a token for the backward pass, and the logits and their gradient."""
    c = model.config
    half = 4 if hardware.precision == "fp32" else 2
    residual = {"fp32": 4, "fp16": 4, "bf16": 2}[hardware.precision]
    if hardware.compiles:
        # Of a block: two norms' inputs and outputs, q, k, v, the attention's output, both sides of the activation.
        block = 2 * residual * c.embed_dim + half * (2 + 3 + 1) * c.embed_dim + half * 2 * c.ff_dim
        head = half * 2 * c.vocab_size
    else:
        # The same, but what is normalised is kept in fp32; the head's softmax, its gradient and that of the logits too.
        block = 2 * 4 * c.embed_dim + half * (2 + 3 + 1) * c.embed_dim + half * 2 * c.ff_dim
        if c.qk_norm and half == 2:
            block += 2 * 4 * c.embed_dim
        head = 3 * 4 * c.vocab_size
    if config.lora_rank and "feed_forward" not in config.lora_targets:  # what a frozen layer reads is not kept for it
        block -= half * (c.embed_dim + c.ff_dim)
    if config.lora_rank and "attention" not in config.lora_targets:
        block -= half * c.embed_dim
    if c.position == "rope" or c.qk_norm:
        block += half * 2 * c.embed_dim  # q and k as attention reads them
    # PyTorch's flash kernel for CPUs knows no dropout; the other keeps three (T, T) matrices, in fp32, per head, and as
    # many at work.
    scores = 3 * 4 * c.num_heads * c.max_seq_len if c.dropout and hardware.device.type == "cpu" else 0
    if config.activation_checkpointing:  # the inputs of all blocks; the rest of one at a time, after the head's is gone
        return c.num_layers * residual * c.embed_dim + max(head, 2 * (block + scores))
    return c.num_layers * (block + scores) + scores + head


def held_memory(data: TokenData, hardware: Hardware) -> int:
    """Bytes in the same memory beside what training takes: the tokens, and on a CPU Python and torch themselves."""
    tokens = data.tokens.nbytes if data.tokens.device.type == hardware.device.type and data.placement != "mmap" else 0
    return tokens if hardware.is_cuda else tokens + PROCESS_BYTES


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


def with_rows(config: TrainConfig, rows: int, source: str = "memory") -> TrainConfig:
    return dataclasses.replace(config, micro_batch_size=rows, sources={**config.sources, "micro_batch_size": source})


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


def with_less_memory(
    error: Exception,
    part: str,
    config: TrainConfig,
    model: TransformerLanguageModel,
    optimizer: Optimizer,
    hardware: Hardware,
) -> TrainConfig:
    """The configuration with half the micro-batch, after `error` in a `part` of a step: for the same batch once more.

    Raises the error if it is about something else, and MemoryExhausted if halving cannot help: one sequence at a time
    is too much, or memory ran out in the update, which may have begun.
    """
    if not is_out_of_memory(error):
        raise error
    rows = config.rows_at_once
    if rows == 1 or part == "optimizer":
        raise MemoryExhausted(no_way_out(config, model, hardware)) from error
    if config.processes > 1:  # which would all have to take the same batch once more
        raise MemoryExhausted(
            f"Out of memory with {rows} sequences at once in one of {config.processes} processes: add "
            f"--micro_batch_size {rows // 2} to the same command, with the same result"
            f"{DROPOUT_ASIDE if config.dropout else ''}. Checkpoints saved before are whole."
        ) from error
    traceback.clear_frames(error.__traceback__)  # they hold the activations
    optimizer.zero_grad(set_to_none=True)
    return_freed_memory(hardware.device)
    if hardware.compiles:
        torch.compiler.reset()  # code for another shape is compiled only so often, and then not any more
    return with_rows(config, rows // 2, GAVE_WAY)


def no_way_out(config: TrainConfig, model: TransformerLanguageModel | None, hardware: Hardware) -> str:
    """What to say when memory runs out with one sequence at a time: what would help, in order, and by how much. `model`
    is None where not even that fits."""
    held: list[str] = []
    ranked: list[tuple[str, int]] = []
    with contextlib.suppress(Exception):  # there may be no memory left to find out
        held = held_by_others(hardware)
        ranked = savings(config, model, hardware) if model is not None else []
    others = (
        f" Other processes hold memory that may be what is missing: {'; '.join(held)}. End them (in a notebook, the "
        f"sessions that are not used any more) and run the same command again."
        if held
        else ""
    )
    ways = "".join(f"\n  {flags}: about {byte_size(saved)} less" for flags, saved in ranked)
    return (
        f"Out of memory with {config.rows_at_once} x {config.max_seq_len} tokens at once (--micro_batch_size x "
        f"--max_seq_len).{others}"
        + (f" What would help:{ways}" if ways else " Choose a smaller --model_size or --max_seq_len.")
        + "\nCheckpoints saved before are whole."
    )


def savings(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> list[tuple[str, int]]:
    """Flags that take less memory, those that change least about the run first, with the bytes each saves. The later
    ones are for a new run."""
    now = estimate_memory(config, model, hardware)
    one = with_rows(config, 1)
    ways: list[tuple[str, int]] = []
    if config.rows_at_once > 1:
        ways.append(("--micro_batch_size 1", now - estimate_memory(one, model, hardware)))
    if not config.activation_checkpointing:
        kept_less = dataclasses.replace(config, activation_checkpointing=True)
        ways.append(("--activation_checkpointing", now - estimate_memory(kept_less, model, hardware)))
    if config.processes > 1 and not config.shard_optimizer:
        sharing = dataclasses.replace(config, shard_optimizer=True)
        ways.append(("--shard_optimizer", now - estimate_memory(sharing, model, hardware)))
    if hardware.precision == "fp32" and has_fast_bf16(hardware.device):
        in_bf16 = dataclasses.replace(hardware, precision="bf16")
        ways.append(("--precision bf16", now - estimate_memory(config, model, in_bf16)))
    changes: list[tuple[str, dict[str, object]]] = []
    if config.dropout:
        changes.append(("--dropout 0", {"dropout": 0.0}))
    if config.init_from and not config.lora_rank:
        changes.append(("--lora_rank 8 (a new run)", {"lora_rank": 8}))
    if config.optimizer == "adamw" and not config.lora_rank:
        changes.append(("--optimizer muon (a new run)", {"optimizer": "muon"}))
    if config.max_seq_len > 1:
        half = config.max_seq_len // 2
        changes.append((f"--max_seq_len {half} (a new run)", {"max_seq_len": half}))
    sizes = [(size, preset(size)) for size in MODEL_SIZES]
    changes += [(f"--model_size {size} (a new run)", keys) for size, keys in sizes]
    smaller = []
    for flags, keys in changes:
        changed = dataclasses.replace(config, **keys)  # type: ignore[arg-type]
        with torch.device("meta"):
            other = TransformerLanguageModel(changed.model_config(model.config.vocab_size))
            if changed.lora_rank:
                add_adapters(other, changed.lora())
        saved = now - estimate_memory(changed, other, hardware)
        if "model_size" not in flags:
            ways.append((flags, saved))
        elif saved > 0:
            smaller.append((flags, saved))
    ways += sorted(smaller, key=lambda way: way[1])[:1]  # the largest that is smaller
    return [way for way in ways if way[1] > 0]


def held_by_others(hardware: Hardware) -> list[str]:
    """Processes that hold a good part of the same memory, largest first."""
    least = OTHERS_SHARE * (hardware.memory_bytes or 0)
    held = gpu_memory_by_process() if hardware.is_cuda else memory_by_process()
    held = {process: size for process, size in held.items() if process[0] != os.getpid() and size > least}
    largest = sorted(held.items(), key=lambda item: -item[1])[:3]
    return [f"{byte_size(size)} by process {pid} ({name})" for (pid, name), size in largest]


def memory_by_process() -> dict[tuple[int, str], int]:
    """Bytes of RAM by (pid, name), as Linux tells."""
    held = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has just ended; a thread of the kernel
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            held[int(status.parent.name), fields["Name"].strip()] = int(fields["VmRSS"].split()[0]) * 1024
    return held


def gpu_memory_by_process() -> dict[tuple[int, str], int]:
    """Bytes of GPU memory by (pid, name), as the driver tells; in a container it may tell nothing."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    held = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        for line in told.splitlines():
            with contextlib.suppress(ValueError):
                pid, name, mib = (part.strip() for part in line.split(","))
                held[int(pid), name] = int(mib) * 2**20
    return held


@contextlib.contextmanager
def memory_advice(config: TrainConfig, model: TransformerLanguageModel | None, hardware: Hardware) -> Iterator[None]:
    """Turn running out of memory where nothing can be halved into a sentence that says what to type. `model` is that of
    `no_way_out`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExhausted(no_way_out(config, model, hardware)) from error
