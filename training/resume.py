"""Begin a session: find what earlier sessions left, continue it or start a new run, and check what may not change."""

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
    find_newest_valid,
    find_problems,
    open_checkpoint,
    step_folders,
    step_of,
)
from common.errors import CheckpointError, ConfigError
from common.files import RECORDS_FOLDER, atomic_write, free_space, make_folder, sha256_file
from common.lora import LoRA, lora_of, read_lora
from common.output import byte_size, log
from common.script import is_main_process
from model_config import ModelConfig
from tokenization.token_folder import find_tokens
from training.choice import write_choice
from training.config import Config, scope_of
from training.data import COMPANION_KEY
from training.mirror import Mirror
from training.parallel import any_process, copy_from_main_process, on_main_process
from training.records import RECORDS, SUMMARY, rewind
from training.run import Run
from training.saver import write_config
from training.schedule import epoch_sequences
from training.state import Previous, Saved, TrainState, read_state
from training.store import (
    Store,
    delete_dry_run,
    finish_setting_aside,
    new_run_path,
    read_best_state,
    set_aside,
)
from training.text import describe_changes


def recover_run(config: Config, mirror: Mirror | None) -> Previous:
    """Find what the run folder and its mirror hold. Clean up after a killed session, and copy what only the mirror has.
    The run folder must be locked. Raises what `find_previous` raises."""
    store = Store(config.run_dir)
    if config.resume != "never":
        finish_setting_aside(store, mirror.store if mirror is not None else None)
    _require_usable_folders(config, store, mirror)
    if not store.is_empty:
        store.clean_up()
        shutil.rmtree(new_run_path(store.dir), ignore_errors=True)
    delete_dry_run(store.dir)
    return _find_checkpoint(config, store, mirror, partial(_copy_here, store=store, mirror=mirror))


def find_previous(config: Config, mirror: Mirror | None) -> Previous:
    """Find what the run folder and its mirror hold. Changes nothing.

    Raises ConfigError or CheckpointError if a folder belongs to another run, cannot be used, or holds only damaged
    checkpoints.
    """
    store = Store(config.run_dir)
    _require_usable_folders(config, store, mirror)
    return _find_checkpoint(config, store, mirror)


def _require_usable_folders(config: Config, store: Store, mirror: Mirror | None) -> None:
    """Raise ConfigError or CheckpointError if the run folder or the mirror cannot be used for this run."""
    store.require_run_folder("--output_dir")
    if config.resume == "never":
        store.require_movable()
    if mirror is not None:
        try:
            _require_mirror(mirror, store, config)
        except OSError as problem:
            raise ConfigError(
                f"--checkpoint_dir {mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or leave "
                "--checkpoint_dir out to train without copies."
            ) from None


def _require_mirror(mirror: Mirror, store: Store, config: Config) -> None:
    """Raise ConfigError or CheckpointError if the mirror is missing or belongs to another run."""
    mirror.store.require_run_folder("--checkpoint_dir")
    mirror.require_usable()
    if config.resume == "never":
        mirror.store.require_movable()
    mirror.initial_copies = {copy.name for copy in mirror.store.steps()}
    run_id = None
    for newest in store.steps()[:1]:
        with contextlib.suppress(CheckpointError, OSError):  # it may be damaged
            run_id = read_state(Checkpoint(newest)).state.run_id
    mirror.require_same_run(run_id)


