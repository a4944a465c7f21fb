"""The run folder: what it may hold already, how a killed process is cleaned up after, how an old run is set aside."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from pathlib import Path

from common.checkpoint import clean_up, step_folders
from common.errors import CheckpointError, ConfigError
from common.files import FolderLock, holder, read_json
from training.config import is_resolved
from training.mirror import MARKER
from training.records import CONFIG, RECORDS


def require_ours(folder: Path, flag: str) -> None:
    """Raises ConfigError if the folder that `flag` leads to cannot be made, or holds something else than a run."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        kind = "a file" if existing.exists() else "a link to nothing"
        raise ConfigError(f"{folder} ({flag}) cannot be a folder, because {existing} is {kind}: choose another {flag}.")
    if not folder.exists() or (folder / MARKER).exists() or step_folders(folder / "checkpoints", folder):
        return
    with contextlib.suppress(ConfigError):
        if is_resolved(read_json(folder / CONFIG, ConfigError)):
            return
    if others := sorted(path.name for path in folder.iterdir() if not is_leftover(path.name)):
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise ConfigError(
            f"{folder} ({flag}) holds files that are not a run's ({named}), and training would add its own. Choose a "
            f"folder that is empty or does not exist yet."
        )


def is_leftover(name: str) -> bool:
    """Whether a killed process left this: an unfinished file of a run, as `atomic_write` names it."""
    return any(name.startswith(f".{file}.") and name.endswith(".tmp") for file in (*RECORDS, MARKER))


def tidy(run_dir: Path) -> None:
    """Clean up after a process that was killed while it wrote into a run folder."""
    with contextlib.suppress(OSError):  # there is none, or it is read-only: the first save tells that
        clean_up(run_dir)
        clean_up(run_dir / "checkpoints")
        for path in run_dir.iterdir():
            if is_leftover(path.name) and path.is_file():
                path.unlink(missing_ok=True)


def lock_folder(lock: FolderLock, folder: Path) -> None:
    """Lock the folder, if there is one. Raises CheckpointError if another process trains in it."""
    if not lock.acquire(folder):
        raise CheckpointError(
            f"{folder} is being trained by another process{holder(folder / CONFIG)}. Wait for it, stop it, or choose "
            f"another --output_dir."
        )


def require_movable(run_dir: Path) -> None:
    """Raises ConfigError if the old run cannot be set aside because this command was started in its folder: the working
    directory would be renamed with it, and the same command would find the old run there again."""
    absolute = run_dir.resolve()
    if is_there(run_dir) and Path.cwd().is_relative_to(absolute):
        raise ConfigError(
            f"--resume never renames {absolute}, and this command was started in it. Start it from another folder (cd "
            f"{absolute.parent}), and change relative paths to fit."
        )


def set_aside(run_dir: Path) -> None:
    """Rename an old run, so that starting over loses nothing. Raises CheckpointError if that fails."""
    if not is_there(run_dir):
        return
    folder = Path(os.path.normpath(run_dir))  # which ends in a name: `require_movable` refuses . and ..
    old = folder.with_name(f"{folder.name}.{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
    try:
        os.replace(folder, old)
    except OSError as problem:  # a disk is mounted on the folder, or its disk is read-only
        raise CheckpointError(
            f"The run in {run_dir} could not be renamed to {old} ({problem.strerror}). Choose another folder for the "
            f"new run, or leave --resume never out."
        ) from None
    print(f"The run that was in {run_dir} is now {old}.")


def is_there(run_dir: Path) -> bool:
    """Whether there is anything to set aside."""
    return run_dir.is_dir() and any(run_dir.iterdir())


def quarantine(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer counts as one and can still be examined."""
    with contextlib.suppress(OSError):
        target = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)


def free_space(folder: Path) -> int:
    """Free bytes on the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
