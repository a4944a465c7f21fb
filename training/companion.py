"""One's own text on a broad base: with `--companion TEXT`, a base learns that text first and `--input` at the end, both
within `--minutes`.

Both are ordinary runs. The base, runs/base_NAME, can serve other texts again. The run of `--input` starts from its best
weights, with its tokenizer and half of the learning rates, and reads the text twice: with more passes it forgets what
the base has learned (docs/benchmarks/companion.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from training.config import MODEL_KEYS, Config, Forecast, parse_config
from training.data import count_windows
from training.dial import EVALUATING_SHARE, SOURCE, Dial, choose
from training.growth import best_weights, kept_choice, shape_keys
from training.law import BEYOND, ERROR, expected_loss, useful_passes
from training.mirror import Mirror
from training.plan import text_settings, tokenized
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
# A text as large as both would be this much better than one's own alone; the share of it that a companion of the same
# kind brings, and how much less for each unit of the `token_ratio` above SAME_KIND (docs/benchmarks/companion.md).
GAIN, GAIN_FALL, SAME_KIND = 0.8, 3.5, 1.1
MAX_RATIO = 1.4  # other English text has up to 1.35, Dutch beside English over 1.5, and makes it worse
LEAST_GAIN = 0.02  # bits per byte that justify the time for the companion


def plan_both(requested: Config, started: float) -> Iterator[tuple[Config, float]]:
    """Yield the two runs to train one after the other: a base on `companion`, unless there is one already, then `input`
    from its weights. Each comes with the time.perf_counter() from which its minutes count; `started` is when the
    command began.

    Raises ConfigError for a companion that cannot be one, and what the dial and `tokenized` raise.
    """
    require_suitable(requested)
    own = measure_text(requested)
    argv = argv_of_base(requested)
    wanted = parse_config(argv)
    before = base = find_base(wanted, argv, own)
    warn_of_setting_aside(requested)
    if not base.is_enough:
        learns = "goes on learning it" if base.checkpoint else "learns it first"
        print(f"Companion  {wanted.input}: {wanted.run_dir} {learns}, then {own.name} is learned from its best weights")
        config = choose(argv, wanted, started) if base.is_chosen else first_choice(argv, wanted, own, started)
        yield with_minutes(config, wanted.minutes - minutes_of_own(own, config), wanted.minutes), started
        if config.dry_run or config.profile:
            return
        base = find_base(wanted, argv, own)
    minutes = max(requested.minutes - base.seconds / 60, minutes_of_own(own, base.config))
    print(
        f"\nCompanion  {wanted.run_dir} has learned {wanted.input}, in {duration(base.seconds)} of --minutes "
        f"{requested.minutes:g}. Now {own.name}, for about {duration(60 * minutes)}"
    )
    if before.is_enough and has_changed(base):
        print(
            f"Note       {wanted.input} has changed since, and this base does not learn what is new. For another base, "
            f"move or delete {wanted.run_dir}"
        )
    config = own_choice(requested, own, base, minutes)
    yield with_minutes(config, minutes, requested.minutes), started + base.seconds - before.seconds


def with_minutes(config: Config, minutes: float, of: float) -> Config:
    """Return the configuration of a run that has a part of the minutes."""
    return replace(config, minutes=round(minutes, 2), sources=config.sources | {"minutes": f"of --minutes {of:g}"})


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

    config: Config  # as the dial chose it, if it did
    is_chosen: bool
    checkpoint: Checkpoint | None = None  # the newest
    seconds: float = 0.0  # of training
    tokens: int = 0  # that it has learned from
    is_enough: bool = False  # no session has to go on with it


def find_base(wanted: Config, argv: list[str], own: Text) -> Base:
    """Find the base, here or in its mirror. Raises ConfigError if its folder holds the run of another text, or if flags
    ask for another model."""
    kept, forecast = kept_choice(wanted, SOURCE)
    config = replace(parse_config(argv, kept, SOURCE), forecast=forecast)
    previous = find_previous(wanted, mirror_of(wanted), is_trained=False)
    if previous.checkpoint is None or previous.saved is None:
        return Base(config, is_chosen=bool(kept))
    state, then = previous.saved.state, previous.saved.config
    require_same_base(wanted, then)
    ended = replace(config, minutes=then["minutes"])
    windows = count_windows(previous.saved.data["train_tokens"], config.max_seq_len)
    by_time = time_progress(state, ended) >= FINISHED
    is_long_enough = ended.minutes >= ENOUGH * (wanted.minutes - minutes_of_own(own, config)) or not by_time
    is_enough = is_long_enough and progress(state, windows, ended) >= FINISHED
    config = replace(config, input=then["input"])  # as it was written then: token folders are told apart by it
    return Base(config, True, previous.checkpoint, state.elapsed_seconds, state.tokens, is_enough)


def require_same_base(wanted: Config, then: dict[str, Any]) -> None:
    """Raise ConfigError if the base that is there is of another text or another model."""
    otherwise = f"To train another base, move or delete {wanted.run_dir}, or choose another --output_dir."
    if place(then["input"]) != place(wanted.input):
        raise ConfigError(f"{wanted.run_dir} has learned {then['input']}, and not {wanted.input}. {otherwise}")
    for key in (*MODEL_KEYS, "vocab_size", "tokenizer"):
        if key != "dropout" and wanted.is_explicit(key) and getattr(wanted, key) != then.get(key):
            raise ConfigError(
                f"{wanted.run_dir} was trained with --{key} {then.get(key)}: give the same or leave it out. {otherwise}"
            )


def place(text: Any) -> str:
    """Return where a text is, however its path is written."""
    return str(text) if str(text).startswith(HUB) else os.path.realpath(os.path.expanduser(str(text)))


def has_changed(base: Base) -> bool:
    """Return whether files of the companion were added or edited since; False if its tokens are gone."""
    then = learned_text(base.checkpoint) if base.checkpoint and not str(base.config.input).startswith(HUB) else None
    return then is not None and text_settings(base.config, Previous()).output_dir != str(then.path.parent)


def warn_of_setting_aside(requested: Config) -> None:
    """Say if the folder holds a run that had no companion, or another."""
    saved = find_previous(requested, mirror_of(requested), is_trained=False).saved
    if saved is not None and place(saved.config.get("companion")) != place(requested.companion):
        print(
            f"Note       {requested.run_dir} holds a run with {saved.config.get('companion') or 'no companion'}. It is "
            "kept aside when the new one begins; to keep both in place, press Ctrl-C and choose another --output_dir"
        )


def first_choice(argv: list[str], wanted: Config, own: Text, started: float) -> Config:
    """Choose a base for the companion, and say what the own text will come to on it."""
    text = measure_text(wanted)
    ratio = require_kin(own, text)
    dial = Dial(argv, text, wanted, started=started)
    dial.own = own
    config = dial.chosen()
    assert config.forecast is not None
    seconds = 60 * (wanted.minutes - minutes_of_own(own, config)) * (1 - EVALUATING_SHARE)
    tokens = min(config.epochs * dial.text.train_tokens, seconds * config.forecast.tokens_per_second)
    announce_own(own, expect(own, dial.text, config, tokens / dial.text.train_tokens, ratio))
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
            f"The companion, {companion.name}, is in another language than {own.name}, or of another kind: with the "
            f"other's vocabulary either takes {ratio:.1f} times as many tokens, and your text would be learned worse "
            "than alone. Name text of the same language and kind, or leave --companion out."
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
    loss = alone - (GAIN - GAIN_FALL * max(0.0, ratio - SAME_KIND)) * max(0.0, alone - both)
    return Expected(loss, own.letters / own.bytes * (BEYOND * ERROR + own.doubt), alone)


def block_parameters(num_layers: int, embed_dim: int) -> float:
    return 12.0 * num_layers * embed_dim**2


def announce_own(own: Text, expected: Expected) -> None:
    """Print what to expect of the own text, with the companion and without."""
    loss, error, alone = expected
    print(
        f"Your text  {own.name}: {byte_size(own.bytes)}, read at most {OWN_PASSES} times; expected {loss:.2f} bits per "
        f"byte ({max(0.0, loss - error):.2f} to {loss + error:.2f}), {alone:.2f} without the companion"
    )
    if loss > alone - LEAST_GAIN:
        print(
            "Note       The companion brings nothing by this estimate: it is too small, or not like your text. Without "
            "--companion all minutes are for your text"
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
    is_same_base = saved is None or saved.state.initialized_from == weights.weights_sha256()
    is_same_text = saved is None or saved.data["tokens_sha256"] == now.tokens_sha256
    if "init_from" in kept and is_same_text and (is_same_base or base.seconds > 60 * requested.minutes):
        if not is_same_base:
            print(
                f"Note       {requested.run_dir} is on the base of then. To begin again on that of now: --resume never"
            )
        return replace(parse_config(argv, kept, SOURCE), forecast=forecast)

    text = measure_tokens(replace(requested, data_dir=folder))._replace(name=str(requested.input))
    step_tokens = min(OWN_STEP_TOKENS, OWN_PASSES * text.train_tokens / OWN_STEPS)
    keys: dict[str, Any] = shape_keys(base.config) | {
        "init_from": str(weights.path),
        "batch_size": max(1, round(step_tokens / base.config.max_seq_len)),
    }
    if previous.checkpoint is not None:
        keys["resume"] = "never"
    dial = Dial(argv, text, replace(parse_config(argv, keys, SOURCE), minutes=minutes), keys=recipe() | keys)
    dial.most_passes = OWN_PASSES
    choice = dial.choice()
    config = dial.config_of(choice)
    learned = learned_text(weights)
    if learned is None:
        return config
    companion = measure_tokens(replace(requested, data_dir=str(learned.path.parent)))
    companion = companion._replace(name=str(requested.companion))
    expected = expect(own, companion, base.config, base.tokens / companion.train_tokens, require_kin(own, companion))
    announce_own(own, expected)
    forecast = Forecast(expected.loss, expected.error, choice.tokens_per_second, choice.cpu_share, alone=expected.alone)
    return replace(config, forecast=forecast)
