"""A request for OpenAI's completions or chat completions, checked and turned into a Question.

A parameter that would change the text but is not supported is refused by its name, never ignored.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.chat import Message, require_order
from common.errors import is_out_of_memory
from common.script import LONGEST_MESSAGE
from common.validation import build, suggest
from generation.completion import ROWS_AT_ONCE, prompt_ids
from generation.sampling import Sampling
from generation.terminal import room_for_prompt
from serving.served import Served
from tokenizer_base import TokenizerError, valid_unicode

MOST_STOPS = 4
LONGEST_STOP = 1_000  # characters; each token is compared with every prefix of it
MOST_LIKELIEST = {False: 5, True: 20}  # alternatives to a token, for completions and chat, as at OpenAI
USUAL_TOKENS = Sampling.max_new_tokens  # if the request gives no number
# Parameters that change nothing here, and unsupported ones with the values at which they change nothing.
HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}


class RequestError(Exception):
    """The error that a client gets instead of an answer, and its HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def content(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error"}.get(self.status, "server_error" if self.status >= 500 else "")
        message = str(self)[:LONGEST_MESSAGE]
        kind = kind or "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": "1"}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def explain(problem: Exception) -> RequestError:
    """What the client gets for an error. A bug of ours is printed on stderr, for whoever runs the server."""
    if isinstance(problem, RequestError):
        return problem
    if is_out_of_memory(problem):
        return RequestError("The texts do not fit in memory; ask for fewer or shorter ones.", status=500)
    traceback.print_exception(problem)
    return RequestError(f"The server failed: {type(problem).__name__}; its terminal says where.", status=500)


def require_name(served: Served, name: str) -> None:
    """Raises RequestError for the name of another model."""
    if name != served.name:
        message = f"The model {name!r:.200} does not exist; this server has {served.name!r}."
        raise RequestError(message, "model", 404, "model_not_found")


@dataclass(frozen=True)
class Question:
    """A request that was checked."""

    is_chat: bool
    prompts: list[list[int]]  # ids; one each for every text to make
    asked: list[str]  # the prompts as text; "" in a conversation
    echo: bool  # a text begins with its prompt
    prompt_tokens: int
    logprobs: int | None  # how many alternatives to each token; None: no log-probabilities at all
    sampling: Sampling
    stream: bool
    include_usage: bool