def _find_checkpoint(
    config: Config, store: Store, mirror: Mirror | None, use: Callable[[Previous], Previous] | None = None
) -> Previous:
    """Find the newest valid checkpoint here or in the mirror, else the one named by `resume_from`, else the weights of
    `init_from`. Return what `use` makes of it.

    Raises CheckpointError if all checkpoints are damaged, or if the run did not start from `resume_from` or
    `init_from`.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):  # another machine has just replaced the copy by a newer one
            previous = _read_newest(config, store, mirror)
            if mirror is not None:
                mirror.require_usable()  # again, because a mirror that was unmounted meanwhile looks empty
            return previous if use is None or previous.checkpoint is None else use(previous)


def _read_newest(config: Config, store: Store, mirror: Mirror | None) -> Previous:
    """As `_find_checkpoint`, but raises FileNotFoundError if another machine has deleted the copy meanwhile."""
    places = [store.steps_dir, *([mirror.store.steps_dir] if mirror is not None else [])]
    try:
        newest = find_newest_valid(*places) if config.resume != "never" else None
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}\nNothing was changed or deleted. Restore them from a copy, or start over with --resume never, "
            "which renames this run."
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
    if config.init_from and not _has_started_from(config.init_from, saved):
        raise CheckpointError(
            f"{config.run_dir} already holds a run that did not start from {config.init_from}. Choose another "
            "--output_dir, or --resume never, which renames the old run."
        )
    # The same command again: the run is already further than `resume_from`.
    if config.resume_from is None or saved.state.resumed_from == os.path.normpath(config.resume_from):
        return Previous(newest, saved)
    start = open_checkpoint(config.resume_from)
    if start.path.resolve() == newest.path.resolve():
        return Previous(start, saved)
    raise CheckpointError(
        f"{config.run_dir} already holds another run, at {newest.path.name}. To continue from {start.path}, choose "
        "another --output_dir."
    )


def _has_started_from(path: str, saved: Saved) -> bool:
    """Return whether a run started from the weights at `path`. Compares the path, because the weights may have changed
    or be gone, and their hash, because they may have moved."""
    if saved.config.get("init_from") == path:
        return True
    with contextlib.suppress(CheckpointError):
        return open_checkpoint(path).weights_sha256() == saved.state.initialized_from
    return False


def _copy_here(previous: Previous, store: Store, mirror: Mirror | None) -> Previous:
    """Copy what belongs to a checkpoint from elsewhere into the run folder: the records, the best weights and, if it is
    a copy of this run, the checkpoint itself. Best weights lost here are restored from the mirror.

    Raises FileNotFoundError if another machine has deleted the copy meanwhile.
    """
    assert previous.checkpoint is not None
    folder = previous.checkpoint.path.resolve()
    parent = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    if parent == store.dir.resolve():
        is_lost = mirror is not None and bool(find_problems(store.dir / BEST))
        bests = mirror.store.best_copies() if mirror is not None and is_lost else []
    else:
        make_folder(store.steps_dir)
        if previous.is_own:
            target = store.step_path(step_of(folder))
            if _try_copy(partial(store.copy, folder, target.name), folder, store):
                print(f"Copies     {previous.checkpoint.path}, the newest checkpoint, was restored to {store.dir}.")
                previous = replace(previous, checkpoint=Checkpoint(target))
        records = folder / RECORDS_FOLDER if (folder / RECORDS_FOLDER).is_dir() else parent
        for name in RECORDS:
            if (records / name).is_file():
                with atomic_write(store.dir / name) as file:
                    file.write((records / name).read_bytes())
        bests = [parent / BEST, *parent.glob(f"{BEST}_*")]
    for best in bests:
        if not find_problems(best):
            _try_copy(partial(store.copy_best, best), best, store)
    return previous


def _try_copy(copy: Callable[[], object], source: Path, store: Store) -> bool:
    """Call `copy`. If it fails, print a warning and return False. Raises FileNotFoundError if `source` is gone."""
    try:
        copy()
    except OSError as problem:
        if source.exists():
            reason = problem.strerror or problem
            print(f"Warning: {source} could not be copied to {store.dir} ({reason}); training continues without it.")
            return False
    if not source.exists():
        raise FileNotFoundError(source)
    return True


def start_or_resume(run: Run, previous: Previous) -> bool:
    """Continue the run of `previous`, or start a new one. Return whether it is finished and has its summary.

    Raises CheckpointError if the checkpoint belongs to another model or other data.
    """
    run.state, scaler, has_summary = on_main_process(lambda: _open_run(run, previous))
    run.checkpoint_step, run.checkpoint_seconds = run.state.step, run.state.elapsed_seconds
    run.skips[0] = run.state.skipped_updates
    if run.hardware.processes > 1:
        run.scaler.load_state_dict(scaler)
        _copy_to_all_processes(run)
    return has_summary and run.is_done


def _open_run(run: Run, previous: Previous) -> tuple[TrainState, dict[str, Any], bool]:
    """Load the checkpoint of `previous`, if any, and make the run folder. Return the state of the run, the state of its
    gradient scaler, and whether there is a summary."""
    state = _new_state(run, previous.init) if previous.checkpoint is None else restore(run, previous)
    if run.config.resume == "never":  # done last, because the initial weights may be in the old run

        def write_new(moves: dict[Path, Path], new: Path) -> None:
            for folder, aside in moves.items():
                weights, was = previous.init, folder.resolve()
                if weights is not None and weights.path.resolve().is_relative_to(was):
                    moved = aside / weights.path.resolve().relative_to(was)
                    run.config = replace(run.config, init_from=str(moved))
            write_config(run, new)
            write_choice(run.config, new)

        set_aside(Store(run.dir), run.mirror.store if run.mirror is not None else None, write_new)
    make_folder(run.dir)
    return state, run.scaler.state_dict(), (run.dir / SUMMARY).is_file()


def prepare_run_folder(run: Run) -> None:
    """Write config.json, and rewind the records to the step that the run continues from, in the main process. Print a
    warning if the disk is too small for the run."""
    if not is_main_process():
        return
    write_config(run, run.dir)
    write_choice(run.config, run.dir)
    rewind(run.dir, run.state.step, run.state.evaluated_step)
    need, free = run.disk_bytes, free_space(run.dir)
    if need > free and not run.state.step:
        log.info(f"Warning: the run needs about {byte_size(need)} in {run.dir}, and only {byte_size(free)} are free.")


def _new_run_id(run: Run) -> str:
    """Return an id for a new run: the same on machines that begin the same run at once, random when starting over."""
    config = run.config
    if config.resume == "never":
        return uuid.uuid4().hex
    settings = {key: value for key, value in config.values().items() if scope_of(key) in ("run", "fixed")}
    what = [os.path.normpath(config.run_dir), settings, run.data.fingerprint]
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:32]


def _new_state(run: Run, init: Checkpoint | None) -> TrainState:
    """Return the state of a new run. Load the weights of `init`, if given."""
    state = TrainState(run_id=_new_run_id(run))
    if init is not None:
        _require_tokenizer(init, run)
        if lora_of(run.model) is None:  # with adapters, the base is already loaded
            init.load_weights(run.model)
        print(f"Starting from the weights of {init.path}.")
        state = replace(state, initialized_from=init.weights_sha256())
    if run.mirror is not None:
        print(
            f"Copies     {run.mirror.dir}, which has none of this run yet. If you expected some, press Ctrl-C and "
            "mount the right disk."
        )
    return state


def _require_tokenizer(checkpoint: Checkpoint, run: Run) -> None:
    """Raise CheckpointError if the data was not tokenized with the checkpoint's tokenizer."""
    tokenizer_path = checkpoint.tokenizer_path()
    if sha256_file(tokenizer_path) != run.data.metadata.tokenizer_sha256:
        raise CheckpointError(
            f"The data was not tokenized with the tokenizer of {checkpoint.path}. Tokenize it with: python "
            f"tokenize_local_bpe.py --input my_text.txt --tokenizer_file {tokenizer_path}"
        )


