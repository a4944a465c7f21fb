"""The rows of `gpu_suite.py`: on disk as they come, one JSON object a line, and made into a JSON file and a page."""

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
    """Add a line. It is in the file when this returns, whatever becomes of the process after that."""
    with open(path, "a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # after a line that was cut off
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """All lines but one that was cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def collect(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The commands, and the parts with their rows. A row takes the place of an earlier one of its name in its part, and
    what is said of a part is of the last time it ran: one that began and did not end was interrupted."""
    runs: list[Any] = []
    parts: dict[str, dict[str, Any]] = {}
    for record in records:
        if "run" in record:
            runs.append(record["run"])
            continue
        part = parts.setdefault(record["part"], {"status": "interrupted", "rows": {}})
        if "row" in record:
            part["rows"][record["row"].get("name")] = record["row"]
        else:
            ended = record.get("end", {"status": "interrupted"})
            parts[record["part"]] = {**ended, "rows": part["rows"]}
    for part in parts.values():
        part["rows"] = list(part["rows"].values())
    return {"runs": runs, "parts": parts}


def write_report(rows: Path) -> None:
    """Make the JSON file and the page, beside the file of rows, of what is in it."""
    results = collect(read(rows))
    machine = results["runs"][-1]["machine"]
    commands = "\n    ".join(dict.fromkeys(run["command"] for run in results["runs"]))
    body = "\n\n".join(part_page(name, part) for name, part in results["parts"].items())
    write_results(rows.with_suffix(""), TITLE, {"machine": machine, **results}, body, commands)


def part_page(name: str, part: Mapping[str, Any]) -> str:
    took = f", {part['seconds']} s" if "seconds" in part else ""
    paragraphs = [f"## {name}: {part['status']}{took}"]
    bullets: list[str] = []
    for row in part["rows"]:
        bullets.append(f"- {summary(row)}")
        if details := row_page(row):
            paragraphs += ["\n".join(bullets), details]
            bullets = []
    if bullets:
        paragraphs.append("\n".join(bullets))
    curves = [row for row in part["rows"] if "means" in row]
    if curves:
        steps = list(curves[0]["means"])
        cells = [[row["name"], *(f"{row['means'][at]:.4f}" for at in steps)] for row in curves]
        paragraphs.append(markdown_table(["mean loss of the steps up to", *steps], cells))
    if part.get("log"):
        paragraphs.append(code(part["log"]))
    return "\n\n".join(paragraphs)


def row_page(row: Row) -> str:
    """What of a row does not fit in a line."""
    if "kernels" in row:
        tables = [
            markdown_table(
                [what, "ms a step", "share", "calls a step"],
                [
                    [f"`{name}`", f"{entry['ms']:.3f}", f"{entry['share']:.1%}", f"{entry['calls']:.0f}"]
                    for name, entry in entries
                ],
            )
            for what, entries in (
                ("group", row["groups"].items()),
                ("kernel", [(entry["name"], entry) for entry in row["kernels"]]),
            )
        ]
        return "\n\n".join(tables)
    if "page" in row:  # of another script, whose title stands below ours and whose picture is not here
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
FACTS = ("cuda", "sm_clock_mhz", "torch")  # rows that hold one of them are told as they are


def summary(row: Row) -> str:
    """A row in one line."""
    said = [text.format(row[key]) for key, text in FIGURES.items() if row.get(key) is not None]
    if any(key in row for key in FACTS):
        said = [f"{key} {value}" for key, value in row.items() if key != "name"]
    return f"{row['name']}: {', '.join(said)}" if said else row["name"]
