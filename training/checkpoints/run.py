"""The checkpoints of a run: when they are due, what they hold, where they and their copies go."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from common.checkpoint import (
    BYTES_A_PARAMETER,
    Checkpoint,
    Snapshot,
    prune,
    stored_config,
    stored_weights,
    take_snapshot,
    write_checkpoint,
)
from common.errors import CheckpointError, is_out_of_memory
from common.files import STEP_NAME
from common.machine import available_ram
from common.output import log
from common.script import is_rank_0
from training.checkpoints.interruption import Interruption
from training.checkpoints.lease import TakenOver
from training.checkpoints.mirror import Mirror
from training.checkpoints.state import Saved, TrainState
from training.machine.processes import all_reduce_sum, any_process, broadcast_tensors, on_rank_0
from training.machine.sharding import gather, is_sharded, local, scatter, unsharded_copy
from training.numbers.optimizer import whole_state
from training.numbers.schedule import epoch_sequences, last_step
from training.numbers.step import Trainer, diverged

SNAPSHOT_SHARE = 0.5  # of the free memory, that a snapshot may take at the most


class Run:
    """A run folder, the mirror with its copies, and what is saved there of `parts` and `state`."""

    def __init__(self, trainer: Trainer, mirror: Mirror | None = None):
        """Touches no file. The state is that of a new run; `start_or_resume` may replace it."""
        config = trainer.config
        self.trainer = trainer
        self.state = TrainState(max_steps=last_step(0, 0, trainer.data.windows, config))
        self.dir = config.run_dir
        self.mirror = mirror  # of rank 0
        self.saver = Saver(self.mirror.wake if self.mirror else lambda: None)
        self.saved_step = 0  # of the newest checkpoint
        self.last_saved = time.monotonic()
        self.is_due = False  # a checkpoint that could not be written when it was due
        self.best_is_new = False  # the best weights so far are not saved yet

    @property
    def taken_over(self) -> TakenOver | None:
        """Set once another session has taken the mirror over: this one stops."""
        return self.mirror.taken_over if self.mirror is not None else None

    @property
    def epoch(self) -> float:
        """Epochs that are done."""
        return self.state.sequences_seen / epoch_sequences(self.trainer.data.windows, self.trainer.config)

    @property
    def checkpoint_bytes(self) -> int:
        return BYTES_A_PARAMETER * self.trainer.model.num_parameters(trained_only=True)

    @contextlib.contextmanager
    def saving(self, interruption: Interruption | None = None) -> Iterator[None]:
        """Save and copy in the background of what happens inside; at its end, wait until that is done, for a shorter
        time once somebody has pressed stop."""
        self.saver.begin()
        if self.mirror is not None:
            self.mirror.begin(self.state.run_id, self.checkpoint_bytes)
        try:
            yield
        except KeyboardInterrupt:  # stop at once
            raise
        except BaseException:  # re-raise; only report errors of saving
            try:
                self.finish(interruption)
            except CheckpointError as problem:
                log.info(f"Warning: {problem}")
            raise
        else:
            self.finish(interruption)
            on_rank_0(self.require_not_taken_over)
        finally:
            try:
                self.saver.close()
            finally:
                if self.mirror is not None:
                    self.mirror.close()

    def require_not_taken_over(self) -> None:
        """Raises TakenOver."""
        if self.taken_over is not None:
            raise self.taken_over

    def finish(self, interruption: Interruption | None) -> None:
        """Wait for the save under way, and a limited time for the mirror. Raises CheckpointError if a save fails."""
        try:
            self.saver.finish()
        finally:
            if self.mirror is not None:
                self.mirror.finish(interruption)

    def checkpoint_due(self) -> bool:
        """Whether this step is one of those that the configuration wants saved, by steps, epochs or minutes."""
        config, state = self.trainer.config, self.state
        before = state.sequences_seen - config.sequences_per_step
        size = epoch_sequences(self.trainer.data.windows, config) * config.checkpoint_interval
        epochs_passed = bool(size) and state.sequences_seen // size > before // size
        steps_passed = bool(config.checkpoint_steps) and state.step % config.checkpoint_steps == 0
        minutes = (time.monotonic() - self.last_saved) / 60
        minutes_passed = bool(config.checkpoint_minutes) and minutes >= config.checkpoint_minutes
        return steps_passed or epochs_passed or minutes_passed or state.finished

    def save_is_due(self) -> bool:
        """Whether there is something to be saved at this step; waits for no GPU. Clocks differ: what is due on one rank
        is due on all. Raises CheckpointError if the last save failed."""
        self.saver.check()
        (self.is_due,) = any_process(self.is_due or self.checkpoint_due())
        return self.is_due or self.best_is_new

    def save(self, best_only: bool = False) -> None:
        """Begin to write a checkpoint of this step, or of the best weights alone, or of both if these are the best. Of
        several processes rank 0 writes, and gets from the others what only they have.

        Raises ConfigError if the weights are not finite: a good checkpoint must not make way for a useless one.
        """
        trainer, state = self.trainer, self.state
        total = torch.stack([local(parameter.detach()).sum() for parameter in trainer.model.parameters()]).sum()
        if not torch.isfinite(all_reduce_sum(total) if trainer.config.is_sharded else total):
            raise diverged(state.step, self.saved_step, "a weight is not finite")
        folders = [self.dir / "best"] if self.best_is_new else []
        if not best_only:
            folders.append(self.dir / "checkpoints" / f"step_{state.step:08d}")
            self.saved_step = state.step
            self.last_saved = time.monotonic()
            self.is_due = False
        self.best_is_new = False
        if trainer.config.is_sharded and is_rank_0():
            self.saver.finish()  # what it writes and what is gathered would be in memory together
        weights, optimizer = self.gathered()
        if is_rank_0():
            take = functools.partial(self.snapshot, weights, optimizer)
            self.saver.save(folders, take, self.checkpoint_bytes)

    @contextlib.contextmanager
    def best_weights(self) -> Iterator[None]:
        """Inside, the model has the weights in best/. They were verified when the run was restored. Every process must
        enter this."""
        model = self.trainer.model
        current = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            whole = unsharded_copy(model, torch.device("cpu")) if is_sharded(model) else model
            on_rank_0(lambda: Checkpoint(self.dir / "best").load_weights(whole))
            if whole is model:
                broadcast_tensors(list(model.state_dict().values()))
            else:
                scatter(stored_weights(whole), stored_weights(model))
            yield
        finally:
            model.load_state_dict(current)

    def gathered(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights to keep and the optimizer's tensors; if sharded, rank 0 gets them whole. Every process must call
        this."""
        model = self.trainer.model
        weights = stored_weights(model)
        return gather(weights) if is_sharded(model) else weights, whole_state(self.trainer.optimizer)

    def snapshot(self, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], copy: bool) -> Snapshot:
        """Everything that a checkpoint holds; a `copy` of it stays as it is while the training goes on."""
        trainer, metadata = self.trainer, self.trainer.data.metadata
        copy = copy and not trainer.config.is_sharded  # gathered tensors are copies
        config = stored_config(trainer.model, metadata.tokenizer_type, metadata.chat_template)
        saved = Saved(self.state, trainer.scaler.state_dict(), trainer.data.fingerprint, trainer.resolved())
        return take_snapshot(weights, optimizer, trainer.data.tokenizer_file, config, saved.to_json(), copy)


