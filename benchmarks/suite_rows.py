"""The rows of `gpu_suite.py`: on disk at once, one JSON object per line; from them a JSON file and a page."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import markdown_table, write_results
from common.errors import ConfigError

Row = dict[str, Any]

TITLE = "What a GPU tells"


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line. When this returns it is on disk, even if the process dies."""
    with open(path, "a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # after a line that was cut off
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """All lines, except one that was cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def collect(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The commands, and the parts with their rows. A row replaces an earlier one of its name in its part. A part has
    the status of its last run; a run that began and did not end was interrupted."""
    runs: list[Any] = []
    rows: dict[str, dict[str, Row]] = {}
    ends: dict[str, dict[str, Any]] = {}
    for record in records:
        if "run" in record:
            runs.append(record["run"])
        elif "row" in record:
            rows.setdefault(record["part"], {})[record["row"]["name"]] = record["row"]
        else:
            rows.setdefault(record["part"], {})
            ends[record["part"]] = record.get("end", {})
    parts = {
        name: {"status": "interrupted", **ends.get(name, {}), "rows": list(of.values())} for name, of in rows.items()
    }
    return {"runs": runs, "parts": parts}


def require_one_machine(files: Mapping[Path, Iterable[Mapping[str, Any]]]) -> None:
    """Raises ConfigError if a file's lines hold no run, or the runs are of different machines or versions of torch."""
    machines: dict[str, Path] = {}
    for path, records in files.items():
        of_file = [record["run"]["machine"] for record in records if "run" in record]
        if not of_file:
            raise ConfigError(f"{path} holds no run of benchmarks/gpu_suite.py.")
        machines |= {f"{m['device']}, {m['cores']} cores, torch {m['torch']}": path for m in of_file}
    if len(machines) > 1:
        which = "; ".join(f"{machine} ({path})" for machine, path in machines.items())
        raise ConfigError(f"These rows are of different machines: {which}. Use one --output for each machine.")


def write_report(paths: Iterable[Path], stem: Path) -> None:
    """Write `stem`.json and `stem`.md from the files of rows; a later one replaces rows of an earlier one. Raises
    ConfigError as `require_one_machine` does."""
    files = {path: read(path) for path in paths}
    require_one_machine(files)
    results = collect(record for records in files.values() for record in records)
    machine = results["runs"][-1]["machine"]
    commands = "\n    ".join(dict.fromkeys(run["command"] for run in results["runs"]))
    pages = [target_page(results["parts"], machine)]
    pages += [part_page(name, part) for name, part in results["parts"].items()]
    write_results(stem, TITLE, {"machine": machine, **results}, "\n\n".join(pages), commands)


class Target(NamedTuple):
    """Where a figure of a row should lie. `device` is a word in the GPU's name, where the target is for one only."""

    part: str
    row: str
    key: str
    low: float
    high: float
    device: str = ""


TARGETS = [
    Target("train", "quickstart", "seconds_to_answer", 0, 60),
    Target("train", "gpt2_small", "ms_per_step", 0, 45, "H200"),
    Target("step", "gpt2_small", "ms_per_step", 0, 45, "H200"),
    Target("train", "gpt2_small", "estimate_over_peak", 0.9, 1.1),
    *(Target("memory", f"batch {b}, {how}", "estimate_over_peak", 0.9, 1.1)
      for b, how in ((8, "eager"), (32, "eager"), (128, "eager"), (32, "compiled"), (128, "compiled"))),
    Target("step", "waits", "waits", 0, 0),
    *(Target("losses", name, "largest_relative_difference", 0, 0.01) for name in ("fp32", "automatic, compiled")),
]  # fmt: skip


def target_page(parts: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """The targets beside what was measured; without a verdict on a machine that they are not for."""
    measured = {(name, row["name"]): row for name, part in parts.items() for row in part["rows"]}
    cells = []
    for target in TARGETS:
        value = measured.get((target.part, target.row), {}).get(target.key)
        judged = value is not None and machine["cuda"] and target.device in machine["device"]
        wanted = f"{target.low:g} to {target.high:g}" + (f" ({target.device})" if target.device else "")
        verdict = ("yes" if target.low <= value <= target.high else "no") if judged else ""
        shown = "not measured" if value is None else f"{value:.4g}"
        cells.append([f"{target.part}, {target.row}: `{target.key}`", wanted, shown, verdict])
    return "## Targets\n\n" + markdown_table(["", "target", "measured", "met"], cells)


def part_page(name: str, part: Mapping[str, Any]) -> str:
    took = f", {part['seconds']} s" if "seconds" in part else ""
    paragraphs, bullets = [f"## {name}: {part['status']}{took}"], ""
    for row in part["rows"]:
        bullets += f"\n- {summary(row)}"
        if details := row_page(row):
            paragraphs += [bullets.strip(), details]
            bullets = ""
    paragraphs += [bullets.strip()] if bullets else []
    curves = [row for row in part["rows"] if "means" in row]
    if curves:
        steps = list(curves[0]["means"])
        cells = [[row["name"], *(f"{row['means'][at]:.4f}" for at in steps)] for row in curves]
        paragraphs.append(markdown_table(["mean loss of the steps up to", *steps], cells))
    if part.get("log"):
        paragraphs.append(code(part["log"]))
    return "\n\n".join(paragraphs)


def row_page(row: Row) -> str:
    """The parts of a row that do not fit in a line."""
    if "kernels" in row:
        groups = [{**entry, "name": name} for name, entry in row["groups"].items()]
        tables = []
        for what, entries in ("group", groups), ("kernel", row["kernels"]):
            cells = [[f"`{e['name']}`", f"{e['ms']:.3f}", f"{e['share']:.1%}", f"{e['calls']:.0f}"] for e in entries]
            tables.append(markdown_table([what, "ms a step", "share", "calls a step"], cells))
        return "\n\n".join(tables)
    if "page" in row:  # another script's: its headings go below ours, and its picture is not here
        return re.sub(r"^(#+ )", r"##\1", re.sub(r"!\[.*", "", row["page"]), flags=re.MULTILINE).strip()
    return code(row["output"]) if "output" in row else ""


def code(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```"])


FIGURES = {
    "ms_per_step": "{:.1f} ms a step",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "time_ratio": "{:.3f} of the time of ours",
    "seconds_to_answer": "answer after {:.1f} s",
    "training_seconds": "trained in {:.1f} s",
    "answer": "{!r}",
    "seconds_to_first_step": "first step {:.1f} s after the command",
    "startup_seconds": "first step after {:.1f} s",
    "compile_seconds": "compiled in {:.1f} s",
    "peak_memory_gb": "peak {:.2f} GB",
    "reserved_memory_gb": "reserved {:.2f} GB",
    "estimated_memory_gb": "estimated {:.2f} GB",
    "estimate_over_peak": "estimate {:.2f} of the peak",
    "waits": "{} waits",
    "scale": "gradients scaled by {:g}",
    "loss": "loss {:.4f}",
    "largest_difference": "losses differ by {:.2g} at most",
    "largest_relative_difference": "losses differ by {:.2%} at most from those of the first",
    "outcome": "{}",
    "exit_code": "exit code {}",
    "skipped": "skipped: {}",
    "error": "failed: {}",
    "note": "note: {}",
}
FACTS = ("cuda", "sm_clock_mhz", "torch")  # rows with one of these are printed key by key


def summary(row: Row) -> str:
    """A row in one line."""
    words = [text.format(row[key]) for key, text in FIGURES.items() if row.get(key) is not None]
    if any(key in row for key in FACTS):
        words = [f"{key} {value}" for key, value in row.items() if key != "name"]
    return f"{row['name']}: {', '.join(words)}" if words else row["name"]
