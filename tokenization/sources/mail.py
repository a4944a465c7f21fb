"""Text of e-mail: .eml files and .mbox mailboxes."""

from __future__ import annotations

import contextlib
import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage
from typing import BinaryIO

from tokenization.documents import BadRecord
from tokenization.encodings import decoded
from tokenization.sources.markup import text_of_html

ANSWERS = re.compile(r"^((re|fwd?|aw|wg|sv|tr|rv)\s*:\s*)+", re.I)  # before the subject of an answer


def mbox_documents(file: BinaryIO) -> Iterator[str | BadRecord]:
    """A message is a document. Each begins with a line "From ..." after a blank line. What a reply quotes of an earlier
    message is left out."""
    seen: set[str] = set()  # lines, and subjects
    for number, content in enumerate(messages(file), 1):
        try:
            yield without_quotes(*parts_of_message(content), seen)
        except Exception as problem:  # the parser raises errors of many kinds
            yield BadRecord(f"message {number}", f"{type(problem).__name__}: {problem}"[:200])


def messages(file: BinaryIO) -> Iterator[bytes]:
    lines: list[bytes] = []
    for line in file:
        if line.startswith(b"From ") and (not lines or not lines[-1].strip()):
            if lines:
                yield b"".join(lines)
            lines = []
        else:
            lines.append(re.sub(rb"^>(>*From )", rb"\1", line))
    yield b"".join(lines)


def eml_documents(file: BinaryIO) -> Iterator[str]:
    yield without_quotes(*parts_of_message(file.read()), set())


def parts_of_message(content: bytes) -> tuple[str, str]:
    """Return its subject and its text, without attachments and pictures."""
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    body = message.get_body(("plain", "html"))
    if body is None:
        return "", ""
    text = "\ufffd"
    with contextlib.suppress(LookupError, ValueError):  # an encoding that nobody knows
        text = str(body.get_content())
    if "\ufffd" in text:
        payload = body.get_payload(decode=True)
        text = decoded(payload if isinstance(payload, bytes) else b"")
    is_html = body.get_content_type() == "text/html"
    return str(message.get("subject", "")).strip(), (text_of_html(text) if is_html else text).strip()


def without_quotes(subject: str, text: str, seen: set[str]) -> str:
    """Return a message without the lines that it quotes of those `seen`, and without their introduction ("On Monday
    Anna wrote:"); its own subject and lines are seen from now on."""
    kept: list[str] = []
    for line in text.splitlines():
        own = line.lstrip("> ").rstrip()
        if line.startswith(">") and (not own or own in seen):
            if kept and kept[-1].rstrip().endswith(":"):
                kept.pop()
            continue
        kept.append(line)
        if own:
            seen.add(own)
    topic = ANSWERS.sub("", subject)
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    if topic != subject and topic in seen:
        return body
    seen.add(topic)
    return f"{subject}\n\n{body}".strip()
