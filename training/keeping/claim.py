"""Whose a mirror is: of which run it holds the copies, and which session writes into it now."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files import read_json, write_json
from common.lock import session
from common.publishing import CHECKPOINT_NAME, STEP_NAME, discard
from training.file_names import MARKER, STAGING

HEARTBEAT = 60.0  # seconds between two signs of life of the session that writes into the mirror
GONE = 150.0  # seconds without a new one after which a session counts as dead: disconnected, killed or asleep


class TakenOver(CheckpointError):
    """Another session writes into the mirror, or did so since this one's last sign of life."""


class Claim:
    """A session's hold on the mirror `folder` of the run folder `run_dir`.

    No file lock reaches from one machine to another over a Drive. What holds instead:

    - `run.json` names the session, with a sign of life every minute. The next session waits for a change of it. It
      compares no clocks, for those of two machines may differ.
    - Everything reaches the mirror by a rename out of the session's own folder, `staging`. Whoever takes the mirror
      over moves that folder away. A session that slept meanwhile can then rename nothing more into the mirror,
      wherever it was stopped.
    """

    def __init__(self, folder: Path, run_dir: str):
        self.id = uuid.uuid4().hex
        self.path = folder / MARKER
        self.staging = folder / f"{STAGING}{self.id}"
        self.run_dir = run_dir
        self.run_id = ""  # until it is known which run this is
        self.earlier_run_id: str | None = None  # of a session that signed for the same folder, and may only sleep
        self.is_ours = False
        self.last_known: str | None = None  # the session that signed last, as far as this one knows
        self.renewed_at = 0.0  # time.monotonic()

    def read(self) -> dict[str, Any]:
        """What stands in run.json, whoever wrote it."""
        try:
            return read_json(self.path, CheckpointError)
        except CheckpointError:  # not there, or cut off
            return {}

    def require_free(self, say: Callable[[str], None] = print) -> None:
        """Raises TakenOver if another session, on this or another machine, writes into the mirror.

        A session that was killed leaves its name behind: it is dead if it gives no sign of life for a while.
        """
        first = self.read()
        self.last_known = last_session(first).get("id")
        holder = first.get("holder")
        if not isinstance(holder, dict) or has_ended(holder):
            return
        say(f"{self.path.parent} was in use by {named(holder)}. Waiting {GONE:.0f} s for a sign that it still is.")
        until = time.monotonic() + GONE
        while time.monotonic() < until:
            time.sleep(min(1.0, GONE / 10))
            now = self.read()
            if not now.get("holder"):
                return
            if (now["holder"], now.get("seen")) != (holder, first.get("seen")):
                raise TakenOver(
                    f"{self.path.parent} is in use: {named(now['holder'])} trains this run. Stop that one, or choose "
                    f"another --checkpoint_dir."
                )

    def announce(self) -> None:
        """Take a mirror that is free and holds copies, before a checkpoint is looked for there. Raises TakenOver if
        another session does the same now."""
        before = self.read()
        if before.get("run_dir") == self.run_dir and isinstance(before.get("run_id"), str):
            self.earlier_run_id = before["run_id"]
        if before.get("run_id"):
            with contextlib.suppress(OSError):  # it may be read-only
                self.take(before)

    @property
    def whose(self) -> dict[str, Any]:
        """Of which run these are the copies, and where that lies."""
        return {"run_id": self.run_id, "run_dir": self.run_dir}

    def take(self, whose: dict[str, Any]) -> None:
        """Shut other sessions out, put back what they were in the middle of replacing, and sign. Raises TakenOver if
        another session does the same now: of two that move each other's folder, one comes first."""
        folder = self.path.parent
        folder.parent.mkdir(exist_ok=True)  # not its parents
        folder.mkdir(exist_ok=True)
        self.staging.mkdir(exist_ok=True)
        for theirs in folder.glob(f"{STAGING}*"):
            if theirs != self.staging:
                with contextlib.suppress(FileNotFoundError):  # it has just ended, or has just moved ours: see below
                    os.replace(theirs, self.staging / theirs.name)
        if not self.staging.is_dir():
            raise TakenOver(f"{folder} was taken by another session at the same moment: stop one of the two.")
        self.require_unchanged()  # once more: from here on nobody else can sign
        for replaced in self.staging.rglob(".old-*"):
            name = replaced.name.removeprefix(".old-")
            target = (folder / "checkpoints" if STEP_NAME.fullmatch(name) else folder) / name
            if CHECKPOINT_NAME.fullmatch(name) and not target.exists():
                os.replace(replaced, target)
        self.sign(whose)
        for leftover in self.staging.iterdir():
            discard(leftover, truncate=True)
        self.is_ours = True

    def renew(self) -> None:
        """Take the mirror for this run, or give a sign of life. Raises TakenOver if another session has had it since,
        CheckpointError if it is gone, OSError if it cannot be written."""
        if self.is_ours and not self.path.exists():
            raise CheckpointError(f"{self.path} is gone: was the disk unmounted?")
        self.require_unchanged()
        if self.is_ours and self.staging.is_dir():
            self.sign(self.whose)
        else:
            self.take(self.whose)
        self.renewed_at = time.monotonic()

    def require_unchanged(self) -> None:
        """Raises TakenOver if another session has signed since this one looked or signed."""
        marker = self.read()
        last = last_session(marker)
        if last and last.get("id") != self.last_known:
            does = "trains" if marker.get("holder") else "has trained"
            raise TakenOver(
                f"{named(last)} took over the copies in {self.path.parent} and {does} this run since. This training "
                f"stops, and copies nothing over the newer state. The same command continues from the newest "
                f"checkpoint of both; to train apart, choose another --output_dir."
            )

    def renew_if_due(self) -> None:
        """Raises TakenOver; other problems are told when there is something to copy."""
        if self.is_ours and time.monotonic() - self.renewed_at > HEARTBEAT:
            try:
                self.renew()
            except TakenOver:
                raise
            except (OSError, CheckpointError):
                pass

    def sign(self, whose: dict[str, Any]) -> None:
        holder = {**session(), "id": self.id, "system": system()}
        ours = {"run_id": whose.get("run_id"), "run_dir": whose.get("run_dir")}
        write_json(self.path, {**ours, "holder": holder, "seen": time.time()}, self.staging)
        self.last_known = self.id

    def release(self) -> None:
        """The mirror is free for others. It keeps the name of its last session, for one that slept to see."""
        with contextlib.suppress(OSError):
            holder = self.read().get("holder")
            if isinstance(holder, dict) and holder.get("id") == self.id:
                write_json(self.path, {**self.whose, "last_holder": holder}, self.staging)
        discard(self.staging)


def last_session(marker: dict[str, Any]) -> dict[str, Any]:
    """The session that signed last; empty if there is none."""
    last = marker.get("holder") or marker.get("last_holder")
    return last if isinstance(last, dict) else {}


def named(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('machine')} (started {holder.get('started')})"


def system() -> str:
    """This boot of this machine and this container: only there, process ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def has_ended(holder: dict[str, Any]) -> bool:
    """Whether the process of a session has ended, or is ourselves and the session is an earlier one. Of another machine
    it cannot be known."""
    if holder.get("system") != system() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return holder["pid"] == os.getpid()
