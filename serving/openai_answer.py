"""Text as OpenAI's completions and chat completions, whole or in the parts of a stream."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from generation.completion import Completion
from generation.scoring import Likelihood
from serving.generation_queue import Job
from serving.served import Served
from tokenizer import Tokenizer


class Answer:
    """Each text is sent once: `whole`, or as `opening`, `piece` by `piece`, and `closing`."""

    def __init__(self, job: Job, served: Served) -> None:
        self.job, self.question, self.served = job, job.question, served
        question = job.question
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.places = [TokenPlaces(served.tokenizer, len(text)) for text in question.asked]
        self.lengths = [0] * len(question.prompts)  # characters of each text that were sent
        # In a conversation, the space before an answer is left out.
        self.begun = [not question.is_chat] * len(question.prompts)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for i, completion in enumerate(completions):
            tokens = [*self.echoed_tokens(i), *self.tokens(i, len(completion.text))]
            text: dict[str, Any] = {"text": self.echo(i) + completion.text}
            if self.question.is_chat:
                text = {"message": {"role": "assistant", "content": completion.text.lstrip(), "refusal": None}}
            choices.append(self.choice(i, text, tokens, completion))
        return self.envelope(choices, "") | {"usage": self.usage(completions)}

    def opening(self) -> list[dict[str, Any]]:
        """The first parts of a stream."""
        texts = range(len(self.question.prompts))
        if self.question.is_chat:
            return [self.part([self.choice(i, {"delta": {"role": "assistant", "content": ""}})]) for i in texts]
        return [
            self.part([self.choice(i, {"text": self.echo(i)}, self.echoed_tokens(i))]) for i in texts if self.echo(i)
        ]

    def piece(self, index: int, text: str) -> list[dict[str, Any]]:
        """The next piece of a text."""
        self.lengths[index] += len(text)
        if not self.begun[index]:
            text = text.lstrip()
        if not text:
            return []
        self.begun[index] = True
        content = {"delta": {"content": text}} if self.question.is_chat else {"text": text}
        return [self.part([self.choice(index, content, self.tokens(index, self.lengths[index]))])]

    def closing(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        nothing: dict[str, Any] = {"delta": {}} if self.question.is_chat else {"text": ""}
        parts = [
            self.part([self.choice(i, nothing, self.tokens(i, len(completion.text)), completion)])
            for i, completion in enumerate(completions)
        ]
        if self.question.include_usage:
            parts.append(self.part([]) | {"usage": self.usage(completions)})
        return parts

    def part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.envelope(choices, ".chunk") | ({"usage": None} if self.question.include_usage else {})

    def envelope(self, choices: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
        is_chat = self.question.is_chat
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.id}",
            "object": f"chat.completion{suffix}" if is_chat else "text_completion",
            "created": self.created,
            "model": self.served.name,
            "choices": choices,
        }

    def choice(
        self,
        index: int,
        content: dict[str, Any],
        tokens: Sequence[PlacedToken] = (),
        completion: Completion | None = None,
    ) -> dict[str, Any]:
        form = chat_logprobs if self.question.is_chat else logprobs
        values = None if self.question.logprobs is None else form(tokens, self.served.tokenizer)
        reason = None if completion is None else "stop" if completion.ended else "length"
        return {"index": index, **content, "logprobs": values, "finish_reason": reason}

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        read, written = self.question.prompt_tokens, sum(completion.tokens for completion in completions)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def echo(self, index: int) -> str:
        return self.question.asked[index] if self.question.echo else ""

    def echoed_tokens(self, index: int) -> list[PlacedToken]:
        if self.question.logprobs is None or not self.echo(index):  # no text: its token only stands for it
            return []
        return TokenPlaces(self.served.tokenizer).take(self.job.of_prompts[index])

    def tokens(self, index: int, length: int) -> list[PlacedToken]:
        """Those within the first `length` characters of a text that were not sent yet."""
        return self.places[index].take(self.job.of_texts[index], length)


class PlacedToken(NamedTuple):
    likelihood: Likelihood
    offset: int  # characters before it


class TokenPlaces:
    """Where the tokens of a text begin in it, of which `offset` characters come before them."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self.decoder = tokenizer.decoder()
        self.offset = offset
        self.length = 0  # characters of the tokens that were taken, without an unfinished one
        self.taken = 0

    def take(self, tokens: Sequence[Likelihood], length: float = math.inf) -> list[PlacedToken]:
        """The tokens that begin within the first `length` characters of the text and were not taken yet."""
        placed = []
        while self.taken < len(tokens) and self.length < length:
            token = tokens[self.taken]
            placed.append(PlacedToken(token, self.offset + self.length))
            self.length += len(self.decoder.push([token.token]))
            self.taken += 1
        return placed


def logprobs(tokens: Sequence[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The form of completions. `top_logprobs` has the requested number of likeliest tokens, and the chosen one."""

    def name(token: int) -> str:
        return token_name(tokenizer.token_bytes(token), "bytes:")

    def likeliest(chosen: Likelihood) -> dict[str, float] | None:
        if chosen.logprob is None:
            return None
        return {name(token): logprob for token, logprob in [*chosen.likeliest, (chosen.token, chosen.logprob)]}

    return {
        "tokens": [name(chosen.token) for chosen, _ in tokens],
        "token_logprobs": [chosen.logprob for chosen, _ in tokens],
        "top_logprobs": [likeliest(chosen) for chosen, _ in tokens],
        "text_offset": [offset for _, offset in tokens],
    }


def chat_logprobs(tokens: Sequence[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The form of chat completions."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}

    content = [
        entry(chosen.token, chosen.logprob) | {"top_logprobs": [entry(*likely) for likely in chosen.likeliest]}
        for chosen, _ in tokens
    ]
    return {"content": content, "refusal": None}


def token_name(data: bytes, prefix: str = "") -> str:
    """A token as text; a part of a character as OpenAI writes its bytes: \\xe2\\x82."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
