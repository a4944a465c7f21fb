"""Shared by the benchmark scripts: measure processes in turn, summarize, write results.

Does not import torch, so that --help is quick.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.files import sha256_file
from common.flags import Parser
from tokenization.metadata import TokenMetadata
from tokenizer import CharacterTokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
Measurements = dict[str, list[float]]  # seconds per step by command, in the order measured


def add_result_flags(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [auto]")
    parser.add_argument("--output_dir", metavar="DIR", default=str(RESULTS), help="[docs/benchmarks]")


def measure_in_turn(commands: Mapping[str, Sequence[str]], rounds: int, tokens: int) -> tuple[Measurements, str]:
    """Run each command `rounds` times in turn, A B C A B C, so that a drift in the machine's speed affects all alike.
    Each prints its seconds per step, of `tokens` tokens, on its last line.

    Returns them, and a table with the median, lowest and highest speed-up over the first command, round by round.
    Raises CalledProcessError for a command that fails.
    """
    measured: Measurements = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            output = subprocess.check_output(list(command), text=True)
            measured[name].append(float(output.strip().splitlines()[-1]))
    rows, first = [], next(iter(measured.values()))
    for name, seconds in measured.items():
        ratios = [base / each for base, each in zip(first, seconds, strict=True)]
        speedup = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        median = statistics.median(seconds)
        rows.append([name, f"{1000 * median:,.1f}", f"{tokens / median:,.0f}", speedup])
    columns = ["", "ms a step", "tokens/s", "times as fast as the first (lowest to highest)"]
    return measured, markdown_table(columns, rows)


def flag_words(values: Mapping[str, Any]) -> list[str]:
    """Return values as flags: {"epochs": 2} -> ["--epochs", "2"]."""
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def describe_machine(device: str = "auto") -> dict[str, Any]:
    """Return the hardware and versions that a result depends on. `device`: auto, cpu or cuda."""
    import torch  # imported here to keep --help quick

    from common.machine import device_name, pick_device

    picked = pick_device(device)
    return {
        "device": device_name(picked),
        "cuda": picked.type == "cuda",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def machine_slug(machine: Mapping[str, Any]) -> str:
    """Return the machine as part of a file name: nvidia-a100-sxm4-80gb, cpu-2core-xeon."""
    name = re.sub(r"\([^)]*\)", " ", machine["device"])  # (R), (TM) and what `cpu_name` adds
    if not machine["cuda"]:
        name = re.sub(r"\b(Intel|AMD|CPU|Processor)\b|@.*", " ", name)
        name = f"cpu {machine['cores']}core {name}"
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first column left-aligned, the others right."""
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_results(stem: Path, title: str, results: Mapping[str, Any], body: str) -> None:
    """Write the results as `stem`.json and, with the command that produced them, as the page `stem`.md."""
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps({"command": command, **results}, indent=1) + "\n")
    machine = results["machine"]
    about = f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}, {machine['date']}"
    stem.with_suffix(".md").write_text(f"# {title}\n\n    {command}\n\n{about}\n\n{body.rstrip()}\n")
    print(f"\n{body}\n\nFiles      {stem}.md and .json", flush=True)


def write_random_tokens(folder: Path, tokens: int, vocab_size: int) -> Path:
    """Write a token folder of `tokens` random ids (uint16), as the pre-tokenizer would, and return `folder`.

    The vocabulary is characters, at most 55,000.
    """
    folder.mkdir(parents=True)
    CharacterTokenizer([chr(256 + i) for i in range(vocab_size)]).save(folder / "tokenizer.json")
    np.random.RandomState(0).randint(0, vocab_size, tokens, np.uint16).astype("<u2").tofile(folder / "tokens.bin")
    metadata = TokenMetadata(
        path=folder / "tokens_metadata.json",
        vocab_size=vocab_size,
        total_tokens=tokens,
        train_split_index=tokens * 9 // 10,
        dtype="uint16",
        tokenizer_type="character",
        bin_file="tokens.bin",
        tokenizer_file="tokenizer.json",
        tokens_sha256=sha256_file(folder / "tokens.bin"),
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        val_bytes=None,
    )
    metadata.write(metadata.path)
    return folder