class Parameters:
    """The parameters of a request. Each is read once; `refuse_rest` refuses those that nobody has read.

    Each method returns the default for an absent parameter or null, and raises RequestError for a wrong type or value.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.left = {name: value for name, value in values.items() if value is not None}
        self.known: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        self.known.append(name)
        return self.left.pop(name, default)

    def integer(self, name: str, default: int, least: int, most: int | None = None) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
            between = f"from {least:,} to {most:,}" if most else f"from {least:,} on"
            raise RequestError(f"{name} is {shown(value)}; a whole number {between} is needed.", name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            pass
        raise RequestError(f"{name} is {shown(value)}; a number is needed.", name)

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise RequestError(f"{name} is {shown(value)}; true or false is needed.", name)
        return value

    def strings(self, name: str, default: list[str]) -> list[str]:
        """One text, or a list of texts."""
        value = self.take(name, default)
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise RequestError(f"{name} is {shown(value)}; a text or a list of texts is needed.", name)
        return [valid_unicode(text) for text in values]

    def refuse_rest(self) -> None:
        for name in HARMLESS:
            self.take(name)
        for name, neutral in UNSUPPORTED.items():
            value = self.take(name)
            is_neutral = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
            if value is not None and not is_neutral:  # 0 is not False: logprobs 0 asks for the tokens of the text
                message = f"{name} is {shown(value)}, which this server does not support; leave it out."
                raise RequestError(message, name, code="unsupported_parameter")
        for name in self.left:
            message = f"There is no parameter {name!r:.100}.{suggest(name, self.known)}"
            raise RequestError(message, name[:100], code="unknown_parameter")


def shown(value: Any) -> str:
    """A value as JSON for a message, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_question(body: bytes, is_chat: bool, served: Served) -> Question:
    """The body of a request, checked. Raises RequestError."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as problem:  # thousands of open brackets
        raise RequestError(f"The body of the request is not JSON: {problem}.") from None
    if not isinstance(values, dict):
        raise RequestError("The body of the request is no JSON object.")
    parameters = Parameters(values)
    name = parameters.take("model", served.name)
    require_name(served, name if isinstance(name, str) else shown(name))
    sampling = read_sampling(parameters, served, least_tokens=1 if is_chat else 0)
    logprobs = read_logprobs(parameters, is_chat)
    stream, options = parameters.flag("stream"), parameters.take("stream_options")
    if options is not None and (not stream or not isinstance(options, dict)):
        raise RequestError('stream_options is an object, for requests with "stream": true.', "stream_options")
    streaming = Parameters(options or {})
    include_usage = streaming.flag("include_usage")
    streaming.flag("include_obfuscation")  # it would hide text lengths from eavesdroppers on encrypted streams
    streaming.refuse_rest()
    asked = parameters.take("messages") if is_chat else read_prompts(parameters.take("prompt", ""), served)
    echo = False if is_chat else parameters.flag("echo")
    n = parameters.integer("n", 1, 1, ROWS_AT_ONCE)
    parameters.refuse_rest()
    count = 1 if is_chat else len(asked)
    if not 1 <= n * count <= ROWS_AT_ONCE:
        message = f"{count} prompts with n = {n} are {n * count} texts; 1 to {ROWS_AT_ONCE} are allowed."
        raise RequestError(message, "prompt")
    if is_chat:
        texts, prompts = [""], [chat_ids(read_messages(asked), sampling, served)]
    else:
        texts = [prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt) for prompt in asked]
        prompts = [text_ids(prompt, served) for prompt in asked]
        require_room("A prompt", "prompt", max(prompts, key=len), served)
    return Question(
        is_chat,
        prompts=[prompt for prompt in prompts for _ in range(n)],
        asked=[text for text in texts for _ in range(n)],
        echo=echo,
        prompt_tokens=sum(map(len, prompts)),
        logprobs=logprobs,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
    )


def read_logprobs(parameters: Parameters, is_chat: bool) -> int | None:
    if not is_chat:
        is_wanted = "logprobs" in parameters.left
        count = parameters.integer("logprobs", 0, 0, MOST_LIKELIEST[is_chat])
    else:
        is_wanted = parameters.flag("logprobs")
        count = parameters.integer("top_logprobs", 0, 0, MOST_LIKELIEST[is_chat])
        if count and not is_wanted:
            raise RequestError(f'top_logprobs is {count}; it needs "logprobs": true.', "top_logprobs")
    return count if is_wanted else None


def read_sampling(parameters: Parameters, served: Served, least_tokens: int = 1) -> Sampling:
    """Absent values default to those of generate.py, except the seed: the same request again gives another text."""
    usual = min(USUAL_TOKENS, served.max_tokens)
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in parameters.left]
    if len(limits) == 2:
        raise RequestError("max_tokens and max_completion_tokens are the same; give one of them.", "max_tokens")
    max_new_tokens = usual
    for name in ("max_tokens", "max_completion_tokens"):
        max_new_tokens = parameters.integer(name, max_new_tokens, least_tokens, served.max_tokens)
    stop = parameters.strings("stop", [])
    if len(stop) > MOST_STOPS or not all(1 <= len(text) <= LONGEST_STOP for text in stop):
        message = f"stop is up to {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters."
        raise RequestError(message, "stop")
    try:
        values = {
            "max_new_tokens": max_new_tokens,
            "temperature": parameters.number("temperature", Sampling.temperature),
            # More than the vocabulary means all of it.
            "top_k": min(parameters.integer("top_k", Sampling.top_k, 0), served.model.config.vocab_size),
            "top_p": parameters.number("top_p", Sampling.top_p),
            "repetition_penalty": parameters.number("repetition_penalty", Sampling.repetition_penalty),
            "stop": tuple(stop),
            "frequency_penalty": parameters.number("frequency_penalty", Sampling.frequency_penalty),
            "presence_penalty": parameters.number("presence_penalty", Sampling.presence_penalty),
            "seed": parameters.integer("seed", random.randrange(2**31), 0),
        }
        return build(Sampling, values)
    except ValueError as problem:  # which begins with the parameter's name
        raise RequestError(f"{problem}.", str(problem).partition(" ")[0]) from None


def read_prompts(value: Any, served: Served) -> list[str | list[int]]:
    """One text or list of ids, or several."""
    prompts = [value] if isinstance(value, str) or are_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) or are_ids(prompt) for prompt in prompts):
        raise RequestError(
            f"prompt is {shown(value)}; a text, a list of token ids, or a list of these is needed.", "prompt"
        )
    for prompt in prompts:
        if not isinstance(prompt, str) and (wrong := [i for i in prompt if not 0 <= i < served.tokenizer.vocab_size]):
            message = f"prompt has the token id {wrong[0]}; {served.name} has 0 to {served.tokenizer.vocab_size - 1}."
            raise RequestError(message, "prompt")
    return [valid_unicode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(i) is int for i in value)


def text_ids(prompt: str | list[int], served: Served) -> list[int]:
    try:
        return prompt_ids(served.tokenizer, prompt)
    except TokenizerError as problem:
        raise RequestError(str(problem), "prompt") from None


def chat_ids(messages: Sequence[Message], sampling: Sampling, served: Served) -> list[int]:
    """The ids of a conversation up to its answer. The oldest turns are dropped if they leave no room for the answer."""
    if served.chat is None:
        raise RequestError(
            f"{served.name} was not trained on conversations. Train or fine-tune it on some (tokenize_local_bpe.py "
            "--format chat), or use /v1/completions.",
            "model",
        )
    try:
        require_order(messages, "user")
    except ValueError as problem:
        raise RequestError(f"messages cannot be answered: {problem}.", "messages") from None
    try:
        ids = served.chat.prompt_ids(served.tokenizer, messages, room_for_prompt(served.model, sampling))
    except TokenizerError as problem:
        raise RequestError(str(problem), "messages") from None
    require_room("The last question", "messages", ids, served)
    return ids


def require_room(subject: str, param: str, ids: list[int], served: Served) -> None:
    """Raises RequestError for a prompt longer than the context, of which the model would silently see only the end."""
    if len(ids) > (context := served.model.config.max_seq_len):
        message = f"{subject} makes {len(ids):,} tokens, and {served.name} reads {context:,}."
        raise RequestError(message, param, code="context_length_exceeded")


def read_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise RequestError(
            f"messages is {shown(value)}; a list of objects with role and content is needed.", "messages"
        )
    messages = []
    for i, message in enumerate(value):
        place = f"messages[{i}]"
        given = {name: part for name, part in message.items() if part not in (None, [])}
        role = given.pop("role", None)
        content = read_content(given.pop("content", None), f"{place}.content")
        if not isinstance(role, str):
            raise RequestError(f"{place}.role is {shown(role)}; a text is needed.", f"{place}.role")
        for name in given:
            raise RequestError(f"{place} has {name!r:.100}, which this server does not support; leave it out.", place)
        messages.append(Message("system" if role == "developer" else role, content))  # OpenAI's newer name for it
    return messages


def read_content(value: Any, place: str) -> str:
    """A text, or a list of parts, one line each."""
    if isinstance(value, str):
        return valid_unicode(value)
    for part in value if isinstance(value, list) else [value]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            needed = 'a text or a list of {"type": "text", "text": ...} is needed'
            raise RequestError(f"{place} is {shown(value)}; {needed}.", place)
    return valid_unicode("\n".join(part["text"] for part in value))
