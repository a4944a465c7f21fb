"""A request for OpenAI's completions or chat completions, as pydantic models, and as the Question that is answered.

A parameter that would change the text but is not supported is refused by its name, never ignored.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from common.chat import Message, require_order
from common.errors import is_out_of_memory
from common.validation import build, quoted
from generation.completion import ROWS_AT_ONCE, prompt_ids
from generation.sampling import Sampling
from generation.stream import only_text
from generation.terminal import room_for_prompt
from serving.models import Served
from tokenizer_base import TokenizerError, valid_unicode

MOST_STOPS = 4
LONGEST_STOP = 1_000  # characters; each token is compared with every prefix of it
LONGEST_ID = 10  # digits
USUAL_TOKENS = Sampling.max_new_tokens  # if the request gives no number
# Parameters that this server does not support, with the values at which they change nothing (...: any value).
NEUTRAL: Mapping[str, Any] = {
    "user": ..., "metadata": ..., "store": ..., "service_tier": ..., "safety_identifier": ..., "prompt_cache_key": ...,
    "prompt_cache_retention": ..., "parallel_tool_calls": ..., "verbosity": (), "audio": (), "prediction": (),
    "web_search_options": (), "suffix": ("",), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "reasoning_effort": ("none",), "refusal": (), "tool_calls": ([],), "annotations": ([],),
}  # fmt: skip


class RequestError(Exception):
    """The error that a client gets instead of an answer, and its HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def explain(problem: Exception) -> RequestError:
    """What the client gets for an error. A bug of ours is printed on stderr, for whoever runs the server."""
    if isinstance(problem, RequestError):
        return problem
    if is_out_of_memory(problem):
        return RequestError("The texts do not fit in memory; ask for fewer or shorter ones.", status=500)
    traceback.print_exception(problem)
    return RequestError(f"The server failed: {type(problem).__name__}; its terminal says where.", status=500)


