"""The mirror of a run: a second folder, on Drive for instance, that gets verified copies of what the run folder holds.

A thread of its own makes the copies, one at a time, of whatever is newest then; the training neither waits for it nor
fails with it. A Drive that is full, read-only, slow or gone is told, and tried again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from common.checkpoint import MANIFEST, PUBLISHING, discard, problems_of, prune, publish, step_folders
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write, read_json, write_json
from common.formatting import clock
from common.lock import session
from training.records import CURVE, METRICS, SAMPLES, SUMMARY
from training.run_folder import CONFIG, MARKER

MIRRORED_FILES = (CONFIG, METRICS, SAMPLES, CURVE, SUMMARY)
COPIES = 4  # of a checkpoint at the most: the two kept, the best, and one on its way
COPIED_AT_ONCE = 4 << 20  # bytes
LONGEST_PAUSE = 60.0  # seconds between two attempts, which begin at one and double
LAST_ATTEMPTS = 3  # once the training is over
HEARTBEAT = 60.0  # seconds between two signs of life of whoever trains into the mirror
GONE = 150.0  # seconds without one after which it is taken for dead: it was disconnected or killed


class GivenUp(Exception):
    """The copy under way is not waited for any longer. What it has written is cleaned up by the next session."""


class Mirror:
    """Where the copies of a run folder go."""

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.run_dir = run_dir
        self.root = Path(checkpoint_dir).expanduser()
        self.dir = self.root / run_dir.name
        self.run_id = ""
        self.marked = False
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.asked = threading.Event()
        self.is_up_to_date = threading.Event()
        self.closed = False
        self.failures = 0  # attempts in a row
        self.problem: str | None = None  # of the last attempt
        self.copied_at: float | None = None  # time.time() at which everything was copied

    def require_mounted(self) -> None:
        """Raises ConfigError if there is nothing to make `checkpoint_dir` in: what looks like Drive would else be made
        up on the local disk, and be lost with it."""
        if not self.root.parent.is_dir():
            raise ConfigError(
                f"--checkpoint_dir is {self.root}, and there is no folder {self.root.parent}. Mount the Drive first "
                f'(in Colab: from google.colab import drive; drive.mount("/content/drive")), or make the folder: '
                f"mkdir -p {self.root.parent}"
            )
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{self.root} (--checkpoint_dir) is a file; a folder is needed.")

    def require_free(self, say: Callable[[str], None] = print) -> None:
        """Raises CheckpointError if another process, on this or another machine, trains into the mirror.

        A process that was killed leaves its name behind: it is dead if it gives no sign of life for a while.
        """
        first = self.marker()
        holder = first.get("holder")
        if not isinstance(holder, dict) or is_dead(holder):
            return
        named = f"process {holder.get('pid')} on {holder.get('machine')}, since {holder.get('started')}"
        since = time.time() - seen(first)
        until = time.monotonic() + GONE - max(0.0, since)  # clocks of two machines may differ
        if until > time.monotonic():
            say(
                f"{self.dir} was trained into {since:.0f} s ago by {named}: waiting up to "
                f"{until - time.monotonic():.0f} s for a sign of life of it."
            )
        while time.monotonic() < until:
            time.sleep(min(1.0, GONE / 10))
            now = self.marker()
            if not now.get("holder"):
                return
            if seen(now) != seen(first):
                raise CheckpointError(
                    f"{self.dir} is being trained into by {named}. Stop that one, or choose another --checkpoint_dir."
                )

    def marker(self) -> dict[str, Any]:
        try:
            return read_json(self.dir / MARKER, CheckpointError)
        except CheckpointError:  # not there, or cut off
            return {}

    def begin(self, run_id: str, checkpoint_bytes: int) -> None:
        """Have the run folder copied from now on, and what a session before could not copy."""
        self.run_id = run_id
        with contextlib.suppress(OSError):  # an obstacle is told by the first attempt
            self.mark()
            manifests = [folder / MANIFEST for folder in step_folders(self.dir / "checkpoints")]
            self.copied_at = max((path.stat().st_mtime for path in manifests), default=None)
            missing = COPIES - len(manifests) - (self.dir / "best").is_dir()
            free = shutil.disk_usage(self.dir).free
            if missing * checkpoint_bytes > free:
                self.news.put(
                    f"Warning: {self.dir} will need about {missing * checkpoint_bytes / 1e9:.1f} GB more, and "
                    f"{free / 1e9:.1f} GB are free there."
                )
        self.thread = threading.Thread(target=self.keep_up, name="mirror", daemon=True)
        self.thread.start()
        self.wake()

    def wake(self) -> None:
        """There is something new to copy."""
        self.failures = 0
        self.is_up_to_date.clear()
        self.asked.set()

    def keep_up(self) -> None:
        """The thread's life."""
        with contextlib.suppress(GivenUp):
            while True:
                pause = min(LONGEST_PAUSE, 2.0 ** (self.failures - 1)) if self.problem else HEARTBEAT
                is_asked = self.asked.wait(pause)
                self.asked.clear()
                self.go_on()
                if is_asked or self.problem:
                    self.bring_up_to_date()
                else:
                    self.give_sign_of_life()

    def go_on(self) -> None:
        if self.closed:
            raise GivenUp

    def bring_up_to_date(self) -> None:
        """Copy what is new in the run folder, verify the copies, and only then delete older ones."""
        began = time.time()
        newest = next(iter(step_folders(self.run_dir / "checkpoints")), None)
        try:
            self.require_marked()
            self.copy_files()
            is_new = self.copy_if_new(self.run_dir / "best")
            if newest is not None and self.copy_if_new(newest):
                is_new = True
                prune(self.dir / "checkpoints", truncate=True)
        except (OSError, CheckpointError) as problem:
            self.failures += 1
            reason = getattr(problem, "strerror", None) or str(problem)
            if reason != self.problem:
                what = newest.name if newest is not None else "the run"
                self.news.put(
                    f"Warning: {what} could not be copied to {self.dir} ({reason}); the training goes on, and the "
                    "copy is tried again."
                )
            self.problem = reason
            return
        if newest is not None:
            self.copied_at = began
            if is_new or self.problem is not None:
                self.news.put(f"Copied {newest.name} to {self.dir}")
        self.problem, self.failures = None, 0
        if not self.asked.is_set():
            self.is_up_to_date.set()

    def copy_files(self) -> None:
        for name in MIRRORED_FILES:
            source = self.run_dir / name
            if source.exists():
                with atomic_write(self.dir / name) as file:
                    file.write(source.read_bytes())

    def copy_if_new(self, folder: Path) -> bool:
        """Raises OSError with the reason if there is something to copy and it cannot be."""
        target = self.dir / folder.relative_to(self.run_dir)
        manifests = [path / MANIFEST for path in (folder, target)]
        if not manifests[0].exists() or (
            manifests[1].exists() and manifests[0].read_bytes() == manifests[1].read_bytes()
        ):
            return False
        if problem := copy_checkpoint(folder, target, self.go_on):
            raise OSError(problem)
        return True

    def mark(self) -> None:
        """Write down which run these are the copies of, and who trains it: a sign of life."""
        if not self.marked:
            self.root.mkdir(exist_ok=True)  # not its parents
            self.dir.mkdir(exist_ok=True)
        write_json(self.dir / MARKER, {"run_id": self.run_id, "holder": session(), "seen": time.time()})
        self.marked = True

    def give_sign_of_life(self) -> None:
        """Metrics change all the time, and each version of a file counts on Drive: they come with the checkpoints."""
        with contextlib.suppress(OSError, CheckpointError):  # told when there is something to copy
            self.require_marked()

    def require_marked(self) -> None:
        """Raises CheckpointError if the folder was marked once, and is not the marked one now."""
        if self.marked:
            if not (self.dir / MARKER).exists():
                raise CheckpointError(f"{self.dir / MARKER} is gone: was the disk unmounted?")
            if read_json(self.dir / MARKER, CheckpointError).get("run_id") != self.run_id:
                raise CheckpointError(f"{self.dir / MARKER} is of another run")
        self.mark()

    def status(self) -> str:
        """How old the newest copy is, for the progress line."""
        age = f"copy {clock(max(0.0, time.time() - self.copied_at))} old" if self.copied_at else "no copy yet"
        return f"{age} ({self.problem})" if self.problem else age

    def finish(self, seconds: float, is_asked: Callable[[], bool], seconds_if_asked: float) -> None:
        """Wait for the copy of what is newest, `seconds` at most, or fewer once somebody asks to stop."""
        self.wake()
        began = time.monotonic()
        told = False
        while not self.is_up_to_date.wait(0.05):
            limit = min(seconds, seconds_if_asked) if is_asked() else seconds
            if time.monotonic() - began > limit or self.failures >= LAST_ATTEMPTS:
                reason = self.problem or f"not done within {clock(limit)}"
                self.news.put(
                    f"Warning: the newest state is not in {self.dir} ({reason}); it is whole in {self.run_dir}. "
                    "Once that is put right, the same command copies it."
                )
                return
            if not told and time.monotonic() - began > 1.0:
                told = True
                self.news.put(f"Waiting for the copy to {self.dir}, at most {clock(limit)} ...")

    def close(self) -> None:
        """End the thread; the mirror is free for others."""
        if self.thread is None:
            return
        self.closed = True
        self.asked.set()
        self.thread.join(5.0)
        with contextlib.suppress(OSError, CheckpointError):
            if not self.thread.is_alive() and self.marker().get("run_id") == self.run_id:
                write_json(self.dir / MARKER, {"run_id": self.run_id})
        self.thread = None


