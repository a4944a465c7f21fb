"""How fast this machine trains a model, by a few steps on random tokens."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch

from common.graphs import GraphRecorder
from common.machine import pick_device
from model import TransformerLanguageModel
from training.compilation import compile_model
from training.config import Config
from training.hardware import (
    ALL_THREADS,
    Hardware,
    choose_attention,
    compile_seconds,
    detect_hardware,
    gpu_compile_seconds,
)
from training.memory import estimate_memory, return_freed_memory, without_memory
from training.optimizer import apply_hyperparameters, build_optimizer, gradient_norm, update
from training.recorded import can_record

Batch = tuple[torch.Tensor, ...]
FEWEST_TIMED, MAX_TIMED = 3, 12
LEAST_TOKENS = 512  # that are timed, if a sequence has as many
TOKENIZED_PER_CORE = 3.5e6  # bytes a second: 2 GB took two cores 280 s (docs/benchmarks/README.md)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model that may be trained: its configuration, with the flags that were given, and this machine for it."""

    config: Config
    hardware: Hardware
    model: TransformerLanguageModel  # without numbers
    is_chat: bool
    known: dict[tuple[int, bool, bool], int] = field(default_factory=dict)  # what `memory` returned

    @cached_property
    def block_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.blocks.parameters())

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of a token."""
        return self.model.flops_per_token()

    def memory(self, sequences: int, rows: int, compiles: bool) -> int:
        """Estimate the bytes of a step of so many sequences, `rows` at a time."""
        key = rows, sequences > rows, compiles
        if key not in self.known:
            config = replace(self.config, batch_size=sequences, gradient_accumulation_steps=1, micro_batch_size=None)
            self.known[key] = estimate_memory(config, self.model, replace(self.hardware, compiles=compiles), rows)
        return self.known[key]


class Timed(NamedTuple):
    """Steps of a candidate: each an update, and passes forward and backward over micro-batches."""

    update: float  # seconds
    least: float  # seconds of a pass, however few its tokens
    token: float  # seconds of a token of a pass
    scatter: float = 0.0  # how far the steps were apart, a share of their time
    cpu_share: float = 1.0  # of that time; other programs took the rest

    def step(self, tokens: float, passes: int) -> float:
        """Return the seconds of a step of so many tokens in so many passes."""
        return self.update + max(passes * self.least, tokens * self.token)

    def times(self, factor: float) -> Timed:
        return self._replace(update=factor * self.update, least=factor * self.least, token=factor * self.token)


class Machine:
    """This machine. Tests pretend others."""

    def now(self) -> float:
        """Return the seconds on a clock."""
        return time.perf_counter()

    def candidate(self, config: Config, vocab_size: int, is_chat: bool) -> Candidate:
        shape = config.shape(vocab_size)
        choose_attention(is_chat)
        return Candidate(config, detect_hardware(config, shape), without_memory(config, shape), is_chat)

    def thread_counts(self, config: Config) -> list[int]:
        """Return the numbers of threads to time. Beside other programs, threads that wait for each other can take many
        times as long as one."""
        on_cpu = pick_device(config.device if config.use_gpu else "cpu").type == "cpu"
        return (
            sorted({ALL_THREADS, 1}, reverse=True) if on_cpu and not config.threads else [config.threads or ALL_THREADS]
        )

    def tokenizing_seconds(self, text_bytes: float) -> float:
        """Return the seconds that learning a vocabulary and writing the tokens are expected to take."""
        return text_bytes / TOKENIZED_PER_CORE / (os.cpu_count() or 1)

    def time_steps(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> Timed:
        """Time steps of so many tokens in one pass, uncompiled, for about so many seconds. Fewer tokens than a sequence
        are a shorter context: the time is taken to grow with its floating-point operations."""
        config, shape = candidate.config, candidate.model.config
        rows, length = max(1, int(tokens // shape.max_seq_len)), shape.max_seq_len
        while length > tokens and length > LEAST_TOKENS:
            length //= 2
        torch.set_num_threads(threads)
        model = build(candidate)
        passes, updates, cpu = timed(candidate, model, model, batch(candidate, rows, length), seconds)
        shorter = without_memory(config, replace(shape, max_seq_len=length))
        token = median(passes) * candidate.flops / shorter.flops_per_token() / (rows * length)
        steps = [sum(step) for step in zip(passes, updates, strict=True)]
        scatter = (max(steps) - min(steps)) / (2 * median(steps))
        return Timed(median(updates), 0.0, token, scatter, min(1.0, cpu / sum(steps)))

    def expected_compile(self, candidate: Candidate, cpu_share: float) -> float:
        """Return the seconds that compiling is expected to take where other programs leave this share of the CPU."""
        if candidate.hardware.is_cuda:
            return gpu_compile_seconds()
        return compile_seconds(candidate.config.num_layers, cpu_share)

    def compile(self, candidate: Candidate, rows: int, seconds: float) -> tuple[float, float]:
        """Time compiling for micro-batches of so many sequences, and then a pass over one, in seconds. The training
        finds the compiled code in the compiler's cache."""
        began, model = self.now(), build(candidate)
        example = batch(candidate, rows, model.config.max_seq_len)
        with contextlib.redirect_stdout(io.StringIO()):  # the training says it again
            compiled, _ = compile_model(model, candidate.hardware, example, bool(candidate.config.eval_interval))
        compiling = self.now() - began
        passes, _, _ = timed(candidate, model, compiled, example, seconds)
        if compiled is not model:
            torch.compiler.reset()  # it keeps the model that it compiled
        return compiling, median(passes)

    def free(self, candidate: Candidate) -> None:
        """Return the memory of what was timed."""
        return_freed_memory(candidate.hardware.device)