def restore(run: Run, previous: Previous) -> TrainState:
    """Load weights, optimizer and scaler of a checkpoint, and print what changed since. Return the state."""
    checkpoint, saved, requested = previous.checkpoint, previous.saved, run.config.resume_from
    assert checkpoint is not None and saved is not None
    require_unchanged(run, checkpoint, saved)
    if previous.is_own:
        Store(run.dir).quarantine_newer(checkpoint.path)  # they are damaged, and would be found again
    if saved.data.get(COMPANION_KEY) != run.data.fingerprint.get(COMPANION_KEY):
        print("Note       the companion has changed; the rest of the run reads it as it is now")
    checkpoint.load_weights(run.model)
    checkpoint.load_optimizer(run.optimizer)
    if saved.scaler and run.scaler.is_enabled():
        run.scaler.load_state_dict(saved.scaler)
    best = _read_run_best(run) or TrainState()
    if best.step == saved.state.best_step:  # the state may hold a later evaluation, over other windows
        best = replace(saved.state, step=best.step)
    state = replace(
        saved.state,
        run_id=saved.state.run_id if previous.is_own else _new_run_id(run),
        resumed_from=os.path.normpath(requested) if requested else saved.state.resumed_from,
        best_val_loss=best.best_val_loss,
        best_step=best.step,
        best_windows=best.best_windows,
    )
    epoch = state.sequences_seen / epoch_sequences(run.data.windows, run.config)
    print(f"Continuing from {checkpoint.path}: step {state.step:,}, epoch {epoch:.2f}.")
    _print_changes(saved.config, run)
    return state


