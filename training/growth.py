"""Continue on text that has grown: the same command starts a new run from the best weights, on old and new text.

The learning rate is warmed up again, to a part of its peak, and decays in full. The old text is read again with the
new, so that the model does not forget it (Ibrahim et al. 2024, https://arxiv.org/abs/2403.08763).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint import BASE, Checkpoint, find_problems
from generation.passages import find_training_tokens
from tokenization.metadata import TokenMetadata, find_metadata
from training.config import MODEL_KEYS, Config
from training.mirror import Mirror
from training.plan import text_settings
from training.resume import find_previous
from training.store import Store
from training.text import describe_changes

REWARM_PEAK = 0.5  # relative to training from scratch (docs/benchmarks/companion.md)
WARMUP_SHARE = 0.02  # share of the steps
MAX_VOCABULARY_RATIO = 1.5  # tokens per byte of the new text relative to the old; above, another vocabulary is better


@dataclass(frozen=True)
class Growth:
    """A run whose text has changed: the weights to continue from, and their text."""

    weights: Path
    tokens_trained: int  # tokens the weights were trained on
    tokens_sha256: str
    then: TokenMetadata | None  # None if the tokens are gone

    def has_changed(self, data_dir: str | None) -> bool:
        """Return whether the tokens in `data_dir` are others, and print what has changed."""
        (now,) = map(TokenMetadata.read, find_metadata(Path(str(data_dir))))
        if now.tokens_sha256 == self.tokens_sha256:
            return False
        print(self.describe(now))
        return True

    def build_settings(self, config: Config) -> dict[str, Any]:
        """Return the settings of the new run that do not depend on its length: the shape, and where it starts."""
        shape = {key: value for key in MODEL_KEYS if key != "dropout" and (value := getattr(config, key)) is not None}
        return shape | {"init_from": str(self.weights), "resume": "never"}

    def describe(self, now: TokenMetadata) -> str:
        """Describe where the new run starts, which files have changed, and whether the vocabulary fits them."""
        start = f"Continuing from {self.weights}, because the text has changed; the old run will be renamed"
        if self.then is None:
            return f"{start}\nFiles      unknown, because the tokens of the old text are gone"
        lines = [start, f"Files      {describe_changes(self.then, now)}"]
        grown = now.text_bytes - self.then.text_bytes
        if grown > 0 and self.then.text_bytes:
            worse = (now.total_tokens - self.then.total_tokens) / grown
            worse *= self.then.text_bytes / self.then.total_tokens
            if worse > MAX_VOCABULARY_RATIO:
                lines.append(
                    f"Note       with the old vocabulary the new text takes {worse:.1f} times as many tokens per byte. "
                    "To train a vocabulary on both, start over with `--resume never`"
                )
        return "\n".join(lines)


def find_growth(config: Config) -> Growth | None:
    """Find a run whose files have changed. None if there is no run, or its tokens are those of the files as they are
    now. Also None for another `input`, which the caller refuses.

    Raises what `find_previous` raises.
    """
    if not config.input or config.resume == "never":
        return None
    mirror = Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir else None
    previous = find_previous(config, mirror)
    if previous.checkpoint is None or previous.saved is None or previous.saved.config.get("input") != config.input:
        return None
    sha256 = str(previous.saved.data.get("tokens_sha256"))
    made = find_metadata(Path(text_settings(config, previous).output_dir))
    if any(TokenMetadata.read(path).tokens_sha256 == sha256 for path in made):
        return None
    weights = find_best_weights(config, mirror, previous.checkpoint)
    return Growth(weights, previous.saved.state.tokens, sha256, find_training_tokens(previous.checkpoint))


def find_best_weights(config: Config, mirror: Mirror | None, newest: Checkpoint) -> Path:
    """Return the best weights of a run, here or in its mirror; if all are damaged, its `newest` checkpoint. With a
    companion, those that have read only the companion, if they are kept."""
    stores = [Store(config.run_dir), *([mirror.store] if mirror else [])]
    kept = [path for store in stores for path in store.copies_of(BASE)] if config.companion else []
    kept += [path for store in stores for path in store.best_copies()]
    return next((path for path in kept if path.exists() and not find_problems(path)), newest.path)
