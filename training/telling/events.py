"""`--tensorboard`: the rows of metrics.jsonl as TensorBoard's event files, in the run folder.

It uses TensorBoard's record format without its writer: the writer has a thread that a full disk ends with a traceback,
and it imports TensorFlow where that is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.launch import is_rank_0
from training.config import TrainConfig
from training.telling.records import finite, read_metrics

NAME = "events.out.tfevents"  # what TensorBoard looks for; it reads such files in the order of their names


def require_tensorboard(config: TrainConfig) -> None:
    """Raises ConfigError if event files are asked for and cannot be written here."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard: pip install tensorboard, or leave --tensorboard out "
            "(tools/watch.py shows a run without it)."
        )


class Events:
    """The event file of this session. An error with it is one warning, and never ends the training."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]):
        """Make it after metrics.jsonl was rewound to where the run continues: events of later steps, from an earlier
        session, are hidden. If no event file is left, all rows are written again."""
        self.say = say
        self.file: Any = None
        if not is_rank_0():
            return
        try:
            rows = read_metrics(run_dir)
            is_new = not any(run_dir.glob(f"{NAME}.*"))
            name = f"{NAME}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            self.file = open(run_dir / name, "ab")  # noqa: SIM115 (for as long as the run)
            self.begin(rows[-1]["step"] + 1 if rows else 0)
            for row in rows if is_new else []:
                self.write(row)
        except Exception as problem:
            self.give_up(problem)

    def begin(self, step: int) -> None:
        """Hide what was written of this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.add(file_version="brain.Event:2")
        self.add(step=step, session_log=SessionLog(status=SessionLog.START))
        self.file.flush()

    def add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self.file).write(Event(wall_time=time.time(), **content).SerializeToString())

    def write(self, row: dict[str, Any]) -> None:
        """A row of metrics, each of its numbers under its own name."""
        if self.file is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            numbers = {key: value for key, value in finite(row).items() if key != "step"}
            values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
            self.add(step=row["step"], summary=Summary(value=values))
            self.file.flush()
        except Exception as problem:  # a full disk, say, or another version of the package
            self.give_up(problem)

    def give_up(self, problem: Exception) -> None:
        self.close()
        self.say(f"Warning: TensorBoard's events cannot be written ({problem}); the training goes on without them.")

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            with contextlib.suppress(OSError):  # of the last write; the file is closed all the same
                file.close()
