"""The checkpoints of a run: when they are due, what they hold, where they and their copies go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from common.checkpoint import (
    ADAPTERS,
    BEST,
    BYTES_A_PARAMETER,
    KEEP,
    OPTIMIZER,
    STATE,
    WEIGHTS_FILES,
    Checkpoint,
    delete_folder,
    step_folders,
    stored_config,
    stored_weights,
    write_checkpoint,
)
from common.errors import CheckpointError, is_out_of_memory
from common.files import json_bytes
from common.lora import lora_of
from common.machine import available_ram
from common.output import log
from common.script import is_rank_0
from common.tensors import Content, on_host
from training.mirror import Mirror
from training.parallel import any_process, broadcast_tensors, on_rank_0
from training.schedule import epoch_sequences, last_step
from training.signals import Interruption
from training.state import Saved, TrainState
from training.step import Trainer, diverged

Snapshot = dict[str, Content]  # the files of a checkpoint, in memory
SNAPSHOT_SHARE = 0.5  # of the free memory, that a snapshot may take at the most


class Run:
    """A run folder, the mirror with its copies, and what is saved there of `trainer` and `state`. A thread writes one
    checkpoint at a time while the training goes on; if it fails, the next save, or the end, raises its error."""

    def __init__(self, trainer: Trainer, mirror: Mirror | None = None):
        """Touches no file. The state is that of a new run; `start_or_resume` may replace it."""
        config = trainer.config
        self.trainer = trainer
        self.state = TrainState(max_steps=last_step(0, 0, trainer.data.windows, config))
        self.dir = config.run_dir
        self.mirror = mirror  # of rank 0
        self.saved_step = 0  # of the newest checkpoint
        self.last_saved = time.monotonic()
        self.is_due = False  # a checkpoint that could not be written when it was due
        self.best_is_new = False  # the best weights so far are not saved yet
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.under_way: Future[None] | None = None
        self.write_seconds: float | None = None  # of the last folder that was written
        self.seconds_held = 0.0  # how long the training has waited for saves, in all

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
        time once somebody has pressed stop. Raises CheckpointError if a save failed, or if another session has copied a
        newer state."""
        self.thread.submit(int).result()  # start the thread now: later there may be no memory for it
        if self.mirror is not None:
            self.mirror.begin(self.state.run_id)
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
        finally:
            self.thread.shutdown(cancel_futures=True)
            if self.mirror is not None:
                self.mirror.close()
        on_rank_0(self.require_not_overtaken)

    @property
    def is_overtaken(self) -> bool:
        """Whether another session has copied a newer state: this one stops."""
        return self.mirror is not None and self.mirror.overtaken is not None

    def require_not_overtaken(self) -> None:
        if self.mirror is not None and self.mirror.overtaken is not None:
            raise self.mirror.overtaken

    def finish(self, interruption: Interruption | None) -> None:
        """Wait for the save under way, and a limited time for the mirror. Raises CheckpointError if a save fails."""
        try:
            self.wait_for_save()
        finally:
            if self.mirror is not None:
                self.mirror.finish(interruption)

    def wait_for_save(self) -> None:
        """Raises CheckpointError if it fails."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            under_way.result()

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
        if self.under_way is not None and self.under_way.done():
            self.wait_for_save()
        (self.is_due,) = any_process(self.is_due or self.checkpoint_due())
        return self.is_due or self.best_is_new

    def save(self, best_only: bool = False) -> None:
        """Begin to write a checkpoint of this step, or of the best weights alone, or of both if these are the best. Of
        several processes rank 0 writes.

        Raises ConfigError if the weights are not finite: a good checkpoint must not make way for a useless one.
        """
        trainer, state = self.trainer, self.state
        total = torch.stack([parameter.detach().sum() for parameter in trainer.model.parameters()]).sum()
        if not torch.isfinite(total):
            raise diverged(state.step, self.saved_step, "a weight is not finite")
        folders = [self.dir / BEST] if self.best_is_new else []
        if not best_only:
            folders.append(self.dir / "checkpoints" / f"step_{state.step:08d}")
            self.saved_step = state.step
            self.last_saved = time.monotonic()
            self.is_due = False
        self.best_is_new = False
        if is_rank_0():
            began = time.perf_counter()
            self.wait_for_save()
            if (snapshot := self.copied()) is not None:
                self.under_way = self.thread.submit(self.write, folders, snapshot)
            else:  # the training waits until the weights themselves are written
                self.write(folders, self.snapshot(copy=False))
            self.seconds_held += time.perf_counter() - began

    def write(self, folders: Sequence[Path], snapshot: Snapshot) -> None:
        """Write a snapshot to each of the folders, and delete old checkpoints."""
        for folder in folders:
            began = time.perf_counter()
            write_checkpoint(folder, snapshot)
            self.write_seconds = time.perf_counter() - began
            if folder.name != BEST:
                for old in step_folders(folder.parent)[KEEP:]:
                    delete_folder(old)
                log.info(f"Saved {folder}")
        if self.mirror is not None and not self.state.finished:  # a finished run is copied with its summary
            self.mirror.wake()

    def copied(self) -> Snapshot | None:
        """A snapshot that stays as it is while the training goes on; None if there is too little memory for one."""
        free = available_ram()
        if free is not None and self.checkpoint_bytes > SNAPSHOT_SHARE * free:
            return None
        try:
            return self.snapshot(copy=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    @contextlib.contextmanager
    def best_weights(self) -> Iterator[None]:
        """Inside, the model has the weights in best/. They were verified when the run was restored. Every process must
        enter this."""
        model = self.trainer.model
        current = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            on_rank_0(lambda: Checkpoint(self.dir / BEST).load_weights(model))
            broadcast_tensors(list(model.state_dict().values()))
            yield
        finally:
            model.load_state_dict(current)

    def snapshot(self, copy: bool) -> Snapshot:
        """The files of a checkpoint; a `copy` of their content stays as it is while the training goes on."""
        trainer, metadata = self.trainer, self.trainer.data.metadata
        config = stored_config(trainer.model, metadata.tokenizer_type, metadata.chat_template)
        saved = Saved(self.state, trainer.scaler.state_dict(), trainer.data.fingerprint, trainer.resolved()).to_json()
        weights = WEIGHTS_FILES[0] if lora_of(trainer.model) is None else ADAPTERS
        return {
            weights: on_host(stored_weights(trainer.model), copy),
            OPTIMIZER: on_host(trainer.optimizer.tensors(), copy),
            "tokenizer.json": trainer.data.tokenizer_file,  # not its path: the file may have changed since
            "config.json": json_bytes(config),
            STATE: json_bytes(saved),
        }
