"""Find checkpoints for the demo, and keep the models used last in memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.chat import Template
from common.checkpoint import Checkpoint, open_checkpoint, step_folders
from common.errors import CheckpointError, UserError
from common.files import CHECKPOINT_NAME, STEP_NAME
from generation.loading import load_checkpoint
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from training.records import read_metrics

MAX_COMPARED = 4  # also the number of models kept in memory
MARKER_FILES = ("manifest.json", "pytorch_model.bin")  # a complete checkpoint, ours or the blog's, has one of them


class FoundCheckpoint(NamedTuple):
    """A checkpoint folder, its name on the page, and whether it is a chat model."""

    path: Path
    name: str
    answers: bool


class ServedModel(NamedTuple):
    """A loaded model with its name."""

    name: str
    model: TransformerLanguageModel
    tokenizer: Tokenizer
    chat: Template | None


class Library:
    """The checkpoints below some folders, and the loaded models."""

    def __init__(self, places: Sequence[Path], device: str) -> None:
        self.places, self.device = places, device
        self.loaded: OrderedDict[Path, tuple[tuple[int, int], ServedModel]] = OrderedDict()

    def find(self) -> list[FoundCheckpoint]:
        """Return the existing checkpoints, those of the most recent run first."""
        found = list(dict.fromkeys(path for place in self.places for path in find_checkpoints(place)))
        runs: dict[Path, list[Path]] = {}
        for path in found:
            runs.setdefault(run_folder(path), []).append(path)
        newest_first = sorted(runs.values(), key=lambda paths: max(map(time_written, paths)), reverse=True)
        return [FoundCheckpoint(path, name_checkpoint(path), is_chat(path)) for paths in newest_first for path in paths]

    def require_any(self) -> None:
        """Raise CheckpointError if there is no checkpoint."""
        if not self.find():
            named = ", ".join(f"{place}/" for place in self.places)
            raise CheckpointError(
                f"No trained model in {named}. Train one first, for instance with python train_colab_mmap.py --config "
                "quickstart.json, or name a checkpoint or run folder."
            )

    def open(self, name: str) -> ServedModel:
        """Return the model of the checkpoint folder `name`, from memory if the folder has not changed.

        Raises CheckpointError for a folder that `find` does not return, and what `load_checkpoint` raises.
        """
        found = {str(found.path): found.path for found in self.find()}
        if name not in found:
            raise CheckpointError(f"The checkpoint {name:.200} is gone. Choose another.")
        path = found[name]
        status = (path / "config.json").stat()
        identity = (status.st_ino, status.st_mtime_ns)  # a running training replaces best/
        before = self.loaded.pop(path, None)
        if before is None or before[0] != identity:
            before = None  # frees its memory before the next model is loaded
            while len(self.loaded) >= MAX_COMPARED:
                self.loaded.popitem(last=False)
            checkpoint = open_checkpoint(path)
            model, tokenizer = load_checkpoint(checkpoint, self.device)
            served = ServedModel(run_folder(path).name or "model", model, tokenizer, checkpoint.chat_template())
            before = identity, served
        self.loaded[path] = before
        return before[1]


def run_folder(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint, or the checkpoint folder itself if it is not in a run."""
    path = checkpoint.resolve()
    if CHECKPOINT_NAME.fullmatch(path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path


def find_checkpoints(place: Path) -> Iterator[Path]:
    """Yield the checkpoint `place`, or those of the run `place`, or of all runs in it; each run's newest first."""
    if is_checkpoint(place):
        yield place
        return
    for folder in [place, *sorted(path for path in place.glob("*") if path.is_dir())]:
        if folder != place and is_checkpoint(folder) and run_folder(folder) == folder.resolve():
            yield folder
        elif (folder / "checkpoints").is_dir() or step_folders(folder):
            candidates = [*step_folders(folder / "checkpoints", folder), folder / "best"]
            yield from (path for path in candidates if is_checkpoint(path))


def is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKER_FILES) and (folder / "config.json").is_file()


def time_written(checkpoint: Path) -> float:
    try:
        return (checkpoint / "config.json").stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0


def is_chat(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a chat model; False if config.json is invalid, which opening it will report."""
    try:
        return Checkpoint(checkpoint).chat_template() is not None
    except UserError:
        return False


def name_checkpoint(checkpoint: Path) -> str:
    run = run_folder(checkpoint)
    if run == checkpoint.resolve():
        return run.name
    step = STEP_NAME.fullmatch(checkpoint.name)
    return f"{run.name}, step {int(step[1]):,}" if step else f"{run.name}, {checkpoint.name}"


def describe_progress(checkpoint: Path) -> str:
    """Return the step of a checkpoint (unless its name has it) and its bits per byte, or else its validation loss; ""
    if unknown."""
    try:
        step = Checkpoint(checkpoint).training_state().get("step")
    except UserError:
        return ""
    if not isinstance(step, int) or not step:
        return ""
    rows = [row for row in read_metrics(run_folder(checkpoint)) if row["step"] == step and is_number(row, "val_loss")]
    words = [] if STEP_NAME.fullmatch(checkpoint.name) else [f"step {step:,}"]
    for row in rows[-1:]:
        per_byte = is_number(row, "val_bits_per_byte")
        words.append(
            f"{row['val_bits_per_byte']:.3f} bits per byte" if per_byte else f"validation loss {row['val_loss']:.3f}"
        )
    return ", ".join(words)


def is_number(row: dict[str, object], key: str) -> bool:
    value = row.get(key)
    return isinstance(value, int | float) and math.isfinite(value)
