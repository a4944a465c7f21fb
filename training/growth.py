"""Text that has grown since a run began: the same command goes on from its best weights, on old and new text together.

The learning rate is warmed up again, to a part of its peak, and falls in full; the old text is read again with the new,
so that it is not forgotten (Ibrahim et al. 2024, https://arxiv.org/abs/2403.08763).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint, problems_of
from common.errors import ConfigError
from common.files import read_json
from common.script import world
from common.validation import build
from generation.passages import learned_text
from tokenization.metadata import TokenMetadata, metadata_files
from training.config import MODEL_KEYS, Config, Forecast, is_resolved, scope_of
from training.mirror import Mirror
from training.plan import text_settings, tokenized
from training.records import CONFIG
from training.resume import find_previous
from training.state import Previous
from training.store import Store, finish_setting_aside, replacing
from training.text import changes

PEAK = 0.5  # of the learning rates of a run that starts from nothing (docs/benchmarks/growing.md)
WARMUP_SHARE = 0.02  # of the steps
FITS = 1.5  # times the tokens a byte that the old text takes: with more, another vocabulary would be better


@dataclass(frozen=True)
class Growth:
    """The weights to go on from, and the text that they have learned and are to learn."""

    weights: Path
    read: int  # tokens that they have learned from
    then: TokenMetadata | None  # None: its tokens are gone
    now: TokenMetadata

    def keys(self, config: Config) -> dict[str, Any]:
        """Return the settings of the new run that do not follow its length: its weights are those of `config`."""
        return shape_keys(config) | {"init_from": str(self.weights), "resume": "never"}

    def describe(self) -> str:
        """Say where the new run starts, which files have changed, and whether the vocabulary fits them."""
        start = f"Going on   from {self.weights}, because the text has changed since; the old run is kept aside"
        if self.then is None:
            return f"{start}\nFiles      that are new are not known: the tokens of the old text are gone"
        lines = [start, f"Files      {changes(self.then, self.now)}"]
        grown = self.now.text_bytes - self.then.text_bytes
        if grown > 0 and self.then.text_bytes:
            worse = (self.now.total_tokens - self.then.total_tokens) / grown
            worse *= self.then.text_bytes / self.then.total_tokens
            if worse > FITS:
                lines.append(
                    f"Vocabulary of the old text: the new one takes {worse:.1f} times as many tokens a byte. A new run "
                    "learns one that fits: --resume never"
                )
        return "\n".join(lines)


def find_growth(config: Config) -> Growth | None:
    """Find the run in the folder of `config` and the text of its `input`, and tokenize that if it has changed. None if
    there is no run yet, or its text is the same. None too for another `input`, and for several processes, which cannot
    tokenize: both are refused later.

    Raises what `find_previous` and `tokenized` raise.
    """
    if not config.input or config.resume == "never" or world().size > 1:
        return None
    mirror = Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir else None
    previous = find_previous(config, mirror, is_trained=False)
    if previous.checkpoint is None or previous.saved is None or previous.saved.config.get("input") != config.input:
        return None
    sha256 = str(previous.saved.data.get("tokens_sha256"))
    if tokens_in(text_settings(config, previous).output_dir) == sha256:
        return None
    weights = best_weights(config, mirror, previous.checkpoint)
    folder = tokenized(replace(config, init_from=str(weights)), Previous(init=Checkpoint(weights)))
    (now,) = map(TokenMetadata.read, metadata_files(Path(str(folder))))
    if now.tokens_sha256 == sha256:  # the files were only copied
        return None
    return Growth(weights, previous.saved.state.tokens, learned_text(previous.checkpoint), now)


def shape_keys(config: Config) -> dict[str, Any]:
    """Return the keys of the model that another run needs to start from the weights of `config`."""
    shape = {key: getattr(config, key) for key in MODEL_KEYS if key != "dropout"}
    return {key: value for key, value in shape.items() if value is not None}


def best_weights(config: Config, mirror: Mirror | None, newest: Checkpoint) -> Path:
    """Return the best weights of a run, here or in its mirror; without whole ones its `newest` checkpoint."""
    best = [*Store(config.run_dir).bests(), *(mirror.store.bests() if mirror else [])]
    return next((path for path in best if path.exists() and not problems_of(path)), newest.path)


def kept_choice(config: Config, source: str) -> tuple[dict[str, Any], Forecast | None]:
    """Read what `source`, the dial, chose for the run that is there, here or in its mirror, and what it expected of
    it."""
    if config.resume == "never":
        return {}, None
    store = Store(config.run_dir)
    mirror = Mirror(config.run_dir, config.checkpoint_dir).store if config.checkpoint_dir else None
    if store.is_empty and (replacing(config.run_dir) / CONFIG).is_file():
        with store.locked():  # else another session is about to do it
            finish_setting_aside(store, mirror)
    for path in [*store.records(CONFIG), *(mirror.records(CONFIG) if mirror is not None else [])]:
        content = read_json(path, ConfigError)
        if is_resolved(content):
            values, sources, forecast = content["config"], content["sources"], None
            with contextlib.suppress(ValueError, KeyError):  # there is none, or one of another version
                forecast = build(Forecast, content["forecast"])
            chosen = {key: value for key, value in values.items() if sources.get(key) == source}
            return {key: value for key, value in chosen.items() if scope_of(key) != "command"}, forecast
    return {}, None


def tokens_in(folder: str) -> str | None:
    """Return the hash of the tokens in a folder, if there are some."""
    return next((TokenMetadata.read(path).tokens_sha256 for path in metadata_files(Path(folder))), None)
