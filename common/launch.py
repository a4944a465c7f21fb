"""The rank of this process in the job that torchrun started. Without torchrun there is one process, of rank 0."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    rank: int = 0
    count: int = 1  # world size: processes on all machines
    local_rank: int = 0
    local_count: int = 1  # of processes on this machine


def place() -> Place:
    """From the environment variables that torchrun sets."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return Place()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Place(*(int(os.environ.get(name, 1)) for name in names))


def is_rank_0() -> bool:
    """Whether this is rank 0, the process that prints and writes files."""
    return place().rank == 0
