"""The mirror of a run: a second folder, on Drive for instance, that gets verified copies of what the run folder holds.

A thread of its own makes the copies, one at a time, of whatever is newest then; the training neither waits for it nor
fails with it. A Drive that is full, read-only, slow or gone is told, and tried again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.checkpoint import KEEP, MANIFEST, problems_of, prune, step_folders
from common.errors import ConfigError
from common.files import atomic_write, read_json, write_json
from common.formatting import byte_size, clock
from common.publishing import PUBLISHING, discard, publish
from training.file_names import CONFIG, CURVE, MARKER, METRICS, SAMPLES, SUMMARY
from training.keeping.claim import HEARTBEAT, Claim, TakenOver

MIRRORED_FILES = (CONFIG, METRICS, SAMPLES, CURVE, SUMMARY)
COPIES = 5  # of a checkpoint at the most: the two kept, the best, and one of each on its way
COPIED_AT_ONCE = 4 << 20  # bytes
LONGEST_PAUSE = 60.0  # seconds between two attempts, which begin at one and double
LAST_ATTEMPTS_SECONDS = 30.0  # of failures, once the training is over
LAST_CALL_SECONDS = 5.0  # that a call to the Drive under way is waited for


class GivenUp(Exception):
    """The copy under way is not waited for. What it has written is deleted, by the next session at the latest."""


class Mirror:
    """Where the copies of a run folder go."""

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.run_dir = run_dir
        self.root = Path(checkpoint_dir).expanduser()
        place = os.path.abspath(run_dir)  # by which a run is known, however its folder is spelled
        self.dir = self.root / os.path.basename(place)
        self.claim = Claim(self.dir, place)
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.asked = threading.Event()
        self.counting = threading.Lock()  # of wishes and failures
        self.wishes = 0  # how often something new was there to be copied
        self.wishes_met = 0
        self.closed = False
        self.failures = 0  # attempts in a row, since something new was there
        self.problem: str | None = None  # of the last attempt
        self.copied_at: float | None = None  # time.time() at which everything was copied
        self.taken_over: TakenOver | None = None  # by another session: nothing is copied any more

    def require_mounted(self) -> None:
        """Raises ConfigError if there is no folder to make `checkpoint_dir` in, or if this run's copies are gone: an
        unmounted disk leaves an empty folder behind, and copies in it would lie on the local disk."""
        if not self.root.parent.is_dir():
            raise ConfigError(
                f"--checkpoint_dir is {self.root}, and there is no folder {self.root.parent}. Mount the Drive first "
                f'(in Colab: from google.colab import drive; drive.mount("/content/drive")), or make the folder: '
                f"mkdir -p {self.root.parent}"
            )
        if self.had_copies and not self.claim.path.exists():
            raise ConfigError(
                f"The copies of this run are gone from {self.dir}: there is no {MARKER} in it. Is the disk of "
                f"--checkpoint_dir {self.root} unmounted? Mount it again. If you deleted the copies, delete "
                f"{self.run_dir / MARKER} too, and the run makes new ones."
            )

    @property
    def had_copies(self) -> bool:
        """Whether the run folder knows that this mirror was in use."""
        try:
            return read_json(self.run_dir / MARKER, ConfigError).get("copies") == os.path.abspath(self.dir)
        except (ConfigError, OSError):  # never, or in a version that kept no record
            return False

    def require_apart(self) -> None:
        """Raises ConfigError if it is the run folder: files that are being written would be copied onto themselves."""
        if self.dir.resolve() == self.run_dir.resolve():
            raise ConfigError(
                f"The copies below --checkpoint_dir {self.root} would lie in the run folder itself, {self.run_dir}: "
                f"name another --checkpoint_dir, on another disk, or leave it out."
            )

    def begin(self, run_id: str, checkpoint_bytes: int) -> None:
        """Have the run folder copied from now on, and what a session before could not copy."""
        self.claim.run_id = run_id
        with contextlib.suppress(OSError):  # an obstacle is told by the first attempt
            manifests = [folder / MANIFEST for folder in step_folders(self.dir / "checkpoints")]
            self.copied_at = max((path.stat().st_mtime for path in manifests), default=None)
            self.claim.renew()  # which a read-only disk refuses
            write_json(self.run_dir / MARKER, {"copies": os.path.abspath(self.dir)})
            missing = COPIES - len(manifests) - (self.dir / "best").is_dir()
            free = shutil.disk_usage(self.dir).free
            if missing * checkpoint_bytes > free:
                self.news.put(
                    f"Warning: {self.dir} will need about {byte_size(missing * checkpoint_bytes)} more, and "
                    f"{byte_size(free)} are free there."
                )
        self.thread = threading.Thread(target=self.keep_up, name="mirror", daemon=True)
        self.thread.start()
        self.wake()

    def wake(self) -> None:
        """There is something new to copy."""
        with self.counting:
            self.wishes += 1
            self.failures = 0
        self.asked.set()

    @property
    def is_up_to_date(self) -> bool:
        return self.wishes_met == self.wishes

    def keep_up(self) -> None:
        """The thread's life."""
        try:
            while True:
                pause = min(LONGEST_PAUSE, 2.0 ** min(self.failures - 1, 10)) if self.problem else HEARTBEAT
                is_asked = self.asked.wait(pause)
                if is_asked:
                    self.asked.clear()
                self.go_on()
                if is_asked or self.problem:
                    wishes = self.wishes
                    is_done = self.bring_up_to_date()
                    with self.counting:
                        if is_done:
                            self.wishes_met = wishes
                        elif wishes == self.wishes:  # else there is more by now than was tried
                            self.failures += 1
        except GivenUp:
            pass
        except TakenOver as told:
            self.taken_over = told

    def go_on(self) -> None:
        """Called all along, in the middle of a long copy too: gives a sign of life now and then."""
        if self.closed:
            raise GivenUp
        self.claim.renew_if_due()

    def bring_up_to_date(self) -> bool:
        """Copy what is new in the run folder, verify the copies, and only then delete older ones. Returns whether all
        is copied; a problem is told, and is no reason to give up."""
        problems: dict[str, Exception] = {}  # by what could not be copied
        newest = None
        self.copy_rest(problems)
        try:
            for _ in range(KEEP + 1):  # while one is looked for, it may have made way for a newer one
                newest = next(iter(step_folders(self.run_dir / "checkpoints")), None)
                if newest is None or self.copy_step(newest, problems):
                    break
        except (GivenUp, TakenOver):
            raise
        except Exception as error:
            problems[newest.name if newest is not None else "the newest checkpoint"] = error
        if not problems:
            self.problem, self.failures = None, 0
            return True
        what, problem = problems.popitem()
        reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        if reason != self.problem:
            self.news.put(
                f"Warning: {what} could not be copied to {self.dir} ({reason}){self.what_is_there()}; the training "
                f"goes on, and the copy is tried again."
            )
        self.problem = reason
        return False

    def copy_rest(self, problems: dict[str, Exception]) -> None:
        """Copy metrics and best weights. A problem of any kind is noted: the steps are copied all the same."""
        best = functools.partial(self.copy_if_new, self.run_dir / "best")
        for what, copy in (("metrics and summary", self.copy_files), ("best/", best)):
            try:
                copy()
                problems.pop(what, None)
            except (GivenUp, TakenOver):
                raise
            except Exception as error:
                problems[what] = error

    def copy_step(self, folder: Path, problems: dict[str, Exception]) -> bool:
        """Whether the mirror holds this checkpoint now; False if it has gone here. Raises OSError with the reason.

        Metrics and best weights go as far as it does before it has its name, if they can be copied: whoever has only
        the copies needs all."""
        if self.holds(folder):
            return True
        began = time.time()

        def first() -> None:
            self.copy_rest(problems)
            self.claim.renew()  # in a long copy the mirror may have become another's

        try:
            is_copied = self.copy_if_new(folder, first)
        except OSError:
            if folder.exists():
                raise
            return False
        if is_copied:
            self.copied_at = began
            self.news.put(f"Copied {folder.name} to {self.dir}")
            prune(self.dir / "checkpoints", truncate=True, staging=self.claim.staging)
        return (self.dir / folder.relative_to(self.run_dir)).exists()

    def copy_files(self) -> None:
        self.claim.renew()
        for name in MIRRORED_FILES:
            source = self.run_dir / name
            if source.exists():
                with atomic_write(self.dir / name, self.claim.staging) as file:
                    file.write(source.read_bytes())
            elif name == SUMMARY:  # of a shorter run, which this one continues
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.dir / name, self.claim.staging / name)

    def copy_if_new(self, folder: Path, first: Callable[[], None] = lambda: None) -> bool:
        """Raises OSError with the reason if there is something to copy and it cannot be. `first` is that of
        `copy_checkpoint`."""
        if not (folder / MANIFEST).exists() or self.holds(folder):
            return False
        self.claim.renew()
        target = self.dir / folder.relative_to(self.run_dir)
        if problem := copy_checkpoint(folder, target, self.go_on, first, self.claim.staging):
            raise OSError(problem)
        return True

    def holds(self, folder: Path) -> bool:
        """Whether a checkpoint of the run folder is there, by its manifest."""
        ours, theirs = folder / MANIFEST, self.dir / folder.relative_to(self.run_dir) / MANIFEST
        return ours.exists() and theirs.exists() and ours.read_bytes() == theirs.read_bytes()

    def what_is_missing(self) -> str:
        """Of what is newest, with its verb."""
        checkpoints = [*step_folders(self.run_dir / "checkpoints")[:1], self.run_dir / "best"]
        with contextlib.suppress(OSError):
            if all(self.holds(folder) for folder in checkpoints if folder.exists()):
                return "the newest metrics and summary are"
        return "the newest state is"

    def what_is_there(self) -> str:
        """The newest copy, as the end of a sentence; "" if there is none, or none that can be seen."""
        with contextlib.suppress(OSError):
            for newest in step_folders(self.dir / "checkpoints")[:1]:
                return f", where {newest.name} is the newest"
        return ""

    def status(self) -> str:
        """How old the newest copy is, for the progress line."""
        age = f"copy {clock(max(0.0, time.time() - self.copied_at))} old" if self.copied_at else "no copy yet"
        return f"{age} ({self.problem})" if self.problem else age

    def finish(
        self, seconds: float, is_asked: Callable[[], bool], seconds_if_asked: float, say: Callable[[str], None]
    ) -> None:
        """Wait for the copy of what is newest, `seconds` at most, or fewer once somebody asks to stop; not long if it
        keeps failing."""
        self.wake()
        began = last_hope = time.monotonic()
        told = False
        while not self.is_up_to_date and self.taken_over is None:
            for line in self.heard():
                say(line)
            now = time.monotonic()
            if not self.failures:
                last_hope = now
            limit = min(seconds, seconds_if_asked) if is_asked() else seconds
            if not told and now - began > 1.0:
                told = True
                say(f"Waiting for the copy to {self.dir}, at most {clock(limit)} ...")
            is_alive = self.thread is not None and self.thread.is_alive()
            if now - began > limit or now - last_hope > LAST_ATTEMPTS_SECONDS or not is_alive:
                reason = self.problem or f"not done within {clock(limit)}"
                say(
                    f"Warning: {self.what_is_missing()} not in {self.dir} ({reason}){self.what_is_there()}; all is "
                    f"whole in {self.run_dir}. Once that is put right, the same command copies it."
                )
                return
            time.sleep(0.02)
        for line in self.heard():
            say(line)

    def heard(self) -> Iterator[str]:
        """What the thread has told since the last call."""
        while not self.news.empty():
            yield self.news.get()

    def close(self) -> None:
        """End the thread; the mirror is free for others."""
        if self.thread is None:
            return
        self.closed = True
        self.asked.set()
        self.thread.join(LAST_CALL_SECONDS)
        if self.thread.is_alive():  # it hangs in a call to the Drive
            return
        self.claim.release()
        self.thread = None


def copy_checkpoint(
    folder: Path,
    target: Path,
    between: Callable[[], None] = lambda: None,
    first: Callable[[], None] = lambda: None,
    staging: Path | None = None,
) -> str | None:
    """Copy a whole checkpoint to `target` (on Drive, say) and check the copy.

    Returns None, or the reason why it could not be copied. `folder` may be replaced or pruned meanwhile. `between` is
    called between two pieces of a file, `first` before the copy gets its name; both may raise to give the copy up.
    `staging` is the folder that it is made in, on the same disk; by default that of `target`.
    """
    temporary = (staging or target.parent) / f".tmp-{target.name}"
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
        between()
        first()
        publish(temporary, target, truncate=True)
    except OSError as problem:
        discard(temporary, truncate=True)
        return problem.strerror or str(problem)
    except BaseException:
        discard(temporary, truncate=True)
        raise
    return None


def copy_file(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
    with open(target, "wb") as file:
        while piece := source.read(COPIED_AT_ONCE):
            between()
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
