"""Files of conversations as a stream of conversations, in each of the usual FORMS; and chats of people as text."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from common.chat import ChatTemplate, Message, require_order
from common.errors import DataError
from tokenization.corpus import BLOCK_BYTES, Source, require_unchanged, unpacked_blocks
from tokenization.documents import BadRecord, OnBad, key_of, normalized, records, skip_space, text_of_record

SUFFIXES = (".jsonl", ".json")
FORMS = (
    '{"messages": [{"role", "content"}, ...]}, {"prompt", "completion"}, {"instruction", "input", "output"}, '
    '{"conversations": [{"from", "value"}, ...]}, or the exports of ChatGPT and Claude'
)
KEYS = ("messages", "conversations", "mapping", "chat_messages", "completion", "output")  # one of them is in each form
LONGEST_FIRST_RECORD = 8_000_000  # bytes, of a file that is looked at to see what it is
OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
PEOPLE = {  # programs whose chats are {"messages": [...]}: the keys of a message's writer and of its text
    "Telegram": ("from", "text"),
    "Discord": ("author", "content"),
    "Messenger and Instagram": ("sender_name", "content"),
}


class Conversation(NamedTuple):
    """One record as text."""

    parts: list[tuple[str, bool]]  # (text, whether it is an answer), from the template
    source: Source

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


def read_conversations(
    sources: Iterable[Source],
    template: ChatTemplate,
    on_read: Callable[[int], None],
    on_bad: OnBad = lambda bad: None,
) -> Iterator[Conversation]:
    """Stream the conversations of all sources. Other records are left out, and `on_bad` is called with each. `on_read`
    is that of `read_pieces`.

    Raises DataError for a file that cannot be read to its end.
    """
    for source in sources:
        for record in records(source, on_bad, on_read):
            try:
                yield Conversation(template.split_turns(messages_of(record.value)), source)
            except ValueError as problem:
                on_bad(BadRecord(record.place, str(problem)))
        require_unchanged(source)


def are_conversations(source: Source, text_key: str) -> bool:
    """Return whether the first usable record of a JSON file is a conversation, and has no text beside it."""
    if source.suffix not in SUFFIXES:
        return False
    try:
        blocks = itertools.islice(unpacked_blocks(source), LONGEST_FIRST_RECORD // BLOCK_BYTES)
        text = b"".join(blocks).decode("utf-8-sig", "ignore").lstrip().removeprefix("[")
    except DataError:
        return False
    decoder, at = json.JSONDecoder(), skip_space(text, 0)
    while at < len(text):
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at = text.find("\n", at) + 1 or len(text)
            continue
        if isinstance(record, dict) and text_key in record:
            return False
        with contextlib.suppress(ValueError):
            return bool(messages_of(record))
        at = skip_space(text, at)
        at = skip_space(text, at + (text[at : at + 1] == ","))
    return False


def texts_of(record: Any, text_key: str) -> list[str]:
    """Return the texts of a record: its own; or those of a conversation, each ending with an answer, as in training on
    conversations; or a chat of people. Raises ValueError that says why there is none."""
    if not isinstance(record, dict) or key_of(record, text_key) is not None:
        return [text_of_record(record, text_key)]
    try:
        messages = messages_of(record)
    except ValueError:
        if chats := chats_of_people(record):
            return chats
        if not any(key in record for key in KEYS):
            return [text_of_record(record, text_key)]
        raise
    texts, before = [], ""
    for part, is_answer in ChatTemplate().split_turns(messages):
        before += part
        if is_answer:
            texts.append(before)
            before = ""
    return texts


def chats_of_people(record: dict[str, Any]) -> list[str]:
    """Return the chats that one of the programs in PEOPLE has exported, a message a line: `Anna: Hi`."""
    listed = record.get("chats")  # of Telegram, if all are exported
    if isinstance(listed, dict) and isinstance(listed.get("list"), list):
        return [chat for each in listed["list"] if isinstance(each, dict) for chat in chats_of_people(each)]
    messages = record.get("messages")
    messages = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    messages.sort(key=lambda each: each["timestamp_ms"] if isinstance(each.get("timestamp_ms"), int) else 0)
    for writer, key in PEOPLE.values():
        said = [(name_of(each.get(writer)), said_in(each.get(key))) for each in messages]
        if lines := [f"{name}: {text}" for name, text in said if name and text]:
            return ["\n".join(lines)]
    return []


def name_of(writer: Any) -> str:
    if isinstance(writer, dict):
        writer = writer.get("nickname") or writer.get("name")
    return repaired(writer) if isinstance(writer, str) else ""


def said_in(text: Any) -> str:
    if isinstance(text, list):  # Telegram's, with links and the like
        text = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in text)
    return repaired(text).strip() if isinstance(text, str) else ""


def repaired(text: str) -> str:
    """Messenger writes each byte of UTF-8 as a character."""
    with contextlib.suppress(UnicodeError):
        return normalized(text.encode("latin-1").decode())
    return normalized(text)


def messages_of(record: Any) -> list[Message]:
    """Return the turns of a record in any of the FORMS: neighbouring turns of one side are joined, and a last question
    without an answer is left out. Raises ValueError for a record that is not a conversation."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}; an object {{...}} was expected")
    if "messages" in record:
        messages = turns(record["messages"])
    elif "conversations" in record:
        messages = turns(record["conversations"])
    elif "chat_messages" in record:
        messages = turns(record["chat_messages"], lenient=True)
    elif isinstance(record.get("mapping"), dict):
        try:
            messages = messages_of_mapping(record["mapping"], record.get("current_node"))
        except (AttributeError, TypeError):
            raise ValueError("its mapping is not as ChatGPT writes it") from None
    elif "instruction" in record and "output" in record:
        given = content_of(record.get("input") or "", "input")
        question = content_of(record["instruction"], "instruction")
        messages = [
            Message("user", f"{question}\n\n{given}" if given.strip() else question),
            Message("assistant", content_of(record["output"], "output")),
        ]
    elif "prompt" in record and "completion" in record:
        messages = [
            *turns_or_text(record["prompt"], "user", "prompt"),
            *turns_or_text(record["completion"], "assistant", "completion"),
        ]
    else:
        keys = ", ".join(f"{key!r:.50}" for key in list(record)[:10]) or "none"
        raise ValueError(f"not a known form of conversation ({FORMS}); its keys are {keys}")
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[:1] and messages[0].role != "system":
        messages.insert(0, Message("system", normalized(system)))
    messages = answered(messages)
    require_order(messages, "assistant")
    return messages


