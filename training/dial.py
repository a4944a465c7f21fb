"""The dial, which is the automatic configuration of `--input TEXT --minutes N`: choose vocabulary, model, step size and
epochs, and forecast the loss.

It times a few models on this machine. Models and settings come from recipe.py, losses from law.py. The method:
docs/choosing.md.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from common.errors import MemoryExhausted
from common.output import byte_size, duration, log, plural
from tokenization.held_out import MAX_SHARE_FACTOR
from tokenization.settings import HUB
from training.choice import CHOSEN
from training.config import Config, Forecast, parse_config
from training.data import MAX_GPU_TOKENS_SHARE
from training.growth import REWARM_PEAK, WARMUP_SHARE, Growth
from training.hardware import (
    CPU_COMPILE_SAVING,
    CPU_DROPOUT_SLOWDOWN,
    CPU_FLOPS_PER_CORE,
    DEFAULT_THREADS,
    GPU_COMPILED_PASS_RATIO,
    Units,
    choose_compile,
)
from training.law import expected_error, expected_loss, is_measured, useful_passes
from training.memory import MEMORY_SHARE, PROCESS_BYTES, suppress_out_of_memory
from training.parallel import require_single_process
from training.recipe import (
    HEAD_WIDTH,
    LADDER,
    PASSES_WITHOUT_DROPOUT,
    Shape,
    choose_context,
    choose_sequences,
    choose_settings,
    read_recipe,
)
from training.schedule import MAX_LAST_PART, OWN_PASSES
from training.text import TRAIN_SHARE, TextStats, choose_vocabulary, measure_text, measure_tokens
from training.timing import MIN_TIMED_STEPS, Candidate, Machine, StepTimes

T = TypeVar("T")
EVALUATIONS, EVALUATING_SHARE = 20, 0.05  # evaluations per run, and the share of its time they may take
FORWARD_SHARE = 1 / 3  # time of a forward pass relative to a training step
DOWNLOAD_MARGIN = 1.5  # text taken from the hub relative to the forecast

FIRST_VOCABULARY_BYTES = 1e7  # a larger text is first timed with the vocabulary of one this size
TIMING_SHARE = 0.05  # share of --minutes
MIN_ANNOUNCED_SECONDS = 5.0
CANDIDATE_SECONDS = 1.0
TIMED_STEP_TOKENS, MAX_TIMED_STEP_TOKENS = 2048, 65_536  # a GPU gets larger steps until it is busy
MAX_COMPILED_CANDIDATES = 2
LENGTH_ROUNDS = 4
RECOMPILE_SHARE = 0.25  # a second compilation finds most of its code in the cache
MAX_EFFICIENCY_GAIN = 2.0  # FLOP/s relative to the next smaller model: larger ones use a machine better
FEWER_THREADS_SPEEDUP = 1.1  # fewer threads are chosen only if they are this much faster

MIN_HELD_OUT_SHARE = (1 - TRAIN_SHARE) / MAX_SHARE_FACTOR  # share of the tokens, in a small text

SUGGESTED_COMPANION = "hf://datasets/manu/project_gutenberg/data/en-*.parquet"

MAX_KNOWN_DIFFICULTY_ERROR = 0.3  # bits per letter; no text that differs more from English books was measured
MIN_STEPS = 50  # a model with fewer steps has hardly begun to learn


def choose(argv: Sequence[str] | None, requested: Config, started: float) -> Config:
    """Choose the configuration for `requested`, which names a text and no model. Flags win. `started`: the
    time.perf_counter() at which the minutes began.

    Raises ConfigError under torchrun, MemoryExhausted if no model fits, DataError if the text cannot be read or is too
    short.
    """
    require_single_process()
    return Dial(argv, measure_text(requested), requested, started=started).choose_config()


def choose_continuation(
    argv: Sequence[str] | None, config: Config, growth: Growth, data_dir: str, started: float
) -> Config:
    """Choose length, step size and learning rates of a run that continues from the weights of `config` on the tokens in
    `data_dir`, the text as it is now. Shape and vocabulary stay."""
    keys = growth.build_settings(config)
    text = measure_tokens(replace(config, data_dir=data_dir))._replace(name=str(config.input))
    dial = Dial(argv, text, parse_config(argv, keys, CHOSEN), keys=read_recipe() | keys, started=started)
    dial.tokens_seen = growth.tokens_trained
    return dial.choose_config()


def _choose_heads(requested: Config, embed_dim: int) -> dict[str, int]:
    """Return width and heads near the ladder's `embed_dim` that fit each other; flags win."""
    if requested.is_explicit("embed_dim"):
        embed_dim = requested.embed_dim
    elif requested.is_explicit("num_heads"):
        unit = 2 * requested.num_heads  # rotary positions need an even number per head
        embed_dim = unit * max(1, round(embed_dim / unit))
    heads = next(count for count in range(max(1, embed_dim // HEAD_WIDTH), 0, -1) if embed_dim % count == 0)
    return {"embed_dim": embed_dim, "num_heads": heads}


class Choice(NamedTuple):
    """The planned run of one candidate, and its forecast."""

    candidate: Candidate
    shape: Shape
    sequences: int  # sequences per step
    rows: int  # sequences per micro-batch
    compiles: bool
    threads: int
    cpu_share: float
    tokens_per_second: float
    steps: int
    passes: float  # of the text or, with a companion, of the companion
    useful_passes: int
    own_passes: float  # of one's own text beside a companion
    seconds: float
    loss: float
    error: float  # half of the interval

    @property
    def reads_all(self) -> bool:
        """Whether all useful passes fit. `passes` is the result of divisions, so the comparison has a tolerance."""
        return self.passes > self.useful_passes - 0.01


class Dial:
    """The candidates for a text, and their speeds as far as they are timed."""

    def __init__(
        self,
        argv: Sequence[str] | None,
        text: TextStats,
        requested: Config,
        machine: Machine | None = None,
        keys: dict[str, Any] | None = None,
        started: float | None = None,
    ):
        self.argv, self.text, self.requested = argv, text, requested
        self.machine = machine or Machine()
        self.keys = keys or read_recipe()
        self.ladder: Sequence[Shape] = LADDER
        self.tokens_seen = 0  # tokens the weights were trained on before
        self.own_text: TextStats | None = None  # with `text` as its companion
        if requested.init_from:
            self.ladder = [Shape(requested.num_layers, requested.embed_dim, requested.max_seq_len)]
        self.started = self.machine.now() if started is None else started
        is_on_hub = bool(requested.input and requested.input.startswith(HUB))  # only a part is read
        self.tokenizing_seconds = 0.0 if text.is_tokenized or is_on_hub else self.machine.tokenizing_seconds(text.bytes)
        self.first_timed_at = math.inf  # time of the first measurement; starting a GPU does not count
        # threads -> FLOPs per token -> times
        self.step_times: dict[int, dict[int, StepTimes]] = {
            count: {} for count in self.machine.thread_counts(requested)
        }
        # FLOPs per token -> time of a compiled pass relative to its forecast
        self.compiled_ratios: dict[int, float] = {}
        self.compile_time_ratio = 1.0  # time to compile relative to its forecast
        self.chooses_vocabulary = (
            requested.input
            and requested.tokenizer == "bpe"
            and not (requested.is_explicit("vocab_size") or requested.init_from)
        )
        if self.chooses_vocabulary:  # on a slow machine, timing a large vocabulary may use up the minutes
            self.text = text.with_vocabulary(choose_vocabulary(min(FIRST_VOCABULARY_BYTES, text.bytes)))
        self.vocabularies = {self.text.vocab_size}  # sizes tried so far
        self.shapes: dict[Candidate, Shape] = {}
        self.make_candidates()

    @property
    def candidates(self) -> list[Candidate]:
        """The shapes that still differ after the flags are applied and that fit in memory."""
        return list(self.shapes)

    @property
    def own_tokens(self) -> float:
        """Tokens of one's own text."""
        share = self.own_text.letters / self.text.letters if self.own_text else 1.0
        return share * self.text.tokens

    def make_candidates(self) -> None:
        self.shapes = {}
        for shape in self.ladder:
            candidate = self.build_candidate(parse_config(self.argv, self.build_settings(shape), CHOSEN))
            if all(candidate.model.config != other.model.config for other in self.shapes) and self.find_fitting_rows(
                candidate, 1
            ):
                self.shapes[candidate] = shape
        self.require_candidates()

    def require_candidates(self) -> None:
        if not self.shapes:
            raise MemoryExhausted(
                "Not even the smallest model that these flags allow fits in memory. Lower --max_seq_len or "
                "--micro_batch_size, or leave out the flags of the shape."
            )

    def build_candidate(self, config: Config) -> Candidate:
        return self.machine.candidate(config, self.text.vocab_size, self.text.is_chat)

    def find_fitting_rows(self, candidate: Candidate, sequences: int, compiles: bool = False) -> int:
        """Return the largest micro-batch for steps of `sequences` that fits in memory; 0 if one sequence does not."""
        hardware, rows = candidate.hardware, min(sequences, self.requested.micro_batch_size or sequences)
        if hardware.memory_bytes is None:
            return rows
        tokens, on_gpu = 2 * self.text.tokens, hardware.is_cuda and self.requested.placement in ("auto", "gpu")
        held = tokens if on_gpu and tokens <= MAX_GPU_TOKENS_SHARE * hardware.memory_bytes else 0
        while rows and candidate.memory(sequences, rows, compiles) > MEMORY_SHARE * hardware.memory_bytes - held:
            rows //= 2
        return rows

    def choose_config(self) -> Config:
        """Choose, print the choice, and return it as a configuration with its forecast."""
        choice = self.find_best()
        config = self.build_config(choice)
        self.print_choice(choice, config.dropout)
        return replace(config, forecast=self.forecast(choice))

    def forecast(self, choice: Choice) -> Forecast:
        minutes = self.requested.minutes
        return Forecast(choice.loss, choice.error, choice.tokens_per_second, choice.cpu_share, minutes)

    def find_best(self) -> Choice:
        """Time the smallest candidate, then the best so far and the next larger one, which uses the machine better. On
        a GPU, compile the best. Return the best."""
        if TIMING_SHARE * 60 * self.requested.minutes > MIN_ANNOUNCED_SECONDS:
            at_most = duration(TIMING_SHARE * 60 * self.requested.minutes)
            log.info(f"Timing     this machine with models of several sizes, for about {at_most} at most ...")
        self.machine.free()  # an earlier run in this process may still hold memory
        self.time_candidate(self.candidates[0])
        while True:
            choice = self.find_best_within(self.requested.minutes)
            if self.take_other_vocabulary(choice):
                continue
            number = self.candidates.index(choice.candidate)
            larger = [each for each in self.candidates[number + 1 : number + 2] if self.may_be_best(each, choice)]
            if any(self.time_candidate(candidate) for candidate in (*larger, choice.candidate)):
                continue
            if not self.compile_best(choice):
                return choice

    def may_be_best(self, candidate: Candidate, choice: Choice) -> bool:
        """Return whether a candidate would be better than the choice if it ran MAX_EFFICIENCY_GAIN times as fast as
        forecast."""
        minutes, time_factor = self.requested.minutes, 1 / MAX_EFFICIENCY_GAIN
        plans = (
            self.plan_run(candidate, minutes, compiles, time_factor) for compiles in self.compile_options(candidate)
        )
        return any(plan.loss < choice.loss for plan in plans)

    def take_other_vocabulary(self, choice: Choice) -> bool:
        """Switch to the vocabulary for as much of the text as the choice reads, unless it was tried before. Return
        whether it changed."""
        vocabulary = choose_vocabulary(min(1.0, choice.passes) * self.text.bytes)
        if not self.chooses_vocabulary or vocabulary.size in self.vocabularies:
            return False
        self.vocabularies.add(vocabulary.size)
        self.text = self.text.with_vocabulary(vocabulary)
        self.make_candidates()
        return True

    def time_candidate(self, candidate: Candidate) -> bool:
        """Time steps of a candidate, unless that was done or takes more than its share of the minutes. If memory runs
        out, drop it and all larger ones. Return whether it was tried."""
        share = TIMING_SHARE * 60 * self.requested.minutes
        left = share - max(0.0, self.machine.now() - self.first_timed_at)
        timed_so_far = self.step_times[next(iter(self.step_times))]
        if candidate.flops in timed_so_far:
            return False
        length = candidate.config.max_seq_len
        tokens: float = length * self.find_fitting_rows(candidate, max(1, TIMED_STEP_TOKENS // length))
        step_seconds = self.interpolate_times(candidate, False)[0].step_seconds(tokens, 1) if timed_so_far else 0.0
        if left < MIN_TIMED_STEPS * len(self.step_times) * step_seconds:
            return False
        if not timed_so_far and not candidate.hardware.is_cuda:  # --max_seq_len may be huge
            tokens = min(tokens, share / 2 * CPU_FLOPS_PER_CORE / candidate.flops)
        seconds = min(CANDIDATE_SECONDS, share / 3 / len(self.step_times))
        for threads, timed in self.step_times.items():
            steps = self.attempt(partial(self.measure_speed, candidate, tokens, threads, seconds))
            if steps is None:
                self.shapes = {other: shape for other, shape in self.shapes.items() if other.flops < candidate.flops}
                self.require_candidates()
                return True
            timed[candidate.flops] = steps
        self.first_timed_at = min(self.first_timed_at, self.machine.now())
        return True

    def measure_speed(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> StepTimes:
        """Time steps of `tokens`. On a GPU, start with one sequence and take four times as many until the GPU is
        busy."""
        if not candidate.hardware.is_cuda:
            return self.machine.time_steps(candidate, tokens, threads, seconds)
        length, rows = candidate.config.max_seq_len, 1
        limit = self.find_fitting_rows(candidate, max(1, MAX_TIMED_STEP_TOKENS // length))
        one = steps = self.machine.time_steps(candidate, length, threads, seconds)
        while 4 * rows <= limit:
            rows *= 4
            before, steps = steps, self.machine.time_steps(candidate, rows * length, threads, seconds)
            if 4 * steps.per_token > 2 * before.per_token:  # four times the tokens took more than twice the time
                break
        return steps._replace(min_pass=length * one.per_token)

    def compile_best(self, choice: Choice) -> bool:
        """On a GPU, compile the choice as the training will, and time it. Skip a candidate that was compiled before,
        and a second one that takes too long. Return whether it was tried."""
        candidate = choice.candidate
        takes = self.compile_time(candidate)
        if not (candidate.hardware.is_cuda and choice.compiles) or candidate.flops in self.compiled_ratios:
            return False
        is_too_long = takes > TIMING_SHARE * 60 * self.requested.minutes
        if self.compiled_ratios and (is_too_long or len(self.compiled_ratios) == MAX_COMPILED_CANDIDATES):
            return False
        config = self.build_config(choice)
        final = self.build_candidate(config)
        forecast = self.interpolate_times(candidate, True)[0].scaled(1 / self.compiled_share(candidate))
        self.compiled_ratios[candidate.flops] = 1.0
        took = self.attempt(partial(self.machine.compile, final, choice.rows, CANDIDATE_SECONDS))
        if took is not None:  # None: the training will take a smaller micro-batch
            self.compile_time_ratio *= took[0] / takes
            expected = forecast._replace(update=0.0).step_seconds(choice.rows * config.max_seq_len, 1)
            self.compiled_ratios[candidate.flops] = took[1] / expected
        return True

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns, or None if memory runs out. Free its memory."""
        try:
            with suppress_out_of_memory():
                return work()
            return None
        finally:
            self.machine.free()

    def interpolate_times(self, candidate: Candidate, compiles: bool) -> tuple[StepTimes, int]:
        """Return a candidate's step times with the fastest number of threads, and that number. Times are interpolated
        between timed candidates by FLOPs per token, and scaled beyond the largest and smallest."""
        found = []
        for threads, timed in self.step_times.items():
            sizes = sorted(timed)
            values = (np.interp(candidate.flops, sizes, column) for column in zip(*map(timed.get, sizes), strict=True))
            steps = StepTimes(*map(float, values)).scaled(max(1, candidate.flops / sizes[-1]))
            found.append((steps._replace(per_token=steps.per_token * min(1, candidate.flops / sizes[0])), threads))
        handicap = {threads: FEWER_THREADS_SPEEDUP if threads < DEFAULT_THREADS else 1.0 for threads in self.step_times}
        steps, threads = min(found, key=lambda entry: entry[0].per_token * handicap[entry[1]])
        if compiles and candidate.hardware.is_cuda:
            ratio = self.compiled_share(candidate) * GPU_COMPILED_PASS_RATIO
            return steps._replace(min_pass=ratio * steps.min_pass, per_token=ratio * steps.per_token), threads
        return steps.scaled(1 - CPU_COMPILE_SAVING if compiles else 1.0), threads

    def compiled_share(self, candidate: Candidate) -> float:
        """Return the time of compiled passes relative to their forecast: measured for this candidate, else for the last
        one that was compiled."""
        return self.compiled_ratios.get(candidate.flops, [1.0, *self.compiled_ratios.values()][-1])

    def find_best_within(self, minutes: float) -> Choice:
        """Return the candidate with the lowest loss after `minutes`."""
        choices = [
            self.plan_run(candidate, minutes, compiles)
            for candidate in self.candidates
            for compiles in self.compile_options(candidate)
        ]
        return min(
            choices, key=lambda choice: (max(0, MIN_STEPS - choice.steps), round(choice.loss, 4), choice.seconds)
        )

    def compile_options(self, candidate: Candidate) -> list[bool]:
        """Return whether to consider training uncompiled, compiled or both. On a GPU the better one is chosen."""
        config, hardware = candidate.config, candidate.hardware
        if hardware.is_cuda:
            return [False, True] if hardware.compiles and config.compile == "auto" else [hardware.compiles]
        forecast = Forecast(0, 0, 0, self.interpolate_times(candidate, False)[0].cpu_share)
        units = Units.of(hardware.device)
        return [choose_compile(replace(config, forecast=forecast), candidate.model.config, units)[0]]

    def plan_run(self, candidate: Candidate, minutes: float, compiles: bool, time_factor: float = 1.0) -> Choice:
        """Forecast a candidate's run of `minutes` with step times multiplied by `time_factor`.

        Starts with the recipe's step size, and doubles it while the useful passes do not fit and the device is not yet
        busy.
        """
        speed, _ = self.interpolate_times(candidate, compiles)
        busy_tokens, step_tokens = speed.min_pass / speed.per_token, 0.0
        while True:
            choice = self.plan_with_step(candidate, minutes, compiles, time_factor, min(busy_tokens, 2 * step_tokens))
            before, step_tokens = step_tokens, choice.sequences * choice.shape.max_seq_len
            if choice.reads_all or not before < step_tokens < busy_tokens:
                return choice

    def plan_with_step(
        self, candidate: Candidate, minutes: float, compiles: bool, time_factor: float, min_step_tokens: float
    ) -> Choice:
        """Forecast a run with steps of at least `min_step_tokens`."""
        text, (speed, threads) = self.text, self.interpolate_times(candidate, compiles)
        before = self.machine.now() - self.started + self.tokenizing_seconds
        before += compiles * self.compile_time(candidate, speed.cpu_share)
        seconds = max(1.0, 60 * minutes - before) * (1 - EVALUATING_SHARE)
        letters, letters_per_byte = TRAIN_SHARE * text.letters, text.letters / text.bytes
        earlier = self.tokens_seen / text.train_tokens  # passes before this run
        limit = max(1, useful_passes(candidate.block_parameters, letters) - round(earlier))
        own_tokens = TRAIN_SHARE * self.own_tokens if self.own_text else 0.0
        without_dropout = PASSES_WITHOUT_DROPOUT * text.train_tokens
        is_timed_with_dropout = candidate.hardware.is_cuda or self.requested.is_explicit("dropout")
        dropout_slowdown = 1.0 if is_timed_with_dropout else CPU_DROPOUT_SLOWDOWN
        shape, sequences, tokens = self.shapes[candidate], 1, math.inf
        for _ in range(LENGTH_ROUNDS):  # the step size depends on the length of the run, which depends on the step size
            if tokens < math.inf:
                shape = self.with_context(candidate, tokens)
                sequences = self.choose_step_sequences(shape.max_seq_len, tokens, min_step_tokens)
            rows = self.find_fitting_rows(candidate, sequences, compiles) or 1
            step_tokens = sequences * shape.max_seq_len
            step_seconds = time_factor * speed.step_seconds(step_tokens, math.ceil(sequences / rows))
            in_time = seconds / step_seconds * step_tokens
            in_time = min(in_time, max(without_dropout, in_time / dropout_slowdown))
            of_own = min(OWN_PASSES * own_tokens, MAX_LAST_PART / 2 * in_time)
            tokens = max(1.0, min(in_time, limit * text.train_tokens + of_own))
        step_seconds *= dropout_slowdown if tokens > without_dropout else 1.0
        passes = (tokens - of_own) / text.train_tokens
        loss = letters_per_byte * text.difficulty * expected_loss(candidate.block_parameters, letters, earlier + passes)
        error = letters_per_byte * expected_error(candidate.block_parameters, letters, text.difficulty_error)
        if time_factor == 1 and speed.scatter:
            error += self.plan_run(candidate, minutes, compiles, 1 + speed.scatter).loss - loss
        run_seconds = before + tokens * step_seconds / step_tokens / (1 - EVALUATING_SHARE)
        return Choice(
            candidate, shape, sequences, rows, compiles, threads, speed.cpu_share, step_tokens / step_seconds,
            int(tokens / step_tokens), passes, limit, of_own / max(1.0, own_tokens), run_seconds, loss, error,
        )  # fmt: skip

    def compile_time(self, candidate: Candidate, cpu_share: float = 1.0) -> float:
        """Return the seconds that compiling a candidate takes, fewer if it was compiled before."""
        again = RECOMPILE_SHARE if candidate.flops in self.compiled_ratios else 1.0
        return again * self.compile_time_ratio * self.machine.expected_compile_seconds(candidate, cpu_share)

    def with_context(self, candidate: Candidate, tokens: float) -> Shape:
        """Return the shape with the context for a run of `tokens`."""
        shape, length = self.shapes[candidate], candidate.config.max_seq_len
        if not self.requested.is_explicit("max_seq_len"):
            length = choose_context(shape, tokens, MIN_HELD_OUT_SHARE * self.own_tokens)
        return shape._replace(max_seq_len=length)

    def choose_step_sequences(self, max_seq_len: int, tokens: float, busy: float) -> int:
        """Return the sequences per step, within the flags, for a run of `tokens`. `busy`: the least tokens per step."""
        requested = self.requested
        if requested.is_explicit("batch_size"):
            return requested.sequences_per_step
        sequences = max(choose_sequences(tokens, max_seq_len, busy), requested.micro_batch_size or 1)
        return requested.gradient_accumulation_steps * math.ceil(sequences / requested.gradient_accumulation_steps)

    def build_settings(self, shape: Shape) -> dict[str, Any]:
        keys = self.keys | shape._asdict() | _choose_heads(self.requested, shape.embed_dim)
        keys["zero_init"] = keys.get("zero_init", False) and not self.requested.tie_embeddings
        keys["batch_size"] = max(keys["batch_size"], self.requested.micro_batch_size or 1)
        if self.requested.input and self.requested.tokenizer == "bpe":
            keys["vocab_size"] = self.text.vocab_size
        if self.requested.input and self.requested.input.startswith(HUB):
            keys["max_mb"] = self.text.bytes / 1e6
        return keys

    def build_config(self, choice: Choice) -> Config:
        """Return the configuration of a choice; flags win."""
        batch_size = choice.sequences // self.requested.gradient_accumulation_steps
        windows = self.own_tokens * (1 - TRAIN_SHARE) / choice.shape.max_seq_len
        in_time = EVALUATING_SHARE / FORWARD_SHARE * choice.steps * choice.sequences / EVALUATIONS
        embed_dim, step_tokens = choice.candidate.config.embed_dim, choice.sequences * choice.shape.max_seq_len
        keys = self.build_settings(choice.shape) | choose_settings(embed_dim, step_tokens, choice.passes)
        keys |= {
            "batch_size": batch_size,
            "epochs": self.limit_epochs(choice),
            "eval_interval": max(1, choice.steps // EVALUATIONS),
            "eval_batches": 0 if windows <= in_time else max(1, int(in_time / batch_size)),
        }
        if self.requested.init_from:
            keys["warmup_steps"] = int(WARMUP_SHARE * choice.steps)
            keys |= {rate: REWARM_PEAK * keys[rate] for rate in ("learning_rate", "muon_learning_rate")}
        if "max_mb" in keys:
            keys["max_mb"] = math.ceil(min(1, DOWNLOAD_MARGIN * choice.passes) * keys["max_mb"])
        if choice.threads < DEFAULT_THREADS and not self.requested.threads:
            keys["threads"] = choice.threads
        if choice.candidate.hardware.is_cuda and choice.candidate.hardware.compiles and not choice.compiles:
            keys["compile"] = "off"
        return parse_config(self.argv, keys, CHOSEN)

    def limit_epochs(self, choice: Choice) -> int:
        """Return the epochs after which another would not help. With a companion they are its passes, in whose time
        one's own text is read, too."""
        if not self.own_text:
            return choice.useful_passes
        tokens = choice.steps * choice.sequences * choice.shape.max_seq_len
        return choice.useful_passes + math.ceil(tokens / self.text.train_tokens - choice.passes)

    def advice(self) -> str:
        """Return advice on using the minutes that are left."""
        if not self.requested.input or self.text.is_chat or self.requested.init_from:
            return (
                "Reading this text again would not help. Add text, or start from a pretrained model (docs/recipes.md): "
                "python tools/import_hf.py openai-community/gpt2 pretrained/gpt2"
            )
        command = shlex.join(["python", "train_colab_mmap.py", *(sys.argv[1:] if self.argv is None else self.argv)])
        return (
            f'To use it, train on books first:\n           {command} --companion "{SUGGESTED_COMPANION}"\n'
            "           Other text to begin with, and a pretrained model: docs/recipes.md"
        )

    def print_choice(self, choice: Choice, dropout: float, alone: float | None = None) -> None:
        """Print the text, the choice, the forecast, and the forecasts for half and twice the minutes; with a companion
        the forecast without it, `alone`, instead."""
        shape, model, text, minutes = choice.shape, choice.candidate.config, self.text, self.requested.minutes
        why = f"the lowest forecast loss of {len(self.shapes)} sizes on this machine"
        if len(self.shapes) == 1:
            why = "the size of these weights" if self.requested.init_from else "the only size these flags allow here"
        hardware = choice.candidate.hardware
        memory = choice.candidate.memory(choice.sequences, choice.rows, choice.compiles)
        memory += 0 if hardware.is_cuda else PROCESS_BYTES
        limit = "another pass would not help" if choice.reads_all else "as often as the time allows"
        is_like_measured = is_measured(choice.candidate.block_parameters, TRAIN_SHARE * text.letters)
        guess = (
            ""
            if is_like_measured and text.difficulty_error < MAX_KNOWN_DIFFICULTY_ERROR
            else "; a guess, as no run like it was measured"
        )
        own = notes = spare = others = ""
        reading = f"the text {choice.passes:.2g} times, {limit}"
        if self.own_text:
            own = f"Text       {self.own_text.name}: {byte_size(self.own_text.bytes)}\n"
            reading = f"{text.name} {choice.passes:.2g} times and {self.own_text.name} {choice.own_passes:.2g} times"
            others = f"Alone      {alone:.2f} bits per byte, without the companion\n"
        else:
            half, double = (
                f"{plural(length, 'minute')}: {self.find_best_within(length).loss:.2f}"
                for length in (minutes / 2, minutes * 2)
            )
            others = f"With       {half}, with {double}\n"
        if 2 * choice.seconds <= 60 * minutes and not self.own_text:
            spare = f"Time left  {duration(60 * minutes - choice.seconds)}. {self.advice()}\n"
        if choice.threads < DEFAULT_THREADS and not self.requested.threads:
            notes = "Threads    1: other programs use this CPU, so more threads would be slower\n"
        if 2 * self.tokenizing_seconds > 60 * minutes:
            takes = f"about {duration(self.tokenizing_seconds)} of the {minutes:g} minutes"
            notes += f"Note       tokenizing takes {takes}. Part of the text would be enough\n"
        size = byte_size(text.bytes) if text.is_tokenized else f"about {byte_size(text.bytes)}"
        print(
            f"{own}{'Companion' if own else 'Text':<10} {text.name}: {size} of "
            f"{'conversations' if text.is_chat else 'text'} in {plural(text.files, 'file')}, about {text.tokens:,.0f} "
            f"tokens of a vocabulary of {text.vocab_size:,}\n"
            f"Choice     {model.num_layers} layers x {model.embed_dim}, context {shape.max_seq_len}: {why}\n"
            f"{notes}"
            f"Expected   {choice.loss:.2f} bits per byte{f' on {self.own_text.name}' if self.own_text else ''} "
            f"({max(0.0, choice.loss - choice.error):.2f} to {choice.loss + choice.error:.2f}) after "
            f"{duration(choice.seconds)}, with about {byte_size(memory)} of memory{guess}\n"
            f"Reading    {reading}{f', with dropout {dropout:g}' if dropout else ''}\n"
            f"{spare}"
            f"{others}",
            end="",
        )
