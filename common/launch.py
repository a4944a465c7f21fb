"""The rank of this process in the job that torchrun started. Without torchrun there is one process, of rank 0."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from common.errors import Script, UserError


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


@contextlib.contextmanager
def only_rank_0_prints() -> Iterator[None]:
    """Only rank 0 prints; a user's error is reported by one process on each machine."""
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


def end(main: Script) -> NoReturn:
    """Run a script, and end the process with its exit code.

    With several processes it skips the interpreter's shutdown: if an error kept the process group open, gloo's threads
    may abort the process there and lose the exit code (pytorch pull request 179291).
    """
    try:
        code = main()
    except SystemExit as left:
        code = int(left.code or 0)
    if place().count > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the stream is closed
                stream.flush()
        os._exit(code)
    sys.exit(code)
