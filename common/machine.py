"""What this machine is: its device and its name, its memory, and its units for bf16."""

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
LIMITED = "ATEN_CPU_CAPABILITY"

# Dense bf16/fp16 tensor-core peaks in FLOP/s from the vendor's datasheets, for the SXM version if there are several.
# The first name found in the device's name counts. An unknown device has no peak, and its MFU is not reported.
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
    """Return the FLOP/s of the device with this name; None if it is not in the table."""
    return next((peak for part, peak in PEAK_FLOPS.items() if names_part(name, part)), None)


def names_part(name: str, part: str) -> bool:
    """Return whether a device's name contains `part` as whole words: an RTX A1000 is not an A100, an L40 not an L4."""
    return re.search(rf"\b{part}\b", name) is not None


def pick_device(name: str) -> torch.device:
    """Return the device for one of DEVICES. Raises ConfigError if this machine does not have it."""
    if name not in DEVICES:
        raise ConfigError(f"device is {name!r}; allowed: {', '.join(DEVICES)}.")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                "--device mps, but PyTorch finds no Apple GPU. It needs a Mac with macOS 14 or later and a build of "
                "torch for arm64. --device auto uses what is there."
            )
        if world().size > 1:
            raise ConfigError("--device mps is one GPU, for one process: leave out torchrun, or add --device cpu.")
        return torch.device("mps", 0)
    if name == "cpu" or not torch.cuda.is_available():
        if name != "cuda":
            return torch.device("cpu")
        raise ConfigError(
            "--device cuda, but PyTorch finds no CUDA GPU. In Colab choose Runtime > Change runtime type > GPU. "
            "Elsewhere check `nvidia-smi`, and that torch is a CUDA build. --device auto uses what is there."
        )
    # With its index, as the tensors on it report it: torch.device("cuda") is not equal to torch.device("cuda:0").
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
        raise ConfigError(f"--device cuda, but {problem} --device cpu works without the GPU.")
    say_once(f"Note       The CPU is used: {problem}")
    return torch.device("cpu")


def has_kernels(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a CUDA GPU of this capability can run what torch was built for: `sm_XY` runs where X is the same
    and Y not larger, `compute_XY` on all that are not older. AMD's names (`gfx942`) have no such order: True."""
    kernels = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built_for))
    return not kernels or any(
        (int(x), int(y)) <= capability and (int(x) == capability[0] or kind == "compute") for kind, x, y in kernels
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"GPU of {cpu_name()}" if device.type == "mps" else cpu_name()


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether matrix products in bf16 are known to run on special units."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and cpu_bf16_flag() is not None


def exact_device(device: torch.device) -> torch.device:
    """Return where to add up in fp64 what `device` computes: Apple's GPUs have no fp64."""
    return torch.device("cpu") if device.type == "mps" else device


@lru_cache(maxsize=1)
def cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def cpu_bf16_flag() -> str | None:
    """Return the instruction set that makes bf16 fast on this CPU; None if it has none or the system does not say."""
    return bf16_flag(cpu_info(), os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL"))


def bf16_flag(info: str, limit: str) -> str | None:
    """Return the same of a CPU with this /proc/cpuinfo. `limit` is that of oneDNN, which computes the products in
    bf16."""
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    units = (("amx_bf16", "AMX", "AMX"), ("avx512_bf16", "AVX512-BF16", "AVX512_CORE_BF16|AVX512_CORE_FP16|AVX10|AMX"))
    usable = (name for flag, name, isa in units if flag in flags and re.search(f"ALL|DEFAULT|{isa}", limit.upper()))
    return next(usable, None)


def cpu_name() -> str:
    lines = (line for line in cpu_info().splitlines() if line.startswith("model name"))
    model = next(lines, "").partition(":")[2].strip() or platform.processor() or platform.machine()
    # This limit simulates other CPUs: PyTorch uses other kernels, so a measured figure is not one of this CPU.
    limit = f", limited to {os.environ[LIMITED].upper()}" if os.environ.get(LIMITED) else ""
    return f"{model} ({os.cpu_count()} cores){limit}"


# Limit and use of a container's memory in bytes: cgroup v2, then v1.
CGROUP_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def total_ram() -> int | None:
    """Return the bytes of memory of this machine, or of the container we run in; None if the system does not say."""
    limit, _ = container_memory()
    return least(memory_info("MemTotal"), limit)


def available_ram() -> int | None:
    """Return the bytes of memory a process could use without swapping; None if the system does not say."""
    limit, used = container_memory()
    return least(memory_info("MemAvailable"), None if limit is None else max(0, limit - used))


def least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def container_memory() -> tuple[int | None, int]:
    """Return (limit, used) in bytes; the limit is None if there is none."""
    for limit, used in CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            return int(Path(limit).read_text()), int(Path(used).read_text())
    return None, 0


def memory_info(name: str) -> int | None:
    """Read a line of Linux's /proc/meminfo, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def runs_ahead(device: torch.device) -> bool:
    """Return whether generation queues work on the device before the host has read the token before."""
    return device.type == "cuda"