def build(candidate: Candidate) -> TransformerLanguageModel:
    with candidate.hardware.device:  # random numbers take a GPU less time
        model = TransformerLanguageModel(candidate.model.config)
    model.activation_checkpointing = candidate.config.activation_checkpointing
    return model


def batch(candidate: Candidate, rows: int, length: int) -> Batch:
    """Make random tokens in the form of the training's."""
    shape, device = candidate.model.config, candidate.hardware.device
    inputs, targets = (torch.randint(shape.vocab_size, (rows, length), device=device) for _ in range(2))
    return (inputs, targets, torch.zeros_like(inputs)) if candidate.is_chat else (inputs, targets)


def timed(
    candidate: Candidate,
    model: TransformerLanguageModel,
    step_model: Callable[..., torch.Tensor],
    tokens: Batch,
    seconds: float,
) -> tuple[list[float], list[float], float]:
    """Time steps. Returns the seconds of their passes and of their updates, without the first, and of the CPU in all of
    them."""
    config, hardware = candidate.config, candidate.hardware
    optimizer, scaler = build_optimizer(model, config), hardware.grad_scaler()
    apply_hyperparameters(optimizer, 0.0, config)
    passes: list[float] = []
    updates: list[float] = []
    cpu: list[float] = []
    skip = torch.zeros((), device=hardware.device)

    def pass_over() -> None:
        with hardware.autocast():
            loss = step_model(*tokens)
        scaler.scale(loss).backward()

    def take_update() -> None:
        update(optimizer, gradient_norm(optimizer), config.grad_clip, skip)

    def now() -> float:
        hardware.synchronize()
        return time.perf_counter()

    do_pass: Callable[[], object] = pass_over
    do_update: Callable[[], object] = take_update
    rows = len(tokens[0])
    records = can_record(config, hardware, candidate.memory(rows, rows, step_model is not model))
    if records:
        recorder = GraphRecorder()
        recorder.warm_up(pass_over)
        recorder.warm_up(take_update)
        optimizer.zero_grad(set_to_none=True)
        do_pass, _ = recorder.record(pass_over)  # which writes the gradients, at each replay
        do_update, _ = recorder.record(take_update)
    while len(passes) < FEWEST_TIMED or (sum(passes + updates) < seconds and len(passes) < MAX_TIMED):
        began, cpu_began = now(), time.thread_time()
        do_pass()
        passed = now()
        do_update()
        if not records:
            optimizer.zero_grad(set_to_none=True)
        updated = now()
        passes.append(passed - began)
        updates.append(updated - passed)
        cpu.append(time.thread_time() - cpu_began)
    is_gpu = hardware.device.type != "cpu"
    return passes[1:], updates[1:], sum(passes[1:] + updates[1:]) if is_gpu else sum(cpu[1:])
