"""A lease: one session at a time, on any machine, may write into a mirror."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files import CHECKPOINT_NAME, STEP_NAME, discard, read_json, session, write_json
from common.output import log

MARKER = "run.json"  # in a mirror: which run these are the copies of; in a run folder: where its copies went
STAGING = ".session-"  # in a mirror: the folder of a session, for what has no name yet
HEARTBEAT = 60.0  # seconds between two signs of life of the session that holds the mirror
DEAD_AFTER = 150.0  # seconds without one, and a session counts as dead: disconnected, killed or asleep


class TakenOver(CheckpointError):
    """Another session holds the mirror, or has held it since this one's last sign of life."""


class Lease:
    """The right to write into the mirror `folder` of the run folder `run_dir`. It lasts as long as it is renewed.

    No file lock works over a Drive, from one machine to another. Instead:

    - `run.json` names the holder, with a new sign of life every minute. The next session waits for it to change. It
      compares no clocks, because the clocks of two machines may differ.
    - The holder writes in a folder of its own, `staging`, and renames everything from there into the mirror. Whoever
      takes the mirror over moves that folder away. A session that slept meanwhile, wherever it was stopped, can then
      rename nothing into the mirror any more.
    """

    def __init__(self, folder: Path, run_dir: str):
        self.id = uuid.uuid4().hex
        self.path = folder / MARKER
        self.staging = folder / f"{STAGING}{self.id}"
        self.run_dir = run_dir
        self.run_id = ""  # not known before the run is started or continued
        self.earlier_run_id: str | None = None  # of this run folder, in `run.json`: that session may only be asleep
        self.last_holder: str | None = None  # the id that stood in `run.json` when this session last read or wrote it
        self.renewed_at = 0.0  # time.monotonic()

    @property
    def is_ours(self) -> bool:
        """Whether this session holds the mirror, as far as it knows."""
        return self.last_holder == self.id

    def read(self) -> dict[str, Any]:
        """What stands in `run.json`, whoever wrote it."""
        try:
            return read_json(self.path, CheckpointError)
        except CheckpointError:  # there is none, or it was cut off
            return {}

    def require_free(self) -> None:
        """Wait until it is sure that no other session, on this or another machine, holds the mirror. A session that was
        killed leaves its name behind. Raises TakenOver if there is a sign of life."""
        first = self.read()
        self.last_holder = last_holder(first).get("id")
        holder = first.get("holder")
        if not isinstance(holder, dict) or has_ended(holder):
            return
        was = f"{self.path.parent} was in use by {described(holder)}"
        log.info(f"{was}. Waiting {DEAD_AFTER:.0f} s for a sign of life.")
        deadline = time.monotonic() + DEAD_AFTER
        while time.monotonic() < deadline:
            time.sleep(min(1.0, DEAD_AFTER / 10))
            now = self.read()
            if not now.get("holder"):
                return
            if (now["holder"], now.get("seen")) != (holder, first.get("seen")):
                raise TakenOver(
                    f"{self.path.parent} is in use: {described(now['holder'])} trains this run. Stop that one, or "
                    f"choose another --checkpoint_dir."
                )

    def announce(self) -> None:
        """Take a mirror that is free and has copies, before a checkpoint is looked for in it. It keeps the name of its
        run. Raises TakenOver if another session takes it at the same moment."""
        found = self.read()
        if found.get("run_dir") == self.run_dir and isinstance(found.get("run_id"), str):
            self.earlier_run_id = found["run_id"]
        if found.get("run_id"):
            with contextlib.suppress(OSError):  # it may be read-only
                self.take(found)

    @property
    def run(self) -> dict[str, Any]:
        """Which run the copies are of, and where it lies."""
        return {"run_id": self.run_id, "run_dir": self.run_dir}

    def take(self, run: dict[str, Any]) -> None:
        """Move away the folders that other sessions write in, put back what they were about to replace, and write our
        name into `run.json`. Raises TakenOver if another session takes the mirror at the same moment: the two move each
        other's folder, and one of them does it first."""
        folder = self.path.parent
        folder.parent.mkdir(exist_ok=True)  # not its parents: they are gone if the disk was unmounted
        folder.mkdir(exist_ok=True)
        self.staging.mkdir(exist_ok=True)
        for theirs in folder.glob(f"{STAGING}*"):
            if theirs != self.staging:
                with contextlib.suppress(FileNotFoundError):  # its session has ended, or has moved ours: see below
                    os.replace(theirs, self.staging / theirs.name)
        if not self.staging.is_dir():
            raise TakenOver(f"{folder} was taken by another session at the same moment: stop one of the two.")
        self.require_unchanged()  # once more: from here on nobody else can write
        for replaced in self.staging.rglob(".old-*"):
            name = replaced.name.removeprefix(".old-")
            target = (folder / "checkpoints" if STEP_NAME.fullmatch(name) else folder) / name
            if CHECKPOINT_NAME.fullmatch(name) and not target.exists():
                os.replace(replaced, target)
        self.write_heartbeat(run)
        for leftover in self.staging.iterdir():
            discard(leftover, truncate=True)

    def renew(self) -> None:
        """Give a sign of life; take the mirror first if it is not ours. Raises TakenOver if another session has held it
        since, CheckpointError if it is gone, OSError if it cannot be written."""
        if self.is_ours and not self.path.exists():
            raise CheckpointError(f"{self.path} is gone: was the disk unmounted?")
        self.require_unchanged()
        if self.is_ours and self.staging.is_dir():
            self.write_heartbeat(self.run)
        else:
            self.take(self.run)
        self.renewed_at = time.monotonic()

    def renew_if_due(self) -> None:
        """Raises TakenOver. Other problems are met again, and told, by the next copy."""
        if self.is_ours and time.monotonic() - self.renewed_at > HEARTBEAT:
            try:
                self.renew()
            except TakenOver:
                raise
            except (OSError, CheckpointError):
                pass

    def require_unchanged(self) -> None:
        """Raises TakenOver if another session has held the mirror since this one last read or wrote `run.json`."""
        found = self.read()
        last = last_holder(found)
        if last and last.get("id") != self.last_holder:
            does = "trains" if found.get("holder") else "has trained"
            raise TakenOver(
                f"{described(last)} took over the copies in {self.path.parent} and {does} this run since. This "
                f"training stops, and copies nothing over the newer state. The same command continues from the newest "
                f"checkpoint of both; to train a second run, choose another --output_dir."
            )

    def write_heartbeat(self, run: dict[str, Any]) -> None:
        holder = {**session(), "id": self.id, "system": system()}
        run = {"run_id": run.get("run_id"), "run_dir": run.get("run_dir")}
        write_json(self.path, {**run, "holder": holder, "seen": time.time()}, self.staging)
        self.last_holder = self.id

    def release(self) -> None:
        """Let other sessions have the mirror. `run.json` keeps the name of its last holder: a session that slept sees
        from it that it was taken over."""
        with contextlib.suppress(OSError):
            holder = self.read().get("holder")
            if isinstance(holder, dict) and holder.get("id") == self.id:
                write_json(self.path, {**self.run, "last_holder": holder}, self.staging)
        discard(self.staging)


def last_holder(found: dict[str, Any]) -> dict[str, Any]:
    """The session that holds the mirror or held it last, by its `run.json`; empty if there is none."""
    last = found.get("holder") or found.get("last_holder")
    return last if isinstance(last, dict) else {}


def described(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('machine')} (started {holder.get('started')})"


def system() -> str:
    """This boot of this machine, and this container: process ids mean the same only there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def has_ended(holder: dict[str, Any]) -> bool:
    """Whether a session is known to have ended: its process is gone, or is this one, in which it was an earlier
    session. Nothing is known about other machines."""
    if holder.get("system") != system() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return holder["pid"] == os.getpid()
