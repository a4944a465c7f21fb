"""Shared by tests: generated text, a handmade token folder, the flags of a tiny run."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.output import log
from model import TransformerLanguageModel
from tokenize_local_bpe import tokenize
from tokenizer import CharacterTokenizer
from training.config import Config
from training.data import TokenData
from training.hardware import Hardware, configure_device
from training.memory import estimate_memory
from training.run import Prompt, Run

CPU = Hardware(torch.device("cpu"), "a CPU", "fp32", "", False, "", None, None)  # of no kind in particular
ROOT = Path(__file__).resolve().parents[1]
# Named, for an environment may lie in the checkout too.
ROOMS = (
    "common", "tokenization", "training", "generation", "exchange", "serving", "tools", "benchmarks", "notebooks",
)  # fmt: skip
SOURCES = sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))])
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,|\n"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "big", "red", "dog", "ran", "over", "that", "hill")


def generated_text(characters: int, seed: int = 0) -> str:
    """Lines of a few words in a fixed order of succession: easy to learn, and not the same line twice in a row."""
    random = np.random.RandomState(seed)
    lines, length = [], 0
    while length < characters:
        start, count = random.randint(len(WORDS)), random.randint(4, 9)
        lines.append(" ".join(WORDS[(start + i) % len(WORDS)] for i in range(count)) + ".\n")
        length += len(lines[-1])
    return "".join(lines)[:characters]


def write_chat_tokens(folder: Path, chats: int = 300) -> Path:
    """Write the token folder of short conversations, some to a window, and return it."""
    rows = [
        {"messages": [{"role": "user", "content": f"Is {i} odd?"}, {"role": "assistant", "content": f"{i % 2}."}]}
        for i in range(chats)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize([str(folder / "chats.jsonl")], folder / "chat", format="chat", vocab_size=300, quiet=True)
    return folder / "chat"


def write_tokens(folder: Path, text: str, alphabet: str = ALPHABET) -> Path:
    """A complete character token folder, as docs describe it, written without the pre-tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = CharacterTokenizer.train(alphabet)
    tokenizer.save(folder / "tokenizer.json")
    tokens = tokenizer.encode(text).astype("<u2")
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    split = len(tokens) * 9 // 10
    metadata = {
        "format_version": 1,
        "tokenizer_type": "character",
        "vocab_size": tokenizer.vocab_size,
        "dtype": "uint16",
        "bytes_per_token": 2,
        "total_tokens": len(tokens),
        "train_split": 0.9,
        "train_split_index": split,
        "train_tokens": split,
        "val_tokens": len(tokens) - split,
        "train_bytes": len(text[:split].encode()),
        "val_bytes": len(text[split:].encode()),
        "bin_file": "tokens.bin",
        "tokenizer_file": "tokenizer.json",
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
    }
    (folder / "tokens_metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


def flags_of_a_tiny_run(token_folder: Path, output_dir: Path, **changes: object) -> list[str]:
    """The command line of a tiny run; None leaves a flag out."""
    values = {
        "data_dir": token_folder,
        "output_dir": output_dir,
        "device": "cpu",
        "num_layers": 1,
        "embed_dim": 32,
        "num_heads": 2,
        "max_seq_len": 16,
        "dropout": 0.1,
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 24,
        "learning_rate": 0.005,
        "log_interval": 1,
        "eval_interval": 12,
        "eval_batches": 4,
        "checkpoint_steps": 6,
        "checkpoint_interval": 0,
        "checkpoint_minutes": 0,
        **changes,
    }
    return [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]


def with_large_weights(model: TransformerLanguageModel) -> TransformerLanguageModel:
    """The model with large random weights, so that its text depends on all of the context."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model


class Killed(BaseException):
    """The process is gone: nothing of ours catches this, no clean-up of ours runs because of it."""


def snapshot(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its path there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def columns(row: str) -> list[str]:
    """The cells of a Markdown table row, split at the bars that are not escaped."""
    return [part.strip() for part in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def run_script(main: Callable[[list[str]], int], *words: object) -> SimpleNamespace:
    """A script called in this process as its user calls it: `code`, `out`, `err`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def run_of(model: TransformerLanguageModel, data: TokenData, config: Config, prompts: Sequence[Prompt] = ()) -> Run:
    """A training of this model on a CPU."""
    return Run(config, CPU, data, list(prompts), model, config.micro_batch_size or config.batch_size)


def rows_of(config: Config) -> int:
    """Sequences per forward pass, if what was asked fits."""
    return config.rows_at_once(config.micro_batch_size or config.batch_size)


def hardware_of(config: Config) -> Hardware:
    return configure_device(config, config)


def open_tokens(config: Config, hardware: Hardware = CPU) -> TokenData:
    return TokenData.open(config, config.data_dir, config.max_seq_len, hardware)


def estimated(config: Config, model: TransformerLanguageModel, hardware: Hardware) -> int:
    return estimate_memory(config, model, hardware, rows_of(config))


def wait_until(happened: Callable[[], bool]) -> None:
    """Fails after half a minute."""
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def call_before(patch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[..., object]) -> None:
    """Make the function `owner.name` call `action` first, with the same arguments."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return original(*args, **options)

    patch.setattr(owner, name, wrapped)


@contextlib.contextmanager
def full_disk(part: str = "") -> Iterator[None]:
    """Inside, no file with `part` in its path reaches the disk."""

    def full(descriptor: int) -> None:
        if part in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, os, "fsync", full)
        yield


@contextlib.contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Inside, these packages are not installed."""
    find_spec = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name in names else find_spec(name, *more)
        )
        yield


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that are logged inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def answer_without_libraries(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has to answer before it imports anything that takes long."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not re.search(r"\| +(torch|numpy|tokenizers)$", done.stderr, re.MULTILINE), f"{words} imports libraries"
    return done