def seen(marker: dict[str, Any]) -> float:
    value = marker.get("seen")
    return float(value) if isinstance(value, int | float) else 0.0


def is_dead(holder: dict[str, Any]) -> bool:
    """Whether a process of this machine is known to have ended. What another machine runs cannot be known."""
    if holder.get("machine") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return holder["pid"] == os.getpid()


def copy_checkpoint(folder: Path, target: Path, between: Callable[[], None] = lambda: None) -> str | None:
    """Copy a whole checkpoint to `target` (on Drive, say) and check the copy.

    Returns None, or the reason why it could not be copied. `folder` may be replaced or pruned meanwhile. `between` is
    called between two pieces of a file, and may raise to give the copy up.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    try:
        with contextlib.ExitStack() as stack:
            with PUBLISHING:  # an open file stays what it is when its folder makes way
                sources = {path.name: stack.enter_context(open(path, "rb")) for path in folder.iterdir()}
            discard(temporary, truncate=True)
            target.parent.mkdir(exist_ok=True)  # not its parents, which are gone if the disk was unmounted
            temporary.mkdir()
            for name, source in sources.items():
                copy_file(source, temporary / name, between)
        problems = problems_of(temporary)
        if problems:
            raise OSError("; ".join(problems))
        publish(temporary, target, truncate=True)
    except OSError as problem:
        discard(temporary, truncate=True)
        return problem.strerror or str(problem)
    return None


def copy_file(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
    with open(target, "wb") as file:
        while piece := source.read(COPIED_AT_ONCE):
            between()
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
