"""Run: everything a training step works on, and the state of the training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import BEST, BYTES_PER_PARAMETER, Checkpoint
from common.output import log
from common.script import is_main_process
from model import TransformerLanguageModel
from model_config import ModelConfig
from training.config import MODEL_KEYS, Config
from training.data import TokenData
from training.hardware import Hardware
from training.mirror import Mirror
from training.optimizer import Optimizer, build_optimizer
from training.parallel import copy_from_main_process
from training.schedule import epoch_sequences, find_switch, learning_rate, progress, steps_left, total_steps
from training.state import TrainState

MAX_CHECKPOINTS_ON_DISK = 4  # two, the best, and the one being written


@dataclass(frozen=True)
class Prompt:
    """A prompt of --eval_prompts, and the right answer, if there is one."""

    text: str
    expected: str | None = None


@dataclass(eq=False)
class Run:
    """A training in one process, built by `make_run` in train_colab_mmap.py.

    A step changes the weights, `optimizer`, `scaler`, `skips` and `state`. Compiling sets `step_model`; where it fails,
    it changes `hardware` and `micro_batch_size`.
    """

    config: Config
    hardware: Hardware
    data: TokenData
    prompts: list[Prompt]  # answered at each evaluation
    model: TransformerLanguageModel
    micro_batch_size: int
    mirror: Mirror | None = None  # in the main process only

    def __post_init__(self) -> None:
        self.optimizer: Optimizer = build_optimizer(self.model, self.config)
        self.scaler = self.hardware.grad_scaler()
        self.step_model: Callable[..., torch.Tensor] = self.model  # compiled, data-parallel, or just the model
        self.captured: Any = None  # CapturedStep of captured.py, or None
        self.state = TrainState()
        self.skips = torch.zeros(3, device=self.hardware.device)  # see `count_skip` in step.py
        self.checkpoint_step = 0  # the step of the newest checkpoint; a thread may still be writing it
        self.checkpoint_seconds = 0.0  # `elapsed_seconds` in it
        self.dir: Path = self.config.run_dir  # a dry run uses a temporary folder

    @property
    def shape(self) -> ModelConfig:
        return self.model.config

    @property
    def tokens_per_step(self) -> int:
        return self.config.sequences_per_step * self.shape.max_seq_len

    @property
    def rows_at_once(self) -> int:
        """Sequences per forward pass."""
        return self.config.rows_at_once(self.micro_batch_size)

    @property
    def epoch(self) -> float:
        """Epochs done."""
        return self.state.sequences_seen / epoch_sequences(self.data.windows, self.config)

    @property
    def passes(self) -> float:
        """How often the text of `input` was read."""
        if self.data.companion is None:
            return self.epoch
        switch = self.state.switch
        mixed = 0 if switch is None else self.state.sequences_seen - switch.sequences
        return mixed / 2 / self.data.layout.windows

    @property
    def took_last_step(self) -> bool:
        """Whether the run has taken its last step."""
        return progress(self.state, self.data.windows, self.config) >= 1

    @property
    def total_steps(self) -> int:
        """Number of steps of the run; with `minutes`, the maximum."""
        return total_steps(self.state, self.data.windows, self.config)

    def steps_left(self, step_seconds: float) -> int:
        """Return the steps left in the run, if each takes `step_seconds`."""
        return steps_left(self.state, self.data.windows, self.config, step_seconds)

    @property
    def learning_rate(self) -> float:
        """AdamW's learning rate in the next step."""
        return learning_rate(self.state, self.data.windows, self.config)

    def due(self, interval: int) -> bool:
        """Return True every `interval` steps (0: never) and after the last."""
        return bool(interval) and (self.state.step % interval == 0 or self.took_last_step)

    @property
    def evaluation_due(self) -> bool:
        """Whether this step still has to be evaluated. The last session may have ended during its evaluation."""
        return self.due(self.config.eval_interval) and self.state.evaluated_step < self.state.step

    @property
    def is_done(self) -> bool:
        """Whether the last step was taken and, if the run evaluates, evaluated."""
        return self.took_last_step and not self.evaluation_due

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint. Cached, because counting parameters takes up to a millisecond."""
        return BYTES_PER_PARAMETER * self.model.num_parameters(trained_only=True)

    @property
    def disk_bytes(self) -> int:
        """Disk space for the checkpoints of the run."""
        return MAX_CHECKPOINTS_ON_DISK * self.checkpoint_bytes

    def advance(self, elapsed_seconds: float = 0.0, ending_seconds: float = 0.0) -> None:
        """Count a step in the state. `elapsed_seconds` and `ending_seconds` (see `TrainState`) matter only with
        `minutes`."""
        self.state.elapsed_seconds, self.state.ending_seconds = elapsed_seconds, ending_seconds
        self.state.step += 1
        self.state.sequences_seen += self.config.sequences_per_step
        self.state.tokens += self.tokens_per_step

    def switch_if_due(self, pace: float) -> None:
        """With a companion, begin with the own text when it is time. `pace`: see `find_switch`."""
        if self.data.companion is None or self.state.switch is not None:
            return
        self.state.switch = find_switch(self.state, self.data.windows, self.data.layout.windows, self.config, pace)
        if self.state.switch is not None:
            passes = self.steps_left(pace) * self.config.sequences_per_step / 2 / self.data.layout.windows
            log.info(
                f"Your text  from step {self.state.step:,} on, every second sequence is from {self.config.input}, "
                f"which is read {passes:.2g} times"
            )

    def resolved(self) -> dict[str, Any]:
        """Return the settings, with the shape and micro-batch that the run uses."""
        found = {key: getattr(self.shape, key) for key in MODEL_KEYS}
        return self.config.values() | found | {"micro_batch_size": self.micro_batch_size}

    @contextlib.contextmanager
    def best_weights(self) -> Iterator[None]:
        """Use the weights of best/ inside. They were verified when the run was resumed. Every process must enter."""
        current = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        try:
            if is_main_process():
                Checkpoint(self.dir / BEST).load_weights(self.model)
            copy_from_main_process(self.model.state_dict().values())
            yield
        finally:
            self.model.load_state_dict(current)
