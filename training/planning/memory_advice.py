"""Advice when memory runs out: which flags take less, and which other processes hold memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import MemoryExhausted, is_out_of_memory
from common.formatting import byte_size
from common.lora import add_adapters
from common.machine import has_fast_bf16
from model import TransformerLanguageModel
from model_config import ModelConfig
from training.config import MODEL_SIZES, Config, preset
from training.machine.hardware import Hardware
from training.planning.estimate import estimate_memory

OTHERS_SHARE = 0.1  # name other processes that hold at least this share of the memory


def no_way_out(config: Config, shape: ModelConfig, hardware: Hardware, rows: int) -> str:
    """The message if one sequence at a time does not fit: what would help, in order, and by how much."""
    held: list[str] = []
    ranked: list[tuple[str, int]] = []
    with contextlib.suppress(Exception):  # memory may run out here too
        held = held_by_others(hardware)
        ranked = savings(config, shape, hardware, rows)
    others = (
        f" Other processes hold memory: {'; '.join(held)}. End those you do not need (in a notebook, unused sessions) "
        "and run the same command again."
        if held
        else ""
    )
    ways = "".join(f"\n  {flags}: about {byte_size(saved)} less" for flags, saved in ranked)
    return (
        f"Out of memory with {rows} x {shape.max_seq_len} tokens at once (--micro_batch_size x "
        f"--max_seq_len).{others}"
        + (f" What would help:{ways}" if ways else " Choose a smaller --model_size or --max_seq_len.")
        + "\nCheckpoints saved before are whole."
    )


def savings(config: Config, shape: ModelConfig, hardware: Hardware, rows: int) -> list[tuple[str, int]]:
    """Flags that take less memory, and the bytes that each saves. Those that change the run least come first; the last
    ones need a new run."""

    def saved(config: Config = config, shape: ModelConfig = shape, hardware: Hardware = hardware, r: int = rows) -> int:
        return now - estimate_memory(config, without_memory(config, shape), hardware, r)

    now = estimate_memory(config, without_memory(config, shape), hardware, rows)
    ways = [
        ("--micro_batch_size 1", saved(r=1)),
        ("--activation_checkpointing", saved(replace(config, activation_checkpointing=True))),
        ("--shard", saved(replace(config, shard=True))),
    ]
    if hardware.precision == "fp32" and has_fast_bf16(hardware.device):
        ways.append(("--precision bf16", saved(hardware=replace(hardware, precision="bf16"))))
    ways.append(("--dropout 0", saved(shape=replace(shape, dropout=0.0))))
    if not config.lora_rank:
        if config.init_from:
            ways.append(("--lora_rank 8 (a new run)", saved(replace(config, lora_rank=8, optimizer="adamw"))))
        ways.append(("--optimizer muon (a new run)", saved(replace(config, optimizer="muon"))))
    half = max(1, shape.max_seq_len // 2)
    ways.append((f"--max_seq_len {half} (a new run)", saved(shape=replace(shape, max_seq_len=half))))
    sizes = [(f"--model_size {size} (a new run)", saved(shape=of_size(shape, size))) for size in MODEL_SIZES]
    ways += sorted((way for way in sizes if way[1] > 0), key=lambda way: way[1])[:1]  # the largest that is smaller
    return [way for way in ways if way[1] > 0]


def of_size(shape: ModelConfig, size: str) -> ModelConfig:
    """A model of the same form, as wide and deep as one of MODEL_SIZES."""
    follow = dict.fromkeys(("ff_dim", "head_dim", "num_kv_heads"))
    return replace(shape, **{**follow, **preset(size)})


def without_memory(config: Config, shape: ModelConfig) -> TransformerLanguageModel:
    """A model on the meta device: sizes without numbers."""
    with torch.device("meta"):
        model = TransformerLanguageModel(shape)
        if config.lora_rank:
            add_adapters(model, config.lora())
    return model


def held_by_others(hardware: Hardware) -> list[str]:
    """Up to three other processes that hold at least OTHERS_SHARE of the same memory, largest first."""
    least = OTHERS_SHARE * (hardware.memory_bytes or 0)
    held = gpu_memory_by_process() if hardware.is_cuda else memory_by_process()
    held = {process: size for process, size in held.items() if process[0] != os.getpid() and size > least}
    largest = sorted(held.items(), key=lambda item: -item[1])[:3]
    return [f"{byte_size(size)} by process {pid} ({name})" for (pid, name), size in largest]


def memory_by_process() -> dict[tuple[int, str], int]:
    """Bytes of RAM by (pid, name); empty except on Linux."""
    held = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a process that just ended, or a kernel thread
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            held[int(status.parent.name), fields["Name"].strip()] = int(fields["VmRSS"].split()[0]) * 1024
    return held


def gpu_memory_by_process() -> dict[tuple[int, str], int]:
    """Bytes of GPU memory by (pid, name), from the driver, which may list none in a container."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    held = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        for line in listed.splitlines():
            with contextlib.suppress(ValueError):
                pid, name, mib = (part.strip() for part in line.split(","))
                held[int(pid), name] = int(mib) * 2**20
    return held


@contextlib.contextmanager
def memory_advice(config: Config, shape: ModelConfig, hardware: Hardware, rows: int) -> Iterator[None]:
    """Raise MemoryExhausted with advice for an out-of-memory error that a smaller micro-batch cannot solve."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExhausted(no_way_out(config, shape, hardware, rows)) from error
