"""The texts of a question as they are made, and as OpenAI's completions: whole, or in the parts of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from generation.completion import Completion
from generation.scoring import Likelihood, likelihoods, prompt_likelihoods
from generation.stream import stream
from serving.models import Served
from serving.openai_request import Question
from tokenizer import Tokenizer


class PlacedToken(NamedTuple):
    likelihood: Likelihood
    offset: int  # characters before it, with those of the prompt


class Answer:
    """`make` writes the texts; each is sent once, `whole` or by `opening`, `piece` after piece, and `closing`."""

    def __init__(self, question: Question, served: Served) -> None:
        self.question, self.served = question, served
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.completions = [Completion(served.tokenizer, question.sampling.stop) for _ in question.rows]
        self.echoed: list[list[PlacedToken]] = [[] for _ in question.rows]
        self.tokens: list[list[PlacedToken]] = [[] for _ in question.rows]  # that are not sent yet
        self.sent = [len(text) for text in question.asked]  # characters, with those of the prompt
        # In a conversation, the space before an answer is left out.
        self.begun = [not question.is_chat] * len(question.rows)

    def make(self) -> Iterator[list[tuple[int, str]]]:
        """Yields after each token the pieces that can be shown: (index of a text, piece)."""
        model, tokenizer, question = self.served.model, self.served.tokenizer, self.question
        if question.count is not None and question.echo:
            for i, (row, text) in enumerate(zip(question.rows, question.asked, strict=True)):
                if text:  # a prompt of nothing is the token that stands for it
                    said = prompt_likelihoods(model, row, question.count, question.bias)
                    self.echoed[i] = placed(said, tokenizer)
        for tokens, logits in stream(model, question.rows, question.sampling, question.bias):
            told = question.count is not None and likelihoods(logits, tokens, question.count, question.bias)
            pieces = []
            for i, (completion, token) in enumerate(zip(self.completions, tokens, strict=True)):
                if told and not completion.ended and token not in tokenizer.end_ids:
                    offset = len(question.asked[i]) + len(completion.text)
                    self.tokens[i].append(PlacedToken(told[i], offset))
                pieces.append((i, completion.push(token)))
            yield pieces
            if all(completion.ended for completion in self.completions):
                break

    def finish(self) -> list[tuple[int, str]]:
        """The last pieces, once `make` is not asked for more."""
        return [(i, completion.finish()) for i, completion in enumerate(self.completions)]

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, completion in enumerate(self.completions):
            text: dict[str, Any] = {"text": self.echo(i) + completion.text}
            if self.question.is_chat:
                text = {"message": {"role": "assistant", "content": completion.text.lstrip(), "refusal": None}}
            choices.append(self.choice(i, text, [*self.echoed[i], *self.fresh_tokens(i, all_of_it=True)], completion))
        return self.envelope(choices, "") | {"usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """The first parts of a stream."""
        texts = range(len(self.completions))
        if self.question.is_chat:
            return [self.part([self.choice(i, {"delta": {"role": "assistant", "content": ""}})]) for i in texts]
        return [self.part([self.choice(i, {"text": self.echo(i)}, self.echoed[i])]) for i in texts if self.echo(i)]

    def piece(self, index: int, text: str) -> list[dict[str, Any]]:
        """The next piece of a text."""
        self.sent[index] += len(text)
        text = text if self.begun[index] else text.lstrip()
        if not text:
            return []
        self.begun[index] = True
        content = {"delta": {"content": text}} if self.question.is_chat else {"text": text}
        return [self.part([self.choice(index, content, self.fresh_tokens(index))])]

    def closing(self) -> list[dict[str, Any]]:
        nothing: dict[str, Any] = {"delta": {}} if self.question.is_chat else {"text": ""}
        parts = [
            self.part([self.choice(i, nothing, self.fresh_tokens(i, all_of_it=True), completion)])
            for i, completion in enumerate(self.completions)
        ]
        if self.question.include_usage:
            parts.append(self.part([]) | {"usage": self.usage()})
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
        values = None if self.question.count is None else form(tokens, self.served.tokenizer)
        reason = None if completion is None else "stop" if completion.ended else "length"
        return {"index": index, **content, "logprobs": values, "finish_reason": reason}

    def usage(self) -> dict[str, int]:
        read, written = self.question.prompt_tokens, sum(completion.tokens for completion in self.completions)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def echo(self, index: int) -> str:
        return self.question.asked[index] if self.question.echo else ""

    def fresh_tokens(self, index: int, all_of_it: bool = False) -> list[PlacedToken]:
        """The tokens that begin in the text sent so far (or in all of it) and were not sent themselves."""
        end = len(self.question.asked[index]) + len(self.completions[index].text) if all_of_it else self.sent[index]
        is_cut = all_of_it and not self.completions[index].ended  # its last tokens may be a part of a character
        fresh = [token for token in self.tokens[index] if is_cut or token.offset < end]
        del self.tokens[index][: len(fresh)]
        return fresh


def placed(tokens: Sequence[Likelihood], tokenizer: Tokenizer) -> list[PlacedToken]:
    """The tokens of a prompt, with their places in it."""
    found, decoder, offset = [], tokenizer.decoder(), 0
    for token in tokens:
        found.append(PlacedToken(token, offset))
        offset += len(decoder.push([token.token]))
    return found


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
