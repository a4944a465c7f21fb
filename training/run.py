"""Run: where a training stands, and how it gets back there after the machine went away."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import (
    STEP_NAME,
    Checkpoint,
    mirror,
    newest_valid,
    open_checkpoint,
    prune,
    restore_interrupted,
    save_checkpoint,
    step_folders,
)
from common.errors import CheckpointError, ConfigError
from common.files import sha256_file, write_json
from model import TransformerLanguageModel
from training.config import MODEL_KEYS, TrainConfig
from training.data import TokenData
from training.schedule import epoch_sequences, last_step

# Keys that say where files lie or how to start, not how to train: a change of them is no news.
UNREPORTED = (
    "input", "tokenizer", "vocab_size", "data_dir", "bin_file", "tokenizer_file", "metadata_file", "placement",
    "output_dir", "checkpoint_dir", "compile_cache_dir", "resume", "resume_from", "init_from", "dry_run", "profile",
    "model_size",
)  # fmt: skip
MIRRORED_FILES = ("config.json", "metrics.jsonl", "samples.md")


class Run:
    """The state of one run: counters, the best loss, and the folders its checkpoints live in."""

    def __init__(
        self,
        config: TrainConfig,
        model: TransformerLanguageModel,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        data: TokenData,
    ):
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.data = data
        self.dir = config.run_dir
        self.mirror_dir = Path(config.checkpoint_dir) / self.dir.name if config.checkpoint_dir else None
        self.step = 0
        self.sequences_seen = 0
        self.tokens = 0
        self.best_val_loss: float | None = None
        self.elapsed = 0.0  # seconds, of earlier sessions
        self.resumed_from: str | None = None
        self.initialized_from: str | None = None
        self.interrupted = False
        self.best_unmirrored = False
        self.damaged: list[Path] = []  # newer than the checkpoint the run continues from
        self.last_saved = time.monotonic()
        self.max_steps = self.plan()

    @classmethod
    def start_or_resume(
        cls,
        config: TrainConfig,
        model: TransformerLanguageModel,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        data: TokenData,
    ) -> Run:
        """Continue the run in `config.run_dir` if there is one, else start it.

        Raises CheckpointError if what is there belongs to another model or other data, or cannot be trusted.
        """
        run = cls(config, model, optimizer, scaler, data)
        folders = [run.dir] if run.mirror_dir is None else [run.dir, run.mirror_dir]
        for folder in folders:
            with contextlib.suppress(OSError):  # a Drive that is not there is reported when a copy fails
                restore_interrupted(folder)
                restore_interrupted(folder / "checkpoints")
        checkpoint = None if config.resume == "never" else run.find()
        if checkpoint is not None:
            run.restore(checkpoint)
        elif config.init_from:
            run.initialize_from(open_checkpoint(config.init_from))
        if config.resume == "never":  # last: the weights may come from the very run that makes way
            for folder in folders:
                set_aside(folder)
        run.max_steps = run.plan()
        return run

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

    @contextlib.contextmanager
    def saving_on_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM only ask: the loop ends after the step in hand, and saves. A second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread alone
            return

        def ask(signum: int, frame: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            with contextlib.suppress(OSError):  # not print: the terminal may be gone, and a print may be under way
                os.write(2, b"\nStopping after this step, then saving. Once more stops at once.\n")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def state(self, elapsed: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "sequences_seen": self.sequences_seen,
            "tokens": self.tokens,
            "best_val_loss": self.best_val_loss,
            "elapsed_seconds": elapsed,
            "resumed_from": self.resumed_from,
            "initialized_from": self.initialized_from,
            "scaler": self.scaler.state_dict(),
            "data": self.data.fingerprint,
            "config": self.config.values(),
            "torch": torch.__version__,
        }

    def save(self, elapsed: float) -> str:
        """Write a checkpoint, drop the older ones, copy it to the mirror. Returns one sentence on how that went."""
        folder = self.dir / "checkpoints" / f"step_{self.step:08d}"
        self.write(folder, elapsed)
        prune(folder.parent)
        self.last_saved = time.monotonic()
        return f"Saved {folder}{self.copy_to_mirror(folder)}"

    def save_best(self, val_loss: float, elapsed: float) -> None:
        """Keep the weights with the lowest validation loss in best/."""
        if self.best_val_loss is None or val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
            self.write(self.dir / "best", elapsed)
            self.best_unmirrored = True

    def require_finite(self, *values: float) -> None:
        """Raises ConfigError if the training diverged: from here on it would only burn time."""
        if not all(map(math.isfinite, values)):
            raise ConfigError(
                f"The training diverged: the loss or the weights are no longer finite at step {self.step:,}. "
                f"Checkpoints saved before are whole. Run the same command with a lower --learning_rate, more "
                "--warmup_steps, or --precision fp32 to continue from there."
            )

    def write(self, folder: Path, elapsed: float) -> None:
        """A good checkpoint must not make way for one that is of no use."""
        sums = [parameter.detach().sum() for parameter in self.model.parameters()]
        self.require_finite(torch.stack(sums).sum().item())
        m = self.data.metadata
        save_checkpoint(
            folder, self.model, self.optimizer, self.data.tokenizer_path, m.tokenizer_type, self.state(elapsed)
        )

    def copy_to_mirror(self, folder: Path) -> str:
        if self.mirror_dir is None:
            return ""
        problem = mirror(folder, self.mirror_dir / "checkpoints" / folder.name)
        if problem is None and self.best_unmirrored:
            problem = mirror(self.dir / "best", self.mirror_dir / "best")
            self.best_unmirrored = problem is not None
        if problem is None:
            prune(self.mirror_dir / "checkpoints")
            with contextlib.suppress(OSError):
                for name in MIRRORED_FILES:
                    if (self.dir / name).exists():
                        shutil.copyfile(self.dir / name, self.mirror_dir / name)
            return f", copied to {self.mirror_dir}"
        return f". Warning: it could not be copied to {self.mirror_dir} ({problem}); the training goes on"

    def find(self) -> Checkpoint | None:
        """The checkpoint to continue from: the newest whole one here or in the mirror, or the one asked for."""
        parents = [self.dir / "checkpoints"]
        if self.mirror_dir is not None:
            parents.append(self.mirror_dir / "checkpoints")
        folders = step_folders(*parents)
        newest = newest_valid(folders)
        if folders and newest is None:
            raise CheckpointError(
                f"None of the checkpoints of this run is whole ({', '.join(map(str, folders))}). "
                "--resume never starts over and keeps them aside."
            )
        if newest is not None:
            self.damaged = folders[: folders.index(newest.path)]
        if self.config.resume_from is None:
            return newest
        self.resumed_from = str(Path(self.config.resume_from).resolve())
        if newest is None:
            return open_checkpoint(self.config.resume_from)
        # The same command again: the run has come further than the checkpoint it was once started from.
        if newest.training_state().get("resumed_from") == self.resumed_from:
            return newest
        asked = open_checkpoint(self.config.resume_from)
        if asked.path.resolve() == newest.path.resolve():
            return asked
        raise CheckpointError(
            f"{self.dir} already holds a run of its own, at {newest.path.name}. To continue from {asked.path} "
            "instead, choose another --output_dir."
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load everything; report what changed since. Raises CheckpointError for what may not change."""
        if not (checkpoint.path / "training_state.json").exists():
            raise CheckpointError(
                f"{checkpoint.path} holds weights but no training state (the blog's form): --init_from "
                f"{checkpoint.path} starts a new run from them."
            )
        state = checkpoint.training_state()
        saved, ours = checkpoint.model_config().to_dict(), self.model.config.to_dict()
        clashes = [
            f"{key}: {saved[key]!r} in the checkpoint, {ours[key]!r} now"
            for key in saved
            if saved[key] != ours[key] and key != "dropout"
        ]
        saved_with = state["config"].get("optimizer", "adamw")
        if saved_with != self.config.optimizer:
            clashes.append(f"optimizer: {saved_with!r} in the checkpoint, {self.config.optimizer!r} now")
        clashes += [
            f"{key} of the data: {str(state['data'].get(key))[:16]} in the checkpoint, {str(value)[:16]} now"
            for key, value in self.data.fingerprint.items()
            if state["data"].get(key) != value
        ]
        if clashes:
            raise CheckpointError(
                "\n  ".join(
                    [
                        f"{checkpoint.path} cannot be continued: architecture, optimizer, tokenizer and data may not "
                        "change.",
                        *clashes,
                    ]
                )
                + f"\nGive the old values, or another --output_dir, or --resume never ({self.dir} is kept aside)."
            )
        self.initialized_from = state.get("initialized_from")
        if self.config.init_from and str(Path(self.config.init_from).resolve()) != self.initialized_from:
            raise CheckpointError(
                f"{self.dir} already holds a run that did not start from {self.config.init_from}. Choose another "
                "--output_dir for the new one, or --resume never to keep the old one aside."
            )
        for folder in self.damaged:
            quarantine(folder)
        checkpoint.load_weights(self.model)
        checkpoint.load_optimizer(self.optimizer)
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.sequences_seen = state["sequences_seen"]
        self.tokens = state["tokens"]
        self.best_val_loss = state["best_val_loss"]
        self.elapsed = state["elapsed_seconds"]
        self.resumed_from = self.resumed_from or state["resumed_from"]
        self.bring_back_files(checkpoint)
        print(f"Continuing from {checkpoint.path}: step {self.step:,}, epoch {self.epoch:.2f}.")
        now = self.config.values()
        for key, value in state["config"].items():
            fixed = key in UNREPORTED or (key in MODEL_KEYS and key != "dropout")
            if key in now and not fixed and now[key] != value:
                print(f"  changed: {key} {value} -> {now[key]} ({self.config.sources.get(key, '')})")
        if any(now[key] != state["config"].get(key) for key in ("eval_batches", "batch_size")):
            self.best_val_loss = None  # another set of validation windows: losses before and after do not compare

    def bring_back_files(self, checkpoint: Checkpoint) -> None:
        """A run found in the mirror alone brings its metrics, samples and best weights with it."""
        source = checkpoint.path.resolve().parent  # of best/, or of a folder of checkpoints
        if source.name == "checkpoints":
            source = source.parent
        if source.resolve() == self.dir.resolve():
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        for name in MIRRORED_FILES:
            if (source / name).exists() and not (self.dir / name).exists():
                shutil.copyfile(source / name, self.dir / name)
        folders = [source / "best"]
        if STEP_NAME.fullmatch(checkpoint.path.name):
            folders.append(source / "checkpoints" / checkpoint.path.name)
        for folder in folders:
            target = self.dir / folder.relative_to(source)
            if folder.is_dir() and not target.exists() and (problem := mirror(folder, target)):
                print(f"Warning: {folder} could not be copied to {target} ({problem}); the training goes on.")

    def initialize_from(self, checkpoint: Checkpoint) -> None:
        """Take trained weights as the start of a new run on data that was tokenized with the same tokenizer."""
        tokenizer_path = checkpoint.tokenizer_path()
        theirs = sha256_file(tokenizer_path)
        if theirs != self.data.metadata.tokenizer_sha256:
            raise CheckpointError(
                f"The data was not tokenized with the tokenizer of {checkpoint.path}. Tokenize it with: python "
                f"tokenize_local_bpe.py --input my_text.txt --tokenizer_file {tokenizer_path}"
            )
        checkpoint.load_weights(self.model)
        self.initialized_from = str(Path(self.config.init_from).resolve())
        print(f"Starting from the weights of {checkpoint.path}.")

    def write_config(self) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        write_json(self.dir / "config.json", {"config": self.config.values(), "sources": self.config.sources})


def set_aside(run_dir: Path) -> None:
    """Rename an old run, so that starting over loses nothing."""
    if run_dir.exists():
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        candidates = (run_dir.with_name(f"{run_dir.name}.{stamp}{name}") for name in names)
        old = next(path for path in candidates if not path.exists())
        os.replace(run_dir, old)
        print(f"The run that was in {run_dir} is now {old}.")


def quarantine(folder: Path) -> None:
    """Take a damaged checkpoint out of the succession of steps, and keep it to be looked at."""
    with contextlib.suppress(OSError):
        target = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
