"""The checkpoint that a run continues from, and what may not have changed since it was saved."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoint import (
    Checkpoint,
    newest_valid,
    open_checkpoint,
    problems_of,
    step_folders,
)
from common.errors import CheckpointError
from common.files import atomic_write, sha256_file
from common.lora import LoRA, find_base, lora_of
from common.publishing import STEP_NAME
from training.config import Config, scope_of
from training.keeping.mirror import MIRRORED_FILES, Mirror, copy_checkpoint
from training.keeping.state import Saved, TrainState, read_state
from training.numbers.data import TokenData
from training.parts import Parts


class Found(NamedTuple):
    """What a run continues from."""

    checkpoint: Checkpoint
    damaged: list[Path]  # newer checkpoints that are not whole
    own: bool = True  # the checkpoint is this run's, here or in the mirror


def require_own_mirror(run_dir: Path, mirror: Mirror) -> None:
    """Raises CheckpointError if the mirror holds the copies of another run whose folder has the same last name."""
    theirs, ours = newest_state(mirror.dir), newest_state(run_dir)
    if theirs is None:
        return
    place = mirror.lease.read().get("run_dir")
    spelled = theirs.config.get("output_dir") or Path("runs") / mirror.dir.name
    if ours is not None:
        is_other = ours.state.run_id != theirs.state.run_id
    else:  # the local folder was lost with its machine, or this is a new run
        is_other = not leads_to(str(spelled), place, run_dir)
    if is_other:
        named = f"--output_dir {place or spelled}"
        raise CheckpointError(
            f"{mirror.dir} holds the copies of another run ({named}), not of {run_dir}. Give this one a "
            f"--checkpoint_dir or an --output_dir of its own; to continue the other, train {named}."
        )


def leads_to(spelled: str, place: Any, run_dir: Path) -> bool:
    """Whether a run was trained in `run_dir`, which is empty now. Its `--output_dir` was `spelled`, and its folder was
    `place` (None: not known).

    The same absolute path is the same folder. The same relative path counts as the same folder, too: the working
    directory may be another one on this machine. It does not count if the run is still at `place`, or if the path
    begins with "..".
    """
    if place == os.path.abspath(run_dir):
        return True
    way = os.path.normpath(os.path.expanduser(spelled))
    if way != os.path.normpath(run_dir):
        return False
    if not isinstance(place, str):
        return True
    return Path(way).parts[:1] not in ((), ("..",)) and not step_folders(Path(place) / "checkpoints")


def own_checkpoint(config: Config) -> Checkpoint | None:
    """A checkpoint of the run that this configuration would continue. Its files are not verified: all checkpoints of a
    run have the same shape. None if the configuration starts a new run."""
    folders = [config.run_dir / "checkpoints"]
    if config.checkpoint_dir:
        folders.append(Mirror(config.run_dir, config.checkpoint_dir).dir / "checkpoints")
    for folder in step_folders(*folders) if config.resume != "never" else []:
        with contextlib.suppress(CheckpointError, OSError):
            Checkpoint(folder).trusted_config()
            return Checkpoint(folder)
    return None


def with_given_shape(config: Config) -> Config:
    """The configuration with the shape of the model that it starts from."""
    given = config.init_from or (config.resume_from if config.lora_rank else None)  # adapters have the shape of a base
    if not given:
        return config
    checkpoint = own_checkpoint(config) or open_checkpoint(given)
    return config.with_model(checkpoint.trusted_config(), str(checkpoint.path))


def own_tokenizer(config: Config) -> str | None:
    """The tokenizer file of the run that this configuration would continue, so that `input` becomes the same tokens
    again. Another version of `tokenizers` could learn another vocabulary.

    None for a new run, and for a configuration with other tokenizer settings.
    """
    checkpoint = own_checkpoint(config)
    if checkpoint is None:
        return None
    with contextlib.suppress(CheckpointError, OSError, KeyError, TypeError):  # damaged: the run says so
        state, path = checkpoint.training_state(), checkpoint.tokenizer_path()
        is_asked_for = all(state["config"][key] == getattr(config, key) for key in ("tokenizer", "vocab_size"))
        if is_asked_for and sha256_file(path) == state["data"]["tokenizer_sha256"]:
            return str(path)
    return None


def newest_state(run_dir: Path) -> Saved | None:
    """The training state of the newest checkpoint whose state can be read."""
    for folder in step_folders(run_dir / "checkpoints"):
        with contextlib.suppress(CheckpointError, OSError):
            return read_state(Checkpoint(folder))
    return None


def find_checkpoint(run_dir: Path, mirror_dir: Path | None, config: Config) -> Found | None:
    """The newest whole checkpoint here or in the mirror, or the one that `resume_from` asks for; None if there is none.

    Raises CheckpointError if there are checkpoints and none is whole, or if the folder holds a run that did not start
    from `resume_from`.
    """
    folders = step_folders(*(parent / "checkpoints" for parent in (run_dir, mirror_dir) if parent is not None))
    try:
        newest = newest_valid(folders)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}\nNothing was changed or deleted. If there are copies elsewhere, put them back; --resume never "
            "starts over and keeps these aside."
        ) from None
    if newest is None:
        return Found(open_checkpoint(config.resume_from), [], own=False) if config.resume_from is not None else None
    found = Found(newest, folders[: folders.index(newest.path)])
    if config.resume_from is None:
        return found
    # The same command again: the run has gone further than the checkpoint that it started from.
    if newest.training_state().get("resumed_from") == resolved(config.resume_from):
        return found
    asked = open_checkpoint(config.resume_from)
    if asked.path.resolve() == newest.path.resolve():
        return found._replace(checkpoint=asked)
    raise CheckpointError(
        f"{run_dir} already holds a run of its own, at {newest.path.name}. To continue from {asked.path} "
        "instead, choose another --output_dir."
    )


def resolved(path: str) -> str:
    """The path as states keep it: the same in every working directory."""
    return str(Path(path).resolve())


def require_the_same(checkpoint: Checkpoint, saved_as: Saved, parts: Parts) -> None:
    """Raises CheckpointError listing what changed since and may not: architecture, adapters, optimizer, tokenizer and
    data; and if the base of the adapters is gone."""
    config, lora = parts.config, lora_of(parts.model)
    adapted = checkpoint.lora()
    if adapted is not None:
        find_base(adapted, checkpoint.path)
    saved, ours = checkpoint.model_config().to_dict(), parts.model.config.to_dict()
    clashes = [
        f"{key}: {saved[key]!r} in the checkpoint, {ours[key]!r} now"
        for key in saved
        if saved[key] != ours[key] and key != "dropout"
    ]
    clashes += [
        f"lora_{key}: {saved!r} in the checkpoint, {now!r} now"
        for (key, saved), now in zip(what_adapts(adapted).items(), what_adapts(lora).values(), strict=True)
        if saved != now
    ]
    saved_with = saved_as.config.get("optimizer")
    if saved_with != config.optimizer:
        clashes.append(f"optimizer: {saved_with!r} in the checkpoint, {config.optimizer!r} now")
    clashes += [
        f"{key} of the data: {str(saved_as.data.get(key))[:16]} in the checkpoint, {str(value)[:16]} now"
        for key, value in parts.data.fingerprint.items()
        if saved_as.data.get(key) != value
    ]
    if clashes:
        said = f"{checkpoint.path} cannot be continued: model, adapters, optimizer, tokenizer and data may not change."
        raise CheckpointError(
            "\n  ".join([said, *clashes])
            + f"\nGive the old values, or another --output_dir, or --resume never ({config.run_dir} is kept aside)."
        )


def what_adapts(lora: LoRA | None) -> dict[str, Any]:
    """The fields of adapters that may not change: all except the path of their base."""
    keys = ("rank", "alpha", "targets", "base_sha256")
    return {key: getattr(lora, key) for key in keys} if lora else {"rank": 0} | dict.fromkeys(keys[1:])


def require_the_same_start(state: TrainState, config: Config) -> None:
    """Raises CheckpointError if `init_from` names other weights than those the run started from."""
    if config.init_from and resolved(config.init_from) != state.initialized_from:
        raise CheckpointError(
            f"{config.run_dir} already holds a run that did not start from {config.init_from}. Choose another "
            "--output_dir for the new one, or --resume never to keep the old one aside."
        )


def print_changes(saved: dict[str, Any], config: Config) -> None:
    """Print the keys of the configuration that changed since the last session."""
    now = config.values()
    for key, value in saved.items():
        if key in now and scope_of(key) == "run" and now[key] != value:
            print(f"  changed: {key} {value} -> {now[key]} ({config.sources.get(key, '')})")


def bring_back_files(checkpoint: Checkpoint, run_dir: Path, mirror_dir: Path | None) -> None:
    """Copy metrics, samples and best weights that belong to a checkpoint from elsewhere into the run folder: from the
    mirror, for instance, if another machine has trained on. A best/ that was lost here comes back from the mirror."""
    source = checkpoint.path.resolve().parent  # of best/, or of a folder of checkpoints
    if source.name == "checkpoints":
        source = source.parent
    folders = []
    if source.resolve() != run_dir.resolve():
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in MIRRORED_FILES:
            if (source / name).exists():
                with atomic_write(run_dir / name) as file:
                    file.write((source / name).read_bytes())
        folders.append(source / "best")
        if STEP_NAME.fullmatch(checkpoint.path.name):
            folders.append(source / "checkpoints" / checkpoint.path.name)
    elif mirror_dir is not None and problems_of(run_dir / "best"):
        source = mirror_dir
        folders.append(source / "best")
    for folder in folders:
        if folder.is_dir() and (problem := copy_checkpoint(folder, run_dir / folder.relative_to(source))):
            print(f"Warning: {folder} could not be copied to {run_dir} ({problem}); the training goes on.")


def require_tokenizer(checkpoint: Checkpoint, data: TokenData) -> None:
    """Raises CheckpointError if the data was tokenized with another tokenizer than the checkpoint's."""
    tokenizer_path = checkpoint.tokenizer_path()
    if sha256_file(tokenizer_path) != data.metadata.tokenizer_sha256:
        raise CheckpointError(
            f"The data was not tokenized with the tokenizer of {checkpoint.path}. Tokenize it with: python "
            f"tokenize_local_bpe.py --input my_text.txt --tokenizer_file {tokenizer_path}"
        )
