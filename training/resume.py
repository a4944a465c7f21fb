"""How a session begins: what its folders hold, what it continues from, and what may not have changed since."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import uuid
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from common.checkpoint import (
    BEST,
    Checkpoint,
    describe_damage,
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
from common.files import OF_RUN, atomic_write, sha256_file
from common.lora import LoRA, find_base, lora_of
from common.script import world
from model_config import ModelConfig
from tokenization.token_folder import find_tokens
from training.config import Config, scope_of
from training.data import TokenData
from training.mirror import Mirror, beats, copy_files, standing
from training.optimizer import apply_hyperparameters
from training.parallel import any_process, broadcast_tensors, on_rank_0
from training.records import RECORDS
from training.run import Run
from training.run_folder import quarantine, require_movable, require_ours, set_aside, tidy
from training.schedule import epoch_sequences, has_stopped_early, last_step, learning_rate
from training.state import Saved, TrainState, read_state
from training.step import Trainer

TOKENS = "tokens_sha256 of the data"  # as `identity` calls it
NAMED = 3  # files


@dataclass(frozen=True)
class Old:
    """What was there before this session: the checkpoint that it continues, or the weights that a new run starts from.
    Its files have been verified."""

    checkpoint: Checkpoint | None = None  # that is continued
    saved: Saved | None = None  # its training state
    own: bool = True  # it is this run's, here or in the mirror
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


def look(config: Config, mirror: Mirror | None, will_train: bool = True) -> Old:
    """What was there before. `will_train`: this session cleans up after one that was killed.

    Raises ConfigError or CheckpointError if a folder is not this run's, cannot be used, or holds nothing whole.
    """
    if config.resume == "never":
        require_movable(config.run_dir)
    if mirror is not None:
        try:
            require_own(mirror, config)
        except OSError as problem:
            raise ConfigError(
                f"--checkpoint_dir {mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or leave "
                f"--checkpoint_dir out to train without copies."
            ) from None
    if will_train:
        tidy(config.run_dir)
    old: Old | None = None
    while old is None:
        with contextlib.suppress(FileNotFoundError):  # the copy has made way for a newer one, of another machine
            old = find_old(config, mirror)
            if will_train and old.checkpoint is not None:
                old = bring_back(old, config, mirror)
    if mirror is not None:
        mirror.require_usable()  # again: in a mirror that has gone meanwhile, there seem to be no copies
    return old


def require_own(mirror: Mirror, config: Config) -> None:
    """Raises ConfigError or CheckpointError if the mirror is not there, or is not this run's."""
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


