"""Machines that are not there: what a step takes of their time and memory, as a function of the model and the rows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from model import TransformerLanguageModel
from model_config import ModelConfig
from training.config import Config, parse_config
from training.dial import EVALUATING_SHARE, Choice, Dial
from training.hardware import CPU_COMPILE_SAVING, CPU_DROPOUT_SLOWDOWN, GPU_COMPILE_SECONDS, Hardware, compile_seconds
from training.law import expected_loss, useful_passes
from training.memory import build_on_meta
from training.optimizer import is_hidden_matrix
from training.text import TRAIN_SHARE, TextStats, choose_vocabulary
from training.timing import TOKENIZING_BYTES_PER_SECOND, Candidate, Machine, StepTimes


class Specs(NamedTuple):
    """The speed and memory of a machine. Rates are those of a good program, not the data sheet's."""

    memory: float  # bytes
    flops: float  # a second, in large products
    bandwidth: float  # bytes a second
    launch: float  # seconds of an operation in a recorded step on a GPU, however small; 0 on a CPU
    compiling: float = 1.0  # times as long as on a host of many cores


MACHINES = {
    "T4": Specs(15.8e9, 22e12, 230e9, 10e-6, 2.0),
    "L4": Specs(23.6e9, 55e12, 230e9, 7e-6, 1.5),
    "RTX 3060": Specs(12.6e9, 35e12, 300e9, 6e-6),
    "A100 40 GB": Specs(42.3e9, 230e12, 1.35e12, 6e-6),
    "A100 80 GB": Specs(85e9, 230e12, 1.85e12, 6e-6),
    "H100": Specs(85e9, 940e12, 2.9e12, 4e-6),
    "two slow cores": Specs(8e9, 6e10, 1.5e10, 0.0),
    "laptop": Specs(16e9, 4e11, 4e10, 0.0),
}
# Of a layer, per token and unit of width, forward and backward: bytes that are moved, bytes that are kept; operations.
# Bytes moved and operations as measured on an H200 at 12 x 768 and 4 x 256 (docs/benchmarks/gpu-nvidia-h200.md).
EAGER, COMPILED = (900, 54, 90), (300, 36, 45)
LOGITS = {False: 12, True: 2}  # bytes kept for each
UPDATE_OPERATIONS, MUON_BYTES, ADAMW_BYTES = 200, 190, 28  # not compiled, as the dial times it
MODELS: dict[Any, Any] = {}  # their shapes, and what memory they take: many dials are asked the same


@functools.cache
def parameters(model: TransformerLanguageModel) -> int:
    return model.num_parameters()


@functools.cache
def muon_parameters(model: TransformerLanguageModel) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if is_hidden_matrix(name, p))


