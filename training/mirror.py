"""The mirror of a run: a second folder, on Drive for instance, that gets a verified copy of each checkpoint."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from common.checkpoint import copy_checkpoint, prune
from common.errors import CheckpointError, ConfigError
from common.files import read_json, write_json
from training.records import METRICS, SAMPLES
from training.run_folder import CONFIG, MARKER

MIRRORED_FILES = (CONFIG, METRICS, SAMPLES)


class Mirror:
    """Where the copies of a run folder go. A copy that fails never stops the training."""

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.run_dir = run_dir
        self.root = Path(checkpoint_dir).expanduser()
        self.dir = self.root / run_dir.name
        self.best_is_newer = False  # the run folder's best/ than the copy here
        self.marked = False

    def require_mounted(self) -> None:
        """Raises ConfigError if there is nothing to make `checkpoint_dir` in: what looks like Drive would else be made
        up on the local disk, and be lost with it."""
        if not self.root.parent.is_dir():
            raise ConfigError(
                f"--checkpoint_dir is {self.root}, and there is no folder {self.root.parent}. Mount the Drive first "
                f'(in Colab: from google.colab import drive; drive.mount("/content/drive")), or make the folder: '
                f"mkdir -p {self.root.parent}"
            )

    def copy(self, checkpoint: Path, run_id: str) -> str:
        """Copy a checkpoint of the run and what goes with it. Returns the end of a sentence on how that went."""
        problem = self.obstacle(run_id) or copy_checkpoint(checkpoint, self.dir / "checkpoints" / checkpoint.name)
        if problem is None and self.best_is_newer:
            problem = copy_checkpoint(self.run_dir / "best", self.dir / "best")
            self.best_is_newer = problem is not None
        if problem is not None:
            return f". Warning: it could not be copied to {self.dir} ({problem}); the training goes on"
        prune(self.dir / "checkpoints")
        with contextlib.suppress(OSError):
            for name in MIRRORED_FILES:
                if (self.run_dir / name).exists():
                    shutil.copyfile(self.run_dir / name, self.dir / name)
        return f", copied to {self.dir}"

    def obstacle(self, run_id: str) -> str | None:
        """Why nothing can be copied now: the folder was marked once, and is not the marked one any more."""
        try:
            if not self.marked:
                self.root.mkdir(exist_ok=True)  # not its parents
                self.dir.mkdir(exist_ok=True)
                write_json(self.dir / MARKER, {"run_id": run_id})
                self.marked = True
            elif read_json(self.dir / MARKER, CheckpointError).get("run_id") != run_id:
                return f"{self.dir / MARKER} is of another run"
        except CheckpointError:
            return f"{self.dir / MARKER} is gone: was the disk unmounted?"
        except OSError as problem:
            return str(problem)
        return None
