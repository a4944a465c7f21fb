"""Reads a run folder while the training goes on: metrics.jsonl, samples.jsonl and config.json."""

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
MOST_STRETCHES = 500  # of a long run, of which the page shows the extremes: a screen has not many more columns
MOST_SAMPLES = 200  # evaluations whose answers the page shows
LARGEST = 1e300  # JavaScript has no larger numbers than Python's floats
# Without keys of the command rather than of the training.
SHOWN = {key for key, f in SCHEMA.items() if extras(f).get("group") != "checkpoints"} | {"init_from"}
SHOWN -= {"vocab_size", "tokenizer"}  # those of the tokens count, not those of a config
TRAINED = (*MODEL_KEYS, "vocab_size", "tokenizer_type")  # of a checkpoint's config.json


class RunReader:
    """Reads a run folder, or a mirror, again and again."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.seen: dict[str, Any] = {"modified": None, "finished": False, "samples": [], "columns": {}}
        self.seen |= {"config": {}, "device": ""}
        self.states: list[Any] = []  # of the files, as they were read last

    def read(self) -> dict[str, Any]:
        """The run as the page takes it. What cannot be read stays as it was, and `problem` says why."""
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
        rows = thinned([row for line in read_metrics(records) if "step" in (row := numbers(line))])
        self.seen |= {
            "modified": (records / METRICS).stat().st_mtime if METRICS in names else None,
            "finished": SUMMARY in names,
            "samples": shown_tables(read_samples(records)),
            "columns": {key: [row.get(key) for row in rows] for key in FIELDS if any(key in row for row in rows)},
        }
        resolved = read_json(records / CONFIG, ConfigError) if CONFIG in names else {}
        config = resolved.get("config")
        self.seen["config"] = self.settings(config) if isinstance(config, dict) else {}
        self.seen["device"] = str(resolved.get("device") or "")
        self.states = states

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """The settings of the training. The vocabulary and the shape of the model come from its newest checkpoint."""
        values = {key: value for key, value in config.items() if key in SHOWN and has_effect(key, config)}
        there = [path for place in ("checkpoints/step_*", "step_*") for path in sorted(self.folder.glob(place))]
        for checkpoint in [*reversed(there), self.folder / "best"]:  # a copy's stand in the folder itself
            with contextlib.suppress(ConfigError, OSError):  # deleted in the meantime
                trained = read_json(checkpoint / "config.json", ConfigError)
                values |= {key: trained[key] for key in TRAINED if key in trained}
                break
        return {key: value if is_number(value) else displayed(value) for key, value in values.items()}


def displayed(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: row[key] for key in FIELDS if is_number(row.get(key))}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def thinned(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Of a long run, the rows of each stretch in which a loss is lowest and highest: each point that is drawn is one
    that was measured, and no spike is lost."""
    if len(rows) <= 2 * MOST_STRETCHES:
        return list(rows)
    kept = {0, len(rows) - 1} | extremes(rows, "train_loss") | extremes(rows, "val_loss")
    return [rows[i] for i in sorted(kept)]


def extremes(rows: Sequence[dict[str, float]], key: str) -> set[int]:
    """Where a value is lowest and where it is highest, in each stretch of the rows that have it."""
    there = [i for i, row in enumerate(rows) if key in row]
    length = math.ceil(len(there) / MOST_STRETCHES) or 1
    stretches = [there[i : i + length] for i in range(0, len(there), length)]
    return {choose(stretch, key=lambda i: rows[i][key]) for stretch in stretches for choose in (min, max)}


def shown_tables(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """For each set of prompts in turn the prompts, what was expected of each ("": nothing), and the answers by step."""
    return [
        {
            "prompts": table[0].prompts,
            "expected": [(text or "").strip() for text in table[0].expected],
            "rows": [
                {"step": row.step, "right": format_score(row), "answers": [text.strip() for text in row.answers]}
                for row in spread(table, MOST_SAMPLES)
            ],
        }
        for table in tables(samples)
    ]


def tables(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples grouped: a new group begins where the prompts or the expected answers change."""
    columns = [(sample.prompts, sample.expected) for sample in samples]
    starts = [i for i in range(1, len(samples)) if columns[i - 1] != columns[i]]
    return [list(samples[a:b]) for a, b in itertools.pairwise([0, *starts, len(samples)]) if a < b]


def spread(values: list[Any], most: int) -> list[Any]:
    """At the most so many of the values, evenly, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
