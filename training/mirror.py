"""The mirror of a run: a second folder, on Drive for instance, that gets a verified copy of each checkpoint."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from common.checkpoint import copy_checkpoint, prune
from training.records import METRICS, SAMPLES

MIRRORED_FILES = ("config.json", METRICS, SAMPLES)


class Mirror:
    """Where the copies of a run folder go. A copy that fails never stops the training."""

    def __init__(self, run_dir: Path, checkpoint_dir: str):
        self.run_dir = run_dir
        self.dir = Path(checkpoint_dir) / run_dir.name
        self.best_is_newer = False  # the run folder's best/ than the copy here

    def copy(self, checkpoint: Path) -> str:
        """Copy a checkpoint of the run and what goes with it. Returns the end of a sentence on how that went."""
        problem = copy_checkpoint(checkpoint, self.dir / "checkpoints" / checkpoint.name)
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
