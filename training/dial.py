"""The dial: for `--input TEXT --minutes N` without a config, choose vocabulary, model, step and epochs by the text, the
time and this machine, and say what to expect.

Models and their settings come from recipe.py, the loss from a law: docs/choosing.md.
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

from common.errors import ConfigError, MemoryExhausted
from common.output import byte_size, duration, log
from common.script import world
from tokenization.held_out import FURTHEST
from tokenization.settings import HUB
from training.config import Config, Forecast, parse_config
from training.data import GPU_SHARE
from training.growth import PEAK, WARMUP_SHARE, Growth, find_growth, kept_choice
from training.hardware import (
    ALL_THREADS,
    COMPILED_PASS,
    CPU_COMPILE_SAVES,
    CPU_DROPOUT_TAKES,
    CPU_FLOPS_PER_CORE,
    Units,
    choose_compile,
)
from training.law import expected_error, expected_loss, is_measured, useful_passes
from training.memory import MEMORY_SHARE, PROCESS_BYTES, attempt
from training.recipe import (
    HEAD_WIDTH,
    LADDER,
    OWN_PASSES,
    OWN_START_SHARE,
    PASSES_WITHOUT_DROPOUT,
    Shape,
    context_for,
    recipe,
    sequences_for,
    settings_for,
)
from training.text import TRAIN_SHARE, Text, measure_text, measure_tokens, vocabulary_for
from training.timing import FEWEST_TIMED, Candidate, Machine, Timed

T = TypeVar("T")
SOURCE = "the dial"  # of the values that it chose, in config.json
EVALUATIONS, EVALUATING_SHARE = 20, 0.05  # of the time
FORWARD_SHARE = 1 / 3  # of the time of a token in training
EPOCHS_TO_SPARE = 3  # times those that the time is thought to hold, for it may hold more
PART_TO_SPARE = 1.5  # times the part of a text on the hub that the time is thought to hold

FIRST_BYTES = 1e7  # of text, for whose vocabulary models are timed first
TIMED_SHARE = 0.05  # of the minutes
ANNOUNCED_SECONDS = 5.0
TIMED_SECONDS = 1.0  # of a candidate's steps
TIMED_TOKENS, MAX_TIMED_TOKENS = 2048, 65_536  # of a step; on a GPU, as many as keep it busy
MAX_COMPILED = 2  # candidates
ROUNDS = 4
AGAIN = 0.25  # of the time to compile, when it is compiled again
MOST_FASTER = 2.0  # times as many operations a second as the model before it; larger ones use a machine better
FEWER_THREADS = 1.1  # times as fast they have to be, to be chosen

LEAST_HELD_OUT = (1 - TRAIN_SHARE) / FURTHEST  # share of a small text's tokens that are held out

COMPANIONS = (  # sizes and licences: docs/recipes.md
    ("books", "hf://datasets/manu/project_gutenberg/data/en-*.parquet"),
    ("text of the web", "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet"),
    ("plain stories with dialogue", "hf://datasets/roneneldan/TinyStories/data/*.parquet"),
)

MUCH_DOUBT = 0.3  # bits per letter; what differs so much from an English book was not measured
FEWEST_STEPS = 50  # a model that takes fewer has hardly begun to learn


def choose(argv: Sequence[str] | None, requested: Config, started: float) -> Config:
    """Choose the configuration for `requested`, which names a text and no model. Flags win, and a run that is there
    keeps its choice. `started`: the time.perf_counter() at which the minutes began.

    Raises ConfigError without minutes, MemoryExhausted if nothing fits, DataError if the text cannot be read or is too
    short.
    """
    if not requested.minutes:
        raise ConfigError(
            f"--input {requested.input} alone does not say how long to train. With --minutes 60, say, the model, its "
            "vocabulary and the number of epochs are chosen for this text and this machine; --config names them."
        )
    kept, forecast = kept_choice(requested, SOURCE)
    if kept:
        config = replace(parse_config(argv, kept, SOURCE), forecast=forecast)
        growth = find_growth(config)
        return config if growth is None else go_on(argv, config, growth, started)
    if world().size > 1:
        raise ConfigError(
            "--input and --minutes alone choose the model in one process. Run the command without torchrun first, with "
            "--dry_run, and give torchrun the size that it names, as flags."
        )
    return Dial(argv, measure_text(requested), requested, started=started).chosen()


def go_on(argv: Sequence[str] | None, config: Config, growth: Growth, started: float) -> Config:
    """Choose the length, the step and the rates of a run that goes on from the weights of `config`, whose shape and
    vocabulary stay, on the text as it is now."""
    print(growth.describe())
    keys = growth.keys(config)
    text = measure_tokens(replace(config, data_dir=str(growth.now.path.parent)))._replace(name=str(config.input))
    dial = Dial(argv, text, parse_config(argv, keys, SOURCE), keys=recipe() | keys, started=started)
    dial.read = growth.read
    return dial.chosen()


class Choice(NamedTuple):
    """What a candidate comes to in a time."""

    candidate: Candidate
    shape: Shape  # with the context
    sequences: int  # of a step
    rows: int  # of a micro-batch
    compiles: bool
    threads: int
    cpu_share: float
    tokens_per_second: float
    steps: int
    passes: float
    useful_passes: int
    seconds: float
    loss: float
    error: float  # the interval reaches as far on both sides

    @property
    def reads_all(self) -> bool:
        """Whether the text is read as often as it is worth. `passes` went through divisions and is rounded."""
        return self.passes > self.useful_passes - 0.01


class Dial:
    """The candidates, and what is known of their speeds on a machine."""

    def __init__(
        self,
        argv: Sequence[str] | None,
        text: Text,
        requested: Config,
        machine: Machine | None = None,
        keys: dict[str, Any] | None = None,
        started: float | None = None,
    ):
        self.argv, self.text, self.requested = argv, text, requested
        self.machine = machine or Machine()
        self.keys = keys or recipe()
        self.ladder: Sequence[Shape] = LADDER
        self.read = 0  # tokens that the weights have learned from
        self.own: Text | None = None  # a text that is read after this one, in the same minutes
        self.most_passes = 10**6
        if requested.init_from:
            self.ladder = [Shape(requested.num_layers, requested.embed_dim, requested.max_seq_len)]
        self.started = self.machine.now() if started is None else started
        is_of_hub = bool(requested.input and requested.input.startswith(HUB))  # of which only a part is read
        self.tokenizing = 0.0 if text.is_tokenized or is_of_hub else self.machine.tokenizing_seconds(text.bytes)
        self.first_timed = math.inf  # when the first was; before, a GPU had to be started
        # by the threads, and by the floating-point operations of a token
        self.timed: dict[int, dict[int, Timed]] = {count: {} for count in self.machine.thread_counts(requested)}
        self.compiled: dict[int, float] = {}  # of those that were: their time, a share of the forecast
        self.compiling = 1.0  # how long compiling took, a share of the forecast
        self.chooses_vocabulary = (
            requested.input
            and requested.tokenizer == "bpe"
            and not (requested.is_explicit("vocab_size") or requested.init_from)
        )
        if self.chooses_vocabulary:  # timing a large one may take the minutes of a slow machine
            self.text = text.with_vocabulary(vocabulary_for(min(FIRST_BYTES, text.bytes)))
        self.vocabularies = {self.text.vocab_size}  # that were taken
        self.shapes: dict[Candidate, Shape] = {}
        self.make_candidates()

    @property
    def candidates(self) -> list[Candidate]:
        """The ladder, without what the flags make the same and what memory is too small for."""
        return list(self.shapes)

    def make_candidates(self) -> None:
        self.shapes = {}
        for shape in self.ladder:
            candidate = self.candidate(parse_config(self.argv, self.keys_of(shape), SOURCE))
            if all(candidate.model.config != other.model.config for other in self.shapes) and self.rows(candidate, 1):
                self.shapes[candidate] = shape
        self.require_candidates()

    def require_candidates(self) -> None:
        if not self.shapes:
            raise MemoryExhausted("Not even the smallest model that these flags allow fits into this machine's memory.")

    def candidate(self, config: Config) -> Candidate:
        return self.machine.candidate(config, self.text.vocab_size, self.text.is_chat)

    def rows(self, candidate: Candidate, sequences: int, compiles: bool = False) -> int:
        """Return how many of the sequences of a step fit into memory at once; 0 if not even one does."""
        hardware, rows = candidate.hardware, min(sequences, self.requested.micro_batch_size or sequences)
        if hardware.memory_bytes is None:
            return rows
        tokens, on_gpu = 2 * self.text.tokens, hardware.is_cuda and self.requested.placement in ("auto", "gpu")
        held = tokens if on_gpu and tokens <= GPU_SHARE * hardware.memory_bytes else 0
        while rows and candidate.memory(sequences, rows, compiles) > MEMORY_SHARE * hardware.memory_bytes - held:
            rows //= 2
        return rows

    def chosen(self) -> Config:
        """Choose, print the choice, and return it as a configuration with what to expect."""
        choice = self.choice()
        config = self.config_of(choice)
        self.print_choice(choice, config.dropout)
        forecast = Forecast(choice.loss, choice.error, choice.tokens_per_second, choice.cpu_share)
        return replace(config, forecast=forecast)

    def choice(self) -> Choice:
        """Time the smallest, the best so far and the next larger, which uses the machine better; on a GPU, compile the
        best. Return the best."""
        if TIMED_SHARE * 60 * self.requested.minutes > ANNOUNCED_SECONDS:
            at_most = duration(TIMED_SHARE * 60 * self.requested.minutes)
            log.info(f"Timing     this machine with models of several sizes, for about {at_most} at most ...")
        self.time(self.candidates[0])
        while True:
            choice = self.best(self.requested.minutes)
            if self.takes_other_vocabulary(choice):
                continue
            number = self.candidates.index(choice.candidate)
            larger = [each for each in self.candidates[number + 1 : number + 2] if self.may_be_best(each, choice)]
            if any(self.time(candidate) for candidate in (*larger, choice.candidate)):
                continue
            if not self.compile(choice):
                return choice

    def may_be_best(self, candidate: Candidate, choice: Choice) -> bool:
        """Return whether a candidate would be better than the choice if it used the machine MOST_FASTER times as well
        as it is expected to."""
        forms, minutes = self.forms(candidate), self.requested.minutes
        return any(self.outcome(candidate, minutes, form, 1 / MOST_FASTER).loss < choice.loss for form in forms)

    def takes_other_vocabulary(self, choice: Choice) -> bool:
        """Take the vocabulary for as much of the text as the choice reads, unless it was taken before. Returns whether
        it did."""
        vocabulary = vocabulary_for(min(1.0, choice.passes) * self.text.bytes)
        if not self.chooses_vocabulary or vocabulary.size in self.vocabularies:
            return False
        self.vocabularies.add(vocabulary.size)
        self.text = self.text.with_vocabulary(vocabulary)
        self.make_candidates()
        return True

    def time(self, candidate: Candidate) -> bool:
        """Time steps of a candidate, unless that was done or takes more than its share of the minutes. If memory runs
        out, drop it and all larger ones. Returns whether it was tried."""
        share = TIMED_SHARE * 60 * self.requested.minutes
        left = share - max(0.0, self.machine.now() - self.first_timed)
        of_all = self.timed[next(iter(self.timed))]
        if candidate.flops in of_all:
            return False
        length = candidate.config.max_seq_len
        tokens: float = length * self.rows(candidate, max(1, TIMED_TOKENS // length))
        if of_all and left < FEWEST_TIMED * len(self.timed) * self.speed(candidate, False)[0].step(tokens, 1):
            return False
        if not of_all and not candidate.hardware.is_cuda:  # nothing is known yet, and --max_seq_len may be huge
            tokens = min(tokens, share / 2 * CPU_FLOPS_PER_CORE / candidate.flops)
        seconds = min(TIMED_SECONDS, share / 3 / len(self.timed))
        for threads, timed in self.timed.items():
            steps = self.attempt(candidate, partial(self.measured, candidate, tokens, threads, seconds))
            if steps is None:
                self.shapes = {other: shape for other, shape in self.shapes.items() if other.flops < candidate.flops}
                self.require_candidates()
                return True
            timed[candidate.flops] = steps
        self.first_timed = min(self.first_timed, self.machine.now())
        return True

    def measured(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> Timed:
        """Time steps of so many tokens. On a GPU, time one sequence, which may be as fast as many, then more and more
        until the GPU is busy."""
        if not candidate.hardware.is_cuda:
            return self.machine.time_steps(candidate, tokens, threads, seconds)
        length, rows = candidate.config.max_seq_len, 1
        limit = self.rows(candidate, max(1, MAX_TIMED_TOKENS // length))
        one = steps = self.machine.time_steps(candidate, length, threads, seconds)
        while 4 * rows <= limit:
            rows *= 4
            before, steps = steps, self.machine.time_steps(candidate, rows * length, threads, seconds)
            if 4 * steps.token > 2 * before.token:  # four times the tokens took more than twice the time
                break
        return steps._replace(least=length * one.token)

    def compile(self, choice: Choice) -> bool:
        """On a GPU, compile a choice as the training will, and time it. Skip what was compiled before, and a second one
        that takes too long. Returns whether it was tried."""
        candidate = choice.candidate
        takes = self.compile_time(candidate)
        if not (candidate.hardware.is_cuda and choice.compiles) or candidate.flops in self.compiled:
            return False
        if self.compiled and (len(self.compiled) == MAX_COMPILED or takes > TIMED_SHARE * 60 * self.requested.minutes):
            return False
        config = self.config_of(choice)
        final = self.candidate(config)
        forecast = self.speed(candidate, True)[0].times(1 / self.of_forecast(candidate))
        self.compiled[candidate.flops] = 1.0
        took = self.attempt(candidate, partial(self.machine.compile, final, choice.rows, TIMED_SECONDS))
        if took is not None:  # else the training takes a smaller micro-batch
            self.compiling *= took[0] / takes
            expected = forecast._replace(update=0.0).step(choice.rows * config.max_seq_len, 1)
            self.compiled[candidate.flops] = took[1] / expected
        return True

    def attempt(self, candidate: Candidate, work: Callable[[], T]) -> T | None:
        """Return what `work` returns, or None if memory runs out; free its memory."""
        try:
            with attempt(candidate.hardware.device):
                return work()
            return None
        finally:
            self.machine.free(candidate)

    def speed(self, candidate: Candidate, compiles: bool) -> tuple[Timed, int]:
        """Return a candidate's steps with the fastest number of threads: as timed, interpolated between two that were
        timed, or scaled from the largest or smallest by floating-point operations."""
        found = []
        for threads, timed in self.timed.items():
            sizes = sorted(timed)
            values = (np.interp(candidate.flops, sizes, column) for column in zip(*map(timed.get, sizes), strict=True))
            steps = Timed(*map(float, values)).times(max(1, candidate.flops / sizes[-1]))
            found.append((steps._replace(token=steps.token * min(1, candidate.flops / sizes[0])), threads))
        steps, threads = min(found, key=lambda one: one[0].token * (FEWER_THREADS if one[1] < ALL_THREADS else 1.0))
        if compiles and candidate.hardware.is_cuda:
            share = self.of_forecast(candidate)
            faster = share * COMPILED_PASS
            return steps._replace(least=faster * steps.least, token=faster * steps.token), threads
        return steps.times(1 - CPU_COMPILE_SAVES if compiles else 1.0), threads

    def of_forecast(self, candidate: Candidate) -> float:
        """Return the time of compiled passes as a share of their forecast: this candidate's, or that of the last one
        compiled."""
        return self.compiled.get(candidate.flops, [1.0, *self.compiled.values()][-1])

    def best(self, minutes: float) -> Choice:
        """Return the candidate with the lowest loss after so many minutes."""
        outcomes = [
            self.outcome(candidate, minutes, form) for candidate in self.candidates for form in self.forms(candidate)
        ]
        return min(outcomes, key=lambda one: (max(0, FEWEST_STEPS - one.steps), round(one.loss, 4), one.seconds))

    def forms(self, candidate: Candidate) -> list[bool]:
        """Return whether it may be trained uncompiled, compiled, or both: on a GPU, the better one is chosen."""
        config, hardware = candidate.config, candidate.hardware
        if hardware.is_cuda:
            return [False, True] if hardware.compiles and config.compile == "auto" else [hardware.compiles]
        forecast = Forecast(0, 0, 0, self.speed(candidate, False)[0].cpu_share)
        units = Units.of(hardware.device)
        return [choose_compile(replace(config, forecast=forecast), candidate.model.config, units)[0]]

    def outcome(self, candidate: Candidate, minutes: float, compiles: bool, slower: float = 1.0) -> Choice:
        """Return what a candidate comes to in so many minutes, on a machine that is `slower` times as slow as timed.

        The step is the recipe's. While the passes that are worth it do not fit, it is doubled, up to what keeps the
        device busy.
        """
        speed, _ = self.speed(candidate, compiles)
        most, of_step = speed.least / speed.token, 0.0
        while True:
            choice = self.planned(candidate, minutes, compiles, slower, min(most, 2 * of_step))
            before, of_step = of_step, choice.sequences * choice.shape.max_seq_len
            if choice.reads_all or not before < of_step < most:
                return choice

    def planned(
        self, candidate: Candidate, minutes: float, compiles: bool, slower: float, least_step_tokens: float
    ) -> Choice:
        """Return the same with steps of at least `least_step_tokens`."""
        text, (speed, threads) = self.text, self.speed(candidate, compiles)
        before = self.machine.now() - self.started + self.tokenizing
        before += compiles * self.compile_time(candidate, speed.cpu_share)
        own_start = OWN_START_SHARE * 60 * minutes if self.own else 0.0
        seconds = max(1.0, 60 * minutes - own_start - before) * (1 - EVALUATING_SHARE)
        letters, of_a_byte = TRAIN_SHARE * text.letters, text.letters / text.bytes
        earlier = self.read / text.train_tokens  # passes
        limit = max(1, min(useful_passes(candidate.block_parameters, letters) - round(earlier), self.most_passes))
        reserved = OWN_PASSES * TRAIN_SHARE * self.own.letters * text.tokens / text.letters if self.own else 0.0
        without_dropout = PASSES_WITHOUT_DROPOUT * text.train_tokens
        timed_so = candidate.hardware.is_cuda or self.requested.is_explicit("dropout")
        dropout_takes = 1.0 if timed_so else CPU_DROPOUT_TAKES
        shape, sequences, tokens = self.shapes[candidate], 1, math.inf
        for _ in range(ROUNDS):  # a step is as large as the run is long, and the run as long as the step is fast
            if tokens < math.inf:
                shape = self.with_context(candidate, tokens)
                sequences = self.sequences(shape.max_seq_len, tokens, least_step_tokens)
            rows, of_step = self.rows(candidate, sequences, compiles) or 1, sequences * shape.max_seq_len
            step = slower * speed.step(of_step, math.ceil(sequences / rows))
            in_time = seconds / step * of_step
            in_time = min(in_time, max(without_dropout, in_time / dropout_takes))
            in_time -= min(reserved, in_time / 2)
            tokens = max(1.0, min(in_time, limit * text.train_tokens))
        step *= dropout_takes if tokens > without_dropout else 1.0
        passes = tokens / text.train_tokens
        loss = of_a_byte * text.difficulty * expected_loss(candidate.block_parameters, letters, earlier + passes)
        error = of_a_byte * expected_error(candidate.block_parameters, letters, text.doubt)
        if slower == 1 and speed.scatter:
            error += self.outcome(candidate, minutes, compiles, 1 + speed.scatter).loss - loss
        took = before + tokens * step / of_step / (1 - EVALUATING_SHARE)
        return Choice(
            candidate, shape, sequences, rows, compiles, threads, speed.cpu_share, of_step / step,
            int(tokens / of_step), passes, limit, took, loss, error,
        )  # fmt: skip

    def compile_time(self, candidate: Candidate, cpu_share: float = 1.0) -> float:
        """Return the seconds that compiling it will take; fewer if it was compiled before."""
        again = AGAIN if candidate.flops in self.compiled else 1.0
        return again * self.compiling * self.machine.expected_compile(candidate, cpu_share)

    def with_context(self, candidate: Candidate, tokens: float) -> Shape:
        """Return the shape with the context for a run of so many tokens."""
        shape, length = self.shapes[candidate], candidate.config.max_seq_len
        if not self.requested.is_explicit("max_seq_len"):
            length = context_for(shape, tokens, LEAST_HELD_OUT * self.text.tokens)
        return shape._replace(max_seq_len=length)

    def sequences(self, max_seq_len: int, tokens: float, busy: float) -> int:
        """Return the sequences of a step, as the flags allow them, in a run of so many tokens. `busy`: tokens of a step
        that keep the device busy."""
        requested = self.requested
        if requested.is_explicit("batch_size"):
            return requested.sequences_per_step
        sequences = max(sequences_for(tokens, max_seq_len, busy), requested.micro_batch_size or 1)
        return requested.gradient_accumulation_steps * math.ceil(sequences / requested.gradient_accumulation_steps)

    def keys_of(self, shape: Shape) -> dict[str, Any]:
        width = self.requested.embed_dim if self.requested.is_explicit("embed_dim") else shape.embed_dim
        heads = next(count for count in range(max(1, width // HEAD_WIDTH), 0, -1) if width % count == 0)
        keys = self.keys | shape._asdict() | {"num_heads": heads}
        keys["batch_size"] = max(keys["batch_size"], self.requested.micro_batch_size or 1)
        if self.requested.input and self.requested.tokenizer == "bpe":
            keys["vocab_size"] = self.text.vocab_size
        if self.requested.input and self.requested.input.startswith(HUB):
            keys["max_mb"] = self.text.bytes / 1e6
        return keys

    def config_of(self, choice: Choice) -> Config:
        """Return the configuration of a choice, with the flags, which win."""
        batch_size = choice.sequences // self.requested.gradient_accumulation_steps
        windows = self.text.tokens * (1 - TRAIN_SHARE) / choice.shape.max_seq_len
        in_time = EVALUATING_SHARE / FORWARD_SHARE * choice.steps * choice.sequences / EVALUATIONS
        embed_dim, of_step = choice.candidate.config.embed_dim, choice.sequences * choice.shape.max_seq_len
        keys = self.keys_of(choice.shape) | settings_for(embed_dim, of_step, choice.passes)
        keys |= {
            "batch_size": batch_size,
            "epochs": max(1, min(choice.useful_passes, math.ceil(EPOCHS_TO_SPARE * choice.passes))),
            "eval_interval": max(1, choice.steps // EVALUATIONS),
            "eval_batches": 0 if windows <= in_time else max(1, int(in_time / batch_size)),
        }
        if self.requested.init_from:
            keys["warmup_steps"] = int(WARMUP_SHARE * choice.steps)
            keys |= {rate: PEAK * keys[rate] for rate in ("learning_rate", "muon_learning_rate")}
        if "max_mb" in keys:
            keys["max_mb"] = math.ceil(min(1, PART_TO_SPARE * choice.passes) * keys["max_mb"])
        if choice.threads < ALL_THREADS and not self.requested.threads:
            keys["threads"] = choice.threads
        if choice.candidate.hardware.is_cuda and choice.candidate.hardware.compiles and not choice.compiles:
            keys["compile"] = "off"
        return parse_config(self.argv, keys, SOURCE)

    def advice(self) -> str:
        """Say how the minutes that are left could be used."""
        if not self.requested.input or self.text.is_chat or self.requested.init_from:
            return (
                "More of it brings little. More text would help, or a pretrained model: python tools/import_hf.py "
                "openai-community/gpt2 pretrained/gpt2, and docs/recipes.md"
            )
        command = shlex.join(["python", "train_colab_mmap.py", *(sys.argv[1:] if self.argv is None else self.argv)])
        (_, first), *others = COMPANIONS
        return "\n           ".join(
            [
                "Other text, which a base learns before this one, would use it:",
                f'{command} --companion "{first}"',
                *(f'or, for {kind}: --companion "{address}"' for kind, address in others),
                "Other languages, licences, and a pretrained model: docs/recipes.md",
            ]
        )

    def print_choice(self, choice: Choice, dropout: float) -> None:
        """Print the text, the choice and why, what to expect, and what other minutes would bring."""
        shape, text, minutes = choice.shape, self.text, self.requested.minutes
        others = ", ".join(
            f"{other:g} minute{'s' * (other != 1)}: {self.best(other).loss:.2f}" for other in (minutes / 2, minutes * 2)
        )
        why = f"of {len(self.shapes)} sizes the one with the lowest loss in this time, on this machine"
        if len(self.shapes) == 1:
            why = f"the only size that {'these weights have' if self.requested.init_from else 'the flags leave here'}"
        hardware = choice.candidate.hardware
        memory = choice.candidate.memory(choice.sequences, choice.rows, choice.compiles)
        memory += 0 if hardware.is_cuda else PROCESS_BYTES
        limit = "nothing more is gained then" if choice.reads_all else "all that the time allows"
        likely = is_measured(choice.candidate.block_parameters, TRAIN_SHARE * text.letters) and text.doubt < MUCH_DOUBT
        busy = spare = ""
        of_text, instead = (f" of {text.name}", "") if self.own else ("", f"Instead    {others}\n")
        if 2 * choice.seconds <= 60 * minutes and not self.own:
            spare = f"Time left  {duration(60 * minutes - choice.seconds)}. {self.advice()}\n"
        if choice.threads < ALL_THREADS and not self.requested.threads:
            busy = "Threads    1 of this CPU: other programs use it, and threads that wait for each other are slower\n"
        if 2 * self.tokenizing > 60 * minutes:
            takes = f"about {duration(self.tokenizing)} of the {minutes:g} minutes"
            busy += f"Note       tokenizing takes {takes}: a part of the text is enough\n"
        print(
            f"Text       {text.name}: {byte_size(text.bytes)} of {'conversations' if text.is_chat else 'text'} in "
            f"{text.files:,} file{'s' * (text.files != 1)}, about {text.tokens:,.0f} tokens of a vocabulary of "
            f"{text.vocab_size:,}\n"
            f"Choice     {shape.num_layers} layers x {shape.embed_dim}, context {shape.max_seq_len}: {why}\n"
            f"{busy}"
            f"Expected   {choice.loss:.2f} bits per byte{of_text} ({max(0.0, choice.loss - choice.error):.2f} to "
            f"{choice.loss + choice.error:.2f}) after {duration(choice.seconds)}, with "
            f"about {byte_size(memory)} of memory"
            f"{'' if likely else '; a guess, for no run like this was measured'}\n"
            f"Reading    the text {choice.passes:.2g} times, {limit}"
            f"{f', with dropout {dropout:g}' if dropout else ''}\n"
            f"{spare}"
            f"{instead}",
            end="",
        )
