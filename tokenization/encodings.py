"""Guess the encoding of bytes, and check that text is text."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import re

from tokenization.corpus import UnreadableError

MIN_CONFIDENCE = 0.12  # chardet is rarely above 0.5 for western European encodings
SAMPLE_BYTES = 1 << 18
MAX_BROKEN_SHARE = 0.01  # share of the characters
BROKEN_CHARACTER = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd]")  # control or undecodable


def has_chardet() -> bool:
    return importlib.util.find_spec("chardet") is not None


def guess_encoding(sample: bytes) -> str:
    """Return the most likely encoding by `chardet`; "" if it is unknown or chardet is not installed."""
    if not has_chardet():
        return ""
    import chardet

    guessed = chardet.detect(sample[:SAMPLE_BYTES])
    return str(guessed["encoding"]) if guessed["encoding"] and guessed["confidence"] >= MIN_CONFIDENCE else ""


def decode(content: bytes, declared: str = "") -> str:
    """Decode bytes by their byte order mark, as UTF-8, as `declared`, or by a guess. Undecodable bytes become
    U+FFFD."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", errors="replace")
    for encoding in ("utf-8-sig", declared):
        with contextlib.suppress(LookupError, UnicodeError):
            return content.decode(encoding)
    with contextlib.suppress(LookupError, UnicodeError):
        return content.decode(guess_encoding(content))
    return content.decode(errors="replace")


class TextCheck:
    """Counts the characters of a file that are not text."""

    def __init__(self) -> None:
        self.characters = self.no_text = 0

    def add(self, text: str) -> str:
        self.characters += len(text)
        self.no_text += len(BROKEN_CHARACTER.findall(text))
        return text

    def require_text(self) -> None:
        """Raise UnreadableError if too many characters are not text."""
        if self.no_text > MAX_BROKEN_SHARE * self.characters:
            share = f"{self.no_text / self.characters:.0%}"
            raise UnreadableError(
                f"{share} of its characters are not text: it is damaged, encrypted or in an unknown encoding"
            )
