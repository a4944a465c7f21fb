"""Read a run folder while the training goes on: metrics.jsonl, samples.jsonl and config.json."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from common.files import read_json, require_regular
from common.validation import extras
from training.config import MODEL_KEYS, SCHEMA, has_effect
from training.records import (
    CONFIG,
    METRICS,
    RECORDS,
    SAMPLES,
    SUMMARY,
    Sample,
    find_records,
    format_score,
    read_metrics,
    read_samples,
)

FIELDS = (
    "step", "epoch", "tokens", "train_loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "ms_per_step",
    "tokens_per_second", "mfu", "peak_memory_gb", "elapsed_seconds", "compute_units", "skipped_updates",
)  # fmt: skip
MAX_STRETCHES = 500  # the page shows the extremes of each stretch; a screen has hardly more columns
MAX_SHOWN_SAMPLES = 200  # evaluations
MAX_NUMBER = 1e300  # larger numbers overflow in JavaScript
# Keys that describe the training, not the command.
SHOWN_KEYS = {key for key, f in SCHEMA.items() if extras(f).get("group") != "checkpoints"} | {"init_from"}
SHOWN_KEYS -= {"vocab_size", "tokenizer"}  # taken from the checkpoint instead
CHECKPOINT_KEYS = (*MODEL_KEYS, "vocab_size", "tokenizer_type")  # read from a checkpoint's config.json


class RunReader:
    """Reads a run folder or a mirror repeatedly."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.seen: dict[str, Any] = {"modified": None, "finished": False, "samples": [], "columns": {}}
        self.seen |= {"config": {}, "device": ""}
        self.states: list[Any] = []  # names, times and sizes of the files at the last read

    def read(self) -> dict[str, Any]:
        """Return the data of the run for the page. What cannot be read stays as it was, and `problem` says why."""
        problem = ""
        try:
            self.read_records(find_records(self.folder))
        except OSError as error:
            problem = "the folder is gone" if not self.folder.is_dir() else error.strerror or str(error)
        except (ConfigError, DataError) as error:
            problem = str(error)
        return {"name": self.name, "folder": str(self.folder), "problem": problem, **self.seen}

    def read_records(self, records: Path) -> None:
        names = [path.name for path in records.iterdir()]  # raises OSError if the folder is gone
        found = [(name, (records / name).stat()) for name in RECORDS if name in names]
        states = [(name, status.st_mtime_ns, status.st_size) for name, status in found]
        if states == self.states:
            return
        for name in (METRICS, SAMPLES):
            require_regular(records / name, DataError)
        rows = thin_rows([row for line in read_metrics(records) if "step" in (row := keep_numbers(line))])
        self.seen |= {
            "modified": (records / METRICS).stat().st_mtime if METRICS in names else None,
            "finished": SUMMARY in names,
            "samples": build_tables(read_samples(records)),
            "columns": {key: [row.get(key) for row in rows] for key in FIELDS if any(key in row for row in rows)},
        }
        resolved = read_json(records / CONFIG, ConfigError) if CONFIG in names else {}
        config = resolved.get("config")
        self.seen["config"] = self.settings(config) if isinstance(config, dict) else {}
        self.seen["device"] = str(resolved.get("device") or "")
        self.states = states

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of the training. Vocabulary and shape come from the newest checkpoint."""
        values = {key: value for key, value in config.items() if key in SHOWN_KEYS and has_effect(key, config)}
        there = [path for place in ("checkpoints/step_*", "step_*") for path in sorted(self.folder.glob(place))]
        for checkpoint in [*reversed(there), self.folder / "best"]:  # a mirror's copies are in the folder itself
            with contextlib.suppress(ConfigError, OSError):  # deleted meanwhile
                trained = read_json(checkpoint / "config.json", ConfigError)
                values |= {key: trained[key] for key in CHECKPOINT_KEYS if key in trained}
                break
        return {key: value if is_number(value) else format_value(value) for key, value in values.items()}


def format_value(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)


def keep_numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: row[key] for key in FIELDS if is_number(row.get(key))}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER


def thin_rows(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows with the lowest and highest losses of each stretch of a long run, so that every point is measured
    and no spike is lost."""
    if len(rows) <= 2 * MAX_STRETCHES:
        return list(rows)
    kept = {0, len(rows) - 1} | find_extremes(rows, "train_loss") | find_extremes(rows, "val_loss")
    return [rows[i] for i in sorted(kept)]


def find_extremes(rows: Sequence[dict[str, float]], key: str) -> set[int]:
    """Return the indices of the lowest and highest value in each stretch of the rows that have it."""
    there = [i for i, row in enumerate(rows) if key in row]
    length = math.ceil(len(there) / MAX_STRETCHES) or 1
    stretches = [there[i : i + length] for i in range(0, len(there), length)]
    return {choose(stretch, key=lambda i: rows[i][key]) for stretch in stretches for choose in (min, max)}


def build_tables(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return for each group of samples the prompts, the expected answers ("" if none), and the answers by step."""
    return [
        {
            "prompts": table[0].prompts,
            "expected": [(text or "").strip() for text in table[0].expected],
            "rows": [
                {"step": row.step, "right": format_score(row), "answers": [text.strip() for text in row.answers]}
                for row in choose_spread(table, MAX_SHOWN_SAMPLES)
            ],
        }
        for table in group_samples(samples)
    ]


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group the samples: a new group begins where prompts or expected answers change."""
    columns = [(sample.prompts, sample.expected) for sample in samples]
    starts = [i for i in range(1, len(samples)) if columns[i - 1] != columns[i]]
    return [list(samples[a:b]) for a, b in itertools.pairwise([0, *starts, len(samples)]) if a < b]


def choose_spread(values: list[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spread values, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