def find_old(config: Config, mirror: Mirror | None) -> Old:
    """The newest whole checkpoint here or in the mirror, or the one that `resume_from` asks for; else the weights of
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
        asked = open_checkpoint(config.resume_from) if config.resume_from else None
        given = open_checkpoint(config.init_from) if config.init_from else None
        return Old(asked, read_state(asked) if asked else None, own=False, given=given)
    try:
        old = Old(newest, read_state(newest))
    except CheckpointError:
        if newest.path.exists():
            raise
        raise FileNotFoundError(newest.path) from None
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


def require_the_same(checkpoint: Checkpoint, saved: Saved, trainer: Trainer) -> None:
    """Raises CheckpointError listing what changed since and may not: architecture, adapters, optimizer, tokenizer and
    data; and if the base of the adapters is gone."""
    config, lora = trainer.config, checkpoint.lora()
    if lora is not None:
        find_base(lora, checkpoint.path)
    then = identity(checkpoint.model_config(), lora, saved.config.get("optimizer"), saved.data)
    now = identity(trainer.shape, lora_of(trainer.model), config.optimizer, trainer.data.fingerprint)
    clashes = [
        f"{key}: {then.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]
    if clashes and then.get(TOKENS) != now.get(TOKENS) and (more := text_change(trainer, saved.data)):
        clashes.append(more)
    if clashes:
        said = f"{checkpoint.path} cannot be continued: model, adapters, optimizer, tokenizer and data may not change."
        raise CheckpointError(
            "\n  ".join([said, *clashes])
            + f"\nGive the old values, or another --output_dir, or --resume never ({config.run_dir} is kept aside)."
        )


def text_change(trainer: Trainer, then: dict[str, Any]) -> str:
    """What has changed in the text of `--input` since, and what to type; "" if its tokens of then are not found."""
    config, tokens = trainer.config, find_tokens(str(then.get("tokens_sha256")))
    if not config.input or tokens is None:
        return ""
    before, after = ({str(file) for file in metadata.source_files} for metadata in (tokens, trainer.data.metadata))
    names = [file["name"] for file in trainer.data.metadata.source_files if str(file) not in before]
    named = f" ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})" if names else ""
    length = f"--minutes {config.minutes:g}" if config.minutes else f"--epochs {config.epochs}"
    return (
        f"files that are new or changed: {len(names)}{named}; gone or changed: {len(before - after)}\n"
        f"The old tokens are kept: to go on with them, --data_dir {tokens.path.parent} --output_dir {config.run_dir} "
        f"instead of --input.\nTo train these weights on the new text: --input {shlex.quote(config.input)} {length} "
        f"--init_from {config.run_dir} --output_dir {config.run_dir}_2."
    )


def identity(shape: ModelConfig, lora: LoRA | None, optimizer: Any, data: dict[str, Any]) -> dict[str, Any]:
    """What a run keeps, by name. The base of adapters may move."""
    values = {key: value for key, value in shape.to_dict().items() if key != "dropout"}
    values |= {f"lora_{key}": getattr(lora, key, 0) for key in ("rank", "alpha", "targets", "base_sha256")}
    values["optimizer"] = optimizer
    return values | {f"{key} of the data": str(value)[:16] for key, value in data.items()}


def print_changes(saved: dict[str, Any], trainer: Trainer) -> None:
    """Print the keys of the configuration that changed since the last session."""
    now, sources = trainer.resolved(), trainer.config.sources
    for key, value in saved.items():
        if key in now and scope_of(key) == "run" and now[key] != value:
            print(f"  changed: {key} {value} -> {now[key]} ({sources.get(key, '')})")


def bring_back(old: Old, config: Config, mirror: Mirror | None) -> Old:
    """Copy into the run folder what belongs to a checkpoint from elsewhere: the records of its run, its best weights,
    and itself if it is a copy of this run, which is then continued from here. Best weights that were lost here come
    back from the mirror.

    Raises FileNotFoundError if another machine has deleted the copy meanwhile.
    """
    assert old.checkpoint is not None
    run_dir, folder = config.run_dir, old.checkpoint.path.resolve()
    parent = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    best: list[Path] = []
    if parent != run_dir.resolve():
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        if old.own:
            here = run_dir / "checkpoints" / f"step_{step_of(folder):08d}"
            if bring(folder, here):
                print(f"Copies     {old.checkpoint.path} is the newest, and now in {run_dir} too.")
                old = replace(old, checkpoint=Checkpoint(here))
        records = folder / OF_RUN if (folder / OF_RUN).is_dir() else parent
        for name in RECORDS:
            if (records / name).is_file():
                with atomic_write(run_dir / name) as file:
                    file.write((records / name).read_bytes())
        best = [run_dir / BEST, parent / BEST, *parent.glob(f"{BEST}_*")]
    elif mirror is not None and problems_of(run_dir / BEST):
        best = mirror.best_copies()
    scores = {path: score for path in best if (score := standing(path)) is not None and not problems_of(path)}
    if scores:
        source = reduce(lambda a, b: b if beats(scores[b], scores[a]) else a, scores)
        if source != run_dir / BEST:
            bring(source, run_dir / BEST)
    return old


def bring(source: Path, target: Path) -> bool:
    """Copy a checkpoint to `target`. If that fails, says so and returns False."""
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


def require_tokenizer(checkpoint: Checkpoint, data: TokenData) -> None:
    """Raises CheckpointError if the data was tokenized with another tokenizer than the checkpoint's."""
    tokenizer_path = checkpoint.tokenizer_path()
    if sha256_file(tokenizer_path) != data.metadata.tokenizer_sha256:
        raise CheckpointError(
            f"The data was not tokenized with the tokenizer of {checkpoint.path}. Tokenize it with: python "
            f"tokenize_local_bpe.py --input my_text.txt --tokenizer_file {tokenizer_path}"
        )


def start_or_resume(run: Run, old: Old) -> None:
    """Continue the run of `old` if there is one, else start it.

    Raises CheckpointError if what is there belongs to another model or other data.
    """
    trainer, config = run.trainer, run.trainer.config
    state = on_rank_0(lambda: open_run(run, old))
    most = last_step(state.step, state.sequences_seen, trainer.data.windows, config)
    if state.cooldown is not None and not state.cooldown.is_for(config.minutes, most):
        state = replace(state, cooldown=None)  # the length that was asked for has changed
    run.state = state = replace(state, max_steps=planned_steps(trainer, state))
    run.saved_step = state.step
    share_rank_0(run)
    # As the last step left it: what is saved before the next one is then what was saved there.
    last = max(state.step - 1, 0)
    fall = state.cooldown.at(last) if state.cooldown else None
    lr = learning_rate(last, state.max_steps, config, fall)
    apply_hyperparameters(trainer.optimizer, lr, config)


