"""The scripts as a user starts them, in processes of their own: the quickstart, and the first half minute of a run."""

from __future__ import annotations

import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT
from training.telling.records import read_metrics

QUESTION = "What is the capital of France?"
FORECAST_SECONDS = 20.0  # a dry run prints its forecast after Python's imports, before it compiles
UNITS = {"GB": 1.0, "MB": 1e-3, "kB": 1e-6}
FOUND = {
    "estimated_memory_gb": r"Memory +about ([\d.]+) (GB|MB|kB)",
    "compile_seconds": r"Compiled in (\d+) s",
    "first_step_seconds": r"First step ([\d.]+) s after the start",
}


def quickstart(flags: Sequence[str], run: Path, limit: float) -> dict[str, Any]:
    """README's two commands: the seconds from the first to the answer. Raises RuntimeError if one fails, and
    TimeoutExpired if both take longer than `limit` seconds."""
    started = time.perf_counter()
    said(["train_colab_mmap.py", *flags, "--output_dir", str(run)], limit)
    trained = time.perf_counter() - started
    answer = said(["generate.py", "--checkpoint", str(run), "--prompt", QUESTION], limit - trained)
    seconds = time.perf_counter() - started
    return {"seconds_to_answer": seconds, "training_seconds": trained, "answer": answer.strip(), **speed(run)}


def said(words: Sequence[str], limit: float) -> str:
    """What a script of ours prints."""
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with code {done.returncode}: {done.stderr[-300:]}")
    return done.stdout


def short_run(flags: Sequence[str], run: Path, seconds: float, limit: float) -> dict[str, Any]:
    """The memory that --dry_run forecasts; then a run, ended by Ctrl-C `seconds` after its first step: its speed, its
    peak memory, its exit code. Raises RuntimeError where the run ends before its first step, or is killed after
    `limit` seconds."""
    command = [sys.executable, "-u", str(ROOT / "train_colab_mmap.py"), *flags, "--output_dir", str(run)]
    row: dict[str, Any] = {}
    with output_of([*command, "--dry_run"], FORECAST_SECONDS) as (process, lines):
        for line in lines:
            row |= told(line)
            if row:
                process.kill()  # the rest would compile, and the run would find that done
    started = time.perf_counter()
    with output_of(command, limit) as (process, lines):
        for line in lines:
            row |= told(line)
            if "first_step_seconds" in told(line):
                row["seconds_to_first_step"] = time.perf_counter() - started  # Python's imports included
                with_limit(seconds, lambda: process.send_signal(signal.SIGINT))
    if "seconds_to_first_step" not in row or process.returncode < 0:
        raise RuntimeError(f"the run ended with code {process.returncode} after {time.perf_counter() - started:.0f} s")
    row |= {"exit_code": process.returncode, **speed(run)}
    if row.get("peak_memory_gb") and "estimated_memory_gb" in row:
        row["estimate_over_peak"] = row["estimated_memory_gb"] / row["peak_memory_gb"]
    return row


def told(line: str) -> dict[str, float]:
    """The figures of FOUND in a line of the trainer's."""
    found = {key: match for key, pattern in FOUND.items() if (match := re.match(pattern, line))}
    return {key: float(match[1]) * (UNITS[match[2]] if match.re.groups > 1 else 1) for key, match in found.items()}


def speed(run: Path) -> dict[str, Any]:
    """Medians of the rows of metrics.jsonl after the first, and the peak memory. The first row's step starts things."""
    rows = read_metrics(run)
    timed: dict[str, Any] = {"steps": rows[-1]["step"] if rows else 0}
    for key in ("ms_per_step", "tokens_per_second", "mfu"):
        if values := [row[key] for row in rows[1:] if key in row]:
            timed[key] = statistics.median(values)
    timed["peak_memory_gb"] = max((row["peak_memory_gb"] for row in rows if "peak_memory_gb" in row), default=None)
    return timed


def with_limit(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def output_of(command: Sequence[str], limit: float) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A process and its lines as they come. It is killed after `limit` seconds, and has ended after the block."""
    process = subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    timer = with_limit(limit, process.kill)
    try:
        yield process, map(echoed, process.stdout)
        process.wait()
    finally:
        timer.cancel()
        process.kill()


def echoed(line: str) -> str:
    print(line, end="", file=sys.stderr)  # into the part's log
    return line
