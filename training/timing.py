"""Time a few training steps on random tokens, to learn how fast this machine trains a model."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch

from common.errors import is_out_of_memory
from common.graphs import GraphCapture
from common.machine import pick_device
from common.script import count_cores
from model import TransformerLanguageModel
from training.captured import can_capture
from training.compilation import compile_model
from training.config import Config
from training.hardware import (
    DEFAULT_THREADS,
    Hardware,
    compile_seconds,
    configure_device,
    gpu_compile_seconds,
    set_attention_backend,
)
from training.memory import build_on_meta, estimate_memory, return_freed_memory
from training.optimizer import apply_hyperparameters, build_optimizer, gradient_norm, update_parameters
from training.step import Batch

MIN_TIMED_STEPS, MAX_TIMED_STEPS = 3, 12
MIN_TIMED_TOKENS = 512
TOKENIZING_BYTES_PER_SECOND = 3.5e6  # per core: 2 GB took two cores 280 s (docs/benchmarks/README.md)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model that may be trained: its configuration, with the user's flags, and the hardware chosen for it."""

    config: Config
    hardware: Hardware
    model: TransformerLanguageModel  # on the meta device
    is_chat: bool
    known: dict[tuple[int, bool, bool], int] = field(default_factory=dict)  # cache of `memory`

    @cached_property
    def block_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.blocks.parameters())

    @cached_property
    def flops(self) -> int:
        """FLOPs per token."""
        return self.model.flops_per_token()

    def memory(self, sequences: int, rows: int, compiles: bool) -> int:
        """Estimate the bytes of memory for a step of `sequences`, `rows` at a time."""
        key = rows, sequences > rows, compiles
        if key not in self.known:
            config = replace(self.config, batch_size=sequences, gradient_accumulation_steps=1, micro_batch_size=None)
            self.known[key] = estimate_memory(config, self.model, replace(self.hardware, compiles=compiles), rows)
        return self.known[key]


class StepTimes(NamedTuple):
    """Times of a candidate's step: an update, and forward and backward passes over micro-batches."""

    update: float  # seconds
    min_pass: float  # seconds of the shortest pass
    per_token: float  # seconds per token of a pass
    scatter: float = 0.0  # half of the range of step times, relative to their median
    cpu_share: float = 1.0  # CPU time / time; other programs took the rest

    def step_seconds(self, tokens: float, passes: int) -> float:
        """Return the seconds of a step of `tokens` in `passes` micro-batches."""
        return self.update + max(passes * self.min_pass, tokens * self.per_token)

    def scaled(self, factor: float) -> StepTimes:
        return self._replace(
            update=factor * self.update, min_pass=factor * self.min_pass, per_token=factor * self.per_token
        )


class Machine:
    """This machine. Tests replace it by pretended ones."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.perf_counter()

    def candidate(self, config: Config, vocab_size: int, is_chat: bool) -> Candidate:
        shape = config.shape(vocab_size)
        set_attention_backend(is_chat)
        return Candidate(config, configure_device(config, shape), build_on_meta(config, shape), is_chat)

    def thread_counts(self, config: Config) -> list[int]:
        """Return the numbers of threads to time. Beside other programs, one thread can be many times faster than
        several that wait for each other."""
        on_cpu = pick_device(config.device if config.use_gpu else "cpu").type == "cpu"
        return (
            sorted({DEFAULT_THREADS, 1}, reverse=True)
            if on_cpu and not config.threads
            else [config.threads or DEFAULT_THREADS]
        )

    def tokenizing_seconds(self, text_bytes: float) -> float:
        """Return the expected seconds to learn a vocabulary and tokenize a text."""
        return text_bytes / TOKENIZING_BYTES_PER_SECOND / count_cores()

    def time_steps(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> StepTimes:
        """Time uncompiled steps of `tokens` in one pass, for about `seconds`. Fewer tokens than a sequence are timed
        with a shorter context, and scaled by FLOPs."""
        config, shape = candidate.config, candidate.model.config
        rows, length = max(1, int(tokens // shape.max_seq_len)), shape.max_seq_len
        while length > tokens and length > MIN_TIMED_TOKENS:
            length //= 2
        torch.set_num_threads(threads)
        model = _build_model(candidate)
        passes, updates, cpu = _time_parts(candidate, model, model, _random_batch(candidate, rows, length), seconds)
        shorter = build_on_meta(config, replace(shape, max_seq_len=length))
        token = median(passes) * candidate.flops / shorter.flops_per_token() / (rows * length)
        steps = [sum(step) for step in zip(passes, updates, strict=True)]
        scatter = (max(steps) - min(steps)) / (2 * median(steps))
        return StepTimes(median(updates), 0.0, token, scatter, min(1.0, cpu / sum(steps)))

    def expected_compile_seconds(self, candidate: Candidate, cpu_share: float) -> float:
        """Return the expected seconds to compile. `cpu_share`: what other programs leave of the CPU."""
        if candidate.hardware.is_cuda:
            return gpu_compile_seconds()
        return compile_seconds(candidate.config.num_layers, cpu_share)

    def compile(self, candidate: Candidate, rows: int, seconds: float) -> tuple[float, float]:
        """Return the seconds to compile for micro-batches of `rows`, and of a compiled pass. The training will find the
        code in the compiler's cache."""
        began, model = self.now(), _build_model(candidate)
        example = _random_batch(candidate, rows, model.config.max_seq_len)
        with contextlib.redirect_stdout(io.StringIO()):  # the training prints it again
            compiled, _ = compile_model(model, candidate.hardware, example, bool(candidate.config.eval_interval))
        compiling = self.now() - began
        passes, _, _ = _time_parts(candidate, model, compiled, example, seconds)
        if compiled is not model:
            torch.compiler.reset()  # the compiler holds on to the model
        return compiling, median(passes)

    def free(self) -> None:
        """Free the memory of timed models."""
        return_freed_memory()