def _read_run_best(run: Run) -> TrainState | None:
    """Read the state saved with best/; None if best/ is missing or damaged."""
    best = run.dir / BEST
    if best.exists() and (problems := find_problems(best)):
        print(f"Warning: {describe_damage(best, problems)} The next evaluation replaces it.", file=sys.stderr)
        return None
    return read_best_state(best)


def _copy_to_all_processes(run: Run) -> None:
    """Copy what the main process has loaded to the others. Raises CheckpointError if the checkpoints are on another
    machine."""
    copy_from_main_process(run.model.state_dict().values())
    copy_from_main_process(run.optimizer.tensors().values())
    steps = step_folders(run.dir / "checkpoints") if run.config.resume == "auto" else []
    if any_process(bool(steps) and run.state.step == 0):
        raise CheckpointError(
            f"{run.dir} has checkpoints on one machine, but not on that of process 0, which reads and writes them. Use "
            "--node_rank=0 on the machine that has them, or --resume never to start over."
        )


# Checks of what may not change


def require_unchanged(run: Run, checkpoint: Checkpoint, saved: Saved) -> None:
    """Raise CheckpointError if architecture, adapters, optimizer, tokenizer or data have changed, listing what, or if
    the base of the adapters is gone."""
    config = run.config
    checkpoint.base()
    old = _list_fixed(checkpoint.model_config(), read_lora(checkpoint.path), saved.config.get("optimizer"), saved.data)
    new = _list_fixed(run.shape, lora_of(run.model), config.optimizer, run.data.fingerprint)
    clashes = [
        f"{key}: {old.get(key)!r} in the checkpoint, {new.get(key)!r} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    if clashes and (change := _describe_text_change(run, saved.data)):
        clashes.append(change)
    if clashes:
        head = f"{checkpoint.path} cannot be continued: model, adapters, optimizer, tokenizer and data may not change."
        remedy = "another --output_dir, or --resume never, which renames the old run"
        if config.resume_from:
            remedy = "or leave out --resume_from to start a new run"
        raise CheckpointError("\n  ".join([head, *clashes]) + f"\nUse the old values, {remedy}.")


def _describe_text_change(run: Run, old: dict[str, Any]) -> str:
    """Describe how the text of `--input` has changed, and what to type; "" if it has not, if its old tokens are gone,
    or if they were made with another tokenizer."""
    config, new, tokens = run.config, run.data.fingerprint, find_tokens(str(old.get("tokens_sha256")))
    is_same_tokenizer = old.get("tokenizer_sha256") == new["tokenizer_sha256"]
    is_changed = old.get("tokens_sha256") != new["tokens_sha256"] and is_same_tokenizer
    if not config.input or config.resume_from or tokens is None or not is_changed:
        return ""
    length = f"--minutes {config.minutes:g}" if config.minutes else f"--epochs {config.epochs}"
    return (
        f"files: {describe_changes(tokens, run.data.metadata)}\n"
        f"To continue on the old text, whose tokens are kept: --data_dir {tokens.path.parent} --output_dir "
        f"{config.run_dir} instead of --input.\nTo train these weights on the new text: --input "
        f"{shlex.quote(config.input)} {length} --init_from {config.run_dir} --output_dir {config.run_dir}_2"
    )


def _list_fixed(shape: ModelConfig, lora: LoRA | None, optimizer: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that may not change during a run, by name. The path of the adapters' base may change."""
    values = {key: value for key, value in shape.to_dict().items() if key != "dropout"}
    fields = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "base": "revision"}
    values |= {f"lora_{key}": getattr(lora, field, 0) for key, field in fields.items()}
    values["optimizer"] = optimizer
    if COMPANION_KEY in data:
        data = data | {COMPANION_KEY: "a text"}  # it may change
    return values | {f"{key} of the data": str(value)[:16] for key, value in data.items()}


def _print_changes(saved: dict[str, Any], run: Run) -> None:
    """Print the keys of the configuration that changed since the last session."""
    values, sources = run.resolved(), run.config.sources
    for key, value in saved.items():
        if key in values and scope_of(key) == "run" and values[key] != value:
            print(f"  changed: {key} {value} -> {values[key]} ({sources.get(key, '')})")
