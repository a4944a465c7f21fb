"""Read conversations in the usual FORMS, and chats of people as text."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from common.chat import ChatTemplate, Message, require_order
from common.errors import DataError
from tokenization.corpus import BLOCK_BYTES, Source, UnreadableError, read_beside, read_blocks, require_unchanged
from tokenization.documents import BadRecord, OnBad, find_text_key, normalize_text, read_records, read_text, skip_space

CHAT_SUFFIXES = (".jsonl", ".json")
FORMS = (
    '{"messages": [{"role", "content"}, ...]}, {"prompt", "completion"}, {"instruction", "input", "output"}, '
    '{"conversations": [{"from", "value"}, ...]}, or the exports of ChatGPT and Claude'
)
# Each form has one of these keys.
FORM_KEYS = (
    "messages",
    "conversations",
    "mapping",
    "chat_messages",
    "completion",
    "output",
)
MAX_FIRST_RECORD_BYTES = 8_000_000
OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
CHAT_EXPORTS = {  # program -> the keys of writer and text in {"messages": [...]}
    "Telegram": ("from", "text"),
    "Discord": ("author", "content"),
    "Messenger and Instagram": ("sender_name", "content"),
}


class Conversation(NamedTuple):
    """A record as text."""

    parts: list[tuple[str, bool]]  # (text, is_answer), from the template
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
    """Yield the conversations of all sources. Call `on_bad` with each other record. `on_read`: see `read_pieces`.

    Raises DataError for a file that cannot be read to its end.
    """
    for source in sources:
        for record in read_records(source, on_bad, on_read):
            try:
                yield Conversation(template.split_turns(extract_messages(record.value)), source)
            except ValueError as problem:
                on_bad(BadRecord(record.place, str(problem)))
        require_unchanged(source)


def are_conversations(source: Source, text_key: str) -> bool:
    """Return whether the first valid record of a JSON file is a conversation without a text of its own."""
    if source.suffix not in CHAT_SUFFIXES:
        return False
    try:
        blocks = itertools.islice(read_blocks(source), MAX_FIRST_RECORD_BYTES // BLOCK_BYTES)
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
        if is_conversation(record, text_key):
            return True
        at = skip_space(text, at)
        at = skip_space(text, at + (text[at : at + 1] == ","))
    return False


def is_conversation(record: Any, text_key: str) -> bool:
    """Return whether a record is a conversation without a text of its own."""
    with contextlib.suppress(ValueError):
        return bool(extract_messages(record)) and text_key not in record
    return False


def extract_texts(record: Any, text_key: str) -> list[str]:
    """Return the texts of a record: its own text, those of a conversation up to each answer (as in training on
    conversations), or a chat of people. Raises ValueError with the reason if there is none."""
    if not isinstance(record, dict) or find_text_key(record, text_key) is not None:
        return [read_text(record, text_key)]
    try:
        messages = extract_messages(record)
    except ValueError:
        if chats := _extract_chats(record):
            return chats
        if not any(key in record for key in FORM_KEYS):
            return [read_text(record, text_key)]
        raise
    texts, before = [], ""
    for part, is_answer in ChatTemplate().split_turns(messages):
        before += part
        if is_answer:
            texts.append(before)
            before = ""
    return texts


def _extract_chats(record: dict[str, Any]) -> list[str]:
    """Return the chats of an export by one of the programs in CHAT_EXPORTS, one message per line: `Anna: Hi`."""
    listed = record.get("chats")  # Telegram's export of all chats
    if isinstance(listed, dict) and isinstance(listed.get("list"), list):
        return [chat for entry in listed["list"] if isinstance(entry, dict) for chat in _extract_chats(entry)]
    messages = record.get("messages")
    messages = [entry for entry in messages if isinstance(entry, dict)] if isinstance(messages, list) else []
    messages.sort(key=lambda entry: entry["timestamp_ms"] if isinstance(entry.get("timestamp_ms"), int) else 0)
    for writer, key in CHAT_EXPORTS.values():
        turns = [(_read_name(entry.get(writer)), _read_message_text(entry.get(key))) for entry in messages]
        if lines := [f"{name}: {text}" for name, text in turns if name and text]:
            return ["\n".join(lines)]
    return []


def is_of_slack(record: Any) -> bool:
    return isinstance(record, dict) and {"ts", "text", "type"} <= set(record)


def read_slack(messages: Iterable[Any], source: Source) -> str:
    """Return a day of Slack's export as a chat, one message per line. Raises UnreadableError if the names of the
    writers are missing."""
    try:
        users = json.loads(read_beside(source, "../users.json"))
        names: dict[str, str] = {
            entry["id"]: entry.get("profile", {}).get("real_name") or entry["name"] for entry in users
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnreadableError(
            "a Slack export whose names are missing; give the whole folder, with users.json"
        ) from None
    lines = []
    for entry in messages:
        if (
            is_of_slack(entry)
            and isinstance(entry["text"], str)
            and entry["text"]
            and not str(entry.get("subtype", "")).startswith("channel_")
        ):
            text = re.sub(r"<@(\w+)[^>]*>", lambda match: names.get(match[1]) or match[1], entry["text"])
            text = html.unescape(re.sub(r"<(?:[^<>|]*\|)?([^<>|]*)>", r"\1", text))
            lines.append(f"{names.get(entry.get('user'), entry.get('username', 'Bot'))}: {normalize_text(text)}")
    return "\n".join(lines)


def _read_name(writer: Any) -> str:
    if isinstance(writer, dict):
        writer = writer.get("nickname") or writer.get("name")
    return _repair_encoding(writer) if isinstance(writer, str) else ""


def _read_message_text(text: Any) -> str:
    if isinstance(text, list):  # Telegram's parts, such as links
        text = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in text)
    return _repair_encoding(text).strip() if isinstance(text, str) else ""


def _repair_encoding(text: str) -> str:
    """Decode Messenger's exports, which write each byte of UTF-8 as a character."""
    with contextlib.suppress(UnicodeError):
        return normalize_text(text.encode("latin-1").decode())
    return normalize_text(text)