class Checked(BaseModel):
    """null is the same as no value. Values are not converted: "64" and true are no numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {name: value for name, value in values.items() if value is not None}
        for name in (kept.keys() & NEUTRAL.keys()) - cls.model_fields.keys():
            if NEUTRAL[name] is not ... and kept[name] not in NEUTRAL[name]:
                raise RequestError(
                    f"{name} is {quoted(kept[name])}, which this server does not support; leave it out.",
                    name,
                    code="unsupported_parameter",
                )
            del kept[name]
        return kept


class StreamOptions(Checked):
    include_usage: bool = False
    include_obfuscation: bool = False  # it would hide text lengths from eavesdroppers on encrypted streams


class ChatMessage(Checked):
    role: str
    content: str
    name: str = ""  # of no use to a template, and no harm

    @field_validator("content", mode="before")
    @classmethod
    def joined(cls, value: Any) -> str:
        """A text, or a list of parts, one line each."""
        parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in parts
        ):
            raise ValueError('a text or a list of {"type": "text", "text": ...} is needed')
        return valid_unicode("\n".join(part["text"] for part in parts))


class Parameters(Checked):
    """Of both kinds of request. What is left out has the default of generate.py, except for the seed: the same request
    again gives another text. `Sampling` checks the ranges."""

    model: str = ""
    max_tokens: int = Field(USUAL_TOKENS, ge=0)
    temperature: float = Sampling.temperature
    top_k: int = Sampling.top_k
    top_p: float = Sampling.top_p
    min_p: float = Sampling.min_p
    repetition_penalty: float = Sampling.repetition_penalty
    frequency_penalty: float = Sampling.frequency_penalty
    presence_penalty: float = Sampling.presence_penalty
    logit_bias: dict[str, float] = {}  # id of a token: what is added to its logit
    stop: list[str] = []
    seed: int = Field(default_factory=lambda: random.randrange(2**31))
    n: int = Field(1, ge=1, le=ROWS_AT_ONCE)
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def with_one_limit(cls, values: Any) -> Any:
        if isinstance(values, dict) and (most := values.get("max_completion_tokens")) is not None:
            if values.get("max_tokens") is not None:
                raise RequestError("max_tokens and max_completion_tokens are the same; give one.", "max_tokens")
            values = values | {"max_tokens": most, "max_completion_tokens": None}
        return values

    @field_validator("stop", mode="before")
    @classmethod
    def as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def agrees(self) -> Self:
        if len(self.stop) > MOST_STOPS or not all(1 <= len(text) <= LONGEST_STOP for text in self.stop):
            raise RequestError(f"stop is up to {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters.", "stop")
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of is {self.best_of}, which this server does not support; leave it out.", "best_of"
            )
        if self.stream_options and not self.stream:
            raise RequestError('stream_options is for requests with "stream": true.', "stream_options")
        return self

    def sampling(self, served: Served) -> Sampling:
        """Raises RequestError for a value out of range."""
        names = self.model_fields_set & Sampling.__dataclass_fields__.keys()
        values = {name: getattr(self, name) for name in names} | {"seed": self.seed, "stop": tuple(self.stop)}
        # More than the vocabulary means all of it.
        values["top_k"] = min(self.top_k, served.model.config.vocab_size)
        values["max_new_tokens"] = min(self.max_tokens, served.max_tokens)
        try:
            return build(Sampling, values)
        except ValueError as problem:  # which begins with the parameter's name
            raise RequestError(f"{problem}.", str(problem).partition(" ")[0]) from None

    def asking(self, served: Served, prompts: list[list[int]], asked: list[str], **more: Any) -> Question:
        bias = only_text(served.model, served.tokenizer)
        for name, value in self.logit_bias.items():
            require_ids("logit_bias", [int(name) if name.isdecimal() and len(name) < LONGEST_ID else -1], served)
            bias[int(name)] += value
        return Question(
            rows=[prompt for prompt in prompts for _ in range(self.n)],
            asked=[text for text in asked for _ in range(self.n)],
            prompt_tokens=sum(map(len, prompts)),
            sampling=self.sampling(served),
            bias=bias,
            stream=self.stream,
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            **more,
        )


class CompletionRequest(Parameters):
    prompt: list[Any] = [""]  # texts, or lists of ids
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)  # alternatives to each token

    @field_validator("prompt", mode="before")
    @classmethod
    def as_prompts(cls, value: Any) -> Any:
        prompts = [value] if isinstance(value, str) or are_ids(value) else value
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) or are_ids(prompt) for prompt in prompts):
            raise ValueError("a text, a list of token ids, or a list of these is needed")
        return [valid_unicode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def question(self, served: Served) -> Question:
        """Raises RequestError."""
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                require_ids("prompt", prompt, served)
        if not 1 <= self.n * len(self.prompt) <= ROWS_AT_ONCE:
            message = f"{len(self.prompt)} prompts with n = {self.n} are {self.n * len(self.prompt)} texts; "
            raise RequestError(f"{message}1 to {ROWS_AT_ONCE} are allowed.", "prompt")
        prompts = [text_ids(prompt, served) for prompt in self.prompt]
        require_room("A prompt", "prompt", max(prompts, key=len), served)
        asked = [prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt) for prompt in self.prompt]
        return self.asking(served, prompts, asked, echo=self.echo, count=self.logprobs)


class ChatRequest(Parameters):
    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def question(self, served: Served) -> Question:
        """Raises RequestError."""
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; an answer needs 1 or more.", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f'top_logprobs is {self.top_logprobs}; it needs "logprobs": true.', "top_logprobs")
        # "developer" is OpenAI's newer name for it.
        messages = [Message("system" if m.role == "developer" else m.role, m.content) for m in self.messages]
        ids = chat_ids(messages, self.sampling(served), served)
        return self.asking(served, [ids], [""], is_chat=True, count=self.top_logprobs if self.logprobs else None)


@dataclass(frozen=True)
class Question:
    """A request that was checked."""

    rows: list[list[int]]  # ids; one each for every text to make
    asked: list[str]  # the prompts as text; "" in a conversation
    prompt_tokens: int
    sampling: Sampling
    bias: torch.Tensor  # see `stream`
    stream: bool
    include_usage: bool
    count: int | None = None  # log-probabilities of how many alternatives to each token; None: none at all
    echo: bool = False  # a text begins with its prompt
    is_chat: bool = False


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(i) is int for i in value)


def text_ids(prompt: str | list[int], served: Served) -> list[int]:
    try:
        return prompt_ids(served.tokenizer, prompt)
    except TokenizerError as problem:
        raise RequestError(str(problem), "prompt") from None


def chat_ids(messages: Sequence[Message], sampling: Sampling, served: Served) -> list[int]:
    """The ids of a conversation up to its answer, whose beginning may be given. The oldest turns are dropped if they
    leave no room for the answer."""
    if served.chat is None:
        raise RequestError(
            f"{served.name} was not trained on conversations. Train or fine-tune it on some (tokenize_local_bpe.py "
            "--format chat), or use /v1/completions.",
            "model",
        )
    turns = messages[:-1] if messages and messages[-1].role == "assistant" else messages
    try:
        require_order(turns, "user")
    except ValueError as problem:
        raise RequestError(f"messages cannot be answered: {problem}.", "messages") from None
    try:
        begun = served.chat.answer_ids(served.tokenizer, messages[-1].content) if turns is not messages else []
        room = room_for_prompt(served.model, sampling) - len(begun)
        ids = [*served.chat.prompt_ids(served.tokenizer, turns, room), *begun]
    except TokenizerError as problem:
        raise RequestError(str(problem), "messages") from None
    require_room("The last question", "messages", ids, served)
    return ids


def require_ids(name: str, ids: Sequence[int], served: Served) -> None:
    if wrong := [i for i in ids if not 0 <= i < served.tokenizer.vocab_size]:
        message = f"{name} has the token id {wrong[0]}; {served.name} has 0 to {served.tokenizer.vocab_size - 1}."
        raise RequestError(message, name)


def require_room(subject: str, param: str, ids: list[int], served: Served) -> None:
    """Raises RequestError for a prompt longer than the context, of which the model would silently see only the end."""
    if len(ids) > (context := served.model.config.max_seq_len):
        message = f"{subject} makes {len(ids):,} tokens, and {served.name} reads {context:,}."
        raise RequestError(message, param, code="context_length_exceeded")
