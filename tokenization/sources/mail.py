"""Text of mail: .eml files, and .mbox files of many messages."""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterator
from email.message import EmailMessage
from typing import BinaryIO

from tokenization.sources.markup import text_of_html


def mbox_documents(file: BinaryIO) -> Iterator[str]:
    """A message is a document. Each begins with a line "From ..." after a blank line."""
    lines: list[bytes] = []
    for line in file:
        if line.startswith(b"From ") and (not lines or not lines[-1].strip()):
            yield text_of_message(b"".join(lines))
            lines = []
        else:
            lines.append(re.sub(rb"^>(>*From )", rb"\1", line))
    yield text_of_message(b"".join(lines))


def eml_documents(file: BinaryIO) -> Iterator[str]:
    yield text_of_message(file.read())


def text_of_message(content: bytes) -> str:
    """Its subject and its text, without attachments and pictures."""
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    body = message.get_body(("plain", "html"))
    if body is None:
        return ""
    text = body.get_content()
    subject = str(message.get("subject", ""))
    return f"{subject}\n\n{text_of_html(text) if body.get_content_type() == 'text/html' else text}".strip()
