"""Copy the checkpoints of a run to a mirror below `--checkpoint_dir` (Google Drive, for instance), in a thread.

    drive/book/step_00001000-1f0c9a3b/    a copy made by session 1f0c9a3b; run/ in it holds the records of the run
    drive/book/best_00000900-1f0c9a3b/    a copy of best/
    drive/book/base-1f0c9a3b/             a copy of base/, in a run with a companion

Machines that share a mirror need not know of each other: a session adds copies, which never change, and deletes only
those older than the newest two. So a session that sleeps, wakes up or runs twice never deletes a copy that is needed.

Training neither waits for the mirror nor fails with it. If the Drive is full, read-only, slow or gone, the mirror warns
and retries.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.checkpoint import BASE, BEST, make_entry, read_manifest, step_of
from common.errors import CheckpointError, ConfigError
from common.files import RECORDS_FOLDER, read_json, sync_directory, write_json
from common.output import duration, log
from training.records import RECORDS
from training.stop import Stop
from training.store import RUN_MARKER, Store, is_better, lacks_summary, read_best_state

MAX_COPIES = 4  # two checkpoints, the best weights, and the one being written
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0  # pause between two attempts
LAST_COPY_SECONDS = 600.0  # timeout for the last copy
LAST_COPY_SECONDS_IF_STOPPED = 60.0  # timeout once the user has pressed stop
LAST_RETRY_SECONDS = 30.0  # give up on the last copy after failing this long
THREAD_JOIN_SECONDS = 5.0
ABANDONED_COPY_SECONDS = 86_400.0  # no other machine is still writing an older unfinished copy


class OvertakenError(CheckpointError):
    """Another session has copied a newer state of this run."""


class OtherRunError(CheckpointError):
    """The mirror now holds the copies of another run."""


class MirrorStore(Store):
    """The mirror folder of a run, which also has the copies of other sessions."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.steps_dir = folder
        self.session = uuid.uuid4().hex[:8]
        self.run_id = ""  # the run that is copied here

    def best_copies(self) -> list[Path]:
        return sorted(self.dir.glob(f"{BEST}_*"))

    def records(self, name: str) -> list[Path]:
        paths = [copy / RECORDS_FOLDER / name for copy in self.steps()]
        return [path for path in paths if path.is_file() and _matches_manifest(path)]

    def path_of(self, name: str) -> Path:
        return self.dir / f"{name}-{self.session}"

    def copies_of(self, name: str) -> list[Path]:
        return [*self.dir.glob(f"{name}-*")]

    def copy(self, source: Path, name: str, records: Sequence[Path] = ()) -> bool:
        """Copy as a `Store` does. Raises OtherRunError if another run has begun to use the folder meanwhile."""
        is_copied = super().copy(source, name, records)
        if is_copied:
            try:
                self.require_marker()
            except OtherRunError:
                self.delete(self.path_of(name))
                raise
            for copy in self.copies_of(name):
                if lacks_summary([copy], records):
                    self.delete(copy)
        return is_copied

    def copy_best(self, source: Path) -> None:
        """Copy best weights, unless the ones here are better. Then delete worse ones here. Raises OSError."""
        new, existing = read_best_state(source), {path: read_best_state(path) for path in self.best_copies()}
        if new is None or any(state is not None and is_better(state, new) for state in existing.values()):
            return
        name = f"{BEST}_{new.step:08d}"
        self.copy(source, name)
        if not any(read_best_state(path) == new for path in self.copies_of(name)):
            return  # best/ changed before it was copied
        for path, state in existing.items():
            is_misnamed = state == new and not path.name.startswith(name)
            if state is not None and (is_misnamed or is_better(new, state)):
                self.delete(path)

    def remove(self, folder: Path) -> None:
        _empty_files(folder)
        super().remove(folder)

    def clean_up(self) -> None:
        """Delete leftovers of killed sessions, but nothing that another machine may be copying now."""
        for path in [*self.dir.glob(".old-*"), *self.dir.glob(".tmp-*")]:
            with contextlib.suppress(OSError):
                if path.name.startswith(".old-") or time.time() - path.lstat().st_mtime > ABANDONED_COPY_SECONDS:
                    self.delete(path)

    def marker(self) -> dict[str, Any]:
        """Read `run.json`; {} if it is missing or unreadable."""
        try:
            return read_json(self.dir / RUN_MARKER, CheckpointError)
        except CheckpointError:
            return {}

    def require_marker(self) -> None:
        """Raise OtherRunError if another run has taken over the mirror."""
        if self.marker().get("run_id") not in (None, self.run_id):
            raise OtherRunError(f"{self.dir} now holds the copies of another run.")


