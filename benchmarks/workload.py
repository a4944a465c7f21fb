"""Shared by the benchmark scripts: random token folders, and the trainer's pieces joined as the trainer joins them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.files import sha256_file
from tokenization.metadata import TokenMetadata
from tokenizer import CharacterTokenizer
from training.config import parse_config
from training.machine.compilation import compile_model
from training.numbers.schedule import last_step, learning_rate
from training.numbers.step import train_step
from training.parts import Parts
from training.planning.estimate import estimate_memory, held_memory
from training.prepare import prepare

BLOCK_TOKENS = 8_000_003  # random ids drawn once and repeated; a prime, so that windows of one epoch differ
WARM_UP_SHARE = 0.2  # of the time of a measurement goes before it, not counted


def write_random_tokens(folder: Path, tokens: int, vocab_size: int) -> Path:
    """A complete token folder of `tokens` random ids (uint16), as the pre-tokenizer would leave it; returns `folder`.

    Speed does not depend on what the tokens say. The vocabulary is one of characters, which any size up to 55,000 is.
    """
    folder.mkdir(parents=True)
    tokenizer = CharacterTokenizer([chr(256 + i) for i in range(vocab_size)])
    tokenizer.save(folder / "tokenizer.json")
    block = np.random.RandomState(0).randint(0, vocab_size, min(tokens, BLOCK_TOKENS)).astype("<u2")
    sha256 = hashlib.sha256()
    with open(folder / "tokens.bin", "wb") as file:
        for start in range(0, tokens, len(block)):
            part = block[: tokens - start].tobytes()
            sha256.update(part)
            file.write(part)
    metadata = TokenMetadata(
        path=folder / "tokens_metadata.json",
        vocab_size=vocab_size,
        total_tokens=tokens,
        train_tokens=tokens * 9 // 10,
        dtype="uint16",
        tokenizer_type="character",
        bin_file="tokens.bin",
        tokenizer_file="tokenizer.json",
        tokens_sha256=sha256.hexdigest(),
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        val_bytes=None,
    )
    metadata.write(metadata.path)
    return folder


@dataclass
class Training(Parts):
    """What the trainer holds when its loop begins. `step_model` may be exchanged to try another one."""

    max_steps: int = 0
    compile_seconds: float | None = None  # None where nothing was compiled
    steps_done: int = 0
    loss: torch.Tensor = field(default_factory=lambda: torch.tensor(math.nan))  # of the last step, on the device

    @classmethod
    def open(cls, flags: Sequence[str]) -> Training:
        """Prepare what `python train_colab_mmap.py FLAGS` would train, with the choices it would make by itself."""
        # On the token folder that is named: a config with text of its own would tokenize that into it.
        parts = prepare(dataclasses.replace(parse_config(flags), input=None, eval_prompts=None))
        config, data = parts.config, parts.data
        started = time.perf_counter()
        evaluates = bool(config.eval_interval)
        first_batch = functools.partial(data.batch, 0, config.rows_at_once)
        parts.step_model = compile_model(parts.model, parts.hardware, first_batch, evaluates)
        compile_seconds = time.perf_counter() - started if parts.step_model is not parts.model else None
        return cls(**vars(parts), max_steps=last_step(0, 0, data.windows, config), compile_seconds=compile_seconds)

    def step(self) -> None:
        """One step of the run, as the trainer's loop takes it where it does not report."""
        seen = self.steps_done * self.config.sequences_per_step
        lr = learning_rate(self.steps_done, self.max_steps, self.config)
        self.loss = train_step(self, self.steps_done, seen, lr).loss
        self.steps_done += 1


def time_steps(step: Callable[[], object], synchronize: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Mean seconds of a call of `step`, and the number of calls timed: as many as take about `seconds`, at least three,
    or one where it alone takes as long.

    Call `step` once before this, for the first use of everything; another call here and a share of `seconds` of them
    are not counted either. `synchronize` waits for the device, before and after the timed calls only.
    """

    def timed(count: int) -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return time.perf_counter() - started

    once = timed(1)
    timed(int(WARM_UP_SHARE * seconds / once))
    count = max(3, round(seconds / once)) if once < seconds else 1
    return timed(count) / count, count


def measure_training(flags: Sequence[str], seconds: float, started: float) -> dict[str, Any]:
    """Train with the trainer's FLAGS for about `seconds` and tell how fast it went.

    `started` is the time.perf_counter() from which the time to the end of the first step counts.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    training = Training.open(flags)
    training.step()
    training.hardware.synchronize()
    startup = time.perf_counter() - started
    return {**figures(training, seconds), "startup_seconds": startup}


def figures(training: Training, seconds: float) -> dict[str, Any]:
    """How fast a training that has taken a step goes in about `seconds`, and what memory it has taken at most."""
    hardware, model, config = training.hardware, training.model, training.config
    step_seconds, steps = time_steps(training.step, hardware.synchronize, seconds)
    tokens_per_second = config.tokens_per_step / step_seconds
    peak = hardware.peak_memory()
    estimated = estimate_memory(config, model, hardware) + held_memory(training.data, hardware)
    return {
        "parameters": model.num_parameters(),
        "tokens_per_second": tokens_per_second,
        "ms_per_step": 1000 * step_seconds,
        "steps": steps,
        "compile_seconds": training.compile_seconds,
        "peak_memory_gb": peak and peak / 1e9,
        "reserved_memory_gb": torch.cuda.max_memory_reserved() / 1e9 if hardware.is_cuda else None,
        "estimated_memory_gb": estimated / 1e9,
        "mfu": hardware.peak_flops and tokens_per_second * model.flops_per_token() / hardware.peak_flops,
        "precision": hardware.precision,
        "compiled": training.step_model is not model,
        "placement": training.data.placement,
        "micro_batch_size": config.rows_at_once,
        "loss": training.loss.item(),
    }
