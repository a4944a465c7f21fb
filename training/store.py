"""A folder of checkpoints, each whole or not there: a run folder. Its mirror (mirror.py) is another.

A checkpoint is written as .tmp-NAME, and renamed when it is complete and on the disk. While one of the same name is
there, that is .old-NAME meanwhile. What is being deleted is .old-, too.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors

from common.checkpoint import (
    BEST,
    OPTIMIZER,
    Checkpoint,
    Entry,
    entry_of,
    listed_files,
    problems_of,
    step_folders,
    step_of,
    write_files,
    write_manifest,
)
from common.errors import CheckpointError, ConfigError
from common.files import CHECKPOINT_NAME, OF_RUN, holder, locked, read_json, sync_directory
from common.tensors import Content
from training.config import is_resolved
from training.records import CONFIG, RECORDS
from training.state import TrainState, read_state

KEEP = 2  # never one: the newest may be damaged
MARKER = "run.json"  # in a run folder: where its mirror is; in a mirror: which run it is of
DELETED_NAME = re.compile(r"[0-9a-f]{8}")  # after .old-
COPIED_BYTES = 4 << 20  # at a time


class Store:
    """A run folder: checkpoints/step_00001000/, best/, and the records of the run."""

    def __init__(self, folder: Path):
        self.dir, self.steps_dir = folder, folder / "checkpoints"
        self.verified: set[Path] = set()  # copies that this session has found whole

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes out. Raises CheckpointError if another one trains in the folder."""

        def busy() -> CheckpointError:
            return CheckpointError(
                f"{self.dir} is being trained by another process{holder(self.dir / CONFIG)}. Wait for it, stop it, or "
                f"choose another --output_dir."
            )

        return locked(self.dir, busy)

    # What is there

    def steps(self) -> list[Path]:
        """Return the checkpoints, newest first. They may be damaged."""
        return step_folders(self.steps_dir)

    def bests(self) -> list[Path]:
        """Return the folders of best weights, which may be missing or damaged."""
        return [self.dir / BEST]

    def records(self, name: str) -> list[Path]:
        """Return the whole records of this name, newest first."""
        return [path] if (path := self.dir / name).is_file() else []

    @property
    def is_empty(self) -> bool:
        return not (self.dir.is_dir() and any(self.dir.iterdir()))

    # What goes in

    def step_path(self, step: int) -> Path:
        return self.path_of(f"step_{step:08d}")

    def path_of(self, name: str) -> Path:
        """Return where a checkpoint of this name is saved."""
        return (self.dir if name == BEST else self.steps_dir) / name

    def copies_of(self, name: str) -> list[Path]:
        """Return where copies of a checkpoint of this name may be."""
        return [self.path_of(name)]

    def put(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Make the folder `target`, in place of one that is there: `fill` writes its files into a temporary folder.
        Raises what `fill` raises, and OSError, also if the parent folder is gone; what was there is then as it was."""
        temporary, replaced = (target.with_name(f".{kind}-{target.name}") for kind in ("tmp", "old"))
        try:
            self.delete(temporary)
            temporary.mkdir()  # not its parents: where a disk was unmounted, nothing must be written
            fill(temporary)
            sync_directory(temporary)
            if target.exists():
                os.replace(target, replaced)
            os.replace(temporary, target)
        finally:
            self.delete(temporary)
        sync_directory(target.parent)
        self.delete(replaced)

    def save(self, contents: dict[str, Content], target: Path) -> None:
        """Write a checkpoint; best weights without their optimizer state. Raises CheckpointError (a full disk, say)."""
        kept = {name: contents[name] for name in contents if target.name != BEST or name != OPTIMIZER}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.put(target, lambda folder: write_files(folder, kept))
        except (OSError, safetensors.SafetensorError) as problem:
            is_full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            tensors = [tensor for content in kept.values() if isinstance(content, dict) for tensor in content.values()]
            size = sum(tensor.nbytes for tensor in tensors) / 1e6
            remedy = f"Free some space (one takes about {size:,.0f} MB)" if is_full else "Fix that"
            raise CheckpointError(
                f"{target} could not be saved: {getattr(problem, 'strerror', None) or problem}. Checkpoints saved "
                f"before are whole. {remedy} or choose another --output_dir, then run the same command to continue."
            ) from problem

    def copy(self, source: Path, name: str, records: Iterable[Path] = ()) -> bool:
        """Copy a checkpoint of another store, with the records of its run. Returns False if a whole copy is there, or
        if the source makes way for a newer one in this moment. Raises OSError."""
        files, target = files_of(source), self.path_of(name)
        if not source.exists() or any(self.is_copy(copy, files) for copy in self.copies_of(name)):
            return False

        def fill(folder: Path) -> None:
            if problems := problems_of(source):
                raise OSError(f"{source} is damaged: {'; '.join(problems)}")
            copy_files((source / name for name in files), folder)
            copied = [path for path in records if path.is_file()]
            if copied:
                copy_files(copied, folder / OF_RUN)
            recorded = {f"{OF_RUN}/{path.name}": entry_of(folder / OF_RUN / path.name) for path in copied}
            write_manifest(folder, files | recorded)
            if problems := problems_of(folder):
                raise OSError(f"the copy of {source.name} is damaged: {'; '.join(problems)}")

        try:
            self.put(target, fill)
        except OSError:
            if files_of(source) == files:
                raise
            return False
        self.verified.add(target)
        return True

    def is_copy(self, copy: Path, files: dict[str, Entry]) -> bool:
        """Return whether it is a whole copy of these files."""
        is_whole = files.items() <= files_of(copy).items() and (copy in self.verified or not problems_of(copy))
        if is_whole:
            self.verified.add(copy)
        return is_whole

    def take_best(self, source: Path) -> None:
        """Copy best weights, unless there are better ones here. Raises OSError."""
        theirs, best = read_best_state(source), self.dir / BEST
        ours = None if problems_of(best) else read_best_state(best)
        if theirs is not None and (ours is None or not is_better(ours, theirs)):
            self.copy(source, BEST)

    # What goes

    def delete_older(self, step: int) -> None:
        """Delete the checkpoints that are older than the newest two up to this step."""
        for path in [path for path in self.steps() if step_of(path) <= step][KEEP:]:
            self.delete(path)

    def delete(self, folder: Path) -> None:
        """Delete a checkpoint, or a part of one. It is renamed first, so nobody completes or finds it any more. A link
        is removed, never followed. Errors are ignored: what stays costs only space."""
        going = folder.with_name(f".old-{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):
            os.replace(folder, going)
            if going.is_symlink():
                going.unlink()
            self.remove(going)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def quarantine_newer(self, checkpoint: Path) -> None:
        """Rename the checkpoints from this one's step on, except itself, which are damaged: they no longer count as
        checkpoints, and can still be examined."""
        for folder in self.steps():
            if step_of(folder) >= step_of(checkpoint) and folder.resolve() != checkpoint.resolve():
                with contextlib.suppress(OSError):
                    target = folder.with_name(f"damaged_{folder.name}")
                    shutil.rmtree(target, ignore_errors=True)
                    os.replace(folder, target)

    def clean_up(self) -> None:
        """Delete what sessions left that were killed."""
        for parent in (self.dir, self.steps_dir):
            for path in [*parent.glob(".old-*"), *parent.glob(".tmp-*")]:
                is_old, name = path.name.startswith(".old-"), path.name[len(".old-") :]
                with contextlib.suppress(OSError):
                    if is_old and CHECKPOINT_NAME.fullmatch(name) and not path.with_name(name).exists():
                        os.replace(path, path.with_name(name))  # killed between the two renames of `put`
                    elif CHECKPOINT_NAME.fullmatch(name) or DELETED_NAME.fullmatch(name):
                        self.delete(path)
        with contextlib.suppress(OSError):  # there is none, or it is read-only: the first save tells that
            for path in self.dir.iterdir():
                if is_leftover(path.name) and path.is_file():
                    path.unlink(missing_ok=True)

    # Whose it is

    def require_ours(self, flag: str) -> None:
        """Raise ConfigError if the folder that `flag` leads to cannot be made, or holds something else than a run."""
        folder = self.dir
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not existing.is_dir():
            kind = "a file" if existing.exists() else "a link to nothing"
            raise ConfigError(
                f"{folder} ({flag}) cannot be a folder, because {existing} is {kind}: choose another {flag}."
            )
        if not folder.exists() or (folder / MARKER).exists() or step_folders(folder / "checkpoints", folder):
            return
        with contextlib.suppress(ConfigError):
            if is_resolved(read_json(folder / CONFIG, ConfigError)):
                return
        if others := sorted(path.name for path in folder.iterdir() if not is_leftover(path.name)):
            named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
            raise ConfigError(
                f"{folder} ({flag}) holds files that are not a run's ({named}), and training would add its own. Choose "
                f"a folder that is empty or does not exist yet."
            )

    def require_movable(self) -> None:
        """Raise ConfigError if the old run cannot be set aside because this command was started in its folder: the
        working directory would be renamed with it, and the same command would find the old run there again."""
        absolute = self.dir.resolve()
        if not self.is_empty and Path.cwd().is_relative_to(absolute):
            raise ConfigError(
                f"--resume never renames {absolute}, and this command was started in it. Start it from another folder "
                f"(cd {absolute.parent}), and change relative paths to fit."
            )


# Starting over


def set_aside(run: Store, mirror: Store | None, write_new: Callable[[dict[Path, Path], Path], object]) -> None:
    """Rename an old run and its mirror, so that starting over loses nothing, and put a new run folder in its place.
    Before, `write_new` writes into the new folder what the same command needs to go on if this process is killed here:
    it gets the old folders with the names that they will have, and the new folder.

    Raises CheckpointError if a folder cannot be renamed.
    """
    new, moves = replacing(run.dir), names_aside(run, mirror)
    if moves:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write_new(moves, new)
        put_in_place(run.dir, moves)


def finish_setting_aside(run: Store, mirror: Store | None) -> None:
    """Put a new run in place, if an earlier session was killed when the old one had been set aside."""
    if run.is_empty and (replacing(run.dir) / CONFIG).is_file():
        put_in_place(run.dir, names_aside(mirror))


def replacing(run_dir: Path) -> Path:
    """Return the name of a new run folder while an old one is in its place."""
    parent, name = os.path.split(os.path.abspath(run_dir))
    return Path(parent, f".new-{name}")


def names_aside(*stores: Store | None) -> dict[Path, Path]:
    """Return the names under which those that hold something will be kept."""
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    # Each ends in a name, because `require_movable` refuses . and .. where something is.
    there = [Path(os.path.normpath(store.dir)) for store in stores if store is not None and not store.is_empty]
    return {folder: folder.with_name(f"{folder.name}.{now}") for folder in there}


def put_in_place(run_dir: Path, moves: dict[Path, Path]) -> None:
    """Rename the old folders, then the new one to `run_dir`. Raises CheckpointError."""
    for folder, aside in moves.items():
        try:
            os.replace(folder, aside)
        except OSError as problem:  # a disk is mounted on the folder, or its disk is read-only
            raise CheckpointError(
                f"The run in {folder} could not be renamed to {aside} ({problem.strerror}). Choose another folder for "
                "the new run, or leave --resume never out."
            ) from None
        print(f"The run that was in {folder} is now {aside}.")
    new, target = replacing(run_dir), os.path.normpath(run_dir)  # where run/.. is gone
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(target)  # it was empty
    os.replace(new, target)
    sync_directory(new.parent)


# Files


def is_leftover(name: str) -> bool:
    """Return whether a killed process left this: an unfinished file of a run, as `atomic_write` names it."""
    return any(name.startswith(f".{file}.") and name.endswith(".tmp") for file in (*RECORDS, MARKER))


def copy_files(paths: Iterable[Path], target: Path) -> None:
    """Copy files into a folder."""
    with contextlib.ExitStack() as stack:
        # An open file can be read to its end, even if its folder is deleted.
        sources = {path.name: stack.enter_context(open(path, "rb")) for path in paths}
        target.mkdir(exist_ok=True)
        for name, source in sources.items():
            with open(target / name, "wb") as file:
                shutil.copyfileobj(source, file, COPIED_BYTES)
                file.flush()
                os.fsync(file.fileno())


def files_of(checkpoint: Path) -> dict[str, Entry]:
    """Return the files of a checkpoint by its manifest, without the records of its run; if none can be read, a name
    that no file has."""
    with contextlib.suppress(CheckpointError, OSError):
        return {name: entry for name, entry in listed_files(checkpoint).items() if "/" not in name}
    return {"": Entry(0, "")}


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
