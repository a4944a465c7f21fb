"""The mirror of a run, below `--checkpoint_dir` (on Drive, say): copies of its checkpoints that never change.

    run.json                    which run they are of
    step_00001000-1f0c9a3b/     a checkpoint, and in run/ the records of the run; 1f0c9a3b is the session that made it
    .tmp-step_00001000-1f0c9a3b/    that is being copied
    .old-5e8d1c02/              that is being deleted
    best_00000900-1f0c9a3b/     the best weights

A copy gets its name when it is complete, and is then verified. Its manifest lists all of its files. The newest whole
one is continued from. A session deletes only copies that are older than the newest two, so machines that share a mirror
need not know of each other: one that sleeps, wakes up or runs twice can add a copy, and never takes one away that
somebody needs. It empties only plain files that nothing else holds, and follows no link.

A thread makes the copies. The training neither waits for it nor fails with it: if the Drive is full, read-only, slow or
gone, the mirror says so and retries.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.checkpoint import (
    BEST,
    KEEP,
    Checkpoint,
    Entry,
    entry_of,
    listed_files,
    problems_of,
    step_folders,
    step_of,
    write_manifest,
)
from common.errors import CheckpointError, ConfigError
from common.files import OF_RUN, read_json, write_json
from common.output import clock, log
from training.records import RECORDS
from training.signals import Signals
from training.state import TrainState, read_state

MARKER = "run.json"  # in a mirror: which run it is of; in a run folder: where its mirror is
COPIES = 4  # at the most, in checkpoints: two, the best weights, and one that is being made
PIECE_BYTES = 4 << 20  # copied at a time
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts
COPY_SECONDS = 600.0  # to wait for the last copy
COPY_SECONDS_IF_STOPPED = 60.0  # likewise, once somebody has pressed stop
LAST_ATTEMPTS_SECONDS = 30.0  # of failures, after the training has ended
LAST_CALL_SECONDS = 5.0  # to wait for the thread, when the mirror is closed
ABANDONED_SECONDS = 86_400.0  # since a session of another machine has begun a copy that is not finished


class Overtaken(CheckpointError):
    """Another session has copied a newer state of this run."""


class OfAnotherRun(CheckpointError):
    """The mirror holds the copies of another run by now."""


class Mirror:
    """Where the copies of a run folder go, and the thread that makes them.

    There is at most one request to copy. It asks for whatever is new when the thread gets to it, so a newer request
    replaces the one before.
    """

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.run_dir = run_dir
        self.root = Path(checkpoint_dir).expanduser()
        self.dir = self.root / os.path.basename(os.path.abspath(run_dir))
        self.session = uuid.uuid4().hex[:8]
        self.run_id = ""  # not known before the run is started or continued
        self.known: set[str] = set()  # copies that were there at the start: the newest whole one is continued from
        self.verified: set[Path] = set()  # copies that this session has found whole
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

    def marker(self) -> dict[str, Any]:
        """Read `run.json`; {} if there is none, or none that can be read."""
        try:
            return read_json(self.dir / MARKER, CheckpointError)
        except CheckpointError:
            return {}

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
        if self.dir.resolve() == self.run_dir.resolve():
            raise ConfigError(
                f"The copies below --checkpoint_dir {self.root} would lie in the run folder itself, {self.run_dir}: "
                f"name another --checkpoint_dir, on another disk, or leave it out."
            )
        if self.are_gone:
            raise ConfigError(
                f"The copies of this run are gone from {self.dir}: there is no {MARKER} in it. Is the disk of "
                f"--checkpoint_dir {self.root} unmounted? Mount it again. If you deleted the copies, delete "
                f"{self.run_dir / MARKER} too, and the run makes new ones."
            )

    @property
    def are_gone(self) -> bool:
        """Whether the run folder says that this mirror was in use, and there is none."""
        try:
            was = read_json(self.run_dir / MARKER, ConfigError).get("copies")
        except (ConfigError, OSError):  # there were none
            return False
        return was == os.path.abspath(self.dir) and not (self.dir / MARKER).exists()

    def best_copies(self) -> list[Path]:
        return sorted(self.dir.glob(f"{BEST}_*"))

    def records(self, name: str) -> list[Path]:
        """Return the whole ones among the records of this name, newest first."""
        paths = [copy / OF_RUN / name for copy in step_folders(self.dir)]
        return [path for path in paths if path.is_file() and is_listed(path)]

    def begin(self, run_id: str) -> None:
        """Start the thread. Its first request makes up for what an earlier session could not copy."""
        self.run_id = run_id
        self.thread = threading.Thread(target=self.work, name="mirror", daemon=True)
        self.thread.start()
        self.wake()

    def wake(self) -> None:
        """Request a copy of what is new. Returns at once."""
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
                self.attempt(self.request)

    def attempt(self, request: threading.Event) -> None:
        try:
            self.bring_up_to_date()
        except Overtaken as error:
            self.overtaken = error
        except OfAnotherRun as error:
            log.info(f"Warning: {error}")
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
            self.clean_up()
        # The step is chosen first, and the best weights are copied first: they are those of that step, or newer.
        newest = next(iter(step_folders(self.run_dir / "checkpoints")), None)
        problem: OSError | None = None
        try:
            self.copy_best()
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
        named = self.marker().get("run_id")
        if named is None or (named != self.run_id and not step_folders(self.dir)):  # a kill may have cut it off
            write_json(self.dir / MARKER, {"run_id": self.run_id, "output_dir": str(self.run_dir)})
        self.require_marker()

    def require_marker(self) -> None:
        if self.marker().get("run_id") not in (None, self.run_id):
            raise OfAnotherRun(
                f"{self.dir} holds the copies of another run by now. This one goes on without copies; it is saved in "
                f"{self.run_dir}. Stop it and give it another --checkpoint_dir to have copies."
            )

    def clean_up(self) -> None:
        """Delete what sessions left that were killed, but no copy that another machine may be making right now."""
        write_json(self.run_dir / MARKER, {"copies": os.path.abspath(self.dir)})
        for leftover in [*self.dir.glob(".old-*"), *self.dir.glob(".tmp-*")]:
            with contextlib.suppress(FileNotFoundError):
                age = time.time() - leftover.lstat().st_mtime
                if leftover.name.startswith(".old-") or age > ABANDONED_SECONDS:
                    delete_copy(leftover)
        self.is_clean = True

    def require_ahead(self, newest: Path) -> None:
        """Raise Overtaken if another session has copied a later step than `newest`, the last that this one saved."""
        for copy in step_folders(self.dir):
            is_new = copy.name not in self.known and not copy.name.endswith(self.session)
            if is_new and step_of(copy) > step_of(newest):
                raise Overtaken(
                    f"Another session has trained this run further: {copy}. This one is saved in {self.run_dir}, at "
                    f"step {step_of(newest):,}, and stops. The same command continues from the newest of both; to "
                    f"train a second run, choose another --output_dir."
                )

    def copy_step(self, newest: Path) -> None:
        """Copy the newest checkpoint with the records of the run. Then delete old copies: those that are older than the
        newest two, up to this step."""
        began = time.monotonic()
        if self.copy(newest, newest.name):
            self.copied_at, self.copy_seconds = began, time.monotonic() - began
            log.info(f"Copied {newest.name} to {self.dir}")
        passed = [copy for copy in step_folders(self.dir) if step_of(copy) <= step_of(newest)]
        for copy in passed[KEEP:]:
            delete_copy(copy)

    def copy_best(self) -> None:
        """Copy the best weights, unless there are better ones. Then delete those that are worse."""
        best = self.run_dir / BEST
        ours = read_best_state(best)
        others = {copy: read_best_state(copy) for copy in self.best_copies()}
        if ours is None or any(theirs is not None and is_better(theirs, ours) for theirs in others.values()):
            return
        name = f"{BEST}_{ours.step:08d}"
        self.copy(best, name)
        for copy, theirs in others.items():
            is_misnamed = theirs == ours and not copy.name.startswith(name)  # best/ changed just before it was copied
            if theirs is not None and (is_misnamed or is_better(ours, theirs)):
                delete_copy(copy)

    def copy(self, source: Path, name: str) -> bool:
        """Copy a checkpoint, give the copy its name and verify it. Returns False if there is a whole one already, or if
        the checkpoint makes way for a newer one in this moment. Raises OSError, or OfAnotherRun."""
        temporary, target = self.dir / f".tmp-{name}-{self.session}", self.dir / f"{name}-{self.session}"
        files = files_of(source)
        if not source.exists() or any(self.is_copy(copy, files) for copy in self.dir.glob(f"{name}-*")):
            return False
        try:
            if problems := problems_of(source):
                raise OSError(f"{source} is damaged: {'; '.join(problems)}")
            delete_copy(temporary)
            copy_files((source / name for name in files), temporary)
            records = [path for name in RECORDS if (path := self.run_dir / name).is_file() and source.name != BEST]
            if records:
                copy_files(records, temporary / OF_RUN)
            recorded = {f"{OF_RUN}/{path.name}": entry_of(temporary / OF_RUN / path.name) for path in records}
            write_manifest(temporary, files | recorded)
            delete_copy(target)  # a damaged one
            os.replace(temporary, target)
            self.require_marker()
            if problems := problems_of(target):
                raise OSError(f"the copy of {source.name} is damaged: {'; '.join(problems)}")
        except (OSError, OfAnotherRun) as error:
            delete_copy(target)
            if isinstance(error, OfAnotherRun) or files_of(source) == files:
                raise
            return False
        finally:
            delete_copy(temporary)
        self.verified.add(target)
        return True

    def is_copy(self, copy: Path, files: dict[str, Entry]) -> bool:
        """Return whether it is a whole copy of these files."""
        is_whole = files.items() <= files_of(copy).items() and (copy in self.verified or not problems_of(copy))
        if is_whole:
            self.verified.add(copy)
        return is_whole

    def status(self) -> str:
        """Return how old the newest copy of this session is, for the progress line."""
        age = "no copy yet" if self.copied_at is None else f"copy {clock(time.monotonic() - self.copied_at)} old"
        return f"{age} ({self.problem})" if self.problem else age

    def finish(self, stop: Signals | None = None) -> None:
        """Request a last copy and wait for it: COPY_SECONDS at most, fewer once somebody has pressed stop, or until it
        has failed for LAST_ATTEMPTS_SECONDS."""
        self.wake()
        began, patience = time.monotonic(), 1.0
        while not self.request.wait(patience) and self.overtaken is None and not self.closed:
            limit = COPY_SECONDS_IF_STOPPED if stop is not None and stop.requested else COPY_SECONDS
            if patience == 1.0:
                log.info(f"Waiting for the copy to {self.dir}, at most {clock(limit)} ...")
            patience, now, failing_since = 0.02, time.monotonic(), self.failing_since
            if now - began > limit or (failing_since is not None and now - failing_since > LAST_ATTEMPTS_SECONDS):
                log.info(
                    f"Warning: the copies in {self.dir} are not up to date "
                    f"({self.problem or f'not done within {clock(limit)}'}). Nothing is missing in {self.run_dir}. "
                    f"Once the problem is solved, the same command makes the copies."
                )
                return

    def close(self) -> None:
        """End the thread. One that still copies, or hangs in a call to the Drive, ends with the process."""
        self.closed = True
        self.woken.set()
        if self.thread is not None:
            self.thread.join(LAST_CALL_SECONDS)


def delete_copy(folder: Path) -> None:
    """Delete a copy, or a part of one. It is renamed first, so nobody completes or finds it any more. Its files are
    emptied, because what is in a Drive's bin counts against the quota: plain files that no backup holds, too. A link is
    removed, never followed. Errors are ignored: what stays costs only space."""
    going = folder.with_name(f".old-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        os.replace(folder, going)
        if going.is_symlink():
            going.unlink()
        for parent, _, names in os.walk(going):
            for path in (Path(parent, name) for name in names):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    os.truncate(path, 0)
        shutil.rmtree(going)


def files_of(checkpoint: Path) -> dict[str, Entry]:
    """Return the files that its manifest lists; if none can be read, a name that no file has."""
    try:
        return listed_files(checkpoint)
    except (CheckpointError, OSError):
        return {"": Entry(0, "")}


def is_listed(record: Path) -> bool:
    """Return whether the manifest of its copy lists this record as it is."""
    return files_of(record.parents[1]).get(f"{OF_RUN}/{record.name}") == entry_of(record)


def copy_files(paths: Iterable[Path], target: Path) -> None:
    """Copy files into a new folder `target`."""
    with contextlib.ExitStack() as stack:
        # An open file can be read to its end, even if its folder is deleted.
        sources = {path.name: stack.enter_context(open(path, "rb")) for path in paths}
        target.mkdir()
        for name, source in sources.items():
            with open(target / name, "wb") as file:
                shutil.copyfileobj(source, file, PIECE_BYTES)
                file.flush()
                os.fsync(file.fileno())


def read_best_state(best: Path) -> TrainState | None:
    """Read the state saved with these best weights; None if that fails."""
    try:
        return read_state(Checkpoint(best)).state
    except (CheckpointError, OSError):
        return None


def is_better(one: TrainState, other: TrainState) -> bool:
    """Return whether best weights have the lower loss, or are of a later step if the losses are over other windows."""
    if one.best_val_loss is not None and other.best_val_loss is not None and one.best_windows == other.best_windows:
        return one.best_val_loss < other.best_val_loss
    return one.step > other.step