class Saver:
    """One save at a time. If it fails, the next call of `save`, `check` or `finish` raises its error."""

    def __init__(self, saved: Callable[[], None] = lambda: None):
        self.saved = saved  # called after each save, by the thread that made it
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.under_way: Future[None] | None = None
        self.write_seconds: float | None = None  # of the last folder that was written
        self.seconds_held = 0.0  # how long the training has waited for saves, in all
        self.closed = False

    def begin(self) -> None:
        """Start the thread now: later there may be no memory for it."""
        self.thread.submit(int).result()

    def save(self, folders: Sequence[Path], take: Callable[[bool], Snapshot], size: int) -> None:
        """Write the snapshot that `take(copy)` returns to each of the folders. `size`: about how many bytes it has.

        If there is too little memory for a copy, the training waits until the weights themselves are written.
        """
        began = time.perf_counter()
        self.finish()
        free, snapshot = available_ram(), None
        if free is None or size <= SNAPSHOT_SHARE * free:
            try:
                snapshot = take(True)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        if snapshot is not None:
            self.under_way = self.thread.submit(self.write, folders, snapshot)
        else:
            self.write(folders, take(False))
        self.seconds_held += time.perf_counter() - began

    def write(self, folders: Sequence[Path], snapshot: Snapshot) -> None:
        for folder in folders:
            began = time.perf_counter()
            write_checkpoint(folder, snapshot, self.go_on)
            self.write_seconds = time.perf_counter() - began
            if STEP_NAME.fullmatch(folder.name):
                prune(folder.parent)
                log.info(f"Saved {folder}")
        self.saved()

    def go_on(self) -> None:
        """Raises CheckpointError after `close`: the folder may be another run's by now."""
        if self.closed:
            raise CheckpointError("The save was canceled.")

    def check(self) -> None:
        """Raises CheckpointError if the last save failed. Does not wait."""
        if self.under_way is not None and self.under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way. Raises CheckpointError if it fails."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            under_way.result()

    def close(self) -> None:
        """Cancel the save under way, and end the thread."""
        self.closed = True
        self.thread.shutdown(wait=True, cancel_futures=True)
