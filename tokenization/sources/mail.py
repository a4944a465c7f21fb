"""Extract the text of e-mail: .eml files and .mbox mailboxes."""

from __future__ import annotations

import contextlib
import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage
from typing import BinaryIO

from tokenization.documents import BadRecord
from tokenization.encodings import decode
from tokenization.sources.markup import html_to_text

REPLY_PREFIX = re.compile(r"^((re|fwd?|aw|wg|sv|tr|rv)\s*:\s*)+", re.I)  # "Re:" in several languages

QUOTE_MARK = "\0"
# The header that Outlook, in several languages, writes above a message that it quotes.
QUOTED_HEADER = re.compile(
    r"^(?:[ \t]*[-_]{3,}.*\n+)?\*?(?:From|Von|De|Da|Van|Från|Fra|Od|Lähettäjä|От|差出人|发件人)\*?\s?[:：].*\n"
    r"(?:\*?[^\W\d][\w ]{1,20}\*?\s?[:：].*\n){2,5}",
    re.M,
)


def read_mbox(file: BinaryIO) -> Iterator[str | BadRecord]:
    """Yield each message as a document, without quotes of earlier messages."""
    seen: set[str] = set()  # lines and subjects
    for number, content in enumerate(_split_messages(file), 1):
        try:
            yield _remove_quotes(*_read_message(content), seen)
        except Exception as problem:  # the parser raises many kinds of errors
            yield BadRecord(f"message {number}", f"{type(problem).__name__}: {problem}"[:200])


def _split_messages(file: BinaryIO) -> Iterator[bytes]:
    """Yield the messages of a mailbox. Each begins with a line "From ..." after a blank line."""
    lines: list[bytes] = []
    for line in file:
        if line.startswith(b"From ") and (not lines or not lines[-1].strip()):
            if lines:
                yield b"".join(lines)
            lines = []
        else:
            lines.append(re.sub(rb"^>(>*From )", rb"\1", line))
    yield b"".join(lines)


def read_eml(file: BinaryIO) -> Iterator[str]:
    yield _remove_quotes(*_read_message(file.read()), set())


def _read_message(content: bytes) -> tuple[str, str]:
    """Return the subject and text of a message, without attachments and pictures."""
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    body = message.get_body(("plain", "html"))
    if body is None:
        return "", ""
    text = "\ufffd"
    with contextlib.suppress(LookupError, ValueError):  # unknown encoding
        text = str(body.get_content())
    if "\ufffd" in text:
        payload = body.get_payload(decode=True)
        text = decode(payload if isinstance(payload, bytes) else b"")
    is_html = body.get_content_type() == "text/html"
    return str(message.get("subject", "")).strip(), (html_to_text(text) if is_html else text).strip()


def _remove_quotes(subject: str, text: str, seen: set[str]) -> str:
    """Return a message without quotes of lines in `seen`, and without their introduction ("On Monday Anna wrote:"). Add
    its own subject and lines to `seen`."""
    kept: list[str] = []
    is_quoted = False  # what follows Outlook's header, without ">"
    for line in QUOTED_HEADER.sub(f"{QUOTE_MARK}\n", text).splitlines():
        is_quoted = is_quoted or line == QUOTE_MARK
        unquoted = line.lstrip("> ").rstrip()
        if line == QUOTE_MARK or ((is_quoted or line.startswith(">")) and (not unquoted or unquoted in seen)):
            if line.startswith(">") and kept and kept[-1].rstrip().endswith(":"):
                kept.pop()
            continue
        kept.append(line)
        if unquoted:
            seen.add(unquoted)
    topic = REPLY_PREFIX.sub("", subject)
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    if topic != subject and topic in seen:
        return body
    seen.add(topic)
    return f"{subject}\n\n{body}".strip()
