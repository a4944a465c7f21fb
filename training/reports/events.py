"""`--tensorboard`: the rows of metrics.jsonl as TensorBoard's event files, in the run folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from training.config import Config
from training.reports.records import finite, read_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def require_tensorboard(config: Config) -> None:
    """Raises ConfigError if event files are asked for and cannot be written here."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard: pip install tensorboard, or leave --tensorboard out "
            "(tools/watch.py shows a run without it)."
        )


def open_events(run_dir: Path) -> SummaryWriter:
    """The writer of this session's event file. Make it after metrics.jsonl was rewound to where the run continues:
    events of later steps, from an earlier session, are hidden. If there is no event file yet, it gets all rows."""
    from torch.utils.tensorboard import SummaryWriter

    rows = read_metrics(run_dir)
    is_new = not any(run_dir.glob("events.out.tfevents.*"))
    writer = SummaryWriter(str(run_dir), purge_step=rows[-1]["step"] + 1 if rows else 0)
    for row in rows if is_new else []:
        write_event(writer, row)
    return writer


def write_event(writer: SummaryWriter, row: dict[str, Any]) -> None:
    """A row of metrics, each of its numbers under its own name."""
    for key, value in finite(row).items():
        if key != "step":
            writer.add_scalar(key, value, row["step"])