@dataclass
class Pretended(Machine):
    specs: Specs
    clock: float = 0.0
    peak: float = 0.0  # bytes of the largest step that was timed
    compiled: set[tuple[ModelConfig, int]] = field(default_factory=set)

    @property
    def is_gpu(self) -> bool:
        return bool(self.specs.launch)

    def now(self) -> float:
        return self.clock

    def candidate(self, config: Config, vocab_size: int, is_chat: bool) -> Candidate:
        device, memory = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu"), int(self.specs.memory)
        precision, compiles = "bf16" if self.is_gpu else "fp32", self.is_gpu and config.compile != "off"
        hardware = Hardware(device, "pretended", precision, "", compiles, "", None, memory)
        shape = config.shape(vocab_size)
        key = shape, device.type, self.specs.memory
        if key not in MODELS:
            MODELS[key] = build_on_meta(config, shape), {}
        model, known = MODELS[key]
        return Candidate(config, hardware, model, is_chat, known)

    def thread_counts(self, config: Config) -> list[int]:
        return [2]

    def tokenizing_seconds(self, text_bytes: float) -> float:
        return text_bytes / TOKENIZING_BYTES_PER_SECOND / 2

    def passes(self, shape: ModelConfig, flops: float, tokens: float, compiled: bool) -> float:
        """Seconds of a pass forward and backward over so many tokens."""
        if compiled and not self.is_gpu:
            return (1 - CPU_COMPILE_SAVING) * self.passes(shape, flops, tokens, False)
        moved, _, operations = COMPILED if compiled else EAGER
        in_products = tokens * flops / (self.specs.flops * shape.embed_dim / (shape.embed_dim + 256))
        bytes_moved = tokens * (shape.num_layers * shape.embed_dim * moved + 12 * shape.vocab_size)
        launches = self.specs.launch * operations * shape.num_layers
        return max(launches, in_products + bytes_moved / self.specs.bandwidth)

    def update(self, candidate: Candidate) -> float:
        """Seconds of an update. Muon's iteration has 5 steps of 2 products with a square matrix, and one of two square
        ones. Gives an H200's 0.8, 2.5 and 7.5 ms at 4 x 256, 8 x 512 and 12 x 768, and two cores' 13, 87 and 1,200 ms
        at 4 x 128, 4 x 256 and 8 x 512."""
        width, muon = candidate.model.config.embed_dim, muon_parameters(candidate.model)
        bytes_moved = MUON_BYTES * muon + ADAMW_BYTES * (parameters(candidate.model) - muon)
        rate = self.specs.flops * (width / (width + 256) if self.is_gpu else 1)
        in_products = 5 * muon * (4 * width + 2 * width) / rate
        return UPDATE_OPERATIONS * self.specs.launch + bytes_moved / self.specs.bandwidth + in_products

    def memory(self, candidate: Candidate, rows: int, length: int, compiled: bool) -> float:
        """Bytes at the peak of a step."""
        shape = candidate.model.config
        _, kept, _ = COMPILED if compiled else EAGER
        of_token = shape.num_layers * shape.embed_dim * kept + LOGITS[compiled] * shape.vocab_size
        return 1.1 * (12 * parameters(candidate.model) + rows * length * of_token) + 5e8

    def require(self, needed: float) -> None:
        self.peak = max(self.peak, needed)
        assert needed < self.specs.memory, "out of memory"

    def time_steps(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> StepTimes:
        shape = candidate.model.config
        rows = max(1, int(tokens // shape.max_seq_len))
        self.require(self.memory(candidate, rows, shape.max_seq_len, False))
        update, tokens = self.update(candidate), min(tokens, rows * shape.max_seq_len)
        one = self.passes(shape, candidate.flops, tokens, False)
        self.clock += max(4 * (one + update), min(seconds, 13 * (one + update)))
        return StepTimes(update, 0.0, one / tokens)

    def compile(self, candidate: Candidate, rows: int, seconds: float) -> tuple[float, float]:
        shape = candidate.model.config
        self.require(self.memory(candidate, rows, shape.max_seq_len, True))
        compiling = self.compile_seconds(candidate, rows)
        one = self.passes(shape, candidate.flops, rows * shape.max_seq_len, True)
        self.compiled.add((shape, rows))
        self.clock += compiling + max(4 * one, seconds)
        return compiling, one

    def compile_seconds(self, candidate: Candidate, rows: int) -> float:
        """Less when the same was compiled before."""
        again = 0.25 if (candidate.model.config, rows) in self.compiled else 1.0
        layers = candidate.model.config.num_layers
        return again * self.specs.compiling * GPU_COMPILE_SECONDS if self.is_gpu else compile_seconds(layers)

    def expected_compile_seconds(self, candidate: Candidate, cpu_share: float) -> float:
        layers = candidate.config.num_layers
        return round(self.specs.compiling) * GPU_COMPILE_SECONDS if self.is_gpu else compile_seconds(layers)

    def free(self) -> None:
        pass

    def step(self, candidate: Candidate, sequences: int, rows: int, compiled: bool) -> float:
        """Seconds of a step of a training; it runs out of memory where a GPU would."""
        shape = candidate.model.config
        if self.is_gpu:
            self.require(self.memory(candidate, rows, shape.max_seq_len, compiled))
        one = self.passes(shape, candidate.flops, rows * shape.max_seq_len, compiled)
        seconds = self.update(candidate) + math.ceil(sequences / rows) * one
        return seconds * (CPU_DROPOUT_SLOWDOWN if shape.dropout and not self.is_gpu else 1.0)


SIZES = (5e4, 1e6, 2e7, 1e8, 1.2e10)  # bytes of text
MINUTES = (2, 10, 60, 600)


def text_of(size: float) -> TextStats:
    vocabulary = choose_vocabulary(size)
    return TextStats("a text", 1, int(size), size, size / vocabulary.letters_per_token, vocabulary.size, False, 1.0)


def dial_of(machine: Pretended, size: float, minutes: float, *flags: str) -> Dial:
    """A text of a gigabyte and more is one of the hub, of which only a part is read."""
    argv = ["--input", "text" if size < 1e9 else "hf://datasets/o/texts", "--minutes", str(minutes), *flags]
    return Dial(argv, text_of(size), parse_config(argv), machine)


class Trained(NamedTuple):
    """The result of a choice on a pretended machine."""

    config: Config
    steps: float
    loss: float
    seconds: float  # of the whole command
    all_read: bool  # as often as it is worth


def trained(dial: Dial, choice: Choice, spent: float) -> Trained:
    """Train as chosen, after so many seconds."""
    machine, config = dial.machine, dial.build_config(choice)
    assert isinstance(machine, Pretended)
    final = dial.build_candidate(config)
    spent += dial.tokenizing_seconds + (machine.compile_seconds(final, choice.rows) if choice.compiles else 0.0)
    step = machine.step(final, choice.sequences, choice.rows, choice.compiles)
    seconds = max(1.0, 60 * dial.requested.minutes - spent) * (1 - EVALUATING_SHARE)
    of_step, in_pass = choice.sequences * config.max_seq_len, dial.text.train_tokens
    steps = min(seconds / step, config.epochs * in_pass / of_step)
    letters = TRAIN_SHARE * dial.text.letters
    loss = expected_loss(final.block_parameters, letters, steps * of_step / in_pass)
    all_read = config.epochs >= useful_passes(final.block_parameters, letters)
    return Trained(config, steps, loss, spent + steps * step / (1 - EVALUATING_SHARE), all_read)
