"""Shared by the tests: a tiny token folder made by hand, and the trainer called in-process as a user would call it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tokenizer import CharacterTokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,|\n"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "big", "red", "dog", "ran", "over", "that", "hill")


class Result(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def generated_text(characters: int, seed: int = 0) -> str:
    """Lines of a few words in a fixed order of succession: easy to learn, and not the same line twice in a row."""
    random = np.random.RandomState(seed)
    lines, length = [], 0
    while length < characters:
        start, count = random.randint(len(WORDS)), random.randint(4, 9)
        lines.append(" ".join(WORDS[(start + i) % len(WORDS)] for i in range(count)) + ".\n")
        length += len(lines[-1])
    return "".join(lines)[:characters]


def write_tokens(folder: Path, text: str, alphabet: str = ALPHABET) -> Path:
    """A complete character token folder, as docs describe it, written without the pre-tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = CharacterTokenizer.from_characters(alphabet)
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small lose time to threads waiting for each other, a lot of it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_tokens() -> Callable[..., Path]:
    """`make_tokens(folder, text, alphabet=...)` writes a complete character token folder."""
    return write_tokens


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character token folder of 30 KB of text. Not to be changed by a test."""
    return write_tokens(tmp_path_factory.mktemp("data") / "tiny", generated_text(30_000))


@pytest.fixture(scope="session")
def short_token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token folder so short that an epoch of 8 sequences a step takes about twenty steps."""
    return write_tokens(tmp_path_factory.mktemp("data") / "short", generated_text(3_000, seed=1))


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


@pytest.fixture(scope="session")
def train_flags(token_folder: Path) -> Callable[..., list[str]]:
    """`train_flags(output_dir, key=value, ...)`: the command line of a tiny run on `token_folder`."""
    return functools.partial(flags_of_a_tiny_run, token_folder)


@pytest.fixture(scope="session")
def train(train_flags: Callable[..., list[str]]) -> Callable[..., Result]:
    """`train(output_dir, key=value, ..., extra=[...])` runs the trainer in this process and captures what it prints."""

    def run(output_dir: Path, extra: tuple[str, ...] = (), **changes: object) -> Result:
        import train_colab_mmap

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = train_colab_mmap.main([*train_flags(output_dir, **changes), *extra])
        return Result(code, out.getvalue(), err.getvalue())

    return run
