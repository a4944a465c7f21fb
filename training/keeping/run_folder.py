"""The run folder: whose it is, that one training at a time writes into it, and how an old one makes way."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shutil
from pathlib import Path

from common.checkpoint import step_folders
from common.errors import CheckpointError, ConfigError
from common.files import read_json, write_json
from common.lock import holder, session
from common.publishing import restore_interrupted
from training.config import TrainConfig, is_resolved
from training.file_names import CONFIG, CURVE, MARKER, METRICS, SAMPLES, STAGING, SUMMARY

FILES = (CONFIG, METRICS, SAMPLES, CURVE, SUMMARY, MARKER)


def write_config(config: TrainConfig, device: str) -> None:
    """Write the resolved configuration, and who trains on which device: the folder is a run's of ours from here on."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    resolved = {"config": config.values(), "sources": config.sources, "device": device, "session": session()}
    write_json(config.run_dir / CONFIG, resolved)


def require_ours(folder: Path, flag: str) -> None:
    """Raises ConfigError if the folder that `flag` leads to holds other things than a run of ours, or cannot be one."""
    reached = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not reached.is_dir():
        kind = "a file" if reached.exists() else "a link that leads nowhere"
        raise ConfigError(f"{folder} ({flag}) cannot be a folder, for {reached} is {kind}: choose another {flag}.")
    if not folder.exists():
        return
    if (folder / MARKER).exists() or step_folders(folder / "checkpoints"):
        return
    there = sorted(path.name for path in folder.iterdir() if not is_leftover(path.name))
    with contextlib.suppress(ConfigError):
        if is_resolved(read_json(folder / CONFIG, ConfigError)):
            return
    if there:
        named = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        raise ConfigError(
            f"{folder} ({flag}) holds files that are not a run's ({named}), and training would write between them. "
            f"Choose a folder that is empty or not there yet."
        )


def is_leftover(name: str) -> bool:
    """Whether a file was on its way to a name of ours when a process was killed: as `atomic_write` calls it, or in the
    folder of a session."""
    return name.startswith(STAGING) or any(name.startswith(f".{file}.") and name.endswith(".tmp") for file in FILES)


def tidy(run_dir: Path, truncate: bool = False) -> None:
    """Clean up after a process that was killed while it saved into a run folder: what carries names of ours."""
    with contextlib.suppress(OSError):  # a Drive that is not there is reported when a copy fails
        restore_interrupted(run_dir, truncate)
        restore_interrupted(run_dir / "checkpoints", truncate)
        for path in run_dir.iterdir():
            if is_leftover(path.name) and path.is_file():
                path.unlink(missing_ok=True)


def being_trained(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} is being trained by another process{holder(folder / CONFIG)}. Wait for it, stop it, or choose "
        f"another --output_dir."
    )


def require_movable(run_dir: Path) -> None:
    """Raises ConfigError if this command stands in the old run that is to be set aside. It would go along: the same
    command would then lead to the old run again."""
    whole = run_dir.resolve()
    if is_there(run_dir) and Path.cwd().is_relative_to(whole):
        raise ConfigError(
            f"--resume never renames {whole}, and this command was started in it: start it from another folder (cd "
            f"{whole.parent}), with paths as they are from there."
        )


def set_aside(run_dir: Path) -> None:
    """Rename an old run, so that starting over loses nothing. Raises CheckpointError if that fails."""
    if not is_there(run_dir):
        return
    folder = Path(os.path.normpath(run_dir))  # which ends in a name: `require_movable` refuses . and ..
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    candidates = (folder.with_name(f"{folder.name}.{stamp}{name}") for name in names)
    old = next(path for path in candidates if not path.exists())
    try:
        os.replace(folder, old)
    except OSError as problem:  # a disk is mounted on it; the one it is on is read-only
        raise CheckpointError(
            f"The run in {run_dir} could not be set aside as {old} ({problem.strerror}): choose another folder for the "
            f"new one, or leave --resume never out."
        ) from None
    print(f"The run that was in {run_dir} is now {old}.")


def is_there(run_dir: Path) -> bool:
    """Whether there is anything to be set aside."""
    return run_dir.is_dir() and any(run_dir.iterdir())


def quarantine(folder: Path) -> None:
    """Take a damaged checkpoint out of the succession of steps, and keep it to be looked at."""
    with contextlib.suppress(OSError):
        target = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
