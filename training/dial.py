"""The dial: for `--input TEXT --minutes N` without a config, choose vocabulary, model, batch and epochs by the text,
the time and this machine, and say what to expect.

The form is that of configs/small_modern.json, with a recipe for few steps. The loss comes from a law that was fitted to
small runs on CPUs: docs/choosing.md.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import ConfigError, DataError, MemoryExhausted
from common.files import read_json
from common.machine import pick_device
from common.output import byte_size, clock
from common.validation import build
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.corpus import BLOCK_BYTES, find_sources, unpacked_blocks
from tokenization.extract import format_of, readable
from tokenization.metadata import TokenMetadata, metadata_files, read_tokens
from tokenization.settings import Settings
from tokenizer import load_tokenizer
from training.checkpoints.mirror import Mirror
from training.config import REPOSITORY, Config, Forecast, is_resolved, parse_config
from training.machine.hardware import (
    ALL_THREADS,
    CPU_COMPILE_SAVES,
    CPU_FLOPS_PER_CORE,
    Hardware,
    choose_compile,
    compile_seconds,
    detect_hardware,
)
from training.numbers.optimizer import apply_hyperparameters, build_optimizer, gradient_norm, update
from training.plan import text_of
from training.planning.memory import MEMORY_SHARE, PROCESS_BYTES, estimate_memory, without_memory
from training.reports.records import CONFIG

SOURCE = "the dial"  # of the values that it chose, in config.json
LEAST_BYTES = 2_000  # of a text
TIMED_SHAPES, TIMED_SHARE = 3, 0.05  # how many are timed, in which share of the minutes
EVALUATIONS, EVALUATING_SHARE = 20, 0.05  # of the time
TRAIN_SHARE = 0.9  # of the text
FORWARD_SHARE = 1 / 3  # of the time of a token in training
SAMPLE_BYTES = 1_000_000
BOOKS, HARDNESS_POWER = 0.312, 0.4  # what LZMA packs English books to; how the loss follows that of other texts
LARGEST_MEASURED = 3.3e6  # parameters of the blocks
MEASURED_BYTES = (1e5, 1.1e7)
FORM = "small_modern"  # the config
FOR_FEW_STEPS = {  # docs/benchmarks/recipe.md
    "beta2": 0.995,
    "muon_momentum": 0.9,
    "learning_rate": 3e-3,
    "muon_learning_rate": 0.03,
    "cooldown": 0.75,
}
HEAD_WIDTH = 64
EPOCHS_TO_SPARE = 1.5  # times those that the time is thought to hold, for it may hold more
FEWEST_STEPS = 50  # a model that takes fewer has hardly begun to learn
TIMED_SECONDS, FEWEST_TIMED, MOST_TIMED = 1.0, 3, 12
LEAST_TIMED = 512  # tokens of a step
FEWER_THREADS = 1.1  # times as fast they have to be, to be chosen


class Vocabulary(NamedTuple):
    most_bytes: float  # of a text that it is for
    size: int
    bytes_per_token: float  # of English books


VOCABULARIES = (
    Vocabulary(2e5, 512, 2.1),
    Vocabulary(6e5, 1024, 2.6),
    Vocabulary(2e6, 2048, 3.1),
    Vocabulary(3e7, 4096, 3.5),
    Vocabulary(2e8, 8192, 3.9),
    Vocabulary(math.inf, 32_000, 4.4),
)


class Batch(NamedTuple):
    max_seq_len: int
    batch_size: int


class Shape(NamedTuple):
    num_layers: int
    embed_dim: int
    batch: Batch


LADDER = (
    Shape(4, 64, Batch(256, 8)),
    Shape(4, 128, Batch(256, 8)),
    Shape(4, 192, Batch(256, 8)),
    Shape(4, 256, Batch(256, 8)),
    Shape(6, 384, Batch(256, 8)),
    Shape(8, 512, Batch(512, 8)),
    Shape(12, 768, Batch(1024, 16)),
    Shape(24, 1024, Batch(1024, 32)),
)
FOR_FEW_TOKENS = ((7e5, Batch(128, 4)), (1.6e6, Batch(256, 4)))  # of a run, at most; the steps become too few otherwise


def batch_for(shape: Shape, tokens: float) -> Batch:
    """The batch of a run of so many tokens."""
    smaller = next((batch for most, batch in FOR_FEW_TOKENS if tokens <= most), shape.batch)
    return min(smaller, shape.batch)


class Law(NamedTuple):
    """The loss on English books in bits per byte, after Muennighoff et al. 2023 ("Scaling Data-Constrained Language
    Models"): a floor, a part that falls with the parameters of the blocks, and one that falls with the text, of which
    each further pass is worth less."""

    floor: float
    of_size: float
    size_power: float
    of_text: float
    text_power: float
    worth: float  # first passes that all passes are worth at most, with a byte of text for each parameter
    worth_power: float  # how that grows with the bytes for each parameter
    error: float  # that nine of ten runs stay below

    def loss(self, parameters: Any, text_bytes: Any, passes: Any) -> Any:
        """Of numbers, or of tensors of them."""
        most = self.most_worth(parameters, text_bytes)
        seen = text_bytes * most * (1 - math.e ** (-passes / most))
        return self.floor + self.of_size * parameters**-self.size_power + self.of_text * seen**-self.text_power

    def most_worth(self, parameters: Any, text_bytes: Any) -> Any:
        return self.worth * (text_bytes / parameters) ** self.worth_power

    def most_passes(self, parameters: float, text_bytes: float) -> int:
        """After that many, another one brings next to nothing."""
        return math.ceil(3 * self.most_worth(parameters, text_bytes))


LAW = Law(1.188, 12.78, 0.3242, 19.24, 0.2345, 2.304, 0.1007, 0.04)  # docs/benchmarks/law.md


class Text(NamedTuple):
    name: str
    files: int
    bytes: int
    tokens: float
    vocab_size: int
    is_chat: bool
    difficulty: float  # how much harder it is to predict than English books

    @property
    def train_tokens(self) -> float:
        return TRAIN_SHARE * self.tokens


def vocabulary_for(text_bytes: float) -> Vocabulary:
    return next(each for each in VOCABULARIES if text_bytes <= each.most_bytes)


def dropout_for(passes: float) -> float:
    """Many epochs overfit without dropout."""
    return 0.2 if passes > 6 else 0.0


def choose(argv: Sequence[str] | None, asked: Config) -> Config:
    """The configuration for `asked`, which names a text and no model. Flags win, and a run that is there keeps its
    choice.

    Raises ConfigError without minutes, MemoryExhausted if nothing fits, DataError if the text cannot be read or is too
    short.
    """
    if not asked.minutes:
        raise ConfigError(
            f"--input {asked.input} alone does not say how long to train. With --minutes 60, say, the model, its "
            "vocabulary and the number of epochs are chosen for this text and this machine; --config names them."
        )
    kept, forecast = kept_choice(asked)
    if kept:
        return replace(parse_config(argv, kept, SOURCE), forecast=forecast)
    if asked.processes > 1:
        raise ConfigError(
            "--input and --minutes alone choose the model in one process. Run the command without torchrun first, with "
            "--dry_run, and give torchrun the size that it names, as flags."
        )
    text = look_at(asked)
    dial = Dial(argv, text, asked)
    choice = dial.choice()
    dial.tell(choice)
    shape = choice.candidate.shape._replace(batch=choice.batch)
    keys = keys_of(shape, text, asked) | length_of(choice, text)
    if choice.threads < ALL_THREADS and not asked.threads:
        keys["threads"] = choice.threads
    forecast = Forecast(choice.loss, choice.error, choice.tokens_per_second, choice.cpu_share)
    return replace(parse_config(argv, keys, SOURCE), forecast=forecast)


def kept_choice(config: Config) -> tuple[dict[str, Any], Forecast | None]:
    """The values that the dial chose for the run that is there, here or in its mirror, and what it expected."""
    if config.resume == "never":
        return {}, None
    places = [config.run_dir / CONFIG]
    if config.checkpoint_dir:
        places += Mirror(config.run_dir, config.checkpoint_dir).records(CONFIG)
    for path in filter(Path.is_file, places):
        content = read_json(path, ConfigError)
        if is_resolved(content):
            values, sources = content["config"], content["sources"]
            with contextlib.suppress(ValueError):
                forecast = build(Forecast, content["forecast"]) if "forecast" in content else None
            return {key: value for key, value in values.items() if sources.get(key) == SOURCE}, forecast
    return {}, None


def look_at(config: Config) -> Text:
    """What there is to learn from, and how hard it is."""
    if not config.input:
        return look_at_tokens(config)
    text = text_of(config.input)
    found = find_sources([text])
    settings = Settings(input=(text,), format=format_of(found))
    sources = readable(found, settings).sources
    size = sum(source.text_bytes for source in sources)
    if size < LEAST_BYTES:
        raise DataError(f"{config.input} holds {size:,} bytes of text: too few to learn from and to hold some out.")
    share = max(1, SAMPLE_BYTES // len(sources))
    blocks = [islice(unpacked_blocks(source), math.ceil(share / BLOCK_BYTES)) for source in sources]
    sample = b"".join(b"".join(beginning)[:share] for beginning in blocks)
    vocabulary = vocabulary_for(size)
    if config.is_given("vocab_size"):
        vocabulary = vocabulary._replace(size=config.vocab_size)
    elif config.tokenizer == "char":
        vocabulary = Vocabulary(size, len(set(sample.decode(errors="ignore"))), 1.0)
    return Text(
        config.input,
        len(sources),
        size,
        size / vocabulary.bytes_per_token,
        vocabulary.size,
        settings.format == "chat",
        hard(sample),
    )


def look_at_tokens(config: Config) -> Text:
    """Likewise of tokens that are there."""
    folder = Path(config.data_dir or "")
    paths = [Path(config.metadata_file)] if config.metadata_file else metadata_files(folder)
    if len(paths) != 1:
        raise DataError(f"{folder} holds the tokens of {len(paths)} texts; one is needed.")
    metadata = TokenMetadata.read(paths[0])
    bin_file = Path(config.bin_file) if config.bin_file else metadata.beside("bin_file")
    tokenizer = load_tokenizer(config.tokenizer_file or metadata.beside("tokenizer_file"))
    sample = tokenizer.decode(read_tokens(bin_file, metadata, mapped=True)[: SAMPLE_BYTES // 4])
    size = metadata.text_bytes or round(len(sample.encode()) / (SAMPLE_BYTES // 4) * metadata.total_tokens)
    files, is_chat = max(1, len(metadata.source_files)), metadata.chat_template is not None
    return Text(
        str(paths[0].parent), files, size, metadata.total_tokens, metadata.vocab_size, is_chat, hard(sample.encode())
    )


def hard(sample: bytes) -> float:
    """By what the second half of the sample is packed to when the first is known, for a model has read such text."""
    half = len(sample) // 2
    packed = len(lzma.compress(sample)) - len(lzma.compress(sample[:half]))
    return float((packed / (len(sample) - half) / BOOKS) ** HARDNESS_POWER)


class Candidate(NamedTuple):
    """A shape of the ladder, and the configuration with it and the flags that were given."""

    shape: Shape
    config: Config
    hardware: Hardware
    model: TransformerLanguageModel  # without numbers
    block_parameters: int

    def memory(self, rows: int) -> int:
        """Bytes of a step that takes so many sequences at a time."""
        return estimate_memory(self.config, self.model, self.hardware, rows)


class Timed(NamedTuple):
    """Steps of a candidate."""

    seconds: float  # of a token
    scatter: float  # how far the steps were apart, a share of their time
    cpu_share: float  # of that time; other programs took the rest


class Choice(NamedTuple):
    """What a candidate would come to in a time."""

    candidate: Candidate
    batch: Batch
    threads: int
    tokens_per_second: float
    cpu_share: float
    steps: int
    passes: float
    most_passes: int
    seconds: float
    loss: float
    error: float  # the interval reaches as far on both sides


class Dial:
    """The candidates, and what is known of their speeds."""

    def __init__(self, argv: Sequence[str] | None, text: Text, asked: Config):
        self.text, self.asked = text, asked
        self.started = time.perf_counter()
        on_cpu = pick_device(asked.device if asked.use_gpu else "cpu").type == "cpu"
        # Beside other programs, threads that wait for each other can take many times as long as one alone.
        counts = {ALL_THREADS, 1} if on_cpu and not asked.threads else {asked.threads or ALL_THREADS}
        self.timed: dict[int, dict[int, Timed]] = {count: {} for count in sorted(counts, reverse=True)}
        # by the threads, and by the floating-point operations of a token
        self.candidates = [
            candidate
            for candidate in candidates(argv, text, asked)
            if candidate.memory(1) <= MEMORY_SHARE * (candidate.hardware.memory_bytes or math.inf)
        ]
        if not self.candidates:
            raise MemoryExhausted("Not even the smallest model that these flags allow fits into this machine's memory.")

    def choice(self) -> Choice:
        """Time the smallest, the best so far and the next larger, which uses the machine better; return the best."""
        self.time(self.candidates[0])
        while True:
            choice = self.best(self.asked.minutes)
            number = self.candidates.index(choice.candidate)
            if not any(self.time(each) for each in reversed(self.candidates[number : number + 2])):
                return choice

    def time(self, candidate: Candidate) -> bool:
        """Time steps of it, unless that was done, or takes more than its share of the minutes. Whether it was."""
        share = TIMED_SHARE * 60 * self.asked.minutes
        left = share - (time.perf_counter() - self.started)
        flops, of_all = candidate.model.flops_per_token(), self.timed[next(iter(self.timed))]
        if flops in of_all or len(of_all) == TIMED_SHAPES:
            return False
        tokens: float = tokens_of_step(candidate.config)
        if of_all and left < FEWEST_TIMED * len(self.timed) * tokens * self.speed(candidate)[0].seconds:
            return False
        if not of_all:  # nothing is known yet, and --max_seq_len may be huge
            tokens = min(tokens, share / 2 * CPU_FLOPS_PER_CORE / flops)
        for threads, timed in self.timed.items():
            torch.set_num_threads(threads)
            timed[flops] = timed_step(candidate, tokens, min(TIMED_SECONDS, share / TIMED_SHAPES / len(self.timed)))
        return True

    def speed(self, candidate: Candidate) -> tuple[Timed, int]:
        """Its steps, uncompiled, with the number of threads that is fastest. As timed, between two candidates that
        were, or as many times the largest one's seconds as it has floating-point operations."""
        flops = candidate.model.flops_per_token()
        found = []
        for threads, timed in self.timed.items():
            sizes = sorted(timed)
            values = (float(np.interp(flops, sizes, column)) for column in zip(*map(timed.get, sizes), strict=True))
            steps = Timed(*values)
            found.append((steps._replace(seconds=steps.seconds * max(1, flops / sizes[-1])), threads))
        return min(found, key=lambda one: one[0].seconds * (FEWER_THREADS if one[1] < ALL_THREADS else 1.0))

    def best(self, minutes: float) -> Choice:
        """The candidate with the lowest loss after so many minutes."""
        outcomes = [self.outcome(each, minutes) for each in self.candidates]
        return min(outcomes, key=lambda outcome: (max(0, FEWEST_STEPS - outcome.steps), outcome.loss))

    def outcome(self, candidate: Candidate, minutes: float, slower: float = 1.0) -> Choice:
        """What it comes to, on a machine that is so many times slower than timed."""
        text, config, hardware = self.text, candidate.config, candidate.hardware
        (token_seconds, scatter, cpu_share), threads = self.speed(candidate)
        compiles, _, _ = choose_compile(
            replace(config, forecast=Forecast(0, 0, 0, cpu_share)), candidate.model.config, hardware.device
        )
        compiling = compile_seconds(config.num_layers, cpu_share) if compiles else 0.0
        if compiles and not hardware.is_cuda:
            token_seconds *= 1 - CPU_COMPILE_SAVES
        seconds = 60 * minutes - compiling
        tokens = max(1.0, seconds * (1 - EVALUATING_SHARE) / (slower * token_seconds))
        text_bytes = TRAIN_SHARE * text.bytes
        most = LAW.most_passes(candidate.block_parameters, text_bytes)
        passes = tokens / text.train_tokens
        if passes > most:
            seconds, tokens, passes = seconds * most / passes, most * text.train_tokens, most
        batch = batch_for(candidate.shape, tokens)
        steps = int(tokens / (batch.max_seq_len * batch.batch_size))
        loss = text.difficulty * LAW.loss(candidate.block_parameters, text_bytes, passes)
        guesses = (
            candidate.block_parameters > LARGEST_MEASURED,
            hardware.device.type != "cpu",
            not MEASURED_BYTES[0] <= text.bytes <= MEASURED_BYTES[1],
        )
        error = LAW.error * 2 ** sum(guesses) + abs(1 - text.difficulty)
        if slower == 1 and scatter:
            error += self.outcome(candidate, minutes, 1 + scatter).loss - loss
        speed, seconds = 1 / token_seconds, compiling + seconds
        return Choice(candidate, batch, threads, speed, cpu_share, steps, passes, most, seconds, loss, error)

    def tell(self, choice: Choice) -> None:
        """Five lines: the text, the choice and why, what to expect, and what other minutes would bring."""
        config, text, minutes = choice.candidate.config, self.text, self.asked.minutes
        others = ", ".join(f"{other:g} minutes: {self.best(other).loss:.2f}" for other in (minutes / 2, minutes * 2))
        why = f"of {len(self.candidates)} sizes the one with the lowest loss in this time, on this machine"
        if len(self.candidates) == 1:
            why = "the only size that the flags leave"
        memory = choice.candidate.memory(choice.batch.batch_size)
        memory += 0 if choice.candidate.hardware.is_cuda else PROCESS_BYTES
        limit = "nothing more is gained then" if choice.passes == choice.most_passes else "all that the time allows"
        busy = ""
        if choice.threads < ALL_THREADS and not self.asked.threads:
            busy = "Threads    1 of this CPU: other programs use it, and threads that wait for each other are slower\n"
        print(
            f"Text       {text.name}: {byte_size(text.bytes)} of {'conversations' if text.is_chat else 'text'} in "
            f"{text.files:,} file{'s' * (text.files != 1)}, about {text.tokens:,.0f} tokens of a vocabulary of "
            f"{text.vocab_size:,}\n"
            f"Choice     {config.num_layers} layers x {config.embed_dim}, context {choice.batch.max_seq_len}: {why}\n"
            f"{busy}"
            f"Expected   {choice.loss:.2f} bits per byte ({choice.loss - choice.error:.2f} to "
            f"{choice.loss + choice.error:.2f}) after {clock(choice.seconds)}, with "
            f"about {byte_size(memory)} of memory"
            f"{'; a guess, for no run like this was measured' if choice.error >= 2 * LAW.error else ''}\n"
            f"Reading    the text {choice.passes:.2g} times, {limit}"
            f"{', with dropout' if dropout_for(choice.passes) else ''}\n"
            f"Instead    {others}"
        )


def candidates(argv: Sequence[str] | None, text: Text, asked: Config) -> list[Candidate]:
    """The ladder without what the flags make the same."""
    found: dict[ModelConfig, Candidate] = {}
    for shape in LADDER:
        config = parse_config(argv, keys_of(shape, text, asked), SOURCE)
        model_config = config.shape(text.vocab_size)
        model = without_memory(config, model_config)
        blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
        found.setdefault(model_config, Candidate(shape, config, detect_hardware(config, model_config), model, blocks))
    return list(found.values())


def keys_of(shape: Shape, text: Text, asked: Config) -> dict[str, Any]:
    keys = recipe() | {"num_layers": shape.num_layers, "embed_dim": shape.embed_dim} | shape.batch._asdict()
    keys["num_heads"] = shape.embed_dim // HEAD_WIDTH
    learns_vocabulary = asked.input and asked.tokenizer == "bpe"
    return keys | {"vocab_size": text.vocab_size} if learns_vocabulary else keys


def recipe() -> dict[str, Any]:
    return read_json(REPOSITORY / "configs" / f"{FORM}.json", ConfigError) | FOR_FEW_STEPS


def length_of(choice: Choice, text: Text) -> dict[str, Any]:
    """The keys that depend on how long the run is."""
    windows = text.tokens * (1 - TRAIN_SHARE) / choice.batch.max_seq_len
    in_time = EVALUATING_SHARE / FORWARD_SHARE * choice.steps * choice.batch.batch_size / EVALUATIONS
    return {
        "epochs": max(1, min(choice.most_passes, math.ceil(EPOCHS_TO_SPARE * choice.passes))),
        "dropout": dropout_for(choice.passes),
        "eval_interval": max(1, choice.steps // EVALUATIONS),
        "eval_batches": 0 if windows <= in_time else max(1, int(in_time / choice.batch.batch_size)),
    }


def tokens_of_step(config: Config) -> int:
    return config.sequences_per_step * config.max_seq_len


def timed_step(candidate: Candidate, most_tokens: float, most_seconds: float) -> Timed:
    """Training steps on random tokens, uncompiled. A context of more than `most_tokens` is not timed in full: its time
    is taken to grow with its floating-point operations."""
    config, hardware, shape = candidate.config, candidate.hardware, candidate.model.config
    rows, length = config.batch_size, config.max_seq_len
    while rows * length > most_tokens and rows * length > LEAST_TIMED:
        rows, length = (rows // 2, length) if rows > 1 else (rows, length // 2)
    model = TransformerLanguageModel(shape).to(hardware.device)
    longer = model.flops_per_token() / without_memory(config, replace(shape, max_seq_len=length)).flops_per_token()
    optimizer, scaler = build_optimizer(model, config), hardware.grad_scaler()
    tokens = torch.randint(shape.vocab_size, (rows, length + 1), device=hardware.device)
    seconds: list[float] = []
    cpu: list[float] = []
    while len(seconds) < FEWEST_TIMED or (sum(seconds) < most_seconds and len(seconds) < MOST_TIMED):
        hardware.synchronize()
        began, cpu_began = time.perf_counter(), time.thread_time()
        for _ in range(config.gradient_accumulation_steps):
            with hardware.autocast():
                loss = model(tokens[:, :-1], tokens[:, 1:])
            scaler.scale(loss).backward()
        apply_hyperparameters(optimizer, 0.0, config)
        update(optimizer, gradient_norm(optimizer), config.grad_clip, torch.zeros((), device=hardware.device))
        optimizer.zero_grad(set_to_none=True)
        hardware.synchronize()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - cpu_began)
    later = seconds[1:]  # the first allocates memory
    usual = median(later)
    scatter = (max(later) - min(later)) / (2 * usual)
    cpu_share = 1.0 if hardware.is_cuda else min(1.0, sum(cpu[1:]) / sum(later))
    return Timed(longer * usual / (rows * length * config.gradient_accumulation_steps), scatter, cpu_share)
