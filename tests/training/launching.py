"""The trainer in several processes, as torchrun starts them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.helpers import ROOT

PORTS = itertools.count(20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))
TRAINER = str(ROOT / "train_colab_mmap.py")


def torchrun(count: int, *flags: object, place: Sequence[str] = ("--standalone",)) -> list[str]:
    """The command of a user."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc_per_node={count}"]
    return [*launcher, TRAINER, *map(str, flags)]


def without_gloo(printed: str) -> str:
    """Leave out what torch 2.9 prints itself."""
    return "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("[Gloo]"))


def free_port() -> int:
    """Below those that the system gives to connections by itself: one of them would be taken again before it is used.
    Each of pytest's workers has its own."""
    for port in PORTS:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def places(count: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each process."""
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    of_all |= {"LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "none"}
    return [{**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def join(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process be the first of `count`."""
    for name, value in places(count)[0].items():
        patch.setenv(name, value)


def trained(
    count: int, *flags: object, folders: Sequence[Path] = (), first: Callable[[], object] = int
) -> list[Forked]:
    """The trainer in `count` processes, as torchrun starts them, each in its own folder if `folders` are given. Unlike
    with torchrun, each one's exit code and output can be read."""
    return [
        Forked(flags, folders[rank] if folders else None, place, first=first)
        for rank, place in enumerate(places(count))
    ]
