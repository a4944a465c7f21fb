"""The mirror of a run, below `--checkpoint_dir` (on Drive, say): a thread keeps copies of its checkpoints there.

    drive/book/step_00001000-1f0c9a3b/    a copy that the session 1f0c9a3b made; run/ in it has the records of the run
    drive/book/best_00000900-1f0c9a3b/    a copy of best/

Machines that share a mirror need not know of each other: a session adds copies, which never change, and deletes only
those that are older than the newest two. So one that sleeps, wakes up or runs twice never takes one away that somebody
needs.

The training neither waits for the mirror nor fails with it: if the Drive is full, read-only, slow or gone, the mirror
says so and retries.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.checkpoint import BEST, entry_of, listed_files, step_of
from common.errors import CheckpointError, ConfigError
from common.files import OF_RUN, read_json, write_json
from common.output import duration, log
from training.records import RECORDS
from training.stop import Stop
from training.store import MARKER, Store, is_better, read_best_state

COPIES = 4  # checkpoints in a mirror at its peak: two, the best weights, and one that is being made
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts
COPY_SECONDS = 600.0  # to wait for the last copy
COPY_SECONDS_IF_STOPPED = 60.0  # likewise, once somebody has pressed stop
LAST_ATTEMPTS_SECONDS = 30.0  # of failures, after the training has ended
LAST_CALL_SECONDS = 5.0  # to wait for the thread, when the mirror is closed
ABANDONED_SECONDS = 86_400.0  # age of an unfinished copy that no other machine is still making


class Overtaken(CheckpointError):
    """Another session has copied a newer state of this run."""


class OfAnotherRun(CheckpointError):
    """The mirror holds the copies of another run by now."""


class MirrorStore(Store):
    """The folder that the copies of a run go to, one beside those of other sessions."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.steps_dir = folder
        self.session = uuid.uuid4().hex[:8]
        self.run_id = ""  # the run that copies into this folder

    def bests(self) -> list[Path]:
        return sorted(self.dir.glob(f"{BEST}_*"))

    def records(self, name: str) -> list[Path]:
        paths = [copy / OF_RUN / name for copy in self.steps()]
        return [path for path in paths if path.is_file() and is_listed(path)]

    def path_of(self, name: str) -> Path:
        return self.dir / f"{name}-{self.session}"

    def copies_of(self, name: str) -> list[Path]:
        return [*self.dir.glob(f"{name}-*")]

    def copy(self, source: Path, name: str, records: Iterable[Path] = ()) -> bool:
        """Copy as a `Store` does. Raises OfAnotherRun if another run has begun to use the folder meanwhile."""
        is_copied = super().copy(source, name, records)
        if is_copied:
            try:
                self.require_marker()
            except OfAnotherRun:
                self.delete(self.path_of(name))
                raise
        return is_copied

    def take_best(self, source: Path) -> None:
        """Copy best weights, unless there are better ones here. Then delete those here that are worse. Raises
        OSError."""
        theirs, ours = read_best_state(source), {path: read_best_state(path) for path in self.bests()}
        if theirs is None or any(state is not None and is_better(state, theirs) for state in ours.values()):
            return
        name = f"{BEST}_{theirs.step:08d}"
        self.copy(source, name)
        if not any(read_best_state(path) == theirs for path in self.copies_of(name)):
            return  # best/ changed just before it was copied
        for path, state in ours.items():
            is_misnamed = state == theirs and not path.name.startswith(name)
            if state is not None and (is_misnamed or is_better(theirs, state)):
                self.delete(path)

    def remove(self, folder: Path) -> None:
        empty_files(folder)
        super().remove(folder)

    def clean_up(self) -> None:
        """Delete what sessions left that were killed, and nothing that another machine may be copying now."""
        for path in [*self.dir.glob(".old-*"), *self.dir.glob(".tmp-*")]:
            with contextlib.suppress(OSError):
                if path.name.startswith(".old-") or time.time() - path.lstat().st_mtime > ABANDONED_SECONDS:
                    self.delete(path)

    def marker(self) -> dict[str, Any]:
        """Read `run.json`; {} if there is none, or none that can be read."""
        try:
            return read_json(self.dir / MARKER, CheckpointError)
        except CheckpointError:
            return {}

    def require_marker(self) -> None:
        """Raise OfAnotherRun if a mirror was begun by another run meanwhile."""
        if self.marker().get("run_id") not in (None, self.run_id):
            raise OfAnotherRun(f"{self.dir} holds the copies of another run by now.")


