"""The flags of generate.py: defaults, ranges, help texts, contradictions, parsing. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from common.flags import Parser
from common.validation import STRICT, NonEmptyText, check, extras, fields_of, option, options_of

MAX_SAMPLES = 1_000_000  # a larger number must be a mistake
MAX_NEW_TOKENS = 1_000_000  # all random numbers are drawn at the start


@dataclass(frozen=True, config=STRICT)
class Sampling:
    """Settings for choosing tokens. Raises ValueError listing all invalid values."""

    max_new_tokens: int = option(200, "how", "tokens to generate at most", ge=0, le=MAX_NEW_TOKENS)
    temperature: float = option(0.8, "how", "randomness; 0 is greedy", ge=0)
    top_k: int = option(0, "how", "only the N most likely tokens; 0 is off", ge=0)
    top_p: float = option(0.9, "how", "only the most likely tokens that sum to X; 1 is off", gt=0, le=1)
    repetition_penalty: float = option(1.0, "how", "over 1: repeat less", ge=0.01, le=100)
    stop: tuple[NonEmptyText, ...] = option((), "how", "stop before this text; repeatable")
    seed: int = option(1337, "how", "seed of the first continuation", ge=0)


@dataclass(frozen=True, config=STRICT)
class Request:
    """The other settings of generate.py. Each field is a flag of the same name."""

    prompt: tuple[str, ...] = option((), "what", "text to continue; repeatable")
    prompts_file: NonEmptyText | None = option(None, "what", "text file with one prompt per line", metavar="FILE")
    interactive: bool = option(False, "what", "type prompts one after the other")
    raw: bool = option(False, "what", "continue prompts as plain text, also with a chat model")
    num_samples: int = option(1, "what", "continuations of each prompt", ge=1, le=MAX_SAMPLES)
    checkpoint: NonEmptyText | None = option(
        None, "what", "checkpoint or run folder [the newest run in runs/]", metavar="PATH"
    )
    compare: tuple[NonEmptyText, ...] = option(
        (), "what", "answer the prompts with each of these checkpoints", many=True, min_length=1, metavar="PATH"
    )
    score: tuple[str, ...] = option(
        (),
        "instead of generating",
        "loss, perplexity, bits per byte of text files",
        many=True,
        min_length=1,
        metavar="FILE",
    )
    stride: int | None = option(
        None, "instead of generating", "tokens between windows of text [half the context]", ge=1
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "how", "where to compute")
    stream: bool = option(False, "output", "show text as it is generated, one after the other")
    no_stream: bool = option(False, "output", "show each text when it is complete")
    trace: bool = option(False, "output", "show which parts occur word for word in the training text")
    json: bool = option(False, "output", "one JSON object per line")


SAMPLING = {key: f for key, f in fields_of(Sampling).items() if extras(f)["group"]}
REQUEST = options_of(Request)
FLAGS = REQUEST | SAMPLING
CONTRADICTIONS = {
    "score": ("generates no text", FLAGS.keys() - {"score", "stride", "checkpoint", "device", "json"}),
    "interactive": (
        "asks for prompts and shows the text as it comes",
        {"prompt", "prompts_file", "json", "compare", "num_samples", "no_stream"},
    ),
    "compare": ("names the checkpoints", {"checkpoint"}),
    "trace": ("applies to one checkpoint and its prompts", {"compare", "interactive"}),
    "stream": ("shows plain text as it comes", {"json", "compare", "no_stream"}),
}


def parse_arguments(argv: Sequence[str] | None) -> tuple[Request, Sampling]:
    """Parse the command line. Raises ConfigError listing unknown flags, invalid values and contradictions."""
    parser = Parser(
        prog="generate.py",
        usage="%(prog)s [--prompt TEXT] [--FLAG VALUE ...]",
        description="Generate text with a trained model. The same command gives the same text; change --seed for "
        "another. --score measures how well the model predicts a text.",
    )
    parser.add_options(FLAGS)
    problems: list[str] = []
    settings = _parse_settings(parser.read(argv, problems), problems)
    parser.require_none(problems)
    return settings


def _parse_settings(given: Mapping[str, Any], problems: list[str]) -> tuple[Request, Sampling]:
    """Build the settings from the given flags. Append what is wrong to `problems`."""
    for_request, for_sampling = ({key: given[key] for key in given if key in keys} for keys in (REQUEST, SAMPLING))
    if isinstance(for_sampling.get("stop"), tuple):
        for_sampling["stop"] = tuple(unescape(word) if isinstance(word, str) else word for word in for_sampling["stop"])
    names = {key: f"--{key}" for key in given}
    request, sampling = check(Request, for_request, problems, names), check(Sampling, for_sampling, problems, names)
    problems += _list_contradictions({key for key, value in given.items() if value is not False})
    return request or Request(), sampling or Sampling()


def unescape(word: str) -> str:
    """Return a typed stop string with \\n and \\t as characters, because shells pass them on as two."""
    return word.replace("\\n", "\n").replace("\\t", "\t")


def _list_contradictions(flags: set[str]) -> list[str]:
    """Return a problem for each contradiction between the given flags."""
    problems = [
        f"--{flag} {why}; leave {', '.join(f'--{name}' for name in FLAGS if name in flags & others)} out"
        for flag, (why, others) in CONTRADICTIONS.items()
        if flag in flags and flags & others
    ]
    if "stride" in flags and "score" not in flags:
        problems.append("--stride needs --score and the files to score")
    return problems
