"""Run: where a training stands, and the checkpoints that keep it."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import newest_valid, open_checkpoint, prune, save_checkpoint
from common.errors import ConfigError
from model import TransformerLanguageModel
from training.config import TrainConfig
from training.data import TokenData
from training.evaluate import evaluated_windows, validation_loss
from training.hardware import Hardware
from training.mirror import Mirror
from training.optimizer import Optimizer
from training.resume import (
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
from training.run_folder import quarantine, require_ours, set_aside, tidy
from training.schedule import epoch_sequences, last_step


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
        self.mirror = Mirror(self.dir, config.checkpoint_dir) if config.checkpoint_dir else None
        self.step = 0
        self.sequences_seen = 0
        self.tokens = 0
        self.best_val_loss: float | None = None
        self.best_windows: int | None = None  # of validation that it is the loss over
        self.unevaluated: dict[str, Any] | None = None  # the row of metrics of an evaluation that is not done yet
        self.saved_step = 0  # of the newest checkpoint
        self.elapsed = 0.0  # seconds, of earlier sessions
        self.resumed_from = resolved(config.resume_from) if config.resume_from else None
        self.initialized_from: str | None = None
        self.last_saved = time.monotonic()
        self.id = uuid.uuid4().hex  # of this run and no other, whatever its folder is called
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
        folders = [run.dir] if run.mirror is None else [run.dir, run.mirror.dir]
        run.require_own_folders()
        for folder in folders:
            tidy(folder)
        found = run.find()
        if found is not None:
            run.restore(found)
        elif config.init_from:
            run.initialize_from(config.init_from)
        if config.resume == "never":  # last: the weights may come from the very run that makes way
            for folder in folders:
                set_aside(folder)
        run.max_steps = run.plan()
        return run

    def require_own_folders(self) -> None:
        """Raises ConfigError or CheckpointError if the mirror is not there, or is not this run's."""
        if self.mirror is not None:
            self.mirror.require_mounted()
            require_ours(self.mirror.dir, "--checkpoint_dir")
            require_own_mirror(self.dir, self.mirror.dir, self.config)

    def find(self) -> Found | None:
        """The checkpoint to continue from. Raises CheckpointError if it cannot be continued as things are now."""
        if self.config.resume == "never":
            return None
        found = find_checkpoint(self.dir, self.mirror.dir if self.mirror else None, self.config)
        if found is not None:
            state = saved_state(found.checkpoint)
            require_the_same(found.checkpoint, state, self.config, self.model.config, self.data)
            require_the_same_start(state, self.config)
        return found

    def plan(self) -> int:
        return last_step(self.step, self.sequences_seen, self.data.windows, self.config)

    @property
    def epoch(self) -> float:
        """Epochs behind this run."""
        return self.sequences_seen / epoch_sequences(self.data.windows, self.config)

    @property
    def finished(self) -> bool:
        return self.step >= self.max_steps

    def more(self) -> str:
        """The flag that makes a finished run longer."""
        if self.config.max_steps:
            return f"--max_steps {self.step * 2}"
        return f"--epochs {2 * max(self.config.epochs, int(self.epoch))}"

    def advance(self) -> None:
        """One more step is done."""
        self.step += 1
        self.sequences_seen += self.config.sequences_per_step
        self.tokens += self.config.tokens_per_step

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

    @property
    def best_is_comparable(self) -> bool:
        """Whether the best loss is over the validation windows that are evaluated now."""
        return self.best_val_loss is None or self.best_windows == evaluated_windows(self.data, self.config)

    def require_finite(self, *values: float) -> None:
        """Raises ConfigError if the training diverged: from here on it would only burn time."""
        if not all(map(math.isfinite, values)):
            raise ConfigError(
                f"The training diverged: the loss or the weights are no longer finite at step {self.step:,}. "
                f"Checkpoints saved before are whole. Run the same command with a lower --learning_rate, more "
                "--warmup_steps, or --precision fp32 to continue from there."
            )

    def save(self, elapsed: float) -> str:
        """Write a checkpoint, drop the older ones, copy it to the mirror. Returns one sentence on how that went."""
        folder = self.dir / "checkpoints" / f"step_{self.step:08d}"
        self.write(folder, elapsed)
        prune(folder.parent)
        self.saved_step = self.step
        self.last_saved = time.monotonic()
        return f"Saved {folder}{self.mirror.copy(folder, self.id) if self.mirror else ''}"

    def save_best(self, val_loss: float, elapsed: float) -> None:
        """Keep the weights with the lowest validation loss in best/."""
        if self.best_val_loss is None or val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
            self.best_windows = evaluated_windows(self.data, self.config)
            self.write(self.dir / "best", elapsed)
            if self.mirror:
                self.mirror.best_is_newer = True

    def evaluate_best(
        self, hardware: Hardware, step_model: Callable[..., torch.Tensor], between: Callable[[], None]
    ) -> None:
        """Evaluate the best weights again, over the validation windows of now: the weights that are kept and the loss
        that is to be beaten belong together. `between` is that of `validation_loss`."""
        best = newest_valid([self.dir / "best"]) if (self.dir / "best").exists() else None
        if best is None:
            self.best_val_loss = None
            return
        current = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        try:
            best.load_weights(self.model)
            self.best_val_loss = validation_loss(self.model, step_model, self.data, self.config, hardware, between)
            self.best_windows = evaluated_windows(self.data, self.config)
        finally:
            self.model.load_state_dict(current)

    def write(self, folder: Path, elapsed: float) -> None:
        """Save a checkpoint, unless the weights are not finite: a good one must not make way for one of no use."""
        sums = [parameter.detach().sum() for parameter in self.model.parameters()]
        self.require_finite(torch.stack(sums).sum().item())
        m = self.data.metadata
        save_checkpoint(
            folder, self.model, self.optimizer, self.data.tokenizer_file, m.tokenizer_type, self.state(elapsed)
        )

    def state(self, elapsed: float) -> dict[str, Any]:
        """What `restore` needs beside the weights and the optimizer's state."""
        return {
            "run_id": self.id,
            "step": self.step,
            "sequences_seen": self.sequences_seen,
            "tokens": self.tokens,
            "best_val_loss": self.best_val_loss,
            "best_windows": self.best_windows,
            "unevaluated": self.unevaluated,
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
        self.best_val_loss = state["best_val_loss"]
        self.unevaluated = state.get("unevaluated")  # not in states of older versions
        self.elapsed = state["elapsed_seconds"]
        self.resumed_from = self.resumed_from or state["resumed_from"]
        self.initialized_from = state.get("initialized_from")
        if found.own:
            self.id = state.get("run_id") or self.id  # not in states of older versions
        bring_back_files(checkpoint, self.dir)
        print(f"Continuing from {checkpoint.path}: step {self.step:,}, epoch {self.epoch:.2f}.")
        saved = state["config"]
        print_changes(saved, self.config)
        same = all(getattr(self.config, key) == saved.get(key) for key in ("eval_batches", "batch_size"))
        in_older_states = evaluated_windows(self.data, self.config) if same else None
        self.best_windows = state.get("best_windows", in_older_states)

    def initialize_from(self, path: str) -> None:
        """Take trained weights as the start of a new run on data that was tokenized with the same tokenizer."""
        checkpoint = open_checkpoint(path)
        require_tokenizer(checkpoint, self.data)
        checkpoint.load_weights(self.model)
        self.initialized_from = resolved(path)
        print(f"Starting from the weights of {checkpoint.path}.")
