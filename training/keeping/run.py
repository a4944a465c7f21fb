"""Run: where a training stands, and the checkpoints that keep it."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.checkpoint import BYTES_A_PARAMETER, Snapshot, open_checkpoint, step_folders, take_snapshot
from common.errors import CheckpointError, ConfigError
from common.launch import is_first
from common.lora import lora_of
from model import TransformerLanguageModel
from training.config import TrainConfig
from training.file_names import SUMMARY
from training.keeping.claim import TakenOver
from training.keeping.mirror import Mirror
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
    saved_state,
)
from training.keeping.run_folder import quarantine, require_movable, require_ours, set_aside, tidy, write_config
from training.keeping.saved_state import read_state
from training.keeping.saving import Saver
from training.machine.hardware import Hardware
from training.machine.processes import any_process, count, on_first, share_tensors
from training.numbers.data import TokenData
from training.numbers.evaluate import evaluated_windows
from training.numbers.optimizer import Optimizer, apply_hyperparameters, follow_first, whole_state
from training.numbers.schedule import epoch_sequences, last_step, learning_rate
from training.numbers.stability import Stability, diverged
from training.planning.memory import DROPOUT_ASIDE, with_less_memory
from training.telling.records import finite

COPY_SECONDS = 600.0  # that the last copy to the mirror is waited for
COPY_SECONDS_IF_STOPPED = 60.0  # likewise, by whoever pressed stop
# What the first of several processes knows of a run from its folder.
SHARED = (
    "step", "sequences_seen", "tokens", "best_val_loss", "best_step", "best_windows", "lowest_val_loss", "worse",
    "base", "unevaluated", "saved_step", "elapsed", "resumed_from", "initialized_from", "id",
)  # fmt: skip


class Run:
    """The state of one run: counters, the best loss, and the folders its checkpoints live in."""

    def __init__(
        self,
        config: TrainConfig,
        model: TransformerLanguageModel,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        data: TokenData,
    ):
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.data = data
        self.dir = config.run_dir
        self.mirror = Mirror(self.dir, config.checkpoint_dir) if config.checkpoint_dir and is_first() else None
        self.saver = Saver(self.mirror.wake if self.mirror else lambda: None)
        self.step = 0
        self.sequences_seen = 0
        self.tokens = 0
        self.best_val_loss: float | None = None
        self.best_step = 0  # of those weights
        self.best_windows: int | None = None  # of validation that it is the loss over
        self.best_is_new = False  # and its weights are not saved yet
        self.lowest_val_loss: float | None = (
            None  # up to this step: best/ may be of a step that is still to be repeated
        )
        self.worse = 0  # evaluations in a row without a lower one
        self.base: dict[str, Any] | None = None  # validation loss, prompts, answers of the weights that it started from
        self.unevaluated: dict[str, Any] | None = None  # the row of metrics of an evaluation that is not done yet
        self.saved_step = 0  # of the newest checkpoint
        self.is_due = False  # a checkpoint that could not be written when it was due
        self.elapsed = 0.0  # seconds, of earlier sessions
        self.resumed_from = resolved(config.resume_from) if config.resume_from else None
        self.initialized_from: str | None = None
        self.last_saved = time.monotonic()
        self.id = uuid.uuid4().hex  # of this run and no other, whatever its folder is called
        self.stability = Stability(data.device, scaler.is_enabled())
        self.max_steps = self.plan()

    @classmethod
    def start_or_resume(
        cls,
        config: TrainConfig,
        model: TransformerLanguageModel,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        data: TokenData,
    ) -> Run:
        """Continue the run in `config.run_dir` if there is one, else start it.

        Raises CheckpointError if what is there belongs to another model or other data, or cannot be trusted.
        """
        run = cls(config, model, optimizer, scaler, data)
        on_first(run.open)
        run.follow_first()
        run.max_steps = run.plan()
        # As the last step left it: what is saved before the next one is then what was saved there.
        apply_hyperparameters(optimizer, learning_rate(max(run.step - 1, 0), run.max_steps, config), config)
        return run

    @property
    def taken_over(self) -> TakenOver | None:
        """Set once another session has taken the mirror over: this one stops."""
        return self.mirror.taken_over if self.mirror is not None else None

    def require_not_taken_over(self) -> None:
        """Raises TakenOver."""
        if self.taken_over is not None:
            raise self.taken_over

    def open(self) -> None:
        """Whatever the folders hold: continued, or set aside."""
        folders = [self.dir] if self.mirror is None else [self.dir, self.mirror.dir]
        self.require_own_folders()
        if self.mirror is not None and self.config.resume != "never":
            self.mirror.claim.announce()
        for folder in folders:
            tidy(folder, truncate=folder != self.dir)
        found = self.find()
        if found is not None:
            self.restore(found)
        elif self.config.init_from:
            self.initialize_from(self.config.init_from)
        if found is None and self.mirror is not None:
            self.id = self.mirror.claim.earlier_run_id or self.id
            print(
                f"Copies     go to {self.mirror.dir}. There are none of this run yet: if there should be, stop and "
                f"mount the disk they are on."
            )
        if self.config.resume == "never":  # last: the weights may come from the very run that makes way
            for folder in folders:
                set_aside(folder)
        self.dir.mkdir(parents=True, exist_ok=True)

    def follow_first(self) -> None:
        """Stand where the first process stands: it has read what there is. Raises CheckpointError if this run was begun
        on another machine than the first."""
        if count() == 1:
            return
        plain = on_first(lambda: {name: getattr(self, name) for name in SHARED} | {"skipped": self.stability.skipped})
        self.stability = Stability(self.data.device, self.scaler.is_enabled(), plain.pop("skipped"))
        vars(self).update(plain)
        self.scaler.load_state_dict(on_first(self.scaler.state_dict))
        share_tensors(list(self.model.state_dict().values()))
        follow_first(self.optimizer)
        own = step_folders(self.dir / "checkpoints") if self.config.resume == "auto" else []
        (is_elsewhere,) = any_process(bool(own) and self.step == 0)
        if is_elsewhere:
            raise CheckpointError(
                f"There are checkpoints in {self.dir} on one of the machines, and none on that of process 0, which "
                f"reads and writes them. Give torchrun --node_rank=0 on the machine that has them, or --resume never "
                f"to start over."
            )

    def require_own_folders(self) -> None:
        """Raises ConfigError or CheckpointError if the mirror is not there, or is not this run's, or if an old run
        cannot make way."""
        if self.config.resume == "never":
            require_movable(self.dir)
        if self.mirror is None:
            return
        try:
            require_ours(self.mirror.dir, "--checkpoint_dir")
            self.mirror.require_mounted()
            self.mirror.require_apart()
            require_own_mirror(self.dir, self.mirror)
            if self.config.resume == "never":
                require_movable(self.mirror.dir)
            self.mirror.claim.require_free()
        except OSError as problem:
            raise ConfigError(
                f"--checkpoint_dir {self.mirror.root} cannot be read ({problem.strerror}). Mount the Drive again, or "
                f"leave --checkpoint_dir out to train without copies."
            ) from None

    def find(self) -> Found | None:
        """The checkpoint to continue from. Raises CheckpointError if it cannot be continued as things are now."""
        if self.config.resume == "never":
            return None
        found = find_checkpoint(self.dir, self.mirror.dir if self.mirror else None, self.config)
        if self.mirror is not None:
            # Still: else its newer checkpoints would look like none, or damaged, as those that are being deleted do.
            self.mirror.require_mounted()
            self.mirror.claim.require_unchanged()
        if found is not None:
            state = saved_state(found.checkpoint)
            shape, lora = self.model.config, lora_of(self.model)
            require_the_same(found.checkpoint, state, self.config, shape, lora, self.data)
            require_the_same_start(state, self.config)
        return found

    def plan(self) -> int:
        if self.has_stopped_early:
            return self.step
        return last_step(self.step, self.sequences_seen, self.data.windows, self.config)

    @property
    def has_stopped_early(self) -> bool:
        return 0 < self.config.stop_after_worse <= self.worse

    @property
    def epoch(self) -> float:
        """Epochs behind this run."""
        return self.sequences_seen / epoch_sequences(self.data.windows, self.config)

    @property
    def finished(self) -> bool:
        return self.step >= self.max_steps

    def more(self) -> str:
        """The flag that makes a finished run longer."""
        if self.has_stopped_early:
            return f"--stop_after_worse {2 * self.config.stop_after_worse}"
        if self.config.max_steps:
            return f"--max_steps {self.step * 2}"
        return f"--epochs {2 * max(self.config.epochs, int(self.epoch))}"

    def is_finished_message(self) -> str:
        return (
            f"This run is finished: step {self.step:,} of {self.max_steps:,}, results in {self.dir / SUMMARY}. "
            f"To go on, ask for more: {self.more()}. "
            f"To start over: --resume never (the old run is kept aside)."
        )

    def advance(self, skipped: torch.Tensor) -> None:
        """One more step is done, `skipped` (1.0 or 0.0, unread) or not."""
        self.stability.step_done(skipped)
        self.step += 1
        self.sequences_seen += self.config.sequences_per_step
        self.tokens += self.config.tokens_per_step

    def give_way(self, error: Exception, part: str, hardware: Hardware) -> str:
        """Halve the micro-batch after `error` in a `part` of a step, for the same batch once more, and for this run on
        this device. Returns a sentence on it. Raises what `with_less_memory` raises."""
        rows = self.config.rows_at_once
        self.config = with_less_memory(error, part, self.config, self.model, self.optimizer, hardware)
        with contextlib.suppress(OSError):  # a full disk is told by the next save
            write_config(self.config, hardware.name)
        less = self.config.rows_at_once
        return (
            f"Out of memory with {rows} sequences at once: the same batch again with {less}, with the same result"
            f"{DROPOUT_ASIDE if self.config.dropout else ''}. Kept for this run; another: --micro_batch_size {less}"
        )

    def due(self, interval: int) -> bool:
        """True every `interval` steps (0: never) and after the last."""
        return bool(interval) and (self.step % interval == 0 or self.finished)

    def checkpoint_due(self) -> bool:
        c = self.config
        before = self.sequences_seen - c.sequences_per_step
        size = epoch_sequences(self.data.windows, c) * c.checkpoint_interval
        epochs_passed = bool(size) and self.sequences_seen // size > before // size
        steps_passed = bool(c.checkpoint_steps) and self.step % c.checkpoint_steps == 0
        minutes_passed = bool(c.checkpoint_minutes) and time.monotonic() - self.last_saved >= 60 * c.checkpoint_minutes
        return steps_passed or epochs_passed or minutes_passed or self.finished

    def require_finite(self, value: float, what: str) -> None:
        """Raises ConfigError if the training diverged: from here on it would only burn time."""
        if not math.isfinite(value):
            raise diverged(self.step, self.saved_step, f"{what} is not finite")

    @contextlib.contextmanager
    def saving(self, say: Callable[[str], None], is_asked_to_stop: Callable[[], bool]) -> Iterator[None]:
        """Save and copy beside what happens inside; at its end, wait until that is done."""
        self.saver.begin()
        if self.mirror is not None:
            self.mirror.begin(self.id, self.checkpoint_bytes)
        try:
            yield
        except KeyboardInterrupt:  # the wish to stop at once
            raise
        except BaseException:  # which is what is to be told: what goes wrong with saving now is only said
            try:
                self.finish(say, is_asked_to_stop)
            except CheckpointError as problem:
                say(f"Warning: {problem}")
            raise
        else:
            self.finish(say, is_asked_to_stop)
            on_first(self.require_not_taken_over)
        finally:
            try:
                self.saver.close()
            finally:
                if self.mirror is not None:
                    self.mirror.close()

    def finish(self, say: Callable[[str], None], is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait for the save under way, and a stated time for the mirror."""
        try:
            self.finish_saving(say)
        finally:
            if self.mirror is not None:
                self.mirror.finish(COPY_SECONDS, is_asked_to_stop, COPY_SECONDS_IF_STOPPED, say)

    def finish_saving(self, say: Callable[[str], None]) -> None:
        """Wait for the save under way. Raises CheckpointError if it fails."""
        try:
            self.saver.finish()
        finally:
            for line in self.news():
                say(line)

    def news(self) -> Iterator[str]:
        """What was saved and copied since the last call. Raises CheckpointError if a save failed."""
        yield from self.saver.heard()
        if self.mirror is not None:
            yield from self.mirror.heard()
        self.saver.check()

    @property
    def checkpoint_bytes(self) -> int:
        return BYTES_A_PARAMETER * self.model.num_parameters(trained_only=True)

    def save_is_due(self) -> bool:
        """Whether there is something to be saved at this step; waits for no GPU. Clocks differ: what is due in one
        process is due in all."""
        (self.is_due,) = any_process(self.is_due or self.checkpoint_due())
        return self.is_due or self.best_is_new

    def save_if_sound(self, elapsed: float) -> None:
        """Begin to write what is due, unless the last update was skipped: then it waits for a step that shows the
        weights to be sound, as the evaluation of the best ones has shown already."""
        self.stability.require_stable(self.step, self.saved_step)
        if self.best_is_new or self.finished or not self.stability.in_doubt:
            self.save(elapsed, best_only=not self.is_due)

    def save(self, elapsed: float, best_only: bool = False) -> None:
        """Begin to write a checkpoint of this step, or of the best weights alone, or of both if these are the best. Of
        several processes the first writes, and gets from the others what they alone have.

        Raises ConfigError if the weights are not finite: a good checkpoint must not make way for one of no use.
        """
        sums = [parameter.detach().sum() for parameter in self.model.parameters()]
        self.require_finite(torch.stack(sums).sum().item(), "a weight")
        folders = [self.dir / "best"] if self.best_is_new else []
        if not best_only:
            folders.append(self.dir / "checkpoints" / f"step_{self.step:08d}")
            self.saved_step = self.step
            self.last_saved = time.monotonic()
            self.is_due = False
        self.best_is_new = False
        optimizer_state = whole_state(self.optimizer)
        if is_first():
            self.saver.save(folders, functools.partial(self.snapshot, elapsed, optimizer_state), self.checkpoint_bytes)

    def snapshot(self, elapsed: float, optimizer_state: dict[str, Any], copy: bool) -> Snapshot:
        m = self.data.metadata
        data = self.data.tokenizer_file, m.tokenizer_type
        return take_snapshot(self.model, optimizer_state, *data, self.state(elapsed), m.chat_template, copy)

    def state(self, elapsed: float) -> dict[str, Any]:
        """What `restore` needs beside the weights and the optimizer's state."""
        return {
            "run_id": self.id,
            "step": self.step,
            "sequences_seen": self.sequences_seen,
            "tokens": self.tokens,
            "best_val_loss": self.best_val_loss,
            "best_windows": self.best_windows,
            "lowest_val_loss": self.lowest_val_loss,
            "worse": self.worse,
            "base": self.base,
            "unevaluated": None if self.unevaluated is None else finite(self.unevaluated),
            "skipped_updates": self.stability.skipped,
            "elapsed_seconds": elapsed,
            "resumed_from": self.resumed_from,
            "initialized_from": self.initialized_from,
            "scaler": self.scaler.state_dict(),
            "data": self.data.fingerprint,
            "config": self.config.values(),
            "torch": torch.__version__,
        }

    def restore(self, found: Found) -> None:
        """Load everything; report what changed since."""
        checkpoint = found.checkpoint
        state = saved_state(checkpoint)
        for folder in found.damaged:
            quarantine(folder)
        checkpoint.load_weights(self.model)
        checkpoint.load_optimizer(self.optimizer)
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.step = self.saved_step = state["step"]
        self.sequences_seen = state["sequences_seen"]
        self.tokens = state["tokens"]
        self.unevaluated = state.get("unevaluated")  # not in states of older versions
        self.stability = Stability(self.data.device, self.scaler.is_enabled(), state.get("skipped_updates", 0))
        self.elapsed = state["elapsed_seconds"]
        self.resumed_from = self.resumed_from or state["resumed_from"]
        self.initialized_from = state.get("initialized_from")
        self.worse, self.base = state.get("worse", 0), state.get("base")
        self.lowest_val_loss = state.get("lowest_val_loss", state["best_val_loss"])  # in older states there is one
        if found.own:
            self.id = state.get("run_id") or self.id  # not in states of older versions
        bring_back_files(checkpoint, self.dir, self.mirror.dir if self.mirror else None)
        print(f"Continuing from {checkpoint.path}: step {self.step:,}, epoch {self.epoch:.2f}.")
        saved = state["config"]
        print_changes(saved, self.config)
        self.restore_best()

    def restore_best(self) -> None:
        """The loss to be beaten is the one of the weights that are in best/: both or none."""
        state: dict[str, Any] = {}
        if (self.dir / "best").exists():
            try:
                state = read_state(open_checkpoint(self.dir / "best"))
            except CheckpointError as problem:
                print(f"Warning: {problem} The next evaluation replaces it.", file=sys.stderr)
        saved = state.get("config", {})
        same = all(getattr(self.config, key) == saved.get(key) for key in ("eval_batches", "batch_size"))
        in_older_states = evaluated_windows(self.data, self.config) if same else None
        self.best_val_loss, self.best_step = state.get("best_val_loss"), state.get("step", 0)
        self.best_windows = state.get("best_windows", in_older_states)

    def initialize_from(self, path: str) -> None:
        """Take trained weights as the start of a new run on data that was tokenized with the same tokenizer."""
        checkpoint = open_checkpoint(path)
        require_tokenizer(checkpoint, self.data)
        if lora_of(self.model) is None:  # which has its base in place
            checkpoint.load_weights(self.model)
        self.initialized_from = resolved(path)
        print(f"Starting from the weights of {checkpoint.path}.")
