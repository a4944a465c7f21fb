"""The mirror of a run: a second folder, on Drive for instance, with verified copies of what the run folder holds.

A worker thread makes the copies. The training neither waits for it nor fails with it: if the Drive is full, read-only,
slow or gone, the mirror says so and retries.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common.checkpoint import MANIFEST, problems_of, prune, step_folders
from common.errors import ConfigError
from common.files import PUBLISHING, atomic_write, discard, publish, read_json, write_json
from common.output import byte_size, clock, log
from training.checkpoints.interruption import Interruption
from training.checkpoints.lease import HEARTBEAT, MARKER, Lease, TakenOver
from training.reports.records import CONFIG, CURVE, METRICS, SAMPLES, SAMPLES_TABLE, SUMMARY

MIRRORED_FILES = (CONFIG, METRICS, SAMPLES, SAMPLES_TABLE, CURVE, SUMMARY)
COPIES = 5  # checkpoints in the mirror at the most: two kept, the best one, and a new one of each kind
PIECE_BYTES = 4 << 20  # copied at a time
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts
COPY_SECONDS = 600.0  # to wait for the last copy
COPY_SECONDS_IF_STOPPED = 60.0  # likewise, once somebody has pressed stop
LAST_ATTEMPTS_SECONDS = 30.0  # of failures, after the training has ended
LAST_CALL_SECONDS = 5.0  # to wait for a call to the Drive, when the mirror is closed


class GivenUp(Exception):
    """Nobody waits for this copy any more. The next session deletes what is left of it."""


class Mirror:
    """Where the copies of a run folder go, and the worker that makes them.

    There is at most one request to copy. It asks for whatever is new when the worker gets to it, so a newer request
    replaces the one before.
    """

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.run_dir = run_dir
        self.root = Path(checkpoint_dir).expanduser()
        absolute = os.path.abspath(run_dir)  # identifies the run, however its folder is spelled
        self.dir = self.root / os.path.basename(absolute)
        self.lease = Lease(self.dir, absolute)
        self.worker: threading.Thread | None = None
        self.woken = threading.Event()
        self.request = threading.Event()  # set once everything that was new at the last `wake` is copied
        self.copy_seconds: float | None = None  # of the last checkpoint that was copied
        self.failing_since: float | None = None  # time.monotonic() at which this request failed first
        self.problem: str | None = None  # the reason why the last attempt failed
        self.copied_at: float | None = None  # time.time() of the newest copy
        self.taken_over: TakenOver | None = None  # another session copies now, and this one has stopped
        self.closed = False

    def require_mounted(self) -> None:
        """Raises ConfigError if there is no folder to make `checkpoint_dir` in, or if this run's copies are gone: an
        unmounted disk leaves an empty folder behind, and copies in it would lie on the local disk."""
        if not self.root.parent.is_dir():
            raise ConfigError(
                f"--checkpoint_dir is {self.root}, and there is no folder {self.root.parent}. Mount the Drive first "
                f'(in Colab: from google.colab import drive; drive.mount("/content/drive")), or make the folder: '
                f"mkdir -p {self.root.parent}"
            )
        if self.had_copies and not self.lease.path.exists():
            raise ConfigError(
                f"The copies of this run are gone from {self.dir}: there is no {MARKER} in it. Is the disk of "
                f"--checkpoint_dir {self.root} unmounted? Mount it again. If you deleted the copies, delete "
                f"{self.run_dir / MARKER} too, and the run makes new ones."
            )

    @property
    def had_copies(self) -> bool:
        """Whether the run folder says that this mirror was in use."""
        try:
            return read_json(self.run_dir / MARKER, ConfigError).get("copies") == os.path.abspath(self.dir)
        except (ConfigError, OSError):  # there were none, or an older version wrote no such file
            return False

    def require_apart(self) -> None:
        """Raises ConfigError if the mirror is the run folder: each file would be copied onto itself."""
        if self.dir.resolve() == self.run_dir.resolve():
            raise ConfigError(
                f"The copies below --checkpoint_dir {self.root} would lie in the run folder itself, {self.run_dir}: "
                f"name another --checkpoint_dir, on another disk, or leave it out."
            )

    def begin(self, run_id: str, checkpoint_bytes: int) -> None:
        """Start the worker. Its first request makes up for what an earlier session could not copy."""
        self.lease.run_id = run_id
        with contextlib.suppress(OSError):  # the first attempt meets the same problem, and tells it
            manifests = [folder / MANIFEST for folder in step_folders(self.dir / "checkpoints")]
            self.copied_at = max((path.stat().st_mtime for path in manifests), default=None)
            self.lease.renew()
            write_json(self.run_dir / MARKER, {"copies": os.path.abspath(self.dir)})
            missing = COPIES - len(manifests) - (self.dir / "best").is_dir()
            free = shutil.disk_usage(self.dir).free
            if missing * checkpoint_bytes > free:
                log.info(
                    f"Warning: {self.dir} will need about {byte_size(missing * checkpoint_bytes)} more, and "
                    f"{byte_size(free)} are free there."
                )
        self.worker = threading.Thread(target=self.work, name="mirror", daemon=True)
        self.worker.start()
        self.wake()

    def wake(self) -> None:
        """Request a copy: there is something new."""
        self.request, self.failing_since = threading.Event(), None
        self.woken.set()

    def work(self) -> None:
        """What the worker does until it is closed or taken over. A copy that fails is retried after as long as it has
        failed so far, so the pause doubles from one attempt to the next. A new request is tried at once."""
        try:
            while True:
                since, pause = self.failing_since, HEARTBEAT
                if since is not None:
                    pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, time.monotonic() - since))
                self.woken.wait(pause)
                self.woken.clear()
                self.go_on()
                request = self.request
                if not request.is_set():
                    self.attempt(request)
        except GivenUp:
            pass
        except TakenOver as error:
            self.taken_over = error

    def attempt(self, request: threading.Event) -> None:
        try:
            self.bring_up_to_date()
        except (GivenUp, TakenOver):
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if reason != self.problem:
                log.info(
                    f"Warning: copying to {self.dir} failed ({reason}){self.what_is_there()}. The training goes on, "
                    f"and the copy is tried again."
                )
            self.problem = reason
            if self.failing_since is None and request is self.request:  # else there is more to copy than was tried
                self.failing_since = time.monotonic()
        else:
            self.problem = self.failing_since = None
            request.set()

    def go_on(self) -> None:
        """Called between two pieces of a copy, too. Gives a sign of life if one is due. Raises GivenUp, TakenOver."""
        if self.closed:
            raise GivenUp
        self.lease.renew_if_due()

    def bring_up_to_date(self) -> None:
        """Copy what is new in the run folder and verify the copies. Only then delete older ones.

        Raises TakenOver and GivenUp at once, and other errors after everything has been tried: a damaged best/ must not
        keep the checkpoints from being copied.
        """
        errors: list[Exception] = []

        def attempt(copy: Callable[[], object]) -> None:
            try:
                copy()
            except (GivenUp, TakenOver):
                raise
            except Exception as error:
                errors.append(error)

        def copy_the_rest() -> None:
            attempt(self.copy_files)
            attempt(lambda: self.copy_if_new(self.run_dir / "best"))

        copy_the_rest()
        attempt(lambda: self.copy_newest_step(copy_the_rest))
        if errors:
            raise errors[-1]

    def copy_files(self) -> None:
        self.lease.renew()
        for name in MIRRORED_FILES:
            source = self.run_dir / name
            if source.exists():
                with atomic_write(self.dir / name, self.lease.staging) as file:
                    file.write(source.read_bytes())
            elif name == SUMMARY:  # the mirror has that of a shorter run, which this one continues
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.dir / name, self.lease.staging / name)

    def copy_newest_step(self, copy_the_rest: Callable[[], None]) -> None:
        """`copy_the_rest` is called before the copy gets its name: metrics and best weights in the mirror go as far as
        its newest checkpoint, for whoever has nothing else. It also sees whether another session took the mirror over
        during a long copy."""
        for newest in step_folders(self.run_dir / "checkpoints")[:1]:
            began = time.time()
            if self.copy_if_new(newest, copy_the_rest):
                self.copied_at = began
                log.info(f"Copied {newest.name} to {self.dir}")
                prune(self.dir / "checkpoints", truncate=True, staging=self.lease.staging)

    def copy_if_new(self, folder: Path, before_publish: Callable[[], None] = lambda: None) -> bool:
        """Whether a checkpoint is copied now, because the mirror lacked it. Raises OSError if it cannot be copied."""
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:  # there is none yet, or another one replaces it: whoever saves that calls `wake`
            return False
        target = self.dir / folder.relative_to(self.run_dir)
        if (target / MANIFEST).exists() and (target / MANIFEST).read_bytes() == manifest:
            return False
        self.lease.renew()
        began = time.perf_counter()
        problem = copy_checkpoint(folder, target, self.go_on, before_publish, self.lease.staging)
        self.copy_seconds = time.perf_counter() - began
        if problem and folder.exists():  # else it was pruned, and a newer one saved
            raise OSError(problem)
        return problem is None

    def what_is_there(self) -> str:
        """The newest copy, for the end of a sentence; "" if there is none, or if the Drive cannot be read."""
        with contextlib.suppress(OSError):
            for newest in step_folders(self.dir / "checkpoints")[:1]:
                return f"; the newest checkpoint there is {newest.name}"
        return ""

    def status(self) -> str:
        """How old the newest copy is, for the progress line."""
        age = f"copy {clock(max(0.0, time.time() - self.copied_at))} old" if self.copied_at else "no copy yet"
        return f"{age} ({self.problem})" if self.problem else age

    def finish(self, interruption: Interruption | None = None) -> None:
        """Request a last copy and wait for it: COPY_SECONDS at most, fewer once somebody has pressed stop, or until it
        has failed for LAST_ATTEMPTS_SECONDS."""
        self.wake()
        began = time.monotonic()
        has_told = False
        while not self.request.wait(0.02) and self.taken_over is None:
            now, failing_since = time.monotonic(), self.failing_since
            limit = COPY_SECONDS_IF_STOPPED if interruption is not None and interruption.requested else COPY_SECONDS
            if not has_told and now - began > 1.0:
                has_told = True
                log.info(f"Waiting for the copy to {self.dir}, at most {clock(limit)} ...")
            keeps_failing = failing_since is not None and now - failing_since > LAST_ATTEMPTS_SECONDS
            is_alive = self.worker is not None and self.worker.is_alive()
            if now - began > limit or keeps_failing or not is_alive:
                reason = self.problem or f"not done within {clock(limit)}"
                log.info(
                    f"Warning: the copies in {self.dir} are not up to date ({reason}){self.what_is_there()}. Nothing "
                    f"is missing in {self.run_dir}. Once the problem is solved, the same command makes the copies."
                )
                return

    def close(self) -> None:
        """End the worker and let other sessions have the mirror."""
        if self.worker is None:
            return
        self.closed = True
        self.woken.set()
        self.worker.join(LAST_CALL_SECONDS)
        if self.worker.is_alive():  # it hangs in a call to the Drive
            return
        self.lease.release()
        self.worker = None


def copy_checkpoint(
    folder: Path,
    target: Path,
    between: Callable[[], None] = lambda: None,
    before_publish: Callable[[], None] = lambda: None,
    staging: Path | None = None,
) -> str | None:
    """Copy a whole checkpoint to `target` (on Drive, say) and check the copy.

    Returns None, or the reason why it could not be copied. `folder` may be replaced or pruned meanwhile. `between` is
    called between two pieces of a file, `before_publish` before the copy gets its name; both may raise to give the copy
    up. `staging` is the folder that the copy is made in, on the same disk; by default that of `target`.
    """
    temporary = (staging or target.parent) / f".tmp-{target.name}"
    try:
        with contextlib.ExitStack() as stack:
            with PUBLISHING:  # an open file can be read to its end, even if its folder is replaced
                sources = {path.name: stack.enter_context(open(path, "rb")) for path in folder.iterdir()}
            discard(temporary, truncate=True)
            target.parent.mkdir(exist_ok=True)  # not its parents: they are gone if the disk was unmounted
            temporary.mkdir()
            for name, source in sources.items():
                copy_file(source, temporary / name, between)
        if problems := problems_of(temporary):
            raise OSError(f"the copy of {folder.name} is damaged: {'; '.join(problems)}")
        between()
        before_publish()
        publish(temporary, target, truncate=True)
    except OSError as problem:
        return problem.strerror or str(problem)
    finally:
        discard(temporary, truncate=True)  # nothing is left of it if it has its name
    return None


def copy_file(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
    with open(target, "wb") as file:
        while piece := source.read(PIECE_BYTES):
            between()
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
