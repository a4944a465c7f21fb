"""What a GPU's figures depend on besides the code: versions, clocks, power, memory. Unknown facts are absent."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.measure import describe_machine

# Names that old versions of nvidia-smi know too: an unknown one fails the whole query.
SMI_FIELDS = {
    "driver": "driver_version",
    "ecc": "ecc.mode.current",
    "temperature_celsius": "temperature.gpu",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "memory_total_mib": "memory.total",
    "memory_free_mib": "memory.free",
}
CHANGING = ("temperature_celsius", "sm_clock_mhz", "memory_clock_mhz", "power_watts")


def nvidia_smi() -> dict[str, Any]:
    """Those of SMI_FIELDS that the driver reports for the first GPU."""
    query = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        return parse_smi(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        return {}


def parse_smi(line: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, text in zip(SMI_FIELDS, map(str.strip, line.split(",")), strict=False):
        if text and not text.startswith("["):  # [N/A], [Not Supported], [Unknown Error]
            facts[name] = text
            if name not in ("driver", "ecc"):
                with contextlib.suppress(ValueError):
                    facts[name] = float(text)
    return facts


def machine_facts(device: torch.device) -> dict[str, Any]:
    """The machine before it works, with its GPU if `device` is one."""
    facts = describe_machine(device.type)
    del facts["cuda"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["triton"] = importlib.metadata.version("triton")
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    facts |= {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_gb": properties.total_memory / 1e9,
    }
    return {**facts, **nvidia_smi()}


def under_load(step: Callable[[], object], synchronize: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Clocks, power and temperature after `seconds` of steps and while more run: at rest they mean little."""
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        while time.perf_counter() - started < seconds:
            step()
            synchronize()
        asked = pool.submit(nvidia_smi)
        while not asked.done():
            step()
            synchronize()
    return {name: value for name, value in asked.result().items() if name in CHANGING}
