"""`--tracker`: log losses to TensorBoard, Trackio or Weights & Biases, beside metrics.jsonl.

Trackio and wandb have the same calls: init, log, finish, Table. A class gives them to TensorBoard.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.output import log
from training.config import Config
from training.records import Sample, drop_missing, render_answers

PROJECT = "gpt2"


def require_tracker(config: Config) -> None:
    """Raise ConfigError if the tracker's package is missing."""
    if (name := config.tracker) and importlib.util.find_spec(name) is None:
        raise ConfigError(f"--tracker {name} needs its package: pip install {name}.")


class Tracker:
    """A run in a tracker. An error is one warning, and the training goes on without the tracker."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, step: int) -> None:
        self.name = config.tracker
        self.module: Any = None
        self.logged_step = -1  # the last step that Trackio has from a killed session; the others rewind by themselves
        if not self.name:
            return
        with self.warning():
            name = f"{run_dir.name}-{run_id[:8]}"  # the same after a kill, so the tracker continues the run
            options: dict[str, Any] = {"id": run_id, "dir": str(run_dir)} if self.name == "wandb" else {}
            options |= {"project": PROJECT, "name": name, "config": asdict(config), "resume": "allow"}
            module = TensorBoard(run_dir, step) if self.name == "tensorboard" else importlib.import_module(self.name)
            module.init(**options)
            self.module = module
            if self.name == "trackio":
                with contextlib.suppress(Exception):  # another version's storage
                    self.logged_step = self.module.SQLiteStorage.get_max_step_for_run(PROJECT, name) or -1

    def log(self, row: dict[str, Any]) -> None:
        """Log a row of metrics.jsonl."""
        is_logged = row["step"] < self.logged_step or (row["step"] == self.logged_step and "train_loss" in row)
        if self.module and not is_logged:
            with self.warning():
                # An evaluation's row repeats the numbers of its step.
                new = {key: row[key] for key in row if key != "step" and ("train_loss" in row or key[:4] == "val_")}
                self.module.log(drop_missing(new), step=row["step"])

    def log_samples(self, sample: Sample) -> None:
        """Log the answers of an evaluation as a table."""
        if self.module:
            with self.warning():
                rows = [list(row) for row in zip(sample.prompts, sample.answers, sample.expected, strict=True)]
                table = self.module.Table(columns=["prompt", "answer", "expected"], data=rows)
                self.module.log({"answers": table}, step=sample.step)

    def close(self) -> None:
        if self.module:
            with self.warning():
                self.module.finish()

    @contextlib.contextmanager
    def warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:  # no network, a full disk, another version of the package
            self.module = None
            log.info(f"Warning: {self.name} failed ({problem}); the training goes on without it.")


class TensorBoard:
    """TensorBoard's event files in the run folder, with the calls of Trackio and wandb."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir), purge_step=step + 1)  # hides later steps of a killed session

    def init(self, config: dict[str, Any], **_: Any) -> None:
        self.writer.add_text("config", "".join(f"    {key}: {value}\n" for key, value in config.items()))

    def Table(self, columns: list[str], data: list[list[Any]]) -> str:
        prompts, answers, expected = (list(column) for column in zip(*data, strict=True))
        return "\n".join(render_answers(prompts, answers, expected))

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            write = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            write(name, value, step)

    def finish(self) -> None:
        self.writer.close()
