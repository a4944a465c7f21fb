"""The time that each kernel of a step takes, by torch.profiler; on a CPU, each operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

LISTED = 25  # the slowest kernels
NAME_LENGTH = 100  # characters; the names of templates have thousands

# The first pattern that matches the name in lower case counts. Inductor's kernels come first, because their names list
# everything that they fuse, outputs of attention too. Its templates (triton_tem_) are matrix products.
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
    """The kernels that ran on the device during `steps` calls of `step`."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    kernels = []
    for event in profiler.key_averages():
        if event.is_user_annotation or (is_cuda and event.device_type.name != "CUDA"):
            continue  # spans around kernels that have their own entry, and the host's work
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        kernels.append(Kernel(event.key, microseconds / 1e6, event.count))
    return kernels


def kernel_table(kernels: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds, share and calls per step, by group and by kernel, the slowest first."""
    kernels = sorted(kernels, key=lambda kernel: -kernel.seconds)
    total = sum(kernel.seconds for kernel in kernels)
    names = {kernel.name: group_of(kernel.name) for kernel in kernels}

    def entry(some: Sequence[Kernel]) -> dict[str, float]:
        seconds, calls = sum(kernel.seconds for kernel in some), sum(kernel.calls for kernel in some)
        return {"ms": 1000 * seconds / steps, "share": seconds / total if total else 0.0, "calls": calls / steps}

    groups = {group: entry([k for k in kernels if names[k.name] == group]) for group in set(names.values())}
    return {
        **{key: value for key, value in entry(kernels).items() if key != "share"},
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1]["ms"])),
        "kernels": [{"name": k.name[:NAME_LENGTH], "group": names[k.name], **entry([k])} for k in kernels[:LISTED]],
    }
