"""How a session begins: what earlier sessions left, continue it or start a new run; and what may not have changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint import (
    BEST,
    Checkpoint,
    describe_damage,
    newest_valid,
    open_checkpoint,
    problems_of,
    step_folders,
    step_of,
)
from common.errors import CheckpointError, ConfigError
from common.files import OF_RUN, atomic_write, sha256_file
from common.lora import LoRA, find_base, lora_of
from common.script import world
from model_config import ModelConfig
from tokenization.token_folder import find_tokens
from training.config import Config, scope_of
from training.mirror import Mirror
from training.parallel import any_process, broadcast_tensors, on_rank_0
from training.records import RECORDS, SUMMARY
from training.run import Run
from training.saver import write_config
from training.schedule import epoch_sequences
from training.state import Previous, Saved, TrainState, read_state
from training.store import Store, finish_setting_aside, read_best_state, replacing, set_aside
from training.text import changes


def find_previous(config: Config, mirror: Mirror | None, is_trained: bool) -> Previous:
    """Find what the run folder and its mirror hold. If the run `is_trained` then, its folder is locked: clean up after
    a session that was killed, and copy into it what only the mirror has.

    Raises ConfigError or CheckpointError if a folder is not this run's, cannot be used, or holds nothing whole.
    """
    store = Store(config.run_dir)
    if is_trained and config.resume != "never":
        finish_setting_aside(store, mirror.store if mirror is not None else None)
    store.require_ours("--output_dir")
    if config.resume == "never":
        store.require_movable()
    if mirror is not None:
        try:
            require_mirror(mirror, store, config)
        except OSError as problem:
            raise ConfigError(
                f"--checkpoint_dir {mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or leave "
                f"--checkpoint_dir out to train without copies."
            ) from None
    if is_trained and not store.is_empty:
        store.clean_up()
        shutil.rmtree(replacing(store.dir), ignore_errors=True)
    previous: Previous | None = None
    while previous is None:
        with contextlib.suppress(FileNotFoundError):  # another machine has just replaced the copy by a newer one
            previous = find_checkpoint(config, store, mirror)
            if is_trained and previous.checkpoint is not None:
                previous = bring_here(previous, store, mirror)
    if mirror is not None:
        mirror.require_usable()  # again: a mirror that was unmounted meanwhile looks empty
    return previous


def require_mirror(mirror: Mirror, store: Store, config: Config) -> None:
    """Raise ConfigError or CheckpointError if the mirror is not there, or is not this run's."""
    mirror.store.require_ours("--checkpoint_dir")
    mirror.require_usable()
    if config.resume == "never":
        mirror.store.require_movable()
    mirror.known = {copy.name for copy in mirror.store.steps()}
    run_id = None
    for newest in store.steps()[:1]:
        with contextlib.suppress(CheckpointError, OSError):  # it is damaged
            run_id = read_state(Checkpoint(newest)).state.run_id
    mirror.require_of(run_id)


def find_checkpoint(config: Config, store: Store, mirror: Mirror | None) -> Previous:
    """Find the newest whole checkpoint here or in the mirror, or the one that `resume_from` names; else the weights of
    `init_from`.

    Raises CheckpointError if there are checkpoints and none is whole, or if the folder holds a run that did not start
    from `resume_from` or `init_from`; FileNotFoundError if another machine has deleted the copy meanwhile.
    """
    places = [store.steps_dir, *([mirror.store.steps_dir] if mirror is not None else [])]
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
        return open_checkpoint(path).weights_sha256() == saved.state.initialized_from
    return False


def bring_here(previous: Previous, store: Store, mirror: Mirror | None) -> Previous:
    """Copy into the run folder what belongs to a checkpoint from elsewhere: the records of its run, its best weights,
    and the checkpoint itself if it is a copy of this run. Best weights that were lost here come back from the mirror.

    Raises FileNotFoundError if another machine has deleted the copy meanwhile.
    """
    assert previous.checkpoint is not None
    folder = previous.checkpoint.path.resolve()
    parent = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    if parent == store.dir.resolve():
        is_lost = mirror is not None and bool(problems_of(store.dir / BEST))
        bests = mirror.store.bests() if mirror is not None and is_lost else []
    else:
        store.steps_dir.mkdir(parents=True, exist_ok=True)
        if previous.is_own:
            here = store.step_path(step_of(folder))
            if is_copied(partial(store.copy, folder, here.name), folder, store):
                print(f"Copies     {previous.checkpoint.path} is the newest, and now in {store.dir} too.")
                previous = replace(previous, checkpoint=Checkpoint(here))
        records = folder / OF_RUN if (folder / OF_RUN).is_dir() else parent
        for name in RECORDS:
            if (records / name).is_file():
                with atomic_write(store.dir / name) as file:
                    file.write((records / name).read_bytes())
        bests = [parent / BEST, *parent.glob(f"{BEST}_*")]
    for best in bests:
        if not problems_of(best):
            is_copied(partial(store.take_best, best), best, store)
    return previous


