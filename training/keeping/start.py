"""How a run begins: it continues from its newest checkpoint, starts from other weights, or starts anew."""

from __future__ import annotations

import sys
from dataclasses import replace

from common.checkpoint import open_checkpoint, step_folders
from common.errors import CheckpointError, ConfigError
from common.lora import lora_of
from training.keeping.resume import (
    Found,
    bring_back_files,
    find_checkpoint,
    print_changes,
    require_own_mirror,
    require_the_same,
    require_the_same_start,
    require_tokenizer,
    resolved,
)
from training.keeping.run import Run
from training.keeping.run_folder import quarantine, require_movable, require_ours, set_aside, tidy
from training.keeping.state import TrainState, read_state
from training.machine.processes import any_process, broadcast_tensors, count, on_rank_0
from training.machine.sharding import shard
from training.numbers.optimizer import apply_hyperparameters, build_optimizer
from training.numbers.schedule import epoch_sequences, has_stopped_early, last_step, learning_rate
from training.parts import Parts


def start_or_resume(parts: Parts) -> Run:
    """Continue the run in `config.run_dir` if there is one, else start it.

    Raises CheckpointError if what is there belongs to another model or other data, or cannot be trusted.
    """
    config = parts.config
    run = Run(parts)
    state = on_rank_0(lambda: open_run(run))
    most = last_step(state.step, state.sequences_seen, parts.data.windows, config)
    if state.cooldown is not None and not state.cooldown.is_for(config.minutes, most):
        state = replace(state, cooldown=None)  # the length that was asked for has changed
    run.state = state = replace(state, max_steps=planned_steps(parts, state))
    run.saved_step = state.step
    share_rank_0(run)
    # As the last step left it: what is saved before the next one is then what was saved there.
    first = state.cooldown.first if state.cooldown else None
    lr = learning_rate(max(state.step - 1, 0), state.max_steps, config, first)
    apply_hyperparameters(parts.optimizer, lr, config)
    return run


def planned_steps(parts: Parts, state: TrainState) -> int:
    """Steps that the run takes in all: no more than now if it has stopped early."""
    if has_stopped_early(state.worse, parts.config):
        return state.step
    if state.cooldown is not None:
        return state.cooldown.last
    return last_step(state.step, state.sequences_seen, parts.data.windows, parts.config)


def open_run(run: Run) -> TrainState:
    """Continue the run that the folders hold, or set it aside and start a new one. Returns where the run stands."""
    config, mirror = run.parts.config, run.mirror
    folders = [run.dir] if mirror is None else [run.dir, mirror.dir]
    require_own_folders(run)
    if mirror is not None and config.resume != "never":
        mirror.lease.announce()
    for folder in folders:
        tidy(folder, truncate=folder != run.dir)
    found = find(run)
    state = restore(run, found) if found is not None else new_state(run)
    if config.resume == "never":  # last: the new weights may come from the old run
        for folder in folders:
            set_aside(folder)
    run.dir.mkdir(parents=True, exist_ok=True)
    return state


def new_state(run: Run) -> TrainState:
    """That of a run which starts now: with trained weights if `init_from` names some."""
    config, mirror, state = run.parts.config, run.mirror, run.state
    if config.init_from:
        initialize(run.parts)
        state = replace(state, initialized_from=resolved(config.init_from))
    if mirror is not None:
        state = replace(state, run_id=mirror.lease.earlier_run_id or state.run_id)
        print(
            f"Copies     go to {mirror.dir}. There are none of this run yet: if there should be, stop and mount the "
            f"disk they are on."
        )
    return state


def require_own_folders(run: Run) -> None:
    """Raises ConfigError or CheckpointError if the mirror is not there, or is not this run's, or if an old run cannot
    make way."""
    config, mirror = run.parts.config, run.mirror
    if config.resume == "never":
        require_movable(run.dir)
    if mirror is None:
        return
    try:
        require_ours(mirror.dir, "--checkpoint_dir")
        mirror.require_mounted()
        mirror.require_apart()
        require_own_mirror(run.dir, mirror)
        if config.resume == "never":
            require_movable(mirror.dir)
        mirror.lease.require_free()
    except OSError as problem:
        raise ConfigError(
            f"--checkpoint_dir {mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or leave "
            f"--checkpoint_dir out to train without copies."
        ) from None