class Mirror:
    """Where the copies of a run folder go, and the thread that makes them.

    There is at most one request to copy: the checkpoint that is the newest then, and the best weights. A newer request
    replaces the one before.
    """

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.source = Store(run_dir)
        self.root = Path(checkpoint_dir).expanduser()
        self.dir = self.root / os.path.basename(os.path.abspath(run_dir))
        self.store = MirrorStore(self.dir)
        self.newest: Path | None = None  # the checkpoint to copy
        self.known: set[str] = set()  # copies that were there at the start: the newest whole one is continued from
        self.thread: threading.Thread | None = None
        self.woken = threading.Event()
        self.request = threading.Event()  # set once everything that was new at the last `wake` is copied
        self.closed = False
        self.is_clean = False
        self.copy_seconds: float | None = None  # of the last checkpoint that was copied
        self.copied_at: float | None = None  # time.monotonic() at which the newest copy was begun
        self.failing_since: float | None = None  # time.monotonic() at which this request failed first
        self.problem: str | None = None  # the reason why the last attempt failed
        self.overtaken: Overtaken | None = None  # this session has stopped copying

    # Before the training

    def require_usable(self) -> None:
        """Raise ConfigError if there is no folder to make `checkpoint_dir` in, if the mirror would be the run folder
        itself, or if this run's copies are gone: an unmounted disk leaves an empty folder behind, and copies in it
        would lie on the local disk."""
        if not self.root.parent.is_dir():
            raise ConfigError(
                f"--checkpoint_dir is {self.root}, and there is no folder {self.root.parent}. Mount the Drive first "
                f'(in Colab: from google.colab import drive; drive.mount("/content/drive")), or make the folder: '
                f"mkdir -p {self.root.parent}"
            )
        if self.dir.resolve() == self.source.dir.resolve():
            raise ConfigError(
                f"The copies below --checkpoint_dir {self.root} would lie in the run folder itself, {self.source.dir}: "
                f"name another --checkpoint_dir, on another disk, or leave it out."
            )
        if self.are_gone:
            raise ConfigError(
                f"The copies of this run are gone from {self.dir}: there is no {MARKER} in it. Is the disk of "
                f"--checkpoint_dir {self.root} unmounted? Mount it again. If you deleted the copies, delete "
                f"{self.source.dir / MARKER} too, and the run makes new ones."
            )

    @property
    def are_gone(self) -> bool:
        """Whether the run folder says that this mirror was in use, and there is none."""
        try:
            was = read_json(self.source.dir / MARKER, ConfigError).get("copies")
        except (ConfigError, OSError):  # there were none
            return False
        return was == os.path.abspath(self.dir) and not (self.dir / MARKER).exists()

    def require_of(self, run_id: str | None) -> None:
        """Raise CheckpointError if the copies are of another run. `run_id`: of the newest checkpoint in the run folder.
        Without one, the run folder was lost with its machine, or this is a new run: then its name decides."""
        theirs = self.store.marker()
        spelled = str(theirs.get("output_dir"))  # relative to a working directory that may be another one
        is_other = bool(theirs) and os.path.normpath(spelled) != os.path.normpath(self.source.dir)
        if run_id is not None:
            is_other = theirs.get("run_id") not in (None, run_id)
        if is_other:
            raise CheckpointError(
                f"{self.dir} holds the copies of another run (--output_dir {spelled}), not of {self.source.dir}. Give "
                f"this one a --checkpoint_dir or an --output_dir of its own; to continue the other, train --output_dir "
                f"{spelled}, without this run in it."
            )

    # The thread

    def begin(self, run_id: str) -> None:
        """Start the thread."""
        self.store.run_id = run_id
        self.thread = threading.Thread(target=self.work, name="mirror", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Request a copy of what is new now. Returns at once."""
        self.newest = next(iter(self.source.steps()), None)
        self.request, self.failing_since = threading.Event(), None
        self.woken.set()

    def work(self) -> None:
        """Copy what is new, until the mirror is closed or another session has gone ahead; the thread runs this. A copy
        that fails is retried after as long as it has failed so far, so the pause doubles from one attempt to the next.
        A new request is tried at once."""
        while not self.closed and self.overtaken is None:
            since, pause = self.failing_since, None
            if since is not None:
                pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, time.monotonic() - since))
            self.woken.wait(pause)
            self.woken.clear()
            if not self.closed and not self.request.is_set():
                self.try_to_copy(self.request)

    def try_to_copy(self, request: threading.Event) -> None:
        try:
            self.bring_up_to_date()
        except Overtaken as error:
            self.overtaken = error
        except OfAnotherRun as error:
            log.info(
                f"Warning: {error} This one goes on without copies; it is saved in {self.source.dir}. Stop it and give "
                f"it another --checkpoint_dir to have copies."
            )
            self.closed, self.problem = True, "of another run"
            request.set()
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if reason != self.problem:
                log.info(
                    f"Warning: copying to {self.dir} failed ({reason}). The training goes on, and the copy is tried "
                    f"again."
                )
            self.problem = reason
            if self.failing_since is None and request is self.request:  # else there is more to copy than was tried
                self.failing_since = time.monotonic()
        else:
            self.problem = self.failing_since = None
            request.set()

    def bring_up_to_date(self) -> None:
        """Copy what is new in the run folder. Raises Overtaken and OfAnotherRun at once, and other errors after
        everything has been tried: a damaged best/ must not keep the checkpoints from being copied."""
        self.write_marker()
        if not self.is_clean:
            write_json(self.source.dir / MARKER, {"copies": os.path.abspath(self.dir)})
            self.store.clean_up()
            self.is_clean = True
        # The step was chosen before, and the best weights are copied first: they are those of that step, or newer.
        newest = self.newest
        problem: OSError | None = None
        try:
            self.store.take_best(self.source.dir / BEST)
        except OSError as error:
            problem = error
        if newest is not None:
            self.require_ahead(newest)
            self.copy_step(newest)
        if problem is not None:
            raise problem

    def write_marker(self) -> None:
        """Name this run in `run.json`, if the mirror has no copies yet. Raises CheckpointError if the mirror is gone,
        OfAnotherRun if it is another run's, OSError if it cannot be written."""
        if self.are_gone:
            raise CheckpointError(f"{self.dir / MARKER} is gone: was the disk unmounted?")
        self.root.mkdir(exist_ok=True)  # not its parents: they are gone if the disk was unmounted
        self.dir.mkdir(exist_ok=True)
        named, run_id = self.store.marker().get("run_id"), self.store.run_id
        if named is None or (named != run_id and not self.store.steps()):  # a kill may have cut it off
            write_json(self.dir / MARKER, {"run_id": run_id, "output_dir": str(self.source.dir)})
        self.store.require_marker()

    def require_ahead(self, newest: Path) -> None:
        """Raise Overtaken if another session has copied a later step than `newest`, the last that this one saved."""
        for copy in self.store.steps():
            is_new = copy.name not in self.known and not copy.name.endswith(self.store.session)
            if is_new and step_of(copy) > step_of(newest):
                raise Overtaken(
                    f"Another session has trained this run further: {copy}. This one is saved in {self.source.dir}, at "
                    f"step {step_of(newest):,}, and stops. The same command continues from the newest of both; to "
                    f"train a second run, choose another --output_dir."
                )

    def copy_step(self, newest: Path) -> None:
        """Copy the newest checkpoint with the records of the run; then delete those that are older than the newest
        two."""
        began = time.monotonic()
        if self.store.copy(newest, newest.name, [self.source.dir / name for name in RECORDS]):
            self.copied_at, self.copy_seconds = began, time.monotonic() - began
            log.info(f"Copied {newest.name} to {self.dir}")
        self.store.delete_older(step_of(newest))

    def status(self) -> str:
        """Return how old the newest copy of this session is, for the progress line."""
        age = "no copy yet" if self.copied_at is None else f"copy {duration(time.monotonic() - self.copied_at)} old"
        return f"{age} ({self.problem})" if self.problem else age

    def finish(self, stop: Stop | None = None) -> None:
        """Request a last copy and wait for it: COPY_SECONDS at most, fewer once somebody has pressed stop, or until it
        has failed for LAST_ATTEMPTS_SECONDS."""
        self.wake()
        began, patience = time.monotonic(), 1.0
        while not self.request.wait(patience) and self.overtaken is None and not self.closed:
            limit = COPY_SECONDS_IF_STOPPED if stop is not None and stop.requested else COPY_SECONDS
            if patience == 1.0:
                log.info(f"Waiting for the copy to {self.dir}, at most {duration(limit)} ...")
            patience, now, failing_since = 0.02, time.monotonic(), self.failing_since
            if now - began > limit or (failing_since is not None and now - failing_since > LAST_ATTEMPTS_SECONDS):
                log.info(
                    f"Warning: the copies in {self.dir} are not up to date "
                    f"({self.problem or f'not done within {duration(limit)}'}). Nothing is missing in "
                    f"{self.source.dir}. Once the problem is solved, the same command makes the copies."
                )
                return

    def close(self) -> None:
        """End the thread. One that still copies, or hangs in a call to the Drive, ends with the process."""
        self.closed = True
        self.woken.set()
        if self.thread is not None:
            self.thread.join(LAST_CALL_SECONDS)


def empty_files(folder: Path) -> None:
    """Empty the plain files that no backup holds, too: what is in a Drive's bin counts against the quota."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                os.truncate(path, 0)


def is_listed(record: Path) -> bool:
    """Return whether the manifest of its copy lists this record as it is."""
    with contextlib.suppress(CheckpointError, OSError):
        return listed_files(record.parents[1]).get(f"{OF_RUN}/{record.name}") == entry_of(record)
    return False