def extract_messages(record: Any) -> list[Message]:
    """Return the turns of a record in any of the FORMS. Neighbouring turns of one side are joined, and a last question
    without an answer is left out. Raises ValueError if the record is not a conversation."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, but an object {{...}} is needed")
    if "messages" in record:
        messages = read_turns(record["messages"])
    elif "conversations" in record:
        messages = read_turns(record["conversations"])
    elif "chat_messages" in record:
        messages = read_turns(record["chat_messages"], lenient=True)
    elif isinstance(record.get("mapping"), dict):
        try:
            messages = _extract_chatgpt(record["mapping"], record.get("current_node"))
        except (AttributeError, TypeError):
            raise ValueError("its mapping is not ChatGPT's format") from None
    elif "instruction" in record and "output" in record:
        context = _read_content(record.get("input") or "", "input")
        question = _read_content(record["instruction"], "instruction")
        messages = [
            Message("user", f"{question}\n\n{context}" if context.strip() else question),
            Message("assistant", _read_content(record["output"], "output")),
        ]
    elif "prompt" in record and "completion" in record:
        messages = [
            *_read_turns_or_text(record["prompt"], "user", "prompt"),
            *_read_turns_or_text(record["completion"], "assistant", "completion"),
        ]
    else:
        keys = ", ".join(f"{key!r:.50}" for key in list(record)[:10]) or "none"
        raise ValueError(f"not a known conversation format ({FORMS}); its keys are {keys}")
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[:1] and messages[0].role != "system":
        messages.insert(0, Message("system", normalize_text(system)))
    messages = _join_turns(messages)
    require_order(messages, "assistant")
    return messages


def _join_turns(messages: list[Message]) -> list[Message]:
    """Join neighbouring turns of one side. Leave out empty turns, an answer at the start, and an unanswered question at
    the end. Raises ValueError if there is no answer."""
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


def _extract_chatgpt(nodes: dict[str, Any], last: Any) -> list[Message]:
    """Return the messages of ChatGPT's export, a tree, from the last one shown back to the root. Hidden messages and
    those to tools are left out."""
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
            path.append(Message(role, normalize_text(text)))
        last = node.get("parent")
    return path[::-1]


def read_turns(value: Any, lenient: bool = False) -> list[Message]:
    """Return the messages of a list of turns: {"role", "content"}, {"from", "value"}, or Claude's {"sender", "text"} or
    {"sender", "content"}. If `lenient`, skip parts of the content that are not text. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"the turns are a JSON {type(value).__name__}, but a list is needed")
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} is a JSON {type(turn).__name__}, but an object {{...}} is needed")
        role = turn.get("role", turn.get("from", turn.get("sender")))
        if not isinstance(role, str):
            raise ValueError(f"turn {number} has no role")
        if turn.get("weight", 1) != 1:  # OpenAI's files mark answers that must not be learned with 0
            raise ValueError(f"turn {number} has the weight {turn['weight']!r:.50}; only 1 is supported")
        parts = next((turn[key] for key in ("text", "content", "value") if turn.get(key)), "")
        if lenient and isinstance(parts, list):
            parts = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        content = _read_content(parts, f"turn {number}")
        messages.append(Message(OTHER_ROLES.get(role, role), content))
    return messages


def _read_turns_or_text(value: Any, role: str, name: str) -> list[Message]:
    return read_turns(value) if isinstance(value, list) else [Message(role, _read_content(value, name))]


def _read_content(value: Any, name: str) -> str:
    """Return a text, given as a string or a list of text parts. Raises ValueError."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is a JSON {type(value).__name__}, but a text is needed")
    return normalize_text(value)