def find(run: Run) -> Found | None:
    """The checkpoint to continue from. Raises CheckpointError if it cannot be continued as things are now."""
    parts, config, mirror = run.parts, run.parts.config, run.mirror
    if config.resume == "never":
        return None
    found = find_checkpoint(run.dir, mirror.dir if mirror else None, config)
    if mirror is not None:
        # Checked again: the newer checkpoints of a mirror that has gone, or is another's by now, look like none, or
        # damaged.
        mirror.require_mounted()
        mirror.lease.require_unchanged()
    if found is not None:
        saved = read_state(found.checkpoint)
        require_the_same(found.checkpoint, saved, parts)
        require_the_same_start(saved.state, config)
    return found


def restore(run: Run, found: Found) -> TrainState:
    """Load everything that a checkpoint holds, and print what changed since."""
    parts, checkpoint, asked = run.parts, found.checkpoint, run.parts.config.resume_from
    saved = read_state(checkpoint)
    state = saved.state
    for folder in found.damaged:
        quarantine(folder)
    checkpoint.load_weights(parts.model)
    checkpoint.load_optimizer(parts.optimizer)
    if saved.scaler and parts.scaler.is_enabled():
        parts.scaler.load_state_dict(saved.scaler)
    bring_back_files(checkpoint, run.dir, run.mirror.dir if run.mirror else None)
    epoch = state.sequences_seen / epoch_sequences(parts.data.windows, parts.config)
    print(f"Continuing from {checkpoint.path}: step {state.step:,}, epoch {epoch:.2f}.")
    print_changes(saved.config, parts.config)
    best_val_loss, best_step, best_windows = best_of(run)
    return replace(
        state,
        run_id=state.run_id if found.own else run.state.run_id,
        resumed_from=resolved(asked) if asked else state.resumed_from,
        best_val_loss=best_val_loss,
        best_step=best_step,
        best_windows=best_windows,
    )


def best_of(run: Run) -> tuple[float | None, int, int | None]:
    """Validation loss, step and validation windows of the weights in best/, which later weights have to beat."""
    if not (run.dir / "best").exists():
        return None, 0, None
    try:
        saved = read_state(open_checkpoint(run.dir / "best"))
    except CheckpointError as problem:
        print(f"Warning: {problem} The next evaluation replaces it.", file=sys.stderr)
        return None, 0, None
    best = saved.state
    return best.best_val_loss, best.step, best.best_windows


def initialize(parts: Parts) -> None:
    """Start a new run with the weights of `init_from`, on data that was tokenized with the same tokenizer."""
    checkpoint = open_checkpoint(str(parts.config.init_from))
    require_tokenizer(checkpoint, parts.data)
    if lora_of(parts.model) is None:  # else the model has them as its base
        checkpoint.load_weights(parts.model)
    print(f"Starting from the weights of {checkpoint.path}.")


def share_rank_0(run: Run) -> None:
    """Give all processes what rank 0 has loaded. Raises CheckpointError if this run was begun on another machine than
    that of rank 0."""
    if count() == 1:
        return
    parts = run.parts
    parts.scaler.load_state_dict(on_rank_0(parts.scaler.state_dict))
    broadcast_tensors(list(parts.model.state_dict().values()))
    if parts.config.is_sharded:
        shard_parts(parts)
    else:
        broadcast_tensors(list(parts.optimizer.tensors().values()))
    own = step_folders(run.dir / "checkpoints") if parts.config.resume == "auto" else []
    (is_elsewhere,) = any_process(bool(own) and run.state.step == 0)
    if is_elsewhere:
        raise CheckpointError(
            f"There are checkpoints in {run.dir} on one of the machines, and none on that of process 0, which "
            f"reads and writes them. Give torchrun --node_rank=0 on the machine that has them, or --resume never "
            f"to start over."
        )


def shard_parts(parts: Parts) -> None:
    """Divide the model, and the optimizer's state that rank 0 has loaded, among the processes."""
    loaded = parts.optimizer.loaded
    shard(parts.model, parts.hardware)
    parts.optimizer = build_optimizer(parts.model, parts.config)
    parts.optimizer.take_rows(loaded)