def is_copied(copy: Callable[[], object], source: Path, store: Store) -> bool:
    """Copy `source`. If that fails, say so and return False. Raises FileNotFoundError if the source is gone."""
    try:
        copy()
    except OSError as problem:
        if source.exists():
            reason = problem.strerror or problem
            print(f"Warning: {source} could not be copied to {store.dir} ({reason}); the training goes on.")
            return False
    if not source.exists():
        raise FileNotFoundError(source)
    return True


TOKENS = "tokens_sha256 of the data"  # as `identity` calls it


def start_or_resume(run: Run, previous: Previous) -> bool:
    """Continue the run that `previous` is of, or start a new one. Returns whether it is finished, and its summary
    written.

    Raises CheckpointError if what is there belongs to another model or other data.
    """

    run.state, scaler, has_summary = on_rank_0(lambda: open_run(run, previous))
    run.saved_step = run.state.step
    run.skips[0] = run.state.skipped_updates
    if world().size > 1:
        run.scaler.load_state_dict(scaler)
        share_rank_0(run)
    return has_summary and run.is_done


def open_run(run: Run, previous: Previous) -> tuple[TrainState, dict[str, Any], bool]:
    """Load what `previous` names, and make the run folder. Returns the state of the run, that of its gradient scaler,
    and whether there is a summary."""
    state = new_state(run, previous.init) if previous.checkpoint is None else restore(run, previous)
    if run.config.resume == "never":  # last: the new weights may come from the old run

        def write_new(moves: dict[Path, Path], new: Path) -> None:
            for folder, aside in moves.items():
                weights, was = previous.init, folder.resolve()
                if weights is not None and weights.path.resolve().is_relative_to(was):
                    moved = aside / weights.path.resolve().relative_to(was)
                    run.config = replace(run.config, init_from=str(moved))
            write_config(run, new)

        set_aside(Store(run.dir), run.mirror.store if run.mirror is not None else None, write_new)
    run.dir.mkdir(parents=True, exist_ok=True)
    return state, run.scaler.state_dict(), (run.dir / SUMMARY).is_file()


def new_run_id(run: Run) -> str:
    """Make the id of a new run: the same on machines that begin the same run at once; another one to start over."""
    config = run.config
    if config.resume == "never":
        return uuid.uuid4().hex
    settings = {key: value for key, value in config.values().items() if scope_of(key) in ("run", "fixed")}
    what = [os.path.normpath(config.run_dir), settings, run.data.fingerprint]
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:32]


def new_state(run: Run, init: Checkpoint | None) -> TrainState:
    """Make the state of a run that starts now, and load the trained weights `init`, if there are some."""
    state = TrainState(run_id=new_run_id(run))
    if init is not None:
        require_tokenizer(init, run)
        if lora_of(run.model) is None:  # else the model has them as its base
            init.load_weights(run.model)
        print(f"Starting from the weights of {init.path}.")
        state = replace(state, initialized_from=init.weights_sha256())
    if run.mirror is not None:
        print(
            f"Copies     go to {run.mirror.dir}. There are none of this run yet: if there should be, stop and mount "
            f"the disk they are on."
        )
    return state


def require_tokenizer(checkpoint: Checkpoint, run: Run) -> None:
    """Raise CheckpointError if the data was tokenized with another tokenizer than the checkpoint's."""
    tokenizer_path = checkpoint.tokenizer_path()
    if sha256_file(tokenizer_path) != run.data.metadata.tokenizer_sha256:
        raise CheckpointError(
            f"The data was not tokenized with the tokenizer of {checkpoint.path}. Tokenize it with: python "
            f"tokenize_local_bpe.py --input my_text.txt --tokenizer_file {tokenizer_path}"
        )