def planned_steps(trainer: Trainer, state: TrainState) -> int:
    """Steps that the run takes in all: no more than now if it has stopped early."""
    if has_stopped_early(state.worse, trainer.config):
        return state.step
    if state.cooldown is not None:
        return state.cooldown.last
    return last_step(state.step, state.sequences_seen, trainer.data.windows, trainer.config)


def open_run(run: Run, old: Old) -> TrainState:
    """Continue the run that the folders hold, or set it aside and start a new one. Returns where the run stands."""
    config, mirror = run.trainer.config, run.mirror
    run_id = old.saved.state.run_id if old.saved is not None and old.own else new_run_id(run.trainer)
    run.state = replace(run.state, run_id=run_id)
    state = restore(run, old) if old.checkpoint is not None else new_state(run, old)
    if config.resume == "never":  # last: the new weights may come from the old run
        for folder in [run.dir] if mirror is None else [run.dir, mirror.dir]:
            set_aside(folder)
    run.dir.mkdir(parents=True, exist_ok=True)
    return state


def new_run_id(trainer: Trainer) -> str:
    """The same for machines that begin the same run at once; another one to start over."""
    config = trainer.config
    if config.resume == "never":
        return uuid.uuid4().hex
    asked = {key: value for key, value in config.values().items() if scope_of(key) in ("run", "fixed")}
    what = [os.path.normpath(config.run_dir), asked, trainer.data.fingerprint]
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:32]


def new_state(run: Run, old: Old) -> TrainState:
    """That of a run which starts now: with trained weights if `init_from` names some."""
    trainer, mirror, state = run.trainer, run.mirror, run.state
    if old.given is not None:
        require_tokenizer(old.given, trainer.data)
        if lora_of(trainer.model) is None:  # else the model has them as its base
            old.given.load_weights(trainer.model)
        print(f"Starting from the weights of {old.given.path}.")
        state = replace(state, initialized_from=resolved(str(trainer.config.init_from)))
    if mirror is not None:
        print(
            f"Copies     go to {mirror.dir}. There are none of this run yet: if there should be, stop and mount the "
            f"disk they are on."
        )
    return state


def restore(run: Run, old: Old) -> TrainState:
    """Load everything that a checkpoint holds, and print what changed since."""
    trainer, checkpoint, saved = run.trainer, old.checkpoint, old.saved
    assert checkpoint is not None and saved is not None
    state, asked = saved.state, trainer.config.resume_from
    require_the_same(checkpoint, saved, trainer)
    for folder in step_folders(run.dir / "checkpoints") if old.own else []:
        if step_of(folder) >= step_of(checkpoint.path) and folder.resolve() != checkpoint.path.resolve():
            quarantine(folder)  # damaged: else the run would continue from it
    checkpoint.load_weights(trainer.model)
    checkpoint.load_optimizer(trainer.optimizer)
    if saved.scaler and trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(saved.scaler)
    epoch = state.sequences_seen / epoch_sequences(trainer.data.windows, trainer.config)
    print(f"Continuing from {checkpoint.path}: step {state.step:,}, epoch {epoch:.2f}.")
    print_changes(saved.config, trainer)
    best = best_of(run) or TrainState()
    return replace(
        state,
        run_id=run.state.run_id,
        resumed_from=resolved(asked) if asked else state.resumed_from,
        best_val_loss=best.best_val_loss,
        best_step=best.step,
        best_windows=best.best_windows,
    )


def best_of(run: Run) -> TrainState | None:
    """Read the state saved with best/, whose loss later weights have to beat; None if best/ is missing or damaged."""
    best = run.dir / BEST
    if best.exists() and (problems := problems_of(best)):
        print(f"Warning: {describe_damage(best, problems)} The next evaluation replaces it.", file=sys.stderr)
        return None
    return standing(best)


def share_rank_0(run: Run) -> None:
    """Give all processes what rank 0 has loaded. Raises CheckpointError if this run was begun on another machine than
    that of rank 0."""
    if world().size == 1:
        return
    trainer = run.trainer
    trainer.scaler.load_state_dict(on_rank_0(trainer.scaler.state_dict))
    broadcast_tensors(list(trainer.model.state_dict().values()))
    broadcast_tensors(list(trainer.optimizer.tensors().values()))
    own = step_folders(run.dir / "checkpoints") if trainer.config.resume == "auto" else []
    (is_elsewhere,) = any_process(bool(own) and run.state.step == 0)
    if is_elsewhere:
        raise CheckpointError(
            f"There are checkpoints in {run.dir} on one of the machines, and none on that of process 0, which "
            f"reads and writes them. Give torchrun --node_rank=0 on the machine that has them, or --resume never "
            f"to start over."
        )