def answered(messages: list[Message]) -> list[Message]:
    """Join neighbouring turns of one side, and leave out what nobody said, an answer to nothing at the start, and a
    question without an answer at the end. Raises ValueError if there is no answer."""
    joined: list[Message] = []
    for role, content in messages:
        if not content.strip():
            continue
        if joined and joined[-1].role == role:
            joined[-1] = Message(role, f"{joined[-1].content}\n\n{content}")
        else:
            joined.append(Message(role, content))
    first = 1 if joined and joined[0].role == "system" else 0
    if joined[first : first + 1] and joined[first].role == "assistant":
        del joined[first]
    if joined and joined[-1].role == "user":
        joined.pop()
    if not any(message.role == "assistant" for message in joined):
        raise ValueError("it has no answer")
    return joined


def messages_of_mapping(nodes: dict[str, Any], last: Any) -> list[Message]:
    """Read ChatGPT's export: a tree of messages, from the last one that was shown back to the root. What the user and
    the assistant said to each other, without what is hidden or was said to a tool."""
    path: list[Message] = []
    seen: set[str] = set()
    while isinstance(last, str) and last in nodes and last not in seen:
        seen.add(last)
        node = nodes[last] if isinstance(nodes[last], dict) else {}
        message = node.get("message") or {}
        role, parts = message.get("author", {}).get("role"), message.get("content", {}).get("parts", [])
        is_hidden = (message.get("metadata") or {}).get("is_visually_hidden_from_conversation")
        if role in ("user", "assistant") and message.get("recipient", "all") == "all" and not is_hidden:
            text = "\n".join(part for part in parts if isinstance(part, str)).strip()
            path.append(Message(role, normalized(text)))
        last = node.get("parent")
    return path[::-1]


def turns(value: Any, lenient: bool = False) -> list[Message]:
    """Return the messages of a list of turns: {"role", "content"}, {"from", "value"} or Claude's {"sender", "text"},
    or its "content"; if `lenient`, of that only what is text. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"the turns are a JSON {type(value).__name__}; a list was expected")
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} is a JSON {type(turn).__name__}; an object {{...}} was expected")
        role = turn.get("role", turn.get("from", turn.get("sender")))
        if not isinstance(role, str):
            raise ValueError(f"turn {number} has no role")
        if turn.get("weight", 1) != 1:  # in OpenAI's files, 0 marks an answer that must not be learned
            raise ValueError(f"turn {number} has the weight {turn['weight']!r:.50}; only 1 is supported")
        said = next((turn[key] for key in ("text", "content", "value") if turn.get(key)), "")
        if lenient and isinstance(said, list):
            said = [part for part in said if isinstance(part, dict) and part.get("type") == "text"]
        content = content_of(said, f"turn {number}")
        messages.append(Message(OTHER_ROLES.get(role, role), content))
    return messages


def turns_or_text(value: Any, role: str, name: str) -> list[Message]:
    return turns(value) if isinstance(value, list) else [Message(role, content_of(value, name))]


def content_of(value: Any, name: str) -> str:
    """A text, given as a string or as a list of text parts. Raises ValueError."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is a JSON {type(value).__name__}; a text was expected")
    return normalized(value)
