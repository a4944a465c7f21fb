"""One's own text on a broad base: with `--companion TEXT`, a base learns that text first and `--input` at the end, both
within `--minutes`.

Both are ordinary runs. The base, runs/base_NAME, can serve other texts again. The run of `--input` starts from its best
weights, with its tokenizer and half of the learning rates, and reads the text twice: with more passes it forgets what
the base has learned (docs/benchmarks/companion.md).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoint import Checkpoint
from common.errors import ConfigError
from common.files import name_of
from common.output import byte_size, duration
from common.script import world
from generation.passages import learned_text
from tokenization.extract import find
from tokenization.metadata import TokenMetadata, metadata_files
from tokenization.settings import HUB
from training.config import Config, Forecast, parse_config
from training.data import count_windows
from training.dial import EVALUATING_SHARE, SOURCE, Dial, choose
from training.fit import fit
from training.growth import best_weights, kept_choice, shape_keys
from training.inspections import inspect
from training.law import BEYOND, ERROR, expected_loss, useful_passes
from training.mirror import Mirror
from training.plan import tokenized
from training.recipe import LADDER, OWN_PASSES, OWN_START_SHARE, OWN_STEP_TOKENS, OWN_STEPS, recipe
from training.resume import find_previous
from training.schedule import progress, time_progress
from training.state import Previous
from training.text import (
    TRAIN_SHARE,
    VOCABULARIES,
    Text,
    input_settings,
    measure_text,
    measure_tokens,
    token_ratio,
)

FINISHED = 0.99  # progress of a base that needs no more steps
ENOUGH = 0.75  # share of the minutes that a base would get now; one that had fewer is trained on
# The share of the gain, from one's own text alone to a text as large as both, that a companion of the same kind brings;
# and how it falls with the square of the `token_ratio` less 1.
GAIN, GAIN_FALL = 0.8, 1.9
MAX_RATIO = 1.6  # there nothing is gained any more


def fit_both(requested: Config, started: float, ends_process: bool) -> int:
    """Train a base on `companion`, unless there is one already, and then `input` from its weights. Returns the exit
    code. `started`: the time.perf_counter() at which the command began.

    Raises ConfigError for a companion that cannot be one, and what the two runs raise.
    """
    require_suitable(requested)
    own = measure_text(requested)
    argv = argv_of_base(requested)
    wanted = parse_config(argv)
    before = base = find_base(wanted, argv, own)
    if base.is_enough:
        learned_in = duration(base.seconds)
        print(f"Companion  {wanted.input}: {wanted.run_dir} is used again, which learned it in {learned_in}")
    else:
        print(
            f"Companion  {wanted.input} is learned first, in {wanted.run_dir}; then {own.name}, from its best weights"
        )
        config = choose(argv, wanted) if before.config.forecast else first_choice(argv, wanted, own)
        config = replace(config, minutes=requested.minutes - minutes_of_own(own, config))
        code = train_or_inspect(config, started, ends_process)
        if code or config.dry_run or config.profile:
            return code
        base = find_base(wanted, argv, own)
    minutes = round(max(requested.minutes - base.seconds / 60, minutes_of_own(own, base.config)), 2)
    config = own_choice(requested, own, base, minutes)
    return train_or_inspect(config, started + base.seconds - before.seconds, ends_process)


def train_or_inspect(config: Config, started: float, ends_process: bool) -> int:
    if config.dry_run or config.profile:
        return inspect(config, started)
    return fit(config, started, ends_process)


def require_suitable(config: Config) -> None:
    """Raise ConfigError if two runs cannot be made of the configuration."""
    if not config.leaves_the_choice or config.data_dir:
        raise ConfigError(
            "--companion is for --input and --minutes alone, which choose the model: leave out --config, --init_from "
            "and --data_dir. With weights of your own, --input and --init_from are enough."
        )
    if world().size > 1:
        raise ConfigError("--companion trains in one process: run the command without torchrun.")
    assert config.input is not None and config.companion is not None
    if not config.input.startswith(HUB) and not config.companion.startswith(HUB):
        settings = (input_settings(each) for each in (config, replace(config, input=config.companion)))
        own, other = ({source.path for source in find(each)} for each in settings)
        if other <= own:
            raise ConfigError(
                f"--companion {config.companion} has no file that --input {config.input} does not have. Name other "
                "text, or leave --companion out."
            )
        if own & other:
            print(
                f"Note       {len(own & other):,} of the files are in both; both runs hold out the same parts of them"
            )


def argv_of_base(config: Config) -> list[str]:
    """Return the flags of the base, whose run folder is beside that of the own text."""
    companion = str(config.companion)
    max_mb = {} if companion.startswith(HUB) else {"max_mb": None}
    run_dir = config.run_dir.parent / f"base_{name_of(companion)}"
    return argv_of(config, input=companion, companion=None, output_dir=str(run_dir), resume=None, **max_mb)


def argv_of(config: Config, **instead: str | None) -> list[str]:
    """Return the flags that `config` was read from, with some of them changed, or left out (None)."""
    flags = {key: value for key, value in config.values().items() if config.sources[key] == "flag"} | instead
    return [f"--{key}={value}" for key, value in flags.items() if value is not None]


def mirror_of(config: Config) -> Mirror | None:
    return Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir else None


class Base(NamedTuple):
    """The base as earlier sessions left it."""

    config: Config  # as the dial chose it
    checkpoint: Checkpoint | None  # the newest
    seconds: float  # that it was trained for
    tokens: int  # that it has learned from
    is_enough: bool  # no session has to go on with it


def find_base(wanted: Config, argv: list[str], own: Text) -> Base:
    """Find the base, here or in its mirror. Raises ConfigError if its folder holds the run of another text."""
    kept, forecast = kept_choice(wanted, SOURCE)
    config = replace(parse_config(argv, kept, SOURCE), forecast=forecast)
    previous = find_previous(wanted, mirror_of(wanted), is_trained=False)
    if previous.checkpoint is None or previous.saved is None:
        return Base(config, None, 0.0, 0, is_enough=False)
    state, then = previous.saved.state, previous.saved.config
    if then.get("input") != wanted.input:
        raise ConfigError(
            f"{wanted.run_dir} is a base of {then.get('input')}: rename it, or choose another --output_dir."
        )
    ended = replace(config, minutes=then["minutes"])
    windows = count_windows(previous.saved.data["train_tokens"], config.max_seq_len)
    by_time = time_progress(state, ended) >= FINISHED
    is_long_enough = ended.minutes >= ENOUGH * (wanted.minutes - minutes_of_own(own, config)) or not by_time
    is_enough = is_long_enough and progress(state, windows, ended) >= FINISHED
    return Base(config, previous.checkpoint, state.elapsed_seconds, state.tokens, is_enough)


def first_choice(argv: list[str], wanted: Config, own: Text) -> Config:
    """Choose a base for the companion, and say what the own text will come to on it."""
    text = measure_text(wanted)
    ratio = require_kin(own, text)
    dial = Dial(argv, text, wanted)
    dial.own = own
    config = dial.chosen()
    assert config.forecast is not None
    seconds = 60 * (wanted.minutes - minutes_of_own(own, config)) * (1 - EVALUATING_SHARE)
    tokens = min(config.epochs * dial.text.train_tokens, seconds * config.forecast.tokens_per_second)
    expected = expect(own, dial.text, config, tokens / dial.text.train_tokens, ratio)
    print(f"Your text  {describe(own, expected)}")
    return config


def minutes_of_own(own: Text, base: Config) -> float:
    """Return the minutes that the run of the own text takes, at the speed at which the base was timed; at most half."""
    vocabulary = next(each for each in VOCABULARIES if base.vocab_size <= each.size)
    tokens = OWN_PASSES * own.with_vocabulary(vocabulary).train_tokens
    speed = base.forecast.tokens_per_second if base.forecast else float("inf")
    return min(tokens / speed / (1 - EVALUATING_SHARE) / 60 + OWN_START_SHARE * base.minutes, base.minutes / 2)


def require_kin(own: Text, companion: Text) -> float:
    """Return the `token_ratio` of the two texts. Raises ConfigError for a companion that would make it worse."""
    if own.is_chat or companion.is_chat:  # their samples are JSON
        return 1.0
    ratio = token_ratio(own.sample, companion.sample)
    if ratio > MAX_RATIO:
        raise ConfigError(
            f"The companion, {companion.name}, is in another language than {own.name}, or of another kind: with its "
            f"vocabulary your text takes {ratio:.1f} times as many tokens, and would be learned worse than alone. Name "
            "text of the same language and kind, or leave --companion out."
        )
    return ratio


class Expected(NamedTuple):
    loss: float  # bits per byte
    error: float
    alone: float  # bits per byte without the companion


def expect(own: Text, companion: Text, base: Config, passes: float, ratio: float) -> Expected:
    """Return what the own text comes to on a base that has read the companion so many times. By the law, it is between
    the own text alone and a text as large as both; where, the `token_ratio` of the two tells."""
    letters = TRAIN_SHARE * own.letters
    per_byte = own.letters / own.bytes * own.difficulty
    sizes = [block_parameters(shape.num_layers, shape.embed_dim) for shape in LADDER]
    alone = per_byte * min(expected_loss(size, letters, useful_passes(size, letters)) for size in sizes)
    size = block_parameters(base.num_layers, base.embed_dim)
    both = per_byte * expected_loss(size, letters + TRAIN_SHARE * companion.letters, passes)
    loss = alone - (GAIN - GAIN_FALL * max(0.0, ratio - 1) ** 2) * max(0.0, alone - both)
    return Expected(loss, own.letters / own.bytes * (BEYOND * ERROR + own.doubt), alone)


def block_parameters(num_layers: int, embed_dim: int) -> float:
    return 12.0 * num_layers * embed_dim**2


def describe(own: Text, expected: Expected) -> str:
    loss, error, alone = expected
    return (
        f"{own.name}: {byte_size(own.bytes)}, read {OWN_PASSES} times; expected {loss:.2f} bits per byte "
        f"({max(0.0, loss - error):.2f} to {loss + error:.2f}), {alone:.2f} without the companion"
    )


def own_choice(requested: Config, own: Text, base: Base, minutes: float) -> Config:
    """Choose the settings of the run that starts from the base, or return those of the one that is there. It is set
    aside if its text has changed since, or if the base was trained on for more minutes that were given for both."""
    assert base.checkpoint is not None
    argv = argv_of(requested)
    weights = Checkpoint(best_weights(base.config, mirror_of(base.config), base.checkpoint))
    folder = str(tokenized(replace(requested, init_from=str(weights.path)), Previous(init=weights)))
    (now,) = map(TokenMetadata.read, metadata_files(Path(folder)))
    previous = find_previous(requested, mirror_of(requested), is_trained=False)
    saved, (kept, forecast) = previous.saved, kept_choice(requested, SOURCE)
    is_same = saved is None or (
        saved.data["tokens_sha256"] == now.tokens_sha256
        and (saved.state.initialized_from == weights.weights_sha256() or base.seconds > 60 * requested.minutes)
    )
    if "init_from" in kept and is_same:
        return replace(parse_config(argv, kept, SOURCE), minutes=minutes, forecast=forecast)

    learned_from = f"{base.tokens:,} tokens of {base.config.input}"
    print(f"\nBase       {weights.path}: trained for {duration(base.seconds)}, on {learned_from}")
    text = measure_tokens(replace(requested, data_dir=folder))._replace(name=str(requested.input))
    of_step = min(OWN_STEP_TOKENS, OWN_PASSES * text.train_tokens / OWN_STEPS)
    keys: dict[str, Any] = shape_keys(base.config) | {
        "init_from": str(weights.path),
        "batch_size": max(1, round(of_step / base.config.max_seq_len)),
    }
    if previous.checkpoint is not None:
        keys["resume"] = "never"
    dial = Dial(argv, text, replace(parse_config(argv, keys, SOURCE), minutes=minutes), keys=recipe() | keys)
    dial.most_passes = OWN_PASSES
    choice = dial.choice()
    config = replace(dial.config_of(choice), minutes=minutes)
    learned = learned_text(weights)
    if learned is None:
        return config
    companion = measure_tokens(replace(requested, data_dir=str(learned.path.parent)))
    companion = companion._replace(name=str(requested.companion))
    ratio = require_kin(own, companion)
    expected = expect(own, companion, base.config, base.tokens / companion.train_tokens, ratio)
    print(f"Your text  {describe(own, expected)}")
    forecast = Forecast(expected.loss, expected.error, choice.tokens_per_second, choice.cpu_share, alone=expected.alone)
    return replace(config, forecast=forecast)
