"""What earlier sessions left: the checkpoint to continue from, or the trained weights that a new run starts from; and
the run folder: whose it is, one training at a time in it, an old run set aside."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from common.checkpoint import (
    ADAPTERS,
    BEST,
    Checkpoint,
    clean_up,
    listed_files,
    newest_valid,
    open_checkpoint,
    problems_of,
    publish,
    step_folders,
    step_of,
    write_manifest,
)
from common.errors import CheckpointError, ConfigError
from common.files import OF_RUN, atomic_write, holder, locked, read_json, sha256_file, sync_directory
from common.tensors import weights_file
from common.validation import build
from training.config import Config, Forecast, is_resolved, scope_of
from training.mirror import MARKER, Mirror, copy_files, is_better, read_best_state
from training.records import CONFIG, RECORDS
from training.state import Saved, read_state


@dataclass(frozen=True)
class Previous:
    """What this session builds on. Its files have been verified."""

    checkpoint: Checkpoint | None = None  # to continue from
    saved: Saved | None = None  # its training state
    is_own: bool = True  # the checkpoint is this run's, here or in the mirror
    init: Checkpoint | None = None  # of `init_from`, if a new run starts

    @property
    def source(self) -> Checkpoint | None:
        """Where the weights come from."""
        return self.checkpoint or self.init


def find_previous(config: Config, mirror: Mirror | None, is_trained: bool) -> Previous:
    """Find what the run folder and its mirror hold. If the run `is_trained` then, its folder is locked: clean up after
    a session that was killed, and copy into it what only the mirror has.

    Raises ConfigError or CheckpointError if a folder is not this run's, cannot be used, or holds nothing whole.
    """
    if is_trained:
        finish_setting_aside(config)
    require_ours(config.run_dir, "--output_dir")
    if config.resume == "never":
        require_movable(config.run_dir)
    if mirror is not None:
        try:
            require_mirror(mirror, config)
        except OSError as problem:
            raise ConfigError(
                f"--checkpoint_dir {mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or leave "
                f"--checkpoint_dir out to train without copies."
            ) from None
    if is_trained:
        tidy(config.run_dir)
    previous: Previous | None = None
    while previous is None:
        with contextlib.suppress(FileNotFoundError):  # another machine has just replaced the copy by a newer one
            previous = find_checkpoint(config, mirror)
            if is_trained and previous.checkpoint is not None:
                previous = copy_here(previous, config, mirror)
    if mirror is not None:
        mirror.require_usable()  # again: a mirror that was unmounted meanwhile looks empty
    return previous


def require_mirror(mirror: Mirror, config: Config) -> None:
    """Raise ConfigError or CheckpointError if the mirror is not there, or is not this run's."""
    require_ours(mirror.dir, "--checkpoint_dir")
    mirror.require_usable()
    if config.resume == "never":
        require_movable(mirror.dir)
    mirror.known = {copy.name for copy in step_folders(mirror.dir)}
    theirs = mirror.marker()
    spelled = str(theirs.get("output_dir"))
    # If the run folder was lost with its machine, or this is a new run. The working directory may be another one.
    is_other = bool(theirs) and os.path.normpath(spelled) != os.path.normpath(config.run_dir)
    for newest in step_folders(config.run_dir / "checkpoints")[:1]:
        with contextlib.suppress(CheckpointError, OSError):  # it is damaged
            is_other = theirs.get("run_id") not in (None, read_state(Checkpoint(newest)).state.run_id)
    if is_other:
        raise CheckpointError(
            f"{mirror.dir} holds the copies of another run (--output_dir {spelled}), not of {config.run_dir}. Give "
            f"this one a --checkpoint_dir or an --output_dir of its own; to continue the other, train --output_dir "
            f"{spelled}, without this run in it."
        )


