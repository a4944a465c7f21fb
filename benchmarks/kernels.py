"""Where the time of a step goes, kernel by kernel, as torch.profiler tells; on a CPU operator by operator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

LISTED = 25  # kernels, those that take most
NAME_LENGTH = 100  # of a kernel's; templates run to thousands of characters

# The first that is found in a name, in lower case, counts. What Inductor generates is named after all that it fuses,
# attention's outputs among them, so it is looked for first; but its templates (triton_tem_) are matrix products.
GROUPS = {
    "triton": r"^triton_(?!tem)",
    "attention": r"flash|fmha|sdpa|attention|cudnn",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm|amp_",
    "matrix products": r"^triton_tem|gemm|nvjet|cutlass|cublas|xmma|splitk|mkldnn|linear$|::(add|b|badd)?mm$",
    "copies": r"memcpy|memset|copy|catarray|clone|contiguous|fill|zero_|::(cat|to)$",
    "pointwise and sums": r"elementwise|reduce|norm|softmax|gelu|loss|embedding|index|::(add|sub|mul|div|sum)_?$",
}


class Kernel(NamedTuple):
    name: str
    seconds: float  # in all its calls
    calls: int


def group_of(name: str) -> str:
    name = name.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")


def profiled(step: Callable[[], object], synchronize: Callable[[], object], steps: int, is_cuda: bool) -> list[Kernel]:
    """What ran on the device during `steps` calls of `step`."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    kernels = []
    for event in profiler.key_averages():
        if event.is_user_annotation or (is_cuda and event.device_type.name != "CUDA"):
            continue  # spans that hold the kernels once more, and the host's side of it
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        kernels.append(Kernel(event.key, microseconds / 1e6, event.count))
    return kernels


def kernel_table(kernels: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds, share and calls, of a step, by group and by kernel, those that take most first."""
    kernels = sorted(kernels, key=lambda kernel: -kernel.seconds)
    total = sum(kernel.seconds for kernel in kernels)

    def entry(seconds: float, calls: int) -> dict[str, float]:
        return {"ms": 1000 * seconds / steps, "share": seconds / total if total else 0.0, "calls": calls / steps}

    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[group_of(kernel.name)].append(kernel)
    summed = {name: entry(sum(k.seconds for k in of), sum(k.calls for k in of)) for name, of in groups.items()}
    return {
        "ms": 1000 * total / steps,
        "calls": sum(kernel.calls for kernel in kernels) / steps,
        "groups": dict(sorted(summed.items(), key=lambda item: -item[1]["ms"])),
        "kernels": [
            {"name": kernel.name[:NAME_LENGTH], "group": group_of(kernel.name), **entry(kernel.seconds, kernel.calls)}
            for kernel in kernels[:LISTED]
        ],
    }
