"""Whose a mirror is: of which run it holds the copies, and who trains into it now."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files import read_json, write_json
from common.lock import session
from training.run_folder import MARKER

HEARTBEAT = 60.0  # seconds between two signs of life of whoever trains into the mirror
GONE = 150.0  # seconds without one after which it is taken for dead: it was disconnected or killed


class Claim:
    """A session's name in the mirror `folder` of the run folder `run_dir`, with signs of life.

    It lies in a file, for no lock reaches from one machine to another over a Drive.
    """

    def __init__(self, folder: Path, run_dir: str):
        self.path = folder / MARKER
        self.run_dir = run_dir
        self.run_id = ""  # until it is known which run this is
        self.made = False
        self.renewed_at = 0.0  # time.monotonic()

    def read(self) -> dict[str, Any]:
        """What stands there, whoever wrote it."""
        try:
            return read_json(self.path, CheckpointError)
        except CheckpointError:  # not there, or cut off
            return {}

    def require_free(self, say: Callable[[str], None] = print) -> None:
        """Raises CheckpointError if another process, on this or another machine, trains into the mirror.

        A process that was killed leaves its name behind: it is dead if it gives no sign of life for a while.
        """
        first = self.read()
        holder = first.get("holder")
        if not isinstance(holder, dict) or is_gone_or_us(holder):
            return
        named = f"process {holder.get('pid')} on {holder.get('machine')}, since {holder.get('started')}"
        since = max(0.0, time.time() - seen(first))  # clocks of two machines may differ
        until = time.monotonic() + GONE - since
        if until > time.monotonic():
            say(
                f"{self.path.parent} was trained into {since:.0f} s ago by {named}: waiting up to "
                f"{until - time.monotonic():.0f} s for a sign of life of it."
            )
        while time.monotonic() < until:
            time.sleep(min(1.0, GONE / 10))
            now = self.read()
            if not now.get("holder"):
                return
            if seen(now) != seen(first):
                raise CheckpointError(
                    f"{self.path.parent} is being trained into by {named}. Stop that one, or choose another "
                    f"--checkpoint_dir."
                )

    def announce(self) -> None:
        """Leave one's name in a mirror that is free, before a checkpoint is looked for there."""
        before = self.read()
        if before.get("run_id"):
            with contextlib.suppress(OSError):
                self.write(before)

    @property
    def whose(self) -> dict[str, str]:
        """Of which run these are the copies, and where that lies."""
        return {"run_id": self.run_id, "run_dir": self.run_dir}

    def renew(self) -> None:
        """Make the mirror this run's, or give a sign of life. Raises CheckpointError if it was this run's, and now is
        gone or another's; OSError if it cannot be written."""
        if self.made:
            if not self.path.exists():
                raise CheckpointError(f"{self.path} is gone: was the disk unmounted?")
            marker = self.read()  # empty if a write of it was cut off
            if marker.get("run_id", self.run_id) != self.run_id:
                raise CheckpointError(f"{self.path} is of another run")
            holder = marker.get("holder")
            if isinstance(holder, dict) and not is_gone_or_us(holder):
                raise CheckpointError(f"process {holder.get('pid')} on {holder.get('machine')} trains into it now")
        else:
            folder = self.path.parent
            folder.parent.mkdir(exist_ok=True)  # not its parents
            folder.mkdir(exist_ok=True)
        self.write(self.whose)
        self.made, self.renewed_at = True, time.monotonic()

    def renew_if_due(self) -> None:
        if self.made and time.monotonic() - self.renewed_at > HEARTBEAT:
            with contextlib.suppress(OSError, CheckpointError):  # told when there is something to copy
                self.renew()

    def write(self, whose: dict[str, Any]) -> None:
        write_json(self.path, {**whose, "holder": session(), "seen": time.time()})

    def release(self) -> None:
        """The mirror is free for others."""
        with contextlib.suppress(OSError):
            marker = self.read()
            if marker.get("run_id") == self.run_id and marker.get("holder") == session():
                write_json(self.path, self.whose)


def seen(marker: dict[str, Any]) -> float:
    value = marker.get("seen")
    return float(value) if isinstance(value, int | float) else 0.0


def is_gone_or_us(holder: dict[str, Any]) -> bool:
    """Whether a holder is a process of this machine that has ended, or ourselves. Of another machine it cannot be
    known."""
    if holder.get("machine") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return holder["pid"] == os.getpid()