def find_checkpoint(config: Config, mirror: Mirror | None) -> Previous:
    """Find the newest whole checkpoint here or in the mirror, or the one that `resume_from` names; else the weights of
    `init_from`.

    Raises CheckpointError if there are checkpoints and none is whole, or if the folder holds a run that did not start
    from `resume_from` or `init_from`; FileNotFoundError if another machine has deleted the copy meanwhile.
    """
    places = [config.run_dir / "checkpoints", *([mirror.dir] if mirror is not None else [])]
    try:
        newest = newest_valid(*places) if config.resume != "never" else None
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}\nNothing was changed or deleted. If there are copies elsewhere, put them back; --resume never "
            "starts over and keeps these aside."
        ) from None
    if newest is None:
        start = open_checkpoint(config.resume_from) if config.resume_from else None
        init = open_checkpoint(config.init_from) if config.init_from else None
        return Previous(start, read_state(start) if start else None, is_own=False, init=init)
    try:
        saved = read_state(newest)
    except CheckpointError:
        if newest.path.exists():
            raise
        raise FileNotFoundError(newest.path) from None
    if config.init_from and not has_started_from(config.init_from, saved):
        raise CheckpointError(
            f"{config.run_dir} already holds a run that did not start from {config.init_from}. Choose another "
            "--output_dir for the new one, or --resume never to keep the old one aside."
        )
    # The same command again: the run has gone further than the checkpoint that it started from.
    if config.resume_from is None or saved.state.resumed_from == os.path.normpath(config.resume_from):
        return Previous(newest, saved)
    start = open_checkpoint(config.resume_from)
    if start.path.resolve() == newest.path.resolve():
        return Previous(start, saved)
    raise CheckpointError(
        f"{config.run_dir} already holds a run of its own, at {newest.path.name}. To continue from {start.path} "
        "instead, choose another --output_dir."
    )


def has_started_from(path: str, saved: Saved) -> bool:
    """Return whether a run started from the weights that `path` leads to. The same path is enough, because these
    weights may have been trained further or deleted since; so are the same weights in another place."""
    if saved.config.get("init_from") == path:
        return True
    with contextlib.suppress(CheckpointError):
        return weights_hash(open_checkpoint(path)) == saved.state.initialized_from
    return False


