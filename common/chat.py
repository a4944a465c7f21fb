"""Chat templates: turn conversations into token ids for training, generation, export and the server. Our own template,
and ChatML for imported models.

    <|endoftext|>System: Be brief.
    User: What is the capital of France?
    Assistant: Paris.<|endoftext|>User: And of Italy?
    Assistant: Rome.<|endoftext|>

The end-of-text token is inserted by its id, so no text that a user types can imitate it. If the tokenizer has a token
for the beginning of a text (Llama 3's), a conversation begins with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from common.validation import build
from tokenizer import Tokenizer
from tokenizer_bpe import TokenizerError

ROLES = ("system", "user", "assistant")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_LABEL_CHARACTERS = 100


class Message(NamedTuple):
    """A turn of a conversation; `role` is one of ROLES."""

    role: str
    content: str


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ChatTemplate:
    """Our template: a label before each turn.

    A prompt ends with the assistant's label and no space. Byte-level BPE joins a space with the next word, so the ids
    of a prompt are a prefix of those of the whole conversation. White space around a turn is dropped for the same
    reason.
    """

    system: str = "System:"
    user: str = "User:"
    assistant: str = "Assistant:"

    @model_validator(mode="after")
    def checked(self) -> ChatTemplate:
        """Reject labels with which the ids of a prompt would not be a prefix of the conversation's."""
        for role, label in asdict(self).items():
            if not label or label != label.strip() or len(label) > MAX_LABEL_CHARACTERS:
                raise ValueError(
                    f"the label of {role} is {label!r:.100}; it must be short, with no white space around it"
                )
        return self

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def split_turns(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Return [(text, is_answer)]. The assistant's label belongs to the text before its answer."""
        parts, prompt = [], ""
        for role, content in messages:
            if role == "assistant":
                parts += [(prompt + self.assistant, False), (f" {content.strip()}", True)]
                prompt = ""
            else:
                prompt += f"{getattr(self, role)} {content.strip()}\n"
        return [*parts, (prompt, False)] if prompt else parts

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, (ids,) int32, and a mask of its answers including their end, (ids,) bool.

        Raises TokenizerError if the tokenizer has no end-of-text token.
        """
        return encode_parts(tokenizer, self.split_turns(messages))

    def prompt_ids(self, tokenizer: Tokenizer, messages: Sequence[Message], room: int | None = None) -> list[int]:
        """Return the ids of `messages` up to the beginning of the next answer.

        If there are more than `room` ids, the oldest questions are dropped with their answers; the system's turn and
        the last question stay. Raises TokenizerError as `encode` does.
        """

        def encode(kept: Sequence[Message]) -> list[int]:
            ids: list[int] = encode_parts(tokenizer, self.split_turns([*kept, Message("assistant", "")])[:-1])[
                0
            ].tolist()
            return ids

        return _without_oldest_turns(messages, room, encode)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ChatML:
    """The template of SmolLM2's and Qwen's chat models, which imported models keep for generation. Special tokens are
    inserted by id, so no text that a user types can imitate them.

        <|im_start|>user
        What is the capital of France?<|im_end|>
        <|im_start|>assistant
        Paris.<|im_end|>
    """

    chatml: str = ""  # default system message; "" means none

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, (ids,) int32, and a mask of its answers including their end, (ids,) bool.

        Raises TokenizerError if the tokenizer lacks the two tokens.
        """
        begin, end = self.special_ids(tokenizer)
        if messages[0].role != "system" and self.chatml:
            messages = [Message("system", self.chatml), *messages]
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        arrays, counted = [np.array(bos, np.int32)], [False] * len(bos)
        for role, content in messages:
            head = [begin, *tokenizer.encode(f"{role}\n")]
            turn = [*tokenizer.encode(content.strip()), end]
            after = tokenizer.encode("\n")
            arrays.append(np.array([*head, *turn, *after], np.int32))
            counted += [False] * len(head) + [role == "assistant"] * len(turn) + [False] * len(after)
        return np.concatenate(arrays), np.array(counted)

    def prompt_ids(self, tokenizer: Tokenizer, messages: Sequence[Message], room: int | None = None) -> list[int]:
        """Return the ids of `messages` up to the beginning of the next answer. See `ChatTemplate.prompt_ids`."""
        begin, _ = self.special_ids(tokenizer)
        asks = [begin, *tokenizer.encode("assistant\n").tolist()]
        return _without_oldest_turns(messages, room, lambda kept: [*self.encode(tokenizer, kept)[0].tolist(), *asks])

    @staticmethod
    def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
        """Return the ids of CHATML_TOKENS. Raises TokenizerError if the tokenizer lacks them."""
        known = tokenizer.special_ids
        if missing := [name for name in CHATML_TOKENS if name not in known]:
            raise TokenizerError(f"The chat template is ChatML, but the tokenizer has no token {missing[0]}.")
        begin, end = (known[name] for name in CHATML_TOKENS)
        return begin, end


Template: TypeAlias = "ChatTemplate | ChatML"


def template_from_dict(values: Any) -> Template:
    """Build the template from a checkpoint's config. Raises ValueError if it is invalid."""
    is_chatml = isinstance(values, dict) and "chatml" in values
    return build(ChatML, values) if is_chatml else build(ChatTemplate, values)


def _without_oldest_turns(
    messages: Sequence[Message], room: int | None, encode: Callable[[Sequence[Message]], list[int]]
) -> list[int]:
    """Encode the messages without the oldest questions and answers that do not fit in `room` (None: keep all)."""
    system = [message for message in messages[:1] if message.role == "system"]
    turns = messages[len(system) :]

    def encode_without(forgotten: int) -> list[int]:
        return encode([*system, *turns[2 * forgotten :]])

    if room is None:
        return encode_without(0)
    # Binary search, because dropping one at a time would encode a long conversation once per question.
    limit = max(0, len(turns) - 1) // 2
    return encode_without(
        bisect.bisect_left(range(limit), True, key=lambda forgotten: len(encode_without(forgotten)) <= room)
    )


def encode_parts(tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
    end = require_end_of_text_id(tokenizer)
    arrays, counted = [np.array([tokenizer.start_id], np.int32)], [np.zeros(1, bool)]
    for text, is_answer in parts:
        ids = tokenizer.encode(text)
        arrays.append(np.append(ids, np.int32(end)) if is_answer else ids)
        counted.append(np.full(len(arrays[-1]), is_answer))
    return np.concatenate(arrays), np.concatenate(counted)


def require_end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id that ends an answer. Raises TokenizerError if the tokenizer has none."""
    if tokenizer.end_of_text_id is None:
        raise TokenizerError(
            f"A {tokenizer.kind} tokenizer without an end-of-text token cannot encode conversations, because nothing "
            "would end an answer. Use a BPE tokenizer."
        )
    return tokenizer.end_of_text_id


def require_order(messages: Sequence[Message], last: str) -> None:
    """Raise ValueError unless user and assistant alternate, after an optional system turn, and end with `last` ("user"
    for a prompt, "assistant" for training), with no empty turn."""
    if not messages:
        raise ValueError("it has no turns")
    for number, (role, content) in enumerate(messages, 1):
        if role not in ROLES:
            raise ValueError(f"turn {number} has the role {role!r:.50}; allowed: {', '.join(ROLES)}")
        if not content.strip():
            raise ValueError(f"turn {number}, from the {role}, is empty")
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    expected = ["user", "assistant"] * (len(turns) // 2 + 1)
    for number, (role, role_expected) in enumerate(zip(turns, expected, strict=False), 1 + len(roles) - len(turns)):
        if role != role_expected:
            raise ValueError(f"turn {number} is from the {role}; it should be from the {role_expected}")
    if roles[-1] != last:
        raise ValueError(f"the last turn is from the {roles[-1]}; it should be from the {last}")
