"""`--companion TEXT`: train a base on that text first, then on one's own `--input`, both within `--minutes`.

Both are ordinary runs. The base, runs/base_NAME, can be used again for other texts. The run on `--input` starts from
its best weights, with its tokenizer and half of the learning rates, and reads the text twice: with more passes the
model forgets what the base has learned (docs/benchmarks/companion.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoint import Checkpoint
from common.errors import ConfigError
from common.files import name_input
from common.output import byte_size, duration
from common.script import world
from generation.passages import find_training_tokens
from tokenization.extract import find_files
from tokenization.metadata import TokenMetadata, find_metadata
from tokenization.settings import HUB
from training.config import MODEL_KEYS, Config, Forecast, parse_config
from training.data import count_windows
from training.dial import DIAL_SOURCE, EVALUATING_SHARE, Dial
from training.growth import find_best_weights, recover_choice, shape_keys
from training.law import MEASURED_ERROR, UNMEASURED_ERROR_FACTOR, expected_loss, useful_passes
from training.mirror import Mirror
from training.plan import text_settings
from training.recipe import LADDER, OWN_PASSES, OWN_START_SHARE, OWN_STEP_TOKENS, OWN_STEPS, read_recipe
from training.resume import find_previous
from training.schedule import progress, time_progress
from training.state import Previous
from training.text import (
    TRAIN_SHARE,
    VOCABULARIES,
    TextStats,
    input_settings,
    measure_text,
    measure_token_ratio,
    measure_tokens,
)

FINISHED_PROGRESS = 0.99  # a base this far needs no more steps
ENOUGH_MINUTES_SHARE = 0.75  # a base that had a smaller share of its current minutes is trained further
# A companion of the same kind brings COMPANION_GAIN of the gain that as much own text would bring, and less by
# GAIN_PER_RATIO for each unit of the token ratio above SAME_KIND_RATIO (docs/benchmarks/companion.md).
COMPANION_GAIN, GAIN_PER_RATIO, SAME_KIND_RATIO = 0.8, 3.5, 1.1
MAX_TOKEN_RATIO = 1.4  # other English text: up to 1.35; Dutch beside English: over 1.5, which makes the loss worse
MIN_GAIN = 0.02  # bits per byte; less does not justify the time


def plan_runs(
    requested: Config,
    started: float,
    choose: Callable[[Sequence[str] | None, Config, float], Config],
    tokenize: Callable[[Config, Previous], str | None],
) -> Iterator[tuple[Config, float]]:
    """Yield the two runs to train, one after the other: a base on `companion`, unless one exists, then `input` from its
    weights. Each comes with the time.perf_counter() at which its minutes begin; `started` is that of the command.
    `choose` and `tokenize`: the script's own steps, `choose_model` and `tokenize_input`.

    Raises ConfigError for an unsuitable companion, and what these two and the dial raise.
    """
    _require_suitable(requested)
    own = measure_text(requested)
    argv = _build_base_argv(requested)
    wanted = parse_config(argv)
    before = base = _find_companion_base(wanted, argv, own)
    _note_setting_aside(requested)
    if not base.is_enough:
        verb = "Continuing" if base.checkpoint else "Training"
        print(f"Companion  {verb} {wanted.run_dir} on {wanted.input}, then training its best weights on {own.name}")
        config = choose(argv, wanted, started) if base.is_chosen else _choose_base(argv, wanted, own, started)
        yield _with_minutes(config, wanted.minutes - own_minutes(own, config), wanted.minutes), started
        if config.dry_run or config.profile:
            return
        base = _find_companion_base(wanted, argv, own)
    minutes = max(requested.minutes - base.seconds / 60, own_minutes(own, base.config))
    print(
        f"\nCompanion  {wanted.run_dir} was trained on {wanted.input} for {duration(base.seconds)} of --minutes "
        f"{requested.minutes:g}. Now training on {own.name} for about {duration(60 * minutes)}"
    )
    if before.is_enough and _has_changed(base):
        print(
            f"Note       {wanted.input} has changed since this base was trained. To train a new one, move or delete "
            f"{wanted.run_dir}"
        )
    assert base.checkpoint is not None
    weights = Checkpoint(find_best_weights(base.config, _open_mirror(base.config), base.checkpoint))
    data_dir = tokenize(replace(requested, init_from=str(weights.path)), Previous(init=weights))
    config = _choose_own(requested, own, base, minutes, weights, str(data_dir))
    yield _with_minutes(config, minutes, requested.minutes), started + base.seconds - before.seconds


def _with_minutes(config: Config, minutes: float, total: float) -> Config:
    """Return the configuration of a run that gets a part of the minutes."""
    return replace(config, minutes=round(minutes, 2), sources=config.sources | {"minutes": f"of --minutes {total:g}"})


def _require_suitable(config: Config) -> None:
    """Raise ConfigError if the configuration does not allow a companion."""
    if not config.needs_dial or config.data_dir:
        raise ConfigError(
            "--companion needs --input and --minutes alone, which choose the model: leave out --config, --init_from "
            "and --data_dir. To start from weights of your own, use --input and --init_from."
        )
    if world().size > 1:
        raise ConfigError("--companion trains in one process: run the command without torchrun.")
    assert config.input is not None and config.companion is not None
    if not config.input.startswith(HUB) and not config.companion.startswith(HUB):
        settings = (input_settings(each) for each in (config, replace(config, input=config.companion)))
        own, other = ({source.path for source in find_files(each)} for each in settings)
        if other <= own:
            raise ConfigError(
                f"Every file of --companion {config.companion} is also in --input {config.input}. Name other text, or "
                "leave --companion out."
            )
        if own & other:
            print(f"Note       {len(own & other):,} files are in both texts; both runs hold out the same parts of them")


def _build_base_argv(config: Config) -> list[str]:
    """Return the flags of the base. Its run folder is beside the run of the own text."""
    companion = str(config.companion)
    max_mb = {} if companion.startswith(HUB) else {"max_mb": None}
    run_dir = config.run_dir.parent / f"base_{name_input(companion)}"
    return _build_argv(config, input=companion, companion=None, output_dir=str(run_dir), resume=None, **max_mb)


def _build_argv(config: Config, **instead: str | None) -> list[str]:
    """Return the flags that `config` was read from, with some replaced, or left out (None)."""
    flags = {key: value for key, value in config.values().items() if config.sources[key] == "flag"} | instead
    return [f"--{key}={value}" for key, value in flags.items() if value is not None]


def _open_mirror(config: Config) -> Mirror | None:
    return Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir else None


class Base(NamedTuple):
    """The base as earlier sessions left it."""

    config: Config
    is_chosen: bool  # the dial has chosen `config`
    checkpoint: Checkpoint | None = None  # the newest
    seconds: float = 0.0  # elapsed in training
    tokens: int = 0  # tokens trained on
    is_enough: bool = False  # needs no more training


def _find_companion_base(wanted: Config, argv: list[str], own: TextStats) -> Base:
    """Find the base, here or in its mirror. Raises ConfigError if its folder holds a run on another text, or if flags
    ask for another model."""
    kept, forecast = recover_choice(wanted, DIAL_SOURCE)
    config = replace(parse_config(argv, kept, DIAL_SOURCE), forecast=forecast)
    previous = find_previous(wanted, _open_mirror(wanted))
    if previous.checkpoint is None or previous.saved is None:
        return Base(config, is_chosen=bool(kept))
    state, then = previous.saved.state, previous.saved.config
    _require_same_base(wanted, then)
    ended = replace(config, minutes=then["minutes"])
    windows = count_windows(previous.saved.data["train_tokens"], config.max_seq_len)
    used_its_minutes = time_progress(state, ended) >= FINISHED_PROGRESS
    is_long_enough = (
        ended.minutes >= ENOUGH_MINUTES_SHARE * (wanted.minutes - own_minutes(own, config)) or not used_its_minutes
    )
    is_enough = is_long_enough and progress(state, windows, ended) >= FINISHED_PROGRESS
    config = replace(config, input=then["input"])  # spelled as before, because it is part of the token folder's name
    return Base(config, True, previous.checkpoint, state.elapsed_seconds, state.tokens, is_enough)


def _require_same_base(wanted: Config, then: dict[str, Any]) -> None:
    """Raise ConfigError if the existing base has another text or model."""
    otherwise = f"To train another base, move or delete {wanted.run_dir}, or choose another --output_dir."
    if _resolve_path(then["input"]) != _resolve_path(wanted.input):
        raise ConfigError(f"{wanted.run_dir} was trained on {then['input']}, not on {wanted.input}. {otherwise}")
    for key in (*MODEL_KEYS, "vocab_size", "tokenizer"):
        if key != "dropout" and wanted.is_explicit(key) and getattr(wanted, key) != then.get(key):
            raise ConfigError(
                f"{wanted.run_dir} was trained with --{key} {then.get(key)}: use the same value or leave it out. "
                f"{otherwise}"
            )


def _resolve_path(text: Any) -> str:
    """Return the absolute path of a text, or its hub address."""
    return str(text) if str(text).startswith(HUB) else os.path.realpath(os.path.expanduser(str(text)))


def _has_changed(base: Base) -> bool:
    """Return whether files of the companion were added or edited since the base was trained; False if its tokens are
    gone."""
    then = (
        find_training_tokens(base.checkpoint)
        if base.checkpoint and not str(base.config.input).startswith(HUB)
        else None
    )
    return then is not None and text_settings(base.config, Previous()).output_dir != str(then.path.parent)


def _note_setting_aside(requested: Config) -> None:
    """Print a note if the folder holds a run that had no companion, or another one."""
    saved = find_previous(requested, _open_mirror(requested)).saved
    if saved is not None and _resolve_path(saved.config.get("companion")) != _resolve_path(requested.companion):
        print(
            f"Note       {requested.run_dir} holds a run with {saved.config.get('companion') or 'no companion'}. It is "
            "renamed when the new run begins. To keep its name, press Ctrl-C and choose another --output_dir"
        )


def _choose_base(argv: list[str], wanted: Config, own: TextStats, started: float) -> Config:
    """Choose a base for the companion, and print the forecast for the own text."""
    text = measure_text(wanted)
    ratio = _require_similar(own, text)
    dial = Dial(argv, text, wanted, started=started)
    dial.own_text = own
    config = dial.choose_config()
    assert config.forecast is not None
    seconds = 60 * (wanted.minutes - own_minutes(own, config)) * (1 - EVALUATING_SHARE)
    tokens = min(config.epochs * dial.text.train_tokens, seconds * config.forecast.tokens_per_second)
    _print_own_forecast(own, forecast_own(own, dial.text, config, tokens / dial.text.train_tokens, ratio))
    return config


def own_minutes(own: TextStats, base: Config) -> float:
    """Return the minutes for the own text, at the speed at which the base was timed; at most half."""
    vocabulary = next(each for each in VOCABULARIES if base.vocab_size <= each.size)
    tokens = OWN_PASSES * own.with_vocabulary(vocabulary).train_tokens
    speed = base.forecast.tokens_per_second if base.forecast else float("inf")
    return min(tokens / speed / (1 - EVALUATING_SHARE) / 60 + OWN_START_SHARE * base.minutes, base.minutes / 2)


def _require_similar(own: TextStats, companion: TextStats) -> float:
    """Return the token ratio of the two texts. Raises ConfigError for a companion that would make the loss worse."""
    if own.is_chat or companion.is_chat:  # samples of conversations are JSON
        return 1.0
    ratio = measure_token_ratio(own.sample, companion.sample)
    if ratio > MAX_TOKEN_RATIO:
        raise ConfigError(
            f"The companion {companion.name} is too different from {own.name}: with each other's vocabulary, they take "
            f"{ratio:.1f} times as many tokens, so the result would be worse than without it. Name text in the same "
            "language and of the same kind, or remove --companion."
        )
    return ratio


class OwnForecast(NamedTuple):
    loss: float  # bits per byte
    error: float
    alone: float  # bits per byte without the companion


def forecast_own(own: TextStats, companion: TextStats, base: Config, passes: float, ratio: float) -> OwnForecast:
    """Forecast the loss on the own text, from a base that has read the companion `passes` times.

    By the law it is between the loss with the own text alone and that with a text as large as both; the token `ratio`
    determines where.
    """
    letters = TRAIN_SHARE * own.letters
    per_byte = own.letters / own.bytes * own.difficulty
    sizes = [block_parameters(shape.num_layers, shape.embed_dim) for shape in LADDER]
    alone = per_byte * min(expected_loss(size, letters, useful_passes(size, letters)) for size in sizes)
    size = block_parameters(base.num_layers, base.embed_dim)
    both = per_byte * expected_loss(size, letters + TRAIN_SHARE * companion.letters, passes)
    loss = alone - (COMPANION_GAIN - GAIN_PER_RATIO * max(0.0, ratio - SAME_KIND_RATIO)) * max(0.0, alone - both)
    return OwnForecast(
        loss, own.letters / own.bytes * (UNMEASURED_ERROR_FACTOR * MEASURED_ERROR + own.difficulty_error), alone
    )


def block_parameters(num_layers: int, embed_dim: int) -> float:
    return 12.0 * num_layers * embed_dim**2


def _print_own_forecast(own: TextStats, expected: OwnForecast) -> None:
    """Print the forecast for the own text with the companion and without."""
    loss, error, alone = expected
    print(
        f"Your text  {own.name}: {byte_size(own.bytes)}, read at most {OWN_PASSES} times; expected {loss:.2f} bits per "
        f"byte ({max(0.0, loss - error):.2f} to {loss + error:.2f}), {alone:.2f} without the companion"
    )
    if loss > alone - MIN_GAIN:
        print(
            "Note       By this estimate the companion does not help: it is too small, or too different. Without "
            "--companion, all minutes go to your text"
        )


def _choose_own(
    requested: Config, own: TextStats, base: Base, minutes: float, weights: Checkpoint, data_dir: str
) -> Config:
    """Choose the settings of the run that starts from the base's `weights`, or return those of the existing run.
    `data_dir`: the tokens of the own text.

    An existing run is set aside if its text has changed, or if more minutes were given and the base has used them.
    """
    argv = _build_argv(requested)
    (now,) = map(TokenMetadata.read, find_metadata(Path(data_dir)))
    previous = find_previous(requested, _open_mirror(requested))
    saved, (kept, forecast) = previous.saved, recover_choice(requested, DIAL_SOURCE)
    is_same_base = saved is None or saved.state.initialized_from == weights.weights_sha256()
    is_same_text = saved is None or saved.data["tokens_sha256"] == now.tokens_sha256
    if "init_from" in kept and is_same_text and (is_same_base or base.seconds > 60 * requested.minutes):
        if not is_same_base:
            print(
                f"Note       {requested.run_dir} started from an earlier state of the base. To start from the current "
                "one: --resume never"
            )
        return replace(parse_config(argv, kept, DIAL_SOURCE), forecast=forecast)

    text = measure_tokens(replace(requested, data_dir=data_dir))._replace(name=str(requested.input))
    step_tokens = min(OWN_STEP_TOKENS, OWN_PASSES * text.train_tokens / OWN_STEPS)
    keys: dict[str, Any] = shape_keys(base.config) | {
        "init_from": str(weights.path),
        "batch_size": max(1, round(step_tokens / base.config.max_seq_len)),
    }
    if previous.checkpoint is not None:
        keys["resume"] = "never"
    dial = Dial(argv, text, replace(parse_config(argv, keys, DIAL_SOURCE), minutes=minutes), keys=read_recipe() | keys)
    dial.max_passes = OWN_PASSES
    choice = dial.find_best()
    config = dial.build_config(choice)
    learned = find_training_tokens(weights)
    if learned is None:
        return config
    companion = measure_tokens(replace(requested, data_dir=str(learned.path.parent)))
    companion = companion._replace(name=str(requested.companion))
    passes, ratio = base.tokens / companion.train_tokens, _require_similar(own, companion)
    expected = forecast_own(own, companion, base.config, passes, ratio)
    _print_own_forecast(own, expected)
    forecast = Forecast(expected.loss, expected.error, choice.tokens_per_second, choice.cpu_share, alone=expected.alone)
    return replace(config, forecast=forecast)
