"""What the dial, growth or a companion has chosen for a run: choice.json, written before anything is trained with it.
The same command reads it here or in the mirror."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from common.checkpoint import BEST
from common.errors import ConfigError
from common.files import read_json, write_json
from common.validation import build
from training.config import Config, Forecast, scope_of
from training.mirror import Mirror
from training.records import CHOICE
from training.store import Store, new_run_path

CHOSEN = "the dial"  # the source of chosen values in config.json
MEASURED_KEYS = ("threads", "compile")  # each session measures them: other programs, or another machine, change them


@dataclass(frozen=True)
class Chosen:
    settings: dict[str, Any]  # keys of the config; `companion` only if it is not used, though the flags name it
    has_companion: bool
    forecast: Forecast


def write_choice(config: Config, folder: Path) -> None:
    """Write what was chosen for the run of `config`, if anything was."""
    if config.forecast is not None:
        keys = [key for key, source in config.sources.items() if source == CHOSEN and key not in MEASURED_KEYS]
        settings = {key: getattr(config, key) for key in keys if scope_of(key) != "command"}
        write_json(folder / CHOICE, asdict(Chosen(settings, bool(config.companion), config.forecast)))


def read_choice(config: Config) -> Chosen | None:
    """Read what was chosen for the run of `config`. None if nothing was, or if nothing was trained with it and it
    starts from no weights: then it is made again, for the minutes, flags and text as they are now."""
    if config.resume == "never":
        return None
    stores = [Store(config.run_dir)]
    if config.checkpoint_dir:
        stores.append(Mirror(config.run_dir, config.checkpoint_dir).store)
    is_trained = any(store.steps() or (store.dir / BEST).exists() for store in stores)
    pending = new_run_path(config.run_dir) / CHOICE  # killed while it set the old run aside
    kept = [path for store in stores for path in store.records(CHOICE)]
    for path in kept or ([pending] if pending.is_file() else []):
        with contextlib.suppress(ConfigError, ValueError):  # damaged, or of another version
            chosen = build(Chosen, read_json(path, ConfigError))
            return chosen if is_trained or "init_from" in chosen.settings else None
    return None
