"""Guess the encoding of bytes, and check that text is text."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
from collections.abc import Iterable

MIN_CONFIDENCE = 0.12  # chardet is rarely above 0.5 for western European encodings
SAMPLE_BYTES = 1 << 18
MAX_ERROR_SHARE = 0.01  # share of the bytes


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
    if not count_errors([content]):
        with contextlib.suppress(LookupError, UnicodeError):
            return content.decode(guess_encoding(content))
    return content.decode(errors="replace")


def count_errors(blocks: Iterable[bytes]) -> int:
    """Return how many characters of a text in UTF-8 cannot be decoded; 0 if it is not UTF-8, or if there are none."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    size = errors = others = 0  # bytes; undecodable and other characters that are not ASCII
    for block in blocks:
        text = decoder.decode(block)
        broken = text.count("\ufffd")
        size, errors = size + len(block), errors + broken
        others += len(text) - len(text.encode("ascii", "ignore")) - broken
    errors += bool(decoder.decode(b"", final=True))
    return errors if errors < MAX_ERROR_SHARE * size and errors < others else 0