def weights_hash(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of a checkpoint's weights, or of its adapters: they are the same wherever they lie."""
    adapters = checkpoint.path / ADAPTERS
    return sha256_file(adapters if adapters.exists() else weights_file(checkpoint.path))


def copy_here(previous: Previous, config: Config, mirror: Mirror | None) -> Previous:
    """Copy into the run folder what belongs to a checkpoint from elsewhere: the records of its run, its best weights,
    and the checkpoint itself if it is a copy of this run. Best weights that were lost here come back from the mirror.

    Raises FileNotFoundError if another machine has deleted the copy meanwhile.
    """
    assert previous.checkpoint is not None
    run_dir, folder = config.run_dir, previous.checkpoint.path.resolve()
    parent = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    candidates: list[Path] = []
    if parent != run_dir.resolve():
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        if previous.is_own:
            here = run_dir / "checkpoints" / f"step_{step_of(folder):08d}"
            if copy_checkpoint(folder, here):
                print(f"Copies     {previous.checkpoint.path} is the newest, and now in {run_dir} too.")
                previous = replace(previous, checkpoint=Checkpoint(here))
        records = folder / OF_RUN if (folder / OF_RUN).is_dir() else parent
        for name in RECORDS:
            if (records / name).is_file():
                with atomic_write(run_dir / name) as file:
                    file.write((records / name).read_bytes())
        candidates = [run_dir / BEST, parent / BEST, *parent.glob(f"{BEST}_*")]
    elif mirror is not None and problems_of(run_dir / BEST):
        candidates = mirror.best_copies()
    states = {path: state for path in candidates if (state := read_best_state(path)) and not problems_of(path)}
    if states:
        best = reduce(lambda one, other: other if is_better(states[other], states[one]) else one, states)
        if best != run_dir / BEST:
            copy_checkpoint(best, run_dir / BEST)
    return previous


def copy_checkpoint(source: Path, target: Path) -> bool:
    """Copy a checkpoint and verify the copy. If that fails, say so and return False."""
    temporary = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        files = {name: entry for name, entry in listed_files(source).items() if "/" not in name}
        copy_files((source / name for name in files), temporary)
        write_manifest(temporary, files)
        if problems := problems_of(temporary):
            raise OSError("; ".join(problems))
        publish(temporary, target)
    except (OSError, CheckpointError) as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        if not source.exists():
            raise FileNotFoundError(source) from None
        reason = getattr(problem, "strerror", None) or problem
        print(f"Warning: {source} could not be copied to {target.parent} ({reason}); the training goes on.")
        return False
    return True


def kept_choice(config: Config, source: str) -> tuple[dict[str, Any], Forecast | None]:
    """Read what `source`, the dial, chose for the run that is there, here or in its mirror, and what it expected of
    it."""
    if config.resume == "never":
        return {}, None
    if not is_there(config.run_dir) and (replacing(config.run_dir) / CONFIG).is_file():
        with locked_run(config):  # else another session is about to do it
            finish_setting_aside(config)
    places = [config.run_dir / CONFIG]
    if config.checkpoint_dir:
        places += Mirror(config.run_dir, config.checkpoint_dir).records(CONFIG)
    for path in filter(Path.is_file, places):
        content = read_json(path, ConfigError)
        if is_resolved(content):
            values, sources, forecast = content["config"], content["sources"], None
            with contextlib.suppress(ValueError, KeyError):  # there is none, or one of another version
                forecast = build(Forecast, content["forecast"])
            chosen = {key: value for key, value in values.items() if sources.get(key) == source}
            return {key: value for key, value in chosen.items() if scope_of(key) != "command"}, forecast
    return {}, None


# The run folder


def require_ours(folder: Path, flag: str) -> None:
    """Raise ConfigError if the folder that `flag` leads to cannot be made, or holds something else than a run."""
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
    """Return whether a killed process left this: an unfinished file of a run, as `atomic_write` names it."""
    return any(name.startswith(f".{file}.") and name.endswith(".tmp") for file in (*RECORDS, MARKER))


def tidy(run_dir: Path) -> None:
    """Clean up after a process that was killed while it wrote into a run folder."""
    with contextlib.suppress(OSError):  # there is none, or it is read-only: the first save tells that
        clean_up(run_dir)
        clean_up(run_dir / "checkpoints")
        if is_there(run_dir):
            shutil.rmtree(replacing(run_dir), ignore_errors=True)
        for path in run_dir.iterdir():
            if is_leftover(path.name) and path.is_file():
                path.unlink(missing_ok=True)


def locked_run(config: Config) -> contextlib.AbstractContextManager[None]:
    """Lock the run folder. Raises CheckpointError if another process trains in it."""
    folder = config.run_dir

    def busy() -> CheckpointError:
        return CheckpointError(
            f"{folder} is being trained by another process{holder(folder / CONFIG)}. Wait for it, stop it, or choose "
            f"another --output_dir."
        )

    return locked(folder, busy)


def require_movable(run_dir: Path) -> None:
    """Raise ConfigError if the old run cannot be set aside because this command was started in its folder: the working
    directory would be renamed with it, and the same command would find the old run there again."""
    absolute = run_dir.resolve()
    if is_there(run_dir) and Path.cwd().is_relative_to(absolute):
        raise ConfigError(
            f"--resume never renames {absolute}, and this command was started in it. Start it from another folder (cd "
            f"{absolute.parent}), and change relative paths to fit."
        )


def set_aside(run_dir: Path, mirror: Path | None, prepare: Callable[[dict[Path, Path], Path], object]) -> None:
    """Rename an old run and its mirror, so that starting over loses nothing, and put a new run folder in its place.
    Before, `prepare` writes into the new folder what the same command needs to go on if this process is killed here: it
    gets the old folders with the names that they will have, and the new folder.

    Raises CheckpointError if a folder cannot be renamed.
    """
    new, moves = replacing(run_dir), names_aside(run_dir, mirror)
    if not moves:
        return
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    prepare(moves, new)
    put_in_place(new, run_dir, moves)


def replacing(run_dir: Path) -> Path:
    """Return the name of a new run folder while an old one is in its place."""
    parent, name = os.path.split(os.path.abspath(run_dir))
    return Path(parent, f".new-{name}")


def names_aside(*folders: Path | None) -> dict[Path, Path]:
    """Return the names under which those of the folders that hold something will be kept."""
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    # Each ends in a name, because `require_movable` refuses . and .. where something is.
    there = [Path(os.path.normpath(folder)) for folder in folders if folder is not None and is_there(folder)]
    return {folder: folder.with_name(f"{folder.name}.{now}") for folder in there}


def put_in_place(new: Path, run_dir: Path, moves: dict[Path, Path]) -> None:
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
    target = os.path.normpath(run_dir)  # where run/.. is gone
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(target)  # it was empty
    os.replace(new, target)
    sync_directory(new.parent)


def finish_setting_aside(config: Config) -> None:
    """Put a new run in place, if an earlier session was killed when the old one had been set aside."""
    new = replacing(config.run_dir)
    if is_there(config.run_dir) or not (new / CONFIG).is_file() or config.resume == "never":
        return
    mirror = Mirror(config.run_dir, config.checkpoint_dir).dir if config.checkpoint_dir else None
    put_in_place(new, config.run_dir, names_aside(mirror))


def is_there(run_dir: Path) -> bool:
    """Return whether there is anything to set aside."""
    return run_dir.is_dir() and any(run_dir.iterdir())


def quarantine(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer counts as one and can still be examined."""
    with contextlib.suppress(OSError):
        target = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
