"""Which of the processes this is that torchrun started for one job. Without torchrun it is the only one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class Place:
    rank: int = 0
    count: int = 1  # of processes, on all machines
    local_rank: int = 0
    local_count: int = 1  # of processes on this machine


def place() -> Place:
    """As torchrun tells in the environment."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return Place()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Place(*(int(os.environ.get(name, 1)) for name in names))


def is_first() -> bool:
    """Whether this is the process that prints, and that writes files."""
    return place().rank == 0


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Of several processes only the first prints; a user's mistake is told by one on each machine."""
    here = place()
    if here.rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        except UserError as error:
            if here.local_rank == 0:
                raise
            sys.exit(error.exit_code)