def _build_model(candidate: Candidate) -> TransformerLanguageModel:
    with candidate.hardware.device:  # a GPU draws the weights faster
        model = TransformerLanguageModel(candidate.model.config)
    model.activation_checkpointing = candidate.config.activation_checkpointing
    return model


def _random_batch(candidate: Candidate, rows: int, length: int) -> Batch:
    """Return a batch of random tokens, as `TokenData.batch` does: (rows, length) each."""
    shape, device = candidate.model.config, candidate.hardware.device
    inputs, targets = (torch.randint(shape.vocab_size, (rows, length), device=device) for _ in range(2))
    return (inputs, targets, torch.zeros_like(inputs)) if candidate.is_chat else (inputs, targets)


def _time_parts(
    candidate: Candidate,
    model: TransformerLanguageModel,
    step_model: Callable[..., torch.Tensor],
    tokens: Batch,
    seconds: float,
) -> tuple[list[float], list[float], float]:
    """Time steps for about `seconds`. Return the seconds of each pass and each update, without the first, and the CPU
    seconds of all."""
    config, hardware = candidate.config, candidate.hardware
    optimizer, scaler = build_optimizer(model, config), hardware.grad_scaler()
    apply_hyperparameters(optimizer, 0.0, config)
    passes: list[float] = []
    updates: list[float] = []
    cpu: list[float] = []
    skip = torch.zeros((), device=hardware.device)

    def run_pass() -> None:
        with hardware.autocast():
            loss = step_model(*tokens)
        scaler.scale(loss).backward()

    def take_update() -> None:
        update_parameters(optimizer, gradient_norm(optimizer), config.grad_clip, skip)

    def now() -> float:
        hardware.synchronize()
        return time.perf_counter()

    do_pass: Callable[[], object] = run_pass
    do_update: Callable[[], object] = take_update
    rows = len(tokens[0])
    captures = can_capture(config, hardware, candidate.memory(rows, rows, step_model is not model))
    if captures:
        try:
            graphs = GraphCapture()
            graphs.warm_up(run_pass)
            graphs.warm_up(take_update)
            optimizer.zero_grad(set_to_none=True)
            do_pass, _ = graphs.capture(run_pass)  # each replay writes the gradients
            do_update, _ = graphs.capture(take_update)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            captures, do_pass, do_update = False, run_pass, take_update  # the training will not capture them either
            optimizer.zero_grad(set_to_none=True)
    while len(passes) < MIN_TIMED_STEPS or (sum(passes + updates) < seconds and len(passes) < MAX_TIMED_STEPS):
        began, cpu_began = now(), time.thread_time()
        do_pass()
        passed = now()
        do_update()
        if not captures:
            optimizer.zero_grad(set_to_none=True)
        updated = now()
        passes.append(passed - began)
        updates.append(updated - passed)
        cpu.append(time.thread_time() - cpu_began)
    is_gpu = hardware.device.type != "cpu"
    return passes[1:], updates[1:], sum(passes[1:] + updates[1:]) if is_gpu else sum(cpu[1:])