def restore(run: Run, previous: Previous) -> TrainState:
    """Load everything that a checkpoint holds, and print what changed since. Returns the state."""
    checkpoint, saved, requested = previous.checkpoint, previous.saved, run.config.resume_from
    assert checkpoint is not None and saved is not None
    require_the_same(run, checkpoint, saved)
    if previous.is_own:
        Store(run.dir).quarantine_newer(checkpoint.path)  # else the run would continue from them
    checkpoint.load_weights(run.model)
    checkpoint.load_optimizer(run.optimizer)
    if saved.scaler and run.scaler.is_enabled():
        run.scaler.load_state_dict(saved.scaler)
    best = best_state(run) or TrainState()
    if best.step == saved.state.best_step:  # which may have evaluated it again, on other windows
        best = replace(saved.state, step=best.step)
    state = replace(
        saved.state,
        run_id=saved.state.run_id if previous.is_own else new_run_id(run),
        resumed_from=os.path.normpath(requested) if requested else saved.state.resumed_from,
        best_val_loss=best.best_val_loss,
        best_step=best.step,
        best_windows=best.best_windows,
    )
    epoch = state.sequences_seen / epoch_sequences(run.data.windows, run.config)
    print(f"Continuing from {checkpoint.path}: step {state.step:,}, epoch {epoch:.2f}.")
    print_changes(saved.config, run)
    return state


def best_state(run: Run) -> TrainState | None:
    """Read the state saved with best/, whose loss later weights have to beat; None if best/ is missing or damaged."""
    best = run.dir / BEST
    if best.exists() and (problems := problems_of(best)):
        print(f"Warning: {describe_damage(best, problems)} The next evaluation replaces it.", file=sys.stderr)
        return None
    return read_best_state(best)


def share_rank_0(run: Run) -> None:
    """Give all processes what rank 0 has loaded. Raises CheckpointError if this run was begun on another machine than
    that of rank 0."""
    broadcast_tensors(list(run.model.state_dict().values()))
    broadcast_tensors(list(run.optimizer.tensors().values()))
    own = step_folders(run.dir / "checkpoints") if run.config.resume == "auto" else []
    (is_elsewhere,) = any_process(bool(own) and run.state.step == 0)
    if is_elsewhere:
        raise CheckpointError(
            f"There are checkpoints in {run.dir} on one of the machines, and none on that of process 0, which "
            f"reads and writes them. Give torchrun --node_rank=0 on the machine that has them, or --resume never "
            f"to start over."
        )


# What may not change


def require_the_same(run: Run, checkpoint: Checkpoint, saved: Saved) -> None:
    """Raise CheckpointError listing what changed since and may not: architecture, adapters, optimizer, tokenizer and
    data; and if the base of the adapters is gone."""
    config, lora = run.config, checkpoint.lora()
    if lora is not None:
        find_base(lora, checkpoint.path)
    then = identity(checkpoint.model_config(), lora, saved.config.get("optimizer"), saved.data)
    now = identity(run.shape, lora_of(run.model), config.optimizer, run.data.fingerprint)
    clashes = [
        f"{key}: {then.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]
    if clashes and then.get(TOKENS) != now.get(TOKENS) and (change := text_change(run, saved.data)):
        clashes.append(change)
    if clashes:
        head = f"{checkpoint.path} cannot be continued: model, adapters, optimizer, tokenizer and data may not change."
        raise CheckpointError(
            "\n  ".join([head, *clashes])
            + f"\nGive the old values, or another --output_dir, or --resume never ({config.run_dir} is kept aside)."
        )


def text_change(run: Run, then: dict[str, Any]) -> str:
    """Say what has changed in the text of `--input` since, and what to type; "" if its tokens of then are not found."""
    config, tokens = run.config, find_tokens(str(then.get("tokens_sha256")))
    if not config.input or tokens is None:
        return ""
    length = f"--minutes {config.minutes:g}" if config.minutes else f"--epochs {config.epochs}"
    return (
        f"files: {changes(tokens, run.data.metadata)}\n"
        f"The old tokens are kept: to go on with them, --data_dir {tokens.path.parent} --output_dir {config.run_dir} "
        f"instead of --input.\nTo train these weights on the new text: --input {shlex.quote(config.input)} {length} "
        f"--init_from {config.run_dir} --output_dir {config.run_dir}_2."
    )


def identity(shape: ModelConfig, lora: LoRA | None, optimizer: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return what a run keeps, by name. The base of adapters may move."""
    values = {key: value for key, value in shape.to_dict().items() if key != "dropout"}
    values |= {f"lora_{key}": getattr(lora, key, 0) for key in ("rank", "alpha", "targets", "base_sha256")}
    values["optimizer"] = optimizer
    return values | {f"{key} of the data": str(value)[:16] for key, value in data.items()}


def print_changes(saved: dict[str, Any], run: Run) -> None:
    """Print the keys of the configuration that changed since the last session."""
    now, sources = run.resolved(), run.config.sources
    for key, value in saved.items():
        if key in now and scope_of(key) == "run" and now[key] != value:
            print(f"  changed: {key} {value} -> {now[key]} ({sources.get(key, '')})")
