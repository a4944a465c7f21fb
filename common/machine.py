"""Detect this machine: device, name, memory, and units for bf16."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from common.errors import ConfigError
from common.output import say_once
from common.script import world

DEVICES = ("auto", "cpu", "cuda", "mps")
CPU_LIMIT_VARIABLE = "ATEN_CPU_CAPABILITY"

# Dense bf16/fp16 tensor-core peaks in FLOP/s from the vendor's datasheets, for the SXM version if there are several.
# The first name contained in the device's name counts. MFU is not reported for other devices.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX PRO 6000": 504e12,
    "RTX 5090": 210e12,
    "RTX A6000": 155e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of a device by its name; None if it is not in PEAK_FLOPS."""
    return next((peak for part, peak in PEAK_FLOPS.items() if name_contains(name, part)), None)


def name_contains(name: str, part: str) -> bool:
    """Return whether a name contains `part` as whole words: an RTX A1000 is no A100, an L40 no L4."""
    return re.search(rf"\b{part}\b", name) is not None


def pick_device(name: str) -> torch.device:
    """Return the device for one of DEVICES. Raises ConfigError if this machine does not have it."""
    if name not in DEVICES:
        raise ConfigError(f"device is {name!r}; allowed: {', '.join(DEVICES)}.")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                "PyTorch finds no Apple GPU for --device mps. It needs a Mac with macOS 14 or later and torch for "
                "arm64. --device auto uses what is available."
            )
        if world().size > 1:
            raise ConfigError("--device mps works in one process only. Leave out torchrun, or use --device cpu.")
        return torch.device("mps", 0)
    if name == "cpu" or not torch.cuda.is_available():
        if name != "cuda":
            return torch.device("cpu")
        raise ConfigError(
            "PyTorch finds no CUDA GPU for --device cuda. In Colab choose Runtime > Change runtime type > GPU. "
            "Elsewhere check `nvidia-smi`, and that torch is a CUDA build. --device auto uses what is available."
        )
    # With an index, as tensors report it: torch.device("cuda") != torch.device("cuda:0").
    device, built_for = torch.device("cuda", world().local_rank), torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(device)
    if has_kernels(built_for, capability):
        return device
    problem = (
        f"this build of torch has no kernels for {torch.cuda.get_device_name(device)} (sm_{capability[0]}"
        f'{capability[1]}), only for {", ".join(built_for)}. For an older GPU: pip install "torch<2.15" --index-url '
        "https://download.pytorch.org/whl/cu126; for a newer one, update torch."
    )
    if name == "cuda":
        raise ConfigError(f"--device cuda cannot be used: {problem} --device cpu works without the GPU.")
    say_once(f"Note       Using the CPU: {problem}")
    return torch.device("cpu")


def has_kernels(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a CUDA GPU of this capability can run kernels that torch was built for: `sm_XY` needs the same X
    and at least Y, `compute_XY` a capability of at least X.Y. AMD's names (`gfx942`) are not checked."""
    kernels = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built_for))
    return not kernels or any(
        (int(x), int(y)) <= capability and (int(x) == capability[0] or kind == "compute") for kind, x, y in kernels
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"GPU of {cpu_name()}" if device.type == "mps" else cpu_name()


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether the device has special units for bf16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and cpu_bf16_flag() is not None


def exact_device(device: torch.device) -> torch.device:
    """Return the device for sums in fp64: the CPU for Apple's GPUs, which have no fp64."""
    return torch.device("cpu") if device.type == "mps" else device


@lru_cache(maxsize=1)
def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def cpu_bf16_flag() -> str | None:
    """Return the instruction set that makes bf16 fast on this CPU; None if there is none or it is unknown."""
    return bf16_flag(_cpu_info(), os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL"))


def bf16_flag(info: str, limit: str) -> str | None:
    """Return the instruction set for bf16 by the content of /proc/cpuinfo and `limit`, the value of
    ONEDNN_MAX_CPU_ISA."""
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    units = (("amx_bf16", "AMX", "AMX"), ("avx512_bf16", "AVX512-BF16", "AVX512_CORE_BF16|AVX512_CORE_FP16|AVX10|AMX"))
    usable = (name for flag, name, isa in units if flag in flags and re.search(f"ALL|DEFAULT|{isa}", limit.upper()))
    return next(usable, None)


def cpu_name() -> str:
    lines = (line for line in _cpu_info().splitlines() if line.startswith("model name"))
    model = next(lines, "").partition(":")[2].strip() or platform.processor() or platform.machine()
    # The limit makes PyTorch use kernels for other CPUs, so timings do not count for this one.
    limit = f", limited to {os.environ[CPU_LIMIT_VARIABLE].upper()}" if os.environ.get(CPU_LIMIT_VARIABLE) else ""
    return f"{model} ({os.cpu_count()} cores){limit}"


# Limit and use of a container's memory in bytes, in cgroup v2 and v1.
CGROUP_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def total_ram() -> int | None:
    """Return the bytes of memory of this machine or container; None if unknown."""
    limit, _ = _read_container_memory()
    return _min_known(memory_info("MemTotal"), limit)


def available_ram() -> int | None:
    """Return the bytes of memory that a process could use without swapping; None if unknown."""
    limit, used = _read_container_memory()
    return _min_known(memory_info("MemAvailable"), None if limit is None else max(0, limit - used))


def _min_known(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _read_container_memory() -> tuple[int | None, int]:
    """Return (limit, used) in bytes; the limit is None outside a container."""
    for limit, used in CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            return int(Path(limit).read_text()), int(Path(used).read_text())
    return None, 0


def memory_info(name: str) -> int | None:
    """Read a value of Linux's /proc/meminfo, in bytes; None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def runs_ahead(device: torch.device) -> bool:
    """Return whether generation queues work on the device before the host has read the last token."""
    return device.type == "cuda"
