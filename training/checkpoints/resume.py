"""The checkpoint that a run continues from, and what may not have changed since it was saved."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.checkpoint import (
    Checkpoint,
    newest_valid,
    open_checkpoint,
    problems_of,
    step_folders,
)
from common.errors import CheckpointError, ConfigError
from common.files import STEP_NAME, atomic_write, sha256_file
from common.lora import LoRA, find_base, lora_of
from model_config import ModelConfig
from training.checkpoints.mirror import MIRRORED_FILES, Mirror, copy_checkpoint
from training.checkpoints.state import Saved, read_state
from training.config import Config, scope_of
from training.numbers.data import TokenData
from training.numbers.step import Trainer


@dataclass(frozen=True)
class Old:
    """What was there before this session: the checkpoint that it continues, or the weights that a new run starts from.
    Its files have been verified."""

    checkpoint: Checkpoint | None = None  # that is continued
    saved: Saved | None = None  # its training state
    own: bool = True  # it is this run's, here or in the mirror
    damaged: tuple[Path, ...] = ()  # newer checkpoints that are not whole
    given: Checkpoint | None = None  # of `init_from`, if a new run starts

    @property
    def source(self) -> Checkpoint | None:
        """Where the weights come from."""
        return self.checkpoint or self.given

    def shape(self, config: Config) -> ModelConfig:
        """The shape that was asked for; that of the trained model, if `init_from` names one or adapters are for it.

        Raises ConfigError if a given key differs from it. With rotary positions, which have no weights, the given
        context may be shorter.
        """
        if self.source is None or not (config.init_from or config.lora_rank):
            return config.shape(config.vocab_size)
        trained, source = self.source.trusted_config(), str(self.source.path)
        theirs = {key: value for key, value in trained.to_dict().items() if key not in ("vocab_size", "dropout")}
        if config.is_given("max_seq_len") and trained.position == "rope" and config.max_seq_len < trained.max_seq_len:
            theirs["max_seq_len"] = config.max_seq_len
        clashes = [
            f"{key} is {getattr(config, key)!r} from {config.sources[key]}, {value!r} in {source}"
            for key, value in theirs.items()
            if config.is_given(key) and getattr(config, key) != value
        ]
        if clashes:
            raise ConfigError("\n  ".join([f"The weights of {source} are for another model:", *clashes]))
        return replace(trained, **theirs, dropout=config.dropout)

    def tokenizer(self, config: Config) -> str | None:
        """The tokenizer file of the run that is continued, so that `input` becomes the same tokens again: another
        version of `tokenizers` could learn another vocabulary. None for a configuration with other settings of it."""
        if self.checkpoint is None or self.saved is None or not self.own:
            return None
        path = self.checkpoint.tokenizer_path()
        is_asked_for = all(self.saved.config.get(key) == getattr(config, key) for key in ("tokenizer", "vocab_size"))
        return str(path) if is_asked_for and sha256_file(path) == self.saved.data.get("tokenizer_sha256") else None


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


def newest_state(run_dir: Path) -> Saved | None:
    """The training state of the newest checkpoint whose state can be read."""
    for folder in step_folders(run_dir / "checkpoints"):
        with contextlib.suppress(CheckpointError, OSError):
            return read_state(Checkpoint(folder))
    return None


def find_old(config: Config, mirror_dir: Path | None) -> Old:
    """The newest whole checkpoint here or in the mirror, or the one that `resume_from` asks for; else the weights of
    `init_from`.

    Raises CheckpointError if there are checkpoints and none is whole, or if the folder holds a run that did not start
    from `resume_from` or `init_from`.
    """
    parents = [config.run_dir, mirror_dir] if config.resume != "never" else []
    folders = step_folders(*(parent / "checkpoints" for parent in parents if parent is not None))
    try:
        newest = newest_valid(folders)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}\nNothing was changed or deleted. If there are copies elsewhere, put them back; --resume never "
            "starts over and keeps these aside."
        ) from None
    if newest is None:
        asked = open_checkpoint(config.resume_from) if config.resume_from else None
        given = open_checkpoint(config.init_from) if config.init_from else None
        return Old(asked, read_state(asked) if asked else None, own=False, given=given)
    old = Old(newest, read_state(newest), damaged=tuple(folders[: folders.index(newest.path)]))
    assert old.saved is not None
    if config.init_from and resolved(config.init_from) != old.saved.state.initialized_from:
        raise CheckpointError(
            f"{config.run_dir} already holds a run that did not start from {config.init_from}. Choose another "
            "--output_dir for the new one, or --resume never to keep the old one aside."
        )
    # The same command again: the run has gone further than the checkpoint that it started from.
    if config.resume_from is None or old.saved.state.resumed_from == resolved(config.resume_from):
        return old
    asked = open_checkpoint(config.resume_from)
    if asked.path.resolve() == newest.path.resolve():
        return replace(old, checkpoint=asked)
    raise CheckpointError(
        f"{config.run_dir} already holds a run of its own, at {newest.path.name}. To continue from {asked.path} "
        "instead, choose another --output_dir."
    )


def resolved(path: str) -> str:
    """The path as states keep it: the same in every working directory."""
    return str(Path(path).resolve())


def require_the_same(checkpoint: Checkpoint, saved_as: Saved, trainer: Trainer) -> None:
    """Raises CheckpointError listing what changed since and may not: architecture, adapters, optimizer, tokenizer and
    data; and if the base of the adapters is gone."""
    config, lora = trainer.config, lora_of(trainer.model)
    adapted = checkpoint.lora()
    if adapted is not None:
        find_base(adapted, checkpoint.path)
    saved, ours = checkpoint.model_config().to_dict(), trainer.model.config.to_dict()
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
        for key, value in trainer.data.fingerprint.items()
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


def print_changes(saved: dict[str, Any], trainer: Trainer) -> None:
    """Print the keys of the configuration that changed since the last session."""
    now, sources = trainer.resolved(), trainer.config.sources
    for key, value in saved.items():
        if key in now and scope_of(key) == "run" and now[key] != value:
            print(f"  changed: {key} {value} -> {now[key]} ({sources.get(key, '')})")


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
