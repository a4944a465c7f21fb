"""The flags of generate.py: defaults, ranges, help, and which of them contradict each other. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.flags import check_values, option, options_of

MOST_SAMPLES = 1_000_000  # more can only be a mistake
MOST_NEW_TOKENS = 1_000_000  # their random numbers are all drawn at the start


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises ValueError listing every value out of range."""

    max_new_tokens: int = option(200, "how", "tokens to generate at most", low=0, high=MOST_NEW_TOKENS)
    temperature: float = option(0.8, "how", "randomness; 0 is greedy", low=0.0)
    top_k: int = option(0, "how", "only the N likeliest tokens, 0 is off", low=0)
    top_p: float = option(0.9, "how", "only the likeliest tokens, X in all; 1 is off", above=0.0, high=1.0)
    repetition_penalty: float = option(1.0, "how", "over 1: repeat less", low=0.01, high=100.0)
    frequency_penalty: float = option(0.0, "", "for each time that a token was generated", low=-2.0, high=2.0)
    presence_penalty: float = option(0.0, "", "for a token that was generated at all", low=-2.0, high=2.0)
    stop: tuple[str, ...] = option((), "how", "stop before this text; repeatable")
    seed: int = option(1337, "how", "seed of the first continuation", low=0)

    def __post_init__(self) -> None:
        problems: list[str] = []
        for key, value in check_values(vars(self), SAMPLING, problems, source="").items():
            object.__setattr__(self, key, value)
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Request:
    """What to do. Each field is a flag of the same name, and so is each field of Sampling that has a group."""

    prompt: tuple[str, ...] = option((), "what", "text to continue; repeatable", empty=True)
    prompts_file: str | None = option(None, "what", "text file with one prompt a line", metavar="FILE")
    interactive: bool = option(False, "what", "type prompts one after the other")
    raw: bool = option(False, "what", "continue prompts as plain text, also with a chat model")
    num_samples: int = option(1, "what", "continuations of each prompt", low=1, high=MOST_SAMPLES)
    checkpoint: str | None = option(None, "what", "checkpoint or run folder [the newest run in runs/]", metavar="PATH")
    compare: tuple[str, ...] = option(
        (), "what", "answer the prompts with each of these checkpoints", many=True, metavar="PATH"
    )
    score: tuple[str, ...] = option(
        (),
        "instead of generating",
        "loss, perplexity, bits per byte of text files",
        many=True,
        empty=True,
        metavar="FILE",
    )
    stride: int | None = option(
        None, "instead of generating", "tokens between windows of text [half the context]", low=1
    )
    device: str = option("auto", "how", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    stream: bool = option(False, "output", "show text as it is generated, one after the other")
    no_stream: bool = option(False, "output", "show each text when it is complete")
    json: bool = option(False, "output", "one JSON object a line")


SAMPLING = options_of(Sampling)
REQUEST = options_of(Request)
FLAGS = REQUEST | {key: f for key, f in SAMPLING.items() if f.metadata["group"]}


def settings_of(given: Mapping[str, Any], problems: list[str]) -> tuple[Request, Sampling]:
    """The settings for the typed flags. Adds what is wrong with them to `problems`."""
    values = check_values(given, FLAGS, problems)
    request = Request(**{key: value for key, value in values.items() if key in REQUEST})
    problems += contradictions(request, {key for key, value in values.items() if value is not False})
    sampling = {key: value for key, value in values.items() if key in SAMPLING}
    return request, Sampling(**sampling | {"stop": tuple(unescape(word) for word in sampling.get("stop", ()))})


def unescape(word: str) -> str:
    """A stop string as typed: shells pass \\n on as two characters."""
    return word.replace("\\n", "\n").replace("\\t", "\t")


def contradictions(request: Request, given: set[str]) -> list[str]:
    """Flags that contradict each other. `given`: the names of the typed flags."""
    problems = []
    allowed = {"score", "stride", "checkpoint", "device", "json"}
    if request.stride is not None and not request.score:
        problems.append("--stride needs --score and the files to score")
    if request.score and given - allowed:
        named = ", ".join(f"--{name}" for name in FLAGS if name in given - allowed)
        problems.append(f"--score generates no text; leave {named} out")
    if request.interactive and given & {"prompt", "prompts_file", "json", "compare"}:
        problems.append("--interactive asks for prompts itself; leave --prompt, --prompts_file, --json, --compare out")
    if request.interactive and request.num_samples > 1:
        problems.append("--interactive generates one text per prompt; leave --num_samples out")
    if request.interactive and request.no_stream:
        problems.append("--interactive shows text as it is generated; leave --no_stream out")
    if request.compare and request.checkpoint:
        problems.append("--compare names the checkpoints; leave --checkpoint out")
    if request.stream and (request.json or request.compare):
        problems.append("--stream shows plain text; leave --json and --compare out")
    if request.stream and request.no_stream:
        problems.append("--stream and --no_stream contradict each other; give one of them")
    return problems
