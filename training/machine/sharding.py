"""--shard_optimizer: each process updates its share of the parameters, and keeps the optimizer's state for those only
(ZeRO, stage 1: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models").

PyTorch's ZeroRedundancyOptimizer does this too. But it gathers states as pickles on the GPU, and once it has loaded the
state of a fused AdamW, the next step fails there (pytorch issue 124133).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from training.machine.processes import OptimizerState, broadcast_state, count, rank


def owners(sizes: Sequence[int], processes: int) -> list[int]:
    """The rank that keeps each parameter: the largest goes first, to the rank that holds least."""
    held = [0] * processes
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = held.index(min(held))
        held[owner[index]] += sizes[index]
    return owner


def largest_share(sizes: Sequence[int], processes: int) -> int:
    """The total size that the most loaded process keeps."""
    held = [0] * processes
    for size, owner in zip(sizes, owners(sizes, processes), strict=True):
        held[owner] += size
    return max(held)


def share_of(state: OptimizerState, owner: Sequence[int], process: int) -> OptimizerState:
    """The part of a state that one process keeps."""
    return {number: held for number, held in state.items() if owner[number] == process}


def broadcast_from_owners(parameters: Sequence[torch.nn.Parameter], owner: Sequence[int]) -> None:
    """Each owner sends the parameters that it has updated to all processes."""
    sent = [
        dist.broadcast(parameter.detach(), source, async_op=True)
        for parameter, source in zip(parameters, owner, strict=True)
    ]
    for work in sent:
        work.wait()


def gather_state(share: OptimizerState) -> OptimizerState:
    """On rank 0, the state of all parameters; what other processes keep arrives in host memory. Every process must call
    it."""
    whole = dict(share)
    for process in range(1, count()):
        sent = share if rank() == process else {}
        sent = {number: {name: tensor.cpu() for name, tensor in held.items()} for number, held in sent.items()}
        received = broadcast_state(sent, process)
        if rank() == 0:
            whole |= received
    return dict(sorted(whole.items()))


def scatter_state(whole: OptimizerState, owner: Sequence[int]) -> OptimizerState:
    """This process's share of the state that rank 0 has. Every process must call it."""
    own = share_of(whole, owner, 0) if rank() == 0 else {}
    for process in range(1, count()):
        received = broadcast_state(share_of(whole, owner, process))
        own = received if rank() == process else own
    return own
