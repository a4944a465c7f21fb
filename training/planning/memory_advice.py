"""What to do when memory runs out: what would take less, and which other processes hold some."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import MemoryExhausted, is_out_of_memory
from common.formatting import byte_size
from common.lora import add_adapters
from common.machine import has_fast_bf16
from model import TransformerLanguageModel
from training.config import MODEL_SIZES, TrainConfig, preset
from training.machine.hardware import Hardware
from training.planning.estimate import estimate_memory, with_rows

OTHERS_SHARE = 0.1  # of the memory there is, that a process must hold to be named


def no_way_out(config: TrainConfig, vocab_size: int, hardware: Hardware) -> str:
    """What to say when memory runs out with one sequence at a time: what would help, in order, and by how much."""
    held: list[str] = []
    ranked: list[tuple[str, int]] = []
    with contextlib.suppress(Exception):  # there may be no memory left to find out
        held = held_by_others(hardware)
        ranked = savings(config, vocab_size, hardware)
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


def savings(config: TrainConfig, vocab_size: int, hardware: Hardware) -> list[tuple[str, int]]:
    """Flags that take less memory, those that change least about the run first, with the bytes each saves. The later
    ones are for a new run."""
    model = without_memory(config, vocab_size)
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
        saved = now - estimate_memory(changed, without_memory(changed, vocab_size), hardware)
        if "model_size" not in flags:
            ways.append((flags, saved))
        elif saved > 0:
            smaller.append((flags, saved))
    ways += sorted(smaller, key=lambda way: way[1])[:1]  # the largest that is smaller
    return [way for way in ways if way[1] > 0]


def without_memory(config: TrainConfig, vocab_size: int) -> TransformerLanguageModel:
    """A model that has sizes and no numbers."""
    with torch.device("meta"):
        model = TransformerLanguageModel(config.model_config(vocab_size))
        if config.lora_rank:
            add_adapters(model, config.lora())
    return model


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
def memory_advice(config: TrainConfig, vocab_size: int, hardware: Hardware) -> Iterator[None]:
    """Raise MemoryExhausted, which says what to type, for an error of memory where nothing can be halved."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExhausted(no_way_out(config, vocab_size, hardware)) from error
