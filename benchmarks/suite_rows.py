"""The rows of `gpu_suite.py`: on disk at once, one JSON object per line; from them a JSON file and a page."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import markdown_table, write_results

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


def write_report(rows: Path) -> None:
    """Write the JSON file and the page beside the file of rows."""
    results = collect(read(rows))
    machine = results["runs"][-1]["machine"]
    commands = "\n    ".join(dict.fromkeys(run["command"] for run in results["runs"]))
    body = "\n\n".join(part_page(name, part) for name, part in results["parts"].items())
    write_results(rows.with_suffix(""), TITLE, {"machine": machine, **results}, body, commands)


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
    "startup_seconds": "first step after {:.1f} s",
    "compile_seconds": "compiled in {:.1f} s",
    "peak_memory_gb": "peak {:.2f} GB",
    "reserved_memory_gb": "reserved {:.2f} GB",
    "estimated_memory_gb": "estimated {:.2f} GB",
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