class Mirror:
    """The copies of a run folder, and the thread that makes them.

    There is at most one request to copy: the newest checkpoint at that time, and the best weights. A newer request
    replaces it.
    """

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.source = Store(run_dir)
        self.root = Path(checkpoint_dir).expanduser()
        self.dir = self.root / os.path.basename(os.path.abspath(run_dir))
        self.store = MirrorStore(self.dir)
        self.newest: Path | None = None  # the checkpoint to copy
        self.initial_copies: set[str] = set()  # names of the copies that existed at the start
        self.thread: threading.Thread | None = None
        self.woken = threading.Event()
        self.request = threading.Event()  # set once the last request is copied
        self.closed = False
        self.has_cleaned_up = False
        self.last_copy_seconds: float | None = None
        self.copied_at: float | None = None  # time.monotonic() at the start of the newest copy
        self.failing_since: float | None = None  # time.monotonic() of the first failure of this request
        self.problem: str | None = None  # why the last attempt failed
        self.overtaken: OvertakenError | None = None  # set when another session is ahead; copying has stopped then

    # Checks before the training

    def require_usable(self) -> None:
        """Raise ConfigError if the parent of `checkpoint_dir` is missing, if the mirror would be the run folder itself,
        or if this run's copies are gone: an unmounted disk leaves an empty folder, which is on the local disk."""
        if not self.root.parent.is_dir():
            raise ConfigError(
                f"--checkpoint_dir is {self.root}, and {self.root.parent} does not exist. Mount the Drive first (in "
                'Colab: from google.colab import drive; drive.mount("/content/drive")), or create the folder: '
                f"mkdir -p {self.root.parent}"
            )
        if self.dir.resolve() == self.source.dir.resolve():
            raise ConfigError(
                f"With --checkpoint_dir {self.root} the copies would go into the run folder itself, {self.source.dir}. "
                "Choose a --checkpoint_dir on another disk, or leave it out."
            )
        if self.copies_are_gone:
            raise ConfigError(
                f"The copies of this run are gone from {self.dir}: it has no {RUN_MARKER}. If the disk of "
                f"--checkpoint_dir {self.root} is unmounted, mount it again. If you deleted the copies, delete "
                f"{self.source.dir / RUN_MARKER} too, and the run makes new ones."
            )

    @property
    def copies_are_gone(self) -> bool:
        """Whether the mirror was in use before and does not exist now."""
        try:
            was = read_json(self.source.dir / RUN_MARKER, ConfigError).get("copies")
        except (ConfigError, OSError):  # the run had no mirror
            return False
        return was == os.path.abspath(self.dir) and not (self.dir / RUN_MARKER).exists()

    def require_same_run(self, run_id: str | None) -> None:
        """Raise CheckpointError if the copies belong to another run. `run_id` is that of the newest checkpoint in the
        run folder. If there is none, the run is new or its folder was lost, and the name of the folder decides."""
        marker = self.store.marker()
        spelled = str(marker.get("output_dir"))  # may be relative to another working directory
        is_other = bool(marker) and os.path.normpath(spelled) != os.path.normpath(self.source.dir)
        if run_id is not None:
            is_other = marker.get("run_id") not in (None, run_id)
        if is_other:
            other = f"--output_dir {spelled}"
            if os.path.normpath(spelled) == os.path.normpath(self.source.dir):
                other = f"also in {spelled}, but begun at another time or on another machine"
            raise CheckpointError(
                f"{self.dir} holds the copies of another run ({other}), not of the one in {self.source.dir}. "
                "Choose another --checkpoint_dir or --output_dir for this run. To continue the other one, move this "
                f"run away and use --output_dir {spelled}."
            )

    # The thread

    def start(self, run_id: str) -> None:
        """Start the thread."""
        self.store.run_id = run_id
        self.thread = threading.Thread(target=self.copy_until_closed, name="mirror", daemon=True)
        self.thread.start()

    def request_copy(self) -> None:
        """Request a copy of the newest checkpoint and the best weights. Returns at once."""
        self.newest = next(iter(self.source.steps()), None)
        self.request, self.failing_since = threading.Event(), None
        self.woken.set()

    def copy_until_closed(self) -> None:
        """Copy on request until the mirror is closed or another session is ahead; the thread runs this. The pause after
        a failure is as long as the copy has failed so far, so it doubles. A new request is tried at once."""
        while not self.closed and self.overtaken is None:
            since, pause = self.failing_since, None
            if since is not None:
                pause = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, time.monotonic() - since))
            self.woken.wait(pause)
            self.woken.clear()
            if not self.closed and not self.request.is_set():
                self.try_to_copy(self.request)

    def try_to_copy(self, request: threading.Event) -> None:
        try:
            self.copy_new()
        except OvertakenError as error:
            self.overtaken = error
        except OtherRunError as error:
            log.info(
                f"Warning: {error} This run continues without copies, and is saved in {self.source.dir}. For copies, "
                "stop it and choose another --checkpoint_dir."
            )
            self.closed, self.problem = True, "stopped: the folder now belongs to another run"
            request.set()
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if reason != self.problem:
                log.info(
                    f"Warning: copying to {self.dir} failed ({reason}). Training continues, and the copy will be "
                    "retried."
                )
            self.problem = reason
            if self.failing_since is None and request is self.request:  # a newer request has not been tried yet
                self.failing_since = time.monotonic()
        else:
            self.problem = self.failing_since = None
            request.set()

    def copy_new(self) -> None:
        """Copy new checkpoints and best weights. Raises OvertakenError and OtherRunError at once, other errors at the
        end, so that a damaged best/ does not keep checkpoints from being copied."""
        self.write_marker()
        if not self.has_cleaned_up:
            write_json(self.source.dir / RUN_MARKER, {"copies": os.path.abspath(self.dir)})
            self.store.clean_up()
            self.has_cleaned_up = True
        # `newest` was chosen before the best weights are copied, so best/ in the mirror is never older than it.
        newest = self.newest
        problem: OSError | None = None
        try:
            self.store.copy_best(self.source.dir / BEST)
            if (base := self.source.path_of(BASE)).exists():
                self.store.copy(base, BASE)
        except OSError as error:
            problem = error
        if newest is not None:
            self.require_ahead(newest)
            self.copy_step(newest)
        if problem is not None:
            raise problem

    def write_marker(self) -> None:
        """Write `run.json` with this run's id, if the mirror has no copies yet. Raises CheckpointError if the mirror is
        gone, OtherRunError if it belongs to another run, OSError if it cannot be written."""
        if self.copies_are_gone:
            raise CheckpointError(f"{self.dir / RUN_MARKER} is missing. If the disk was unmounted, mount it again")
        for folder in (self.root, self.dir):
            folder.mkdir(exist_ok=True)  # parents are not made: they are missing if the disk is unmounted
            sync_directory(folder.parent)
        marked_id, run_id = self.store.marker().get("run_id"), self.store.run_id
        # A kill may have come before the first copy.
        if marked_id is None or (marked_id != run_id and not self.store.steps()):
            write_json(self.dir / RUN_MARKER, {"run_id": run_id, "output_dir": str(self.source.dir)})
        self.store.require_marker()

    def require_ahead(self, newest: Path) -> None:
        """Raise OvertakenError if another session has copied a later step than `newest`."""
        for copy in self.store.steps():
            is_new = copy.name not in self.initial_copies and not copy.name.endswith(self.store.session)
            if is_new and step_of(copy) > step_of(newest):
                raise OvertakenError(
                    f"Another session has trained this run further: {copy}. This session stops at step "
                    f"{step_of(newest):,}, saved in {self.source.dir}. To continue from the newer "
                    "of the two, run the same command. To train a second run, choose another --output_dir."
                )

    def copy_step(self, newest: Path) -> None:
        """Copy the newest checkpoint with the records of the run. Then delete copies older than the newest two."""
        began = time.monotonic()
        if self.store.copy(newest, newest.name, [self.source.dir / name for name in RECORDS]):
            self.copied_at, self.last_copy_seconds = began, time.monotonic() - began
            log.info(f"Copied {newest.name} to {self.dir}")
        self.store.delete_older(step_of(newest))

    def status(self) -> str:
        """Return the age of this session's newest copy, for the progress line."""
        age = "no copy yet" if self.copied_at is None else f"copy {duration(time.monotonic() - self.copied_at)} old"
        return f"{age} ({self.problem})" if self.problem else age

    def finish(self, stop: Stop | None = None) -> None:
        """Request a last copy and wait for it, at most LAST_COPY_SECONDS (less once the user has pressed stop), or
        until it has failed for LAST_RETRY_SECONDS."""
        self.request_copy()
        began = time.monotonic()
        poll_seconds, has_announced = 1.0, False
        while not self.request.wait(poll_seconds) and self.overtaken is None and not self.closed:
            limit = LAST_COPY_SECONDS_IF_STOPPED if stop is not None and stop.requested else LAST_COPY_SECONDS
            if not has_announced:
                log.info(f"Waiting for the copy to {self.dir}, at most {duration(limit)} ...")
            poll_seconds, has_announced = 0.02, True
            now = time.monotonic()
            failing_since = self.failing_since  # the copying thread may change it
            if now - began > limit or (failing_since is not None and now - failing_since > LAST_RETRY_SECONDS):
                log.info(
                    f"Warning: the copies in {self.dir} are not up to date "
                    f"({self.problem or f'not done within {duration(limit)}'}). {self.source.dir} is complete. Once "
                    "the problem is solved, run the same command to copy it."
                )
                return

    def close(self) -> None:
        """End the thread. If it is still copying, or hangs in a call to the Drive, it ends with the process."""
        self.closed = True
        self.woken.set()
        if self.thread is not None:
            self.thread.join(THREAD_JOIN_SECONDS)


def _empty_files(folder: Path) -> None:
    """Empty the regular files below a folder, because files in a Drive's bin count against the quota."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                os.truncate(path, 0)


def _matches_manifest(record: Path) -> bool:
    """Return whether a record in a copy matches the copy's manifest."""
    with contextlib.suppress(CheckpointError, OSError):
        return read_manifest(record.parents[1]).get(f"{RECORDS_FOLDER}/{record.name}") == make_entry(record)
    return False
