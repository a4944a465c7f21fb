"""`--companion TEXT`: a run that reads two texts, the companion first and then, from a switch on, one's own `--input`
as every second sequence (`find_switch` in schedule.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.errors import ConfigError
from tokenization.extract import find_files
from tokenization.settings import HUB
from training.choice import CHOSEN, Chosen
from training.config import Config, parse_config
from training.dial import Choice, Dial
from training.growth import Growth
from training.law import MEASURED_ERROR, UNMEASURED_ERROR_FACTOR, expected_loss, useful_passes
from training.parallel import require_single_process
from training.recipe import LADDER, read_recipe
from training.text import TRAIN_SHARE, TextStats, input_settings, measure_text, measure_token_ratio

MIN_PASSES = 2  # a run with time for fewer passes over the own text is too short for a companion
# A companion of the same kind brings COMPANION_GAIN of the gain that as much own text would bring, and less by
# GAIN_PER_RATIO for each unit of the token ratio above SAME_KIND_RATIO (docs/benchmarks/companion.md).
COMPANION_GAIN, GAIN_PER_RATIO, SAME_KIND_RATIO = 0.8, 3.5, 1.1
MAX_TOKEN_RATIO = 1.4  # other English text: up to 1.35; Dutch beside English: over 1.5, which makes the loss worse
MIN_GAIN = 0.02  # bits per byte; less does not justify a companion


def choose(argv: Sequence[str] | None, requested: Config, started: float, growth: Growth | None = None) -> Config:
    """Choose the configuration for `requested`, which names two texts and no model, and print its forecast. If
    `minutes` are too short for a companion, choose one for the own text alone. With `growth`, continue from its
    weights.

    Raises ConfigError for an unsuitable companion, and what the dial raises.
    """
    require_single_process()
    keys = None
    if growth is not None:
        keys = read_recipe() | growth.build_settings(requested)
        requested = parse_config(argv, keys, CHOSEN)
    own, companion, ratio = require_suitable(requested)
    dial = Dial(argv, companion, _of_companion(requested), keys=keys, started=started)
    dial.own_text = own
    choice = dial.find_best()
    on_own_text = Dial(argv, own, without(requested), dial.machine, keys, started)
    on_own_text.step_times = dial.step_times
    alone = on_own_text.find_best_within(requested.minutes)
    if choice.own_passes < MIN_PASSES:
        print(
            f"Note       {requested.minutes:g} minutes are too short for a companion here: {own.name} could be read "
            f"only {choice.own_passes:.2g} times. Training on {own.name} alone"
        )
        return without(on_own_text.choose_config())
    loss, error = forecast_own(own, companion, choice, ratio)
    config = dial.build_config(choice)
    choice = choice._replace(loss=loss, error=error)
    dial.print_choice(choice, config.dropout, alone.loss)
    if loss > alone.loss - MIN_GAIN:
        print(
            "Note       By this estimate the companion does not help: it is too small, or too different. Without "
            "--companion, all minutes go to your text"
        )
    return replace(config, forecast=replace(dial.forecast(choice), alone=alone.loss))


def was_added_or_left_out(chosen: Chosen, config: Config) -> bool:
    """Return whether the run of this name has a companion and the command none, or the other way round. Print that."""
    if chosen.has_companion == bool(config.companion) or "companion" in chosen.settings:
        return False
    print(
        f"Note       {config.run_dir} holds a run {'with' if chosen.has_companion else 'without'} a companion. It will "
        "be renamed. To keep its name, press Ctrl-C and choose another --output_dir"
    )
    return True


def without(config: Config) -> Config:
    """Return a configuration for the own text alone, though the flags name a companion."""
    return replace(config, companion=None, sources=config.sources | {"companion": CHOSEN})


def _of_companion(config: Config) -> Config:
    return replace(config, input=config.companion, companion=None)


def require_suitable(config: Config) -> tuple[TextStats, TextStats, float]:
    """Measure the own text, the companion, and their token ratio. Raises ConfigError for a companion that is the own
    text, or that would make the loss worse."""
    texts = (config, _of_companion(config))
    if not any(str(each.input).startswith(HUB) for each in texts):
        own_files, others = ({source.path for source in find_files(input_settings(each))} for each in texts)
        if others <= own_files:
            raise ConfigError(
                f"Every file of --companion {config.companion} is also in --input {config.input}. Name other text, or "
                "leave --companion out."
            )
    own, companion = map(measure_text, texts)
    if own.is_chat != companion.is_chat:
        raise ConfigError(
            f"One of {own.name} and the companion {companion.name} holds conversations, the other does not. Name a "
            "companion of the same kind, or remove --companion."
        )
    if own.is_chat:  # samples of conversations are JSON
        return own, companion, 1.0
    ratio = measure_token_ratio(own.sample, companion.sample)
    if ratio > MAX_TOKEN_RATIO:
        raise ConfigError(
            f"The companion {companion.name} is too different from {own.name}: with each other's vocabulary, they take "
            f"{ratio:.1f} times as many tokens, so the result would be worse than without it. Name text in the same "
            "language and of the same kind, or remove --companion."
        )
    return own, companion, ratio


def forecast_own(own: TextStats, companion: TextStats, choice: Choice, ratio: float) -> tuple[float, float]:
    """Forecast the loss on the own text in bits per byte, and its error.

    By the law it is between the loss with the own text alone and that with a text as large as both; the token `ratio`
    determines where. In a run too short for that, it is the latter.
    """
    letters = TRAIN_SHARE * own.letters
    per_letter = own.letters / own.bytes
    sizes = [12.0 * shape.num_layers * shape.embed_dim**2 for shape in LADDER]
    alone = min(expected_loss(size, letters, useful_passes(size, letters)) for size in sizes)
    size = choice.candidate.block_parameters
    both = expected_loss(size, letters + TRAIN_SHARE * companion.letters, choice.passes)
    gain = max(0.0, COMPANION_GAIN - GAIN_PER_RATIO * max(0.0, ratio - SAME_KIND_RATIO))
    loss = per_letter * own.difficulty * max(both, alone - gain * (alone - both))
    return loss, per_letter * (UNMEASURED_ERROR_FACTOR * MEASURED_ERROR + own.difficulty_error)
