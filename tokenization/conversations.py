"""Files of conversations as a stream of conversations: JSON Lines or one JSON array, in each of the usual FORMS."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from common.chat import ChatTemplate, Message, require_order
from common.errors import DataError
from tokenization.corpus import (
    BLOCK_BYTES,
    Source,
    decoded_blocks,
    json_lines,
    normalized,
    record_of_line,
    require_unchanged,
    unpacked_blocks,
)

SUFFIXES = (".jsonl", ".json")
FORMS = (
    '{"messages": [{"role", "content"}, ...]}, {"prompt", "completion"}, {"instruction", "input", "output"}, '
    '{"conversations": [{"from", "value"}, ...]} or ChatGPT\'s {"mapping": ...}'
)
LONGEST_FIRST_RECORD = 8_000_000  # bytes, of a file that is looked at to see what it is
OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}


class Conversation(NamedTuple):
    """One record as text."""

    parts: list[tuple[str, bool]]  # (text, whether it is an answer), from the template
    source: Source
    line: int  # in the file, from 1

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


def read_conversations(
    sources: Iterable[Source],
    template: ChatTemplate,
    on_bad: Callable[[DataError], None],
    on_read: Callable[[int], None],
) -> Iterator[Conversation]:
    """Stream the conversations of all sources. `on_bad` gets an error for each bad record, with its file and line. It
    may raise the error, or return to leave the record out. `on_read` is that of `read_pieces`.

    Raises DataError for a file that cannot be read to its end.
    """
    for source in sources:
        for line, record in records(source, on_bad, on_read):
            try:
                yield Conversation(template.parts(messages_of(record)), source, line)
            except ValueError as problem:
                on_bad(DataError(f"{source.place}, line {line}: {problem}."))
        require_unchanged(source)


def are_conversations(source: Source, text_key: str) -> bool:
    """Whether the first record of a JSON file is a conversation, and has no text beside it."""
    if source.suffix not in SUFFIXES:
        return False
    try:
        blocks = itertools.islice(unpacked_blocks(source), LONGEST_FIRST_RECORD // BLOCK_BYTES)
        text = b"".join(blocks).decode("utf-8-sig", "ignore").lstrip().removeprefix("[").lstrip()
        record, _ = json.JSONDecoder().raw_decode(text)
        return text_key not in record and bool(messages_of(record))
    except (ValueError, TypeError, RecursionError, DataError):
        return False


def records(
    source: Source, on_bad: Callable[[DataError], None], on_read: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    """(line, record) of a file. Many files named .json have a record per line, and some named .jsonl have an array: the
    first character decides. An array is read whole."""
    first = next(unpacked_blocks(source), b"").removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first == b"[":
        yield from records_of_array(source, "".join(decoded_blocks(source, on_read)))
        return
    for number, position, line in json_lines(source, on_read):
        try:
            yield number, record_of_line(source, number, position, line)
        except DataError as problem:
            on_bad(problem)


def records_of_array(source: Source, text: str) -> Iterator[tuple[int, Any]]:
    """Raises DataError with the first line that is not JSON: the records after it cannot be found."""
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        at = skip_space(text, at)
        if text[at : at + 1] == "]":
            break
        line, counted = line + text.count("\n", counted, at), at
        try:
            record, at = decoder.raw_decode(text, at)
            at = skip_space(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("a comma or the end of the array is missing", text, at)
        except json.JSONDecodeError as problem:
            place = f"line {problem.lineno}, column {problem.colno}"
            raise DataError(f"{source.place}, {place}: not valid JSON ({problem.msg}).") from None
        except (ValueError, RecursionError) as problem:  # a number of thousands of digits; thousands of open brackets
            raise DataError(f"{source.place}, line {line}: not usable JSON ({problem}).") from None
        yield line, record
        at += text[at] == ","
    if skip_space(text, at + 1) < len(text):
        raise DataError(
            f"{source.place} has more text after the end of its array; use one array, or one record per line."
        )


def skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def messages_of(record: Any) -> list[Message]:
    """The turns of a record in any of the FORMS. Raises ValueError for a record that is not a conversation."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}; an object {{...}} was expected")
    if "messages" in record:
        messages = turns(record["messages"])
    elif "conversations" in record:
        messages = turns(record["conversations"])
    elif isinstance(record.get("mapping"), dict):
        messages = messages_of_mapping(record["mapping"], record.get("current_node"))
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
    require_order(messages, "assistant")
    return messages


def messages_of_mapping(nodes: dict[str, Any], last: Any) -> list[Message]:
    """ChatGPT's export: a tree of messages, from the last one that was shown back to the root. What the user and the
    assistant wrote, up to the assistant's last answer."""
    path: list[Message] = []
    seen: set[str] = set()
    while isinstance(last, str) and last in nodes and last not in seen:
        seen.add(last)
        node = nodes[last] if isinstance(nodes[last], dict) else {}
        message = node.get("message") or {}
        role, parts = message.get("author", {}).get("role"), message.get("content", {}).get("parts", [])
        text = "\n".join(part for part in parts if isinstance(part, str)).strip()
        if role in ("user", "assistant") and text and (path or role == "assistant"):
            text = normalized(text)
            if path and path[-1].role == role:
                path[-1] = Message(role, f"{text}\n\n{path[-1].content}")
            else:
                path.append(Message(role, text))
        last = node.get("parent")
    if path and path[-1].role == "assistant":
        path.pop()  # it answers no question
    return path[::-1]


def turns(value: Any) -> list[Message]:
    """The messages of a list of turns: {"role", "content"} or {"from", "value"}. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"the turns are a JSON {type(value).__name__}; a list was expected")
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} is a JSON {type(turn).__name__}; an object {{...}} was expected")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str):
            raise ValueError(f"turn {number} has no role")
        if turn.get("weight", 1) != 1:  # in OpenAI's files, 0 marks an answer that must not be learned
            raise ValueError(f"turn {number} has the weight {turn['weight']!r:.50}; only 1 is supported")
        content = content_of(turn.get("content", turn.get("value")), f"turn {number}")
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
