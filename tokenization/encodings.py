"""What encoding bytes are in, and whether text is text."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import re

from tokenization.corpus import Unreadable

LEAST_CONFIDENCE = 0.12  # chardet is rarely above 0.5 for the encodings of western Europe
SAMPLE_BYTES = 1 << 18
MOST_NO_TEXT = 0.01  # of the characters of a file that is read
NO_TEXT = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd]")  # control characters, and what could not be decoded


def has_chardet() -> bool:
    return importlib.util.find_spec("chardet") is not None


def guess(sample: bytes) -> str:
    """Return the encoding that `chardet` finds most likely; "" if it does not know, or is not installed."""
    if not has_chardet():
        return ""
    import chardet

    guessed = chardet.detect(sample[:SAMPLE_BYTES])
    return str(guessed["encoding"]) if guessed["encoding"] and guessed["confidence"] >= LEAST_CONFIDENCE else ""


def decoded(content: bytes, declared: str = "") -> str:
    """Decode bytes: by their byte order mark, as UTF-8, as they declare, or by a guess; what is no text in any of them
    becomes U+FFFD."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", errors="replace")
    for encoding in ("utf-8-sig", declared):
        with contextlib.suppress(LookupError, UnicodeError):
            return content.decode(encoding)
    with contextlib.suppress(LookupError, UnicodeError):
        return content.decode(guess(content))
    return content.decode(errors="replace")


class TextCheck:
    """Counts the characters of a file that are no text."""

    def __init__(self) -> None:
        self.characters = self.no_text = 0

    def add(self, text: str) -> str:
        self.characters += len(text)
        self.no_text += len(NO_TEXT.findall(text))
        return text

    def require_text(self) -> None:
        """Raise Unreadable if too many are."""
        if self.no_text > MOST_NO_TEXT * self.characters:
            share = f"{self.no_text / self.characters:.0%}"
            raise Unreadable(
                f"{share} of its characters are no text: it is damaged, encrypted or in an unknown encoding"
            )
