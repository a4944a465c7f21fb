"""Save a run: decide when a checkpoint is due, take a snapshot, and write it in a thread."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from common.checkpoint import (
    BASE,
    BEST,
    OPTIMIZER,
    STATE,
    Content,
    build_stored_config,
    build_weights_files,
    to_cpu,
)
from common.errors import CheckpointError
from common.files import describe_session, json_bytes, write_json
from common.machine import available_ram
from common.output import log
from common.script import is_main_process
from training.clock import Clock
from training.config import MODEL_KEYS
from training.memory import suppress_out_of_memory
from training.parallel import on_main_process
from training.records import CONFIG, flush_records
from training.run import Run
from training.schedule import epoch_sequences
from training.state import Saved
from training.step import diverged, require_stable
from training.stop import Stop
from training.store import Store

Snapshot = dict[str, Content]  # file name -> content of a checkpoint
MIN_SECONDS_BETWEEN_LINES = 30.0
MAX_SNAPSHOT_SHARE = 0.5  # share of the free memory
# Early in a run each evaluation brings better weights, and writing many of these takes seconds each.
LARGE_CHECKPOINT_BYTES, BEST_INTERVAL_SECONDS = 2e8, 30.0


class Saver:
    """Writes checkpoints in a thread, one at a time, and lets the mirror copy them. Use it as a context manager.
    If writing fails, the next save or the end of the context raises the error.

    At its end the context waits until everything is written and, for a limited time, copied. Raises CheckpointError if
    a save failed, or if another session has copied a newer state.
    """

    def __init__(self, run: Run, clock: Clock, stop: Stop):
        self.run, self.clock, self.stop = run, clock, stop
        self.store = Store(run.dir)
        self.last_saved = time.monotonic()
        # A run from trained weights saves its first step, so that the mirror has them if the machine is lost.
        self.checkpoint_due = run.mirror is not None and run.state.initialized_from is not None and run.state.step == 0
        self.best_due = False  # the current weights are the best so far, and not saved yet
        self.best_saved = -math.inf  # time.monotonic()
        self.logged_at = -math.inf  # time.monotonic()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.pending_write: Future[None] | None = None

    def __enter__(self) -> Saver:
        self.thread.submit(int).result()  # starts the thread now: later there may be no memory for it
        if self.run.mirror is not None:
            self.run.mirror.start(self.run.state.run_id)
            if not self.run.took_last_step:  # a finished run is copied with its summary, at the end
                self.run.mirror.request_copy()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if kind is not KeyboardInterrupt:  # the user wants to stop at once
                self.finish(error)
        finally:
            self.thread.shutdown(cancel_futures=True)
            if self.run.mirror is not None:
                self.run.mirror.close()
        if kind is None:
            on_main_process(self.require_not_overtaken)

    def finish(self, error: BaseException | None) -> None:
        """Wait for what is written and copied. If an error ends the training, errors of saving are only logged."""
        try:
            self.wait()
        except CheckpointError as problem:
            if error is None:
                raise
            log.info(f"Warning: {problem}")
        finally:
            if self.run.mirror is not None and not self.stop.begins_again:
                self.run.mirror.finish(self.stop)

    @property
    def is_overtaken(self) -> bool:
        """Whether another session has copied a newer state, so that this one has to stop."""
        return self.run.mirror is not None and self.run.mirror.overtaken is not None

    def require_not_overtaken(self) -> None:
        if self.run.mirror is not None and self.run.mirror.overtaken is not None:
            raise self.run.mirror.overtaken

    def wait(self) -> None:
        """Wait for the save that is under way. Raises CheckpointError if it fails."""
        self.stop.message = "Stopping after the current checkpoint is saved and copied"
        self.join()

    def join(self) -> None:
        if self.pending_write is not None:
            under_way, self.pending_write = self.pending_write, None
            under_way.result()

    @property
    def is_checkpoint_step(self) -> bool:
        """Whether this step is saved because of its number, its epoch, or because it is the last."""
        config, state = self.run.config, self.run.state
        before = state.sequences_seen - config.sequences_per_step
        size = epoch_sequences(self.run.data.windows, config) * config.checkpoint_interval
        epochs_passed = bool(size) and state.sequences_seen // size > before // size
        steps_passed = bool(config.checkpoint_steps) and state.step % config.checkpoint_steps == 0
        return steps_passed or epochs_passed or self.run.took_last_step or self.needs_base

    @property
    def needs_base(self) -> bool:
        """Whether a run with a companion has just come to its own text, and its weights are not kept yet."""
        switch = self.run.state.switch
        is_there = switch is not None and switch.sequences == self.run.state.sequences_seen
        return is_there and is_main_process() and not self.store.path_of(BASE).exists()

    @property
    def minutes_passed(self) -> bool:
        minutes = self.run.config.checkpoint_minutes
        return bool(minutes) and time.monotonic() - self.last_saved >= 60 * minutes

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due, or better weights. After a skipped update, wait for a step or an
        evaluation with a finite loss. Raises CheckpointError if the last save failed."""
        if self.pending_write is not None and self.pending_write.done():
            self.join()
        self.checkpoint_due |= self.is_checkpoint_step
        if self.checkpoint_due or self.best_due:
            require_stable(self.run)
            if self.best_due or self.run.took_last_step or not self.run.skips[1]:
                self.save()

    @property
    def is_too_early(self) -> bool:
        """Whether better weights of a large model are not saved, because others were saved just before."""
        is_large = self.run.checkpoint_bytes > LARGE_CHECKPOINT_BYTES
        return is_large and time.monotonic() - self.best_saved < BEST_INTERVAL_SECONDS

    def save_unsaved_step(self, is_logged: bool = True) -> None:
        """Save a checkpoint of this step if there is none, and log its folder."""
        if self.run.state.step > self.run.checkpoint_step:
            self.checkpoint_due = True
            self.logged_at = -math.inf if is_logged else math.inf
            self.save()

    def save(self) -> None:
        """Begin to write a checkpoint of this step and, as due, best/ and base/, which are made from it. With several
        processes, the main one writes.

        Raises ConfigError if a weight is not finite: a good checkpoint must not be deleted for a useless one.
        """
        run, state = self.run, self.run.state
        with self.clock.paused("saving"):
            total = torch.stack([parameter.detach().sum() for parameter in run.model.parameters()]).sum()
            if not torch.isfinite(total):
                raise diverged(run, "a weight is not finite")
            state.skipped_updates = int(run.skips[0])
            run.checkpoint_step, run.checkpoint_seconds = state.step, state.elapsed_seconds
            also = [name for name, is_due in ((BEST, self.best_due), (BASE, self.needs_base)) if is_due]
            is_copied, self.checkpoint_due, self.best_due = self.checkpoint_due, False, False
            if BEST in also:
                self.best_saved = time.monotonic()
            if is_copied:
                self.last_saved = time.monotonic()
            if is_main_process():
                self.join()
                what = (also, is_copied, run.took_last_step)
                if (snapshot := self.take_snapshot()) is None:
                    self.write(state.step, _build_snapshot(run, copy=False), *what)  # the training waits
                else:
                    self.pending_write = self.thread.submit(self.write, state.step, snapshot, *what)

    def write(self, step: int, snapshot: Snapshot, also: Sequence[str], is_copied: bool, is_last: bool) -> None:
        """Write a checkpoint and the weights that are made from it, and delete old checkpoints."""
        began, folder = time.perf_counter(), self.store.step_path(step)
        flush_records(self.store.dir)
        self.store.save(snapshot, folder, also)
        self.clock.write_seconds = time.perf_counter() - began
        self.store.delete_older(step)
        if time.monotonic() - self.logged_at >= MIN_SECONDS_BETWEEN_LINES or is_last:
            self.logged_at = time.monotonic()
            log.info(f"Saved {folder}")
        # A finished run is copied with its summary.
        if self.run.mirror is not None and is_copied and not is_last:
            self.run.mirror.request_copy()

    def take_snapshot(self) -> Snapshot | None:
        """Return a snapshot that does not change while the training goes on; None if memory is too small for one."""
        free = available_ram()
        if free is not None and self.run.checkpoint_bytes > MAX_SNAPSHOT_SHARE * free:
            return None
        with suppress_out_of_memory():
            return _build_snapshot(self.run, copy=True)
        return None


def _build_snapshot(run: Run, copy: bool) -> Snapshot:
    """Return the files of a checkpoint. With `copy`, they do not change while the training goes on."""
    metadata = run.data.metadata
    config = build_stored_config(run.model, metadata.tokenizer_type, metadata.chat_template)
    saved = Saved(run.state, run.scaler.state_dict(), run.data.fingerprint, run.resolved()).to_json()
    return {
        **build_weights_files(run.model, copy),
        OPTIMIZER: to_cpu(run.optimizer.tensors(), copy),
        "tokenizer.json": run.data.tokenizer_file,  # verified bytes, because the file may have changed
        "config.json": json_bytes(config),
        STATE: json_bytes(saved),
    }


def write_config(run: Run, folder: Path) -> None:
    """Write the resolved configuration, with the device and process. The file marks a run folder."""
    config, values = run.config, run.resolved()
    trained = {key: str(config.init_from) for key in MODEL_KEYS if getattr(config, key) != values[key]}
    sources = config.sources | (trained if config.init_from else {})
    resolved = {"config": values, "sources": sources, "device": run.hardware.name, "session": describe_session()}
    write_json(folder / CONFIG, resolved)
