"""--shard_optimizer: of several processes, each keeps the optimizer's state of its share of the parameters and makes
their update (ZeRO, stage 1: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
models").

PyTorch's ZeroRedundancyOptimizer does this too, but gathers states as pickles on the GPU, and a fused AdamW whose state
it loads fails at its next step there (pytorch issue 124133).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from training.machine.processes import count, rank, share_state


def owners(sizes: Sequence[int], processes: int) -> list[int]:
    """The process that keeps each parameter: the largest first, to whoever has least."""
    held = [0] * processes
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = held.index(min(held))
        held[owner[index]] += sizes[index]
    return owner


def largest_share(sizes: Sequence[int], processes: int) -> int:
    """The sum of the sizes that the process with most of them keeps."""
    held = [0] * processes
    for size, owner in zip(sizes, owners(sizes, processes), strict=True):
        held[owner] += size
    return max(held)


class Sharded(torch.optim.Optimizer):
    """Beside a PyTorch optimizer, as the first of the classes to inherit from. Its state dict is that of this process's
    share, under the numbers that the parameters have in the whole."""

    loaded: dict[int, Any] | None = None  # in the first process: the whole state, until the others have their shares

    def parameters(self) -> list[torch.nn.Parameter]:
        """All of them, by number."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @functools.cached_property
    def owners(self) -> list[int]:
        """The process that keeps each of them."""
        return owners([parameter.numel() for parameter in self.parameters()], count())

    def share_of(self, state: dict[int, Any], process: int) -> dict[int, Any]:
        return {number: held for number, held in state.items() if self.owners[number] == process}

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update this process's parameters, and get the others from those that keep them."""
        kept = list(zip(self.parameters(), self.owners, strict=True))
        for parameter, owner in kept:
            if owner != rank():
                parameter.grad = None  # so the optimizer passes it over
        super().step(closure)
        sent = [dist.broadcast(parameter.detach(), owner, async_op=True) for parameter, owner in kept]
        for work in sent:
            work.wait()

    def gather(self) -> dict[str, Any]:
        """In the first process, the state dict of the whole, the others' shares on the host; all have to call it."""
        whole = self.state_dict()
        for process in range(1, count()):
            share = {
                number: {name: tensor.cpu() for name, tensor in held.items()}
                for number, held in (whole["state"] if rank() == process else {}).items()
            }
            share = share_state(share, process)
            if rank() == 0:
                whole["state"] |= share
        return whole | {"state": dict(sorted(whole["state"].items()))}

    def scatter(self) -> None:
        """Give each process its share of what the first has loaded; all have to call it."""
        for process in range(1, count()):
            share = share_state(self.share_of(self.loaded or {}, process))
            if rank() == process:
                self.load_state_dict({"state": share, "param_groups": self.state_dict()["param_groups"]})
        self.loaded = None


def keep_own(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Of the state dict of the whole, this process's share: before it is loaded."""
    assert isinstance(optimizer, Sharded)
    optimizer.loaded = saved["state"] if rank() == 0 else None
    return saved | {"state": optimizer.share_of(saved["state"], rank())}
