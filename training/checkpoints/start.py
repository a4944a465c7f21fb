"""How a run begins: it continues from its newest checkpoint, starts from other weights, or starts anew."""

from __future__ import annotations

import sys
from dataclasses import replace

from common.checkpoint import open_checkpoint, step_folders
from common.errors import CheckpointError, ConfigError
from common.lora import lora_of
from training.checkpoints.mirror import Mirror
from training.checkpoints.resume import (
    Old,
    bring_back_files,
    find_old,
    print_changes,
    require_own_mirror,
    require_the_same,
    require_tokenizer,
    resolved,
)
from training.checkpoints.run import Run
from training.checkpoints.run_folder import quarantine, require_movable, require_ours, set_aside, tidy
from training.checkpoints.state import TrainState, read_state
from training.config import Config
from training.machine.processes import any_process, broadcast_tensors, count, on_rank_0
from training.machine.sharding import shard
from training.numbers.optimizer import apply_hyperparameters, build_optimizer
from training.numbers.schedule import epoch_sequences, has_stopped_early, last_step, learning_rate
from training.numbers.step import Trainer


def look(config: Config, mirror: Mirror | None, takes_over: bool = True) -> Old:
    """What was there before. `takes_over`: this session will train, so it cleans up after one that was killed.

    Raises ConfigError or CheckpointError if a folder is not this run's, cannot be used, or holds nothing whole.
    """
    require_own_folders(config, mirror)
    if takes_over:
        if mirror is not None and config.resume != "never":
            mirror.lease.announce()
        tidy(config.run_dir)
        if mirror is not None:
            tidy(mirror.dir, truncate=True)
    old = find_old(config, mirror.dir if mirror else None)
    if mirror is not None:
        # Checked again: the newer checkpoints of a mirror that has gone, or is another's by now, look like none, or
        # damaged.
        mirror.require_mounted()
        mirror.lease.require_unchanged()
    return old


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
    first = state.cooldown.first if state.cooldown else None
    lr = learning_rate(max(state.step - 1, 0), state.max_steps, config, first)
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
    state = restore(run, old) if old.checkpoint is not None else new_state(run, old)
    if config.resume == "never":  # last: the new weights may come from the old run
        for folder in [run.dir] if mirror is None else [run.dir, mirror.dir]:
            set_aside(folder)
    run.dir.mkdir(parents=True, exist_ok=True)
    return state


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
        state = replace(state, run_id=mirror.lease.earlier_run_id or state.run_id)
        print(
            f"Copies     go to {mirror.dir}. There are none of this run yet: if there should be, stop and mount the "
            f"disk they are on."
        )
    return state


def require_own_folders(config: Config, mirror: Mirror | None) -> None:
    """Raises ConfigError or CheckpointError if the mirror is not there, or is not this run's, or if an old run cannot
    make way."""
    if config.resume == "never":
        require_movable(config.run_dir)
    if mirror is None:
        return
    try:
        require_ours(mirror.dir, "--checkpoint_dir")
        mirror.require_mounted()
        mirror.require_apart()
        require_own_mirror(config.run_dir, mirror)
        if config.resume == "never":
            require_movable(mirror.dir)
        mirror.lease.require_free()
    except OSError as problem:
        raise ConfigError(
            f"--checkpoint_dir {mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or leave "
            f"--checkpoint_dir out to train without copies."
        ) from None


def restore(run: Run, old: Old) -> TrainState:
    """Load everything that a checkpoint holds, and print what changed since."""
    trainer, checkpoint, saved = run.trainer, old.checkpoint, old.saved
    assert checkpoint is not None and saved is not None
    state, asked = saved.state, trainer.config.resume_from
    require_the_same(checkpoint, saved, trainer)
    for folder in old.damaged:
        quarantine(folder)
    checkpoint.load_weights(trainer.model)
    checkpoint.load_optimizer(trainer.optimizer)
    if saved.scaler and trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(saved.scaler)
    bring_back_files(checkpoint, run.dir, run.mirror.dir if run.mirror else None)
    epoch = state.sequences_seen / epoch_sequences(trainer.data.windows, trainer.config)
    print(f"Continuing from {checkpoint.path}: step {state.step:,}, epoch {epoch:.2f}.")
    print_changes(saved.config, trainer)
    best_val_loss, best_step, best_windows = best_of(run)
    return replace(
        state,
        run_id=state.run_id if old.own else run.state.run_id,
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


def share_rank_0(run: Run) -> None:
    """Give all processes what rank 0 has loaded. Raises CheckpointError if this run was begun on another machine than
    that of rank 0."""
    if count() == 1:
        return
    trainer = run.trainer
    trainer.scaler.load_state_dict(on_rank_0(trainer.scaler.state_dict))
    broadcast_tensors(list(trainer.model.state_dict().values()))
    if trainer.config.is_sharded:
        shard_trainer(trainer)
    else:
        broadcast_tensors(list(trainer.optimizer.tensors().values()))
    own = step_folders(run.dir / "checkpoints") if trainer.config.resume == "auto" else []
    (is_elsewhere,) = any_process(bool(own) and run.state.step == 0)
    if is_elsewhere:
        raise CheckpointError(
            f"There are checkpoints in {run.dir} on one of the machines, and none on that of process 0, which "
            f"reads and writes them. Give torchrun --node_rank=0 on the machine that has them, or --resume never "
            f"to start over."
        )


def shard_trainer(trainer: Trainer) -> None:
    """Divide the model, and the optimizer's state that rank 0 has loaded, among the processes."""
    loaded = trainer.optimizer.loaded
    shard(trainer.model, trainer.hardware)
    trainer.optimizer = build_optimizer(trainer.model, trainer.config)
    trainer.optimizer.take_rows(loaded)
