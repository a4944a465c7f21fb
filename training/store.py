"""Store checkpoints in a run folder, each complete or absent. A mirror (mirror.py) is another such folder.

A checkpoint is written as .tmp-NAME, and renamed once it is complete and on the disk. An existing one of the same name
is renamed to .old-NAME first. Folders are also renamed to .old- before they are deleted.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import safetensors

from common.checkpoint import (
    BEST,
    OPTIMIZER,
    WITHOUT_OPTIMIZER,
    Checkpoint,
    Content,
    ManifestEntry,
    find_problems,
    make_entry,
    read_manifest,
    step_folders,
    step_of,
    write_files,
    write_manifest,
)
from common.errors import CheckpointError, ConfigError
from common.files import (
    CHECKPOINT_NAME,
    RECORDS_FOLDER,
    describe_holder,
    locked,
    make_folder,
    nearest_existing,
    read_json,
    rename,
    sync_directory,
)
from training.config import is_resolved
from training.records import CONFIG, RECORDS, SUMMARY
from training.state import TrainState, read_state

KEPT_CHECKPOINTS = 2  # not 1, because the newest may be damaged
RUN_MARKER = "run.json"  # a run folder's names its mirror; a mirror's names its run
DELETED_NAME = re.compile(r"[0-9a-f]{8}")  # after .old-
COPY_BLOCK_BYTES = 4 << 20


class Store:
    """A run folder: checkpoints/step_00001000/, best/, and the records of the run."""

    def __init__(self, folder: Path):
        self.dir, self.steps_dir = folder, folder / "checkpoints"
        self.verified: set[Path] = set()  # copies that this session has verified

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the folder. Raises CheckpointError if another process trains in it."""

        def busy_error() -> CheckpointError:
            return CheckpointError(
                f"Another process{describe_holder(self.dir / CONFIG)} is training in {self.dir}. Wait for it, stop it, "
                "or choose another --output_dir."
            )

        return locked(self.dir, busy_error)

    # Listing

    def steps(self) -> list[Path]:
        """Return the checkpoints, newest first; some may be damaged."""
        return step_folders(self.steps_dir)

    def best_copies(self) -> list[Path]:
        """Return the folders of best weights; they may be missing or damaged."""
        return [self.dir / BEST]

    def records(self, name: str) -> list[Path]:
        """Return the intact records of this name, newest first."""
        return [path] if (path := self.dir / name).is_file() else []

    @property
    def is_empty(self) -> bool:
        return not (self.dir.is_dir() and any(self.dir.iterdir()))

    # Writing

    def step_path(self, step: int) -> Path:
        return self.path_of(f"step_{step:08d}")

    def path_of(self, name: str) -> Path:
        """Return the path for a checkpoint of this name."""
        return (self.dir if name in WITHOUT_OPTIMIZER else self.steps_dir) / name

    def copies_of(self, name: str) -> list[Path]:
        """Return the paths where copies of this checkpoint may be."""
        return [self.path_of(name)]

    def write_folder(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Create or replace the folder `target`. `fill` writes its files into a temporary folder; the manifest is the
        last, and flushes the folder to disk. Raises what `fill` raises, and OSError, also if the parent is missing; an
        existing folder is then unchanged."""
        temporary, replaced = (target.with_name(f".{kind}-{target.name}") for kind in ("tmp", "old"))
        try:
            self.delete(temporary)
            temporary.mkdir()  # parents are not made: they are missing if a disk is unmounted
            fill(temporary)
            if target.exists():
                rename(target, replaced)
            rename(temporary, target)
        finally:
            self.delete(temporary)
        sync_directory(target.parent)
        self.delete(replaced)

    def save(self, contents: dict[str, Content], target: Path, also: Sequence[str] = ()) -> None:
        """Write a checkpoint and, before it has its name, the folders `also` (BEST, BASE) of its weights: a resumed run
        would not write them. Raises CheckpointError, on a full disk for instance."""

        def fill(folder: Path) -> None:
            write_files(folder, contents)
            for name in also:
                self.write_folder(self.path_of(name), lambda weights: link_weights(folder, weights))

        try:
            make_folder(target.parent)
            self.write_folder(target, fill)
        except (OSError, safetensors.SafetensorError) as problem:
            is_full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            tensors = [
                tensor for content in contents.values() if isinstance(content, dict) for tensor in content.values()
            ]
            size = sum(tensor.nbytes for tensor in tensors) / 1e6
            remedy = f"Free some space (a checkpoint takes about {size:,.0f} MB)" if is_full else "Fix that"
            raise CheckpointError(
                f"{target} could not be saved: {getattr(problem, 'strerror', None) or problem}. Earlier checkpoints "
                f"are intact. {remedy} or choose another --output_dir, then run the same command to continue."
            ) from problem

    def copy(self, source: Path, name: str, records: Sequence[Path] = ()) -> bool:
        """Copy a checkpoint from another folder, with the records of its run. Return False if an intact copy exists, or
        if the source is replaced meanwhile. Raises OSError."""
        files, target = _read_own_files(source), self.path_of(name)
        copies = [copy for copy in self.copies_of(name) if self.is_copy(copy, files)]
        if lacks_summary(copies, records):
            copies = []  # an earlier session has copied the last step before its summary was written
        if copies or not source.exists():
            return False

        def fill(folder: Path) -> None:
            if problems := find_problems(source):
                raise OSError(f"{source} is damaged: {'; '.join(problems)}")
            copy_files((source / name for name in files), folder)
            copied = [path for path in records if path.is_file()]
            if copied:
                copy_files(copied, folder / RECORDS_FOLDER)
            recorded = {
                f"{RECORDS_FOLDER}/{path.name}": make_entry(folder / RECORDS_FOLDER / path.name) for path in copied
            }
            write_manifest(folder, files | recorded)
            if problems := find_problems(folder):
                raise OSError(f"the copy of {source.name} is damaged: {'; '.join(problems)}")

        try:
            self.write_folder(target, fill)
        except OSError:
            if _read_own_files(source) == files:
                raise
            return False
        self.verified.add(target)
        return True

    def is_copy(self, copy: Path, files: dict[str, ManifestEntry]) -> bool:
        """Return whether `copy` is an intact copy of these files."""
        is_whole = files.items() <= _read_own_files(copy).items() and (copy in self.verified or not find_problems(copy))
        if is_whole:
            self.verified.add(copy)
        return is_whole

    def copy_best(self, source: Path) -> None:
        """Copy best weights, unless the ones here are better. Raises OSError."""
        candidate, best = read_best_state(source), self.dir / BEST
        current = None if find_problems(best) else read_best_state(best)
        if candidate is not None and (current is None or not is_better(current, candidate)):
            self.copy(source, BEST)

    # Deleting

    def delete_older(self, step: int) -> None:
        """Delete checkpoints older than the newest two up to this step."""
        for path in [path for path in self.steps() if step_of(path) <= step][KEPT_CHECKPOINTS:]:
            self.delete(path)

    def delete(self, folder: Path) -> None:
        """Delete a checkpoint, complete or not. It is renamed first, so that nobody finds it any more. A link is
        removed, never followed. Errors are ignored, because a leftover costs only space."""
        renamed = folder.with_name(f".old-{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):
            os.replace(folder, renamed)
            if renamed.is_symlink():
                renamed.unlink()
            self.remove(renamed)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def quarantine_newer(self, checkpoint: Path) -> None:
        """Rename damaged checkpoints, which are all others from this one's step on. They no longer count as
        checkpoints, but can still be examined."""
        for folder in self.steps():
            if step_of(folder) >= step_of(checkpoint) and folder.resolve() != checkpoint.resolve():
                with contextlib.suppress(OSError):
                    target = folder.with_name(f"damaged_{folder.name}")
                    shutil.rmtree(target, ignore_errors=True)
                    os.replace(folder, target)

    def clean_up(self) -> None:
        """Delete leftovers of killed sessions."""
        for parent in (self.dir, self.steps_dir):
            for path in [*parent.glob(".old-*"), *parent.glob(".tmp-*")]:
                is_old, name = path.name.startswith(".old-"), path.name[len(".old-") :]
                with contextlib.suppress(OSError):
                    if is_old and CHECKPOINT_NAME.fullmatch(name) and not path.with_name(name).exists():
                        os.replace(path, path.with_name(name))  # killed between the two renames of `write_folder`
                    elif CHECKPOINT_NAME.fullmatch(name) or DELETED_NAME.fullmatch(name):
                        self.delete(path)
        with contextlib.suppress(OSError):  # missing or read-only: the first save reports it
            for path in self.dir.iterdir():
                if _is_leftover(path.name) and path.is_file():
                    path.unlink(missing_ok=True)

    # Checks

    def require_run_folder(self, flag: str) -> None:
        """Raise ConfigError if the folder given by `flag` cannot be created or contains other files than a run's."""
        folder = self.dir
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not existing.is_dir():
            kind = "a file" if existing.exists() else "a link to nothing"
            raise ConfigError(
                f"{folder} ({flag}) cannot be created, because {existing} is {kind}. Choose another {flag}."
            )
        if not folder.exists() or (folder / RUN_MARKER).exists() or step_folders(folder / "checkpoints", folder):
            return
        with contextlib.suppress(ConfigError):
            if is_resolved(read_json(folder / CONFIG, ConfigError)):
                return
        if others := sorted(path.name for path in folder.iterdir() if not _is_leftover(path.name)):
            names = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
            raise ConfigError(
                f"{folder} ({flag}) holds other files ({names}), and training would add its own. Choose an empty or "
                "new folder."
            )

    def require_movable(self) -> None:
        """Raise ConfigError if the working directory is in the old run. It would be renamed with the run, and the same
        command would find the old run again."""
        absolute = self.dir.resolve()
        if not self.is_empty and Path.cwd().is_relative_to(absolute):
            raise ConfigError(
                f"`--resume never` would rename {absolute}, which is the current folder or its parent. Start the "
                f"command from another folder (cd {absolute.parent}), and adjust relative paths."
            )


# Starting over


def set_aside(store: Store, mirror: Store | None, write_new: Callable[[dict[Path, Path], Path], object]) -> None:
    """Rename an old run and its mirror, so that starting over loses nothing, and put a new run folder in place.

    `write_new` gets {old folder: its new name} and the new folder, and writes what the same command needs to continue
    if this process is killed in between. Raises CheckpointError if a folder cannot be renamed.
    """
    new, moves = new_run_path(store.dir), _choose_names_aside(store, mirror)
    if moves:
        shutil.rmtree(new, ignore_errors=True)
        make_folder(new)
        write_new(moves, new)
        _put_in_place(store.dir, moves)


def finish_setting_aside(store: Store, mirror: Store | None) -> None:
    """Put a new run in place, if an earlier session was killed after setting the old one aside."""
    if store.is_empty and (new_run_path(store.dir) / CONFIG).is_file():
        _put_in_place(store.dir, _choose_names_aside(mirror))


def new_run_path(run_dir: Path) -> Path:
    """Return the temporary path of a new run folder, used while the old one is in place."""
    parent, name = os.path.split(os.path.abspath(_follow_link(run_dir)))
    return Path(parent, f".new-{name}")


def _follow_link(folder: Path) -> Path:
    """Return the folder that a link leads to, which may be on another disk; any other folder as it is."""
    return Path(os.path.realpath(folder) if folder.is_symlink() else os.path.normpath(folder))


def dry_run_path(run_dir: Path) -> Path:
    """Return the temporary run folder of a dry run, beside the run folder or in the nearest parent that exists."""
    absolute = Path(os.path.abspath(run_dir))
    return nearest_existing(absolute.parent) / f".dry_run-{absolute.name}"


def delete_dry_run(run_dir: Path) -> None:
    """Delete what a killed dry run has left, unless one is under way."""
    store = Store(dry_run_path(run_dir))
    if store.dir.exists():
        with contextlib.suppress(CheckpointError), store.locked():
            shutil.rmtree(store.dir, ignore_errors=True)


def _choose_names_aside(*stores: Store | None) -> dict[Path, Path]:
    """Return {folder: new name} for stores that are not empty."""
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    # No path is . or ..: `require_movable` has refused them for folders that are not empty.
    folders = [_follow_link(store.dir) for store in stores if store is not None and not store.is_empty]
    return {folder: folder.with_name(f"{folder.name}.{now}") for folder in folders}


def _put_in_place(run_dir: Path, moves: dict[Path, Path]) -> None:
    """Rename the old folders, then the new one to `run_dir`. Raises CheckpointError if that fails."""
    new = new_run_path(run_dir)  # before the old folder is renamed: run/.. would not resolve any more
    for folder, aside in moves.items():
        try:
            rename(folder, aside)
            sync_directory(folder.parent)
        except OSError as problem:  # a mount point, or a read-only disk
            raise CheckpointError(
                f"The run in {folder} could not be renamed to {aside} ({problem.strerror}). Choose another folder, or "
                "remove `--resume never` from the command."
            ) from None
        print(f"Renamed the old run: {folder} is now {aside}.")
    target = new.with_name(new.name.removeprefix(".new-"))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(target)  # empty
    rename(new, target)
    sync_directory(new.parent)


# Files


def _is_leftover(name: str) -> bool:
    """Return whether a name is that of an unfinished record, left by a killed `atomic_write`."""
    return any(name.startswith(f".{file}.") and name.endswith(".tmp") for file in (*RECORDS, RUN_MARKER))


def link_weights(checkpoint: Path, target: Path) -> None:
    """Put the files of a checkpoint into a folder, without the optimizer state. They are the same files, or copies on a
    disk without hard links."""
    files = {name: entry for name, entry in read_manifest(checkpoint).items() if name != OPTIMIZER}
    try:
        for name in files:
            os.link(checkpoint / name, target / name)
    except OSError:
        for name in files:
            (target / name).unlink(missing_ok=True)
        copy_files((checkpoint / name for name in files), target)
    write_manifest(target, files)


def copy_files(paths: Iterable[Path], target: Path) -> None:
    """Copy files into a folder, and flush them to disk."""
    with contextlib.ExitStack() as stack:
        # Open all files first: an open file stays readable if its folder is deleted.
        sources = {path.name: stack.enter_context(open(path, "rb")) for path in paths}
        target.mkdir(exist_ok=True)
        for name, source in sources.items():
            with open(target / name, "wb") as file:
                shutil.copyfileobj(source, file, COPY_BLOCK_BYTES)
                file.flush()
                os.fsync(file.fileno())
    sync_directory(target)


def lacks_summary(copies: Iterable[Path], records: Sequence[Path]) -> bool:
    """Return whether the records have a summary and none of the copies has it."""
    has_summary = any(path.name == SUMMARY and path.is_file() for path in records)
    return has_summary and not any((copy / RECORDS_FOLDER / SUMMARY).is_file() for copy in copies)


def _read_own_files(checkpoint: Path) -> dict[str, ManifestEntry]:
    """Return the files of a checkpoint by its manifest, without the records of its run; if the manifest cannot be read,
    an entry that matches no file."""
    with contextlib.suppress(CheckpointError, OSError):
        return {name: entry for name, entry in read_manifest(checkpoint).items() if "/" not in name}
    return {"": ManifestEntry(0, "")}


def read_best_state(best: Path) -> TrainState | None:
    """Read the state saved with best weights; None if that fails."""
    try:
        return read_state(Checkpoint(best)).state
    except (CheckpointError, OSError):
        return None


def is_better(first: TrainState, second: TrainState) -> bool:
    """Return whether `first` has the lower loss or, if the losses are over different windows, the later step."""
    if (
        first.best_val_loss is not None
        and second.best_val_loss is not None
        and first.best_windows == second.best_windows
    ):
        return first.best_val_loss < second.best_val_loss
    return first.step > second.step
