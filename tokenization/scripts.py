"""Choose how a vocabulary of one's own cuts words, and whether it composes letters, by the scripts of the text.

GPT-2's pattern ends a word at each combining mark, so it cuts the words of most scripts of Asia at every vowel sign,
and those of every script in Unicode's decomposed form (NFD) at every accent.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

from tokenizer_base import joining_character_class
from tokenizer_bpe import BPETokenizer

LEAST_SHARE = 0.005  # of the letters: stray marks in other text change nothing
SAMPLE_CHARACTERS = 8e6


class WordForm(NamedTuple):
    """What `BPETokenizer.train` has to know of a text."""

    splitting: str = "gpt-2"
    to_nfc: bool = False


def word_form(texts: Iterable[str]) -> WordForm:
    """Return how to cut the words of these texts. Marks count inside words only, not those of an emoji."""
    marked_letter = re.compile(rf"[^\W\d_][{joining_character_class()}]+")

    def marks_in(text: str) -> int:
        return sum(len(found) - 1 for found in marked_letter.findall(text))

    letters = marks = marks_in_nfc = composed = 0
    for text in texts:
        letters += sum(map(str.isalpha, text))
        if text.isascii():
            continue
        nfc, found = unicodedata.normalize("NFC", text), marks_in(text)
        marks += found
        marks_in_nfc += found if nfc == text else marks_in(nfc)
        composed += len(text) - len(nfc)
    to_nfc = composed > LEAST_SHARE * letters
    has_marks = (marks_in_nfc if to_nfc else marks) > LEAST_SHARE * letters
    return WordForm("qwen35" if has_marks else "gpt-2", to_nfc)


def describe_word_form(tokenizer: BPETokenizer) -> list[str]:
    """Return one line for each way in which a learned vocabulary differs from GPT-2's."""
    lines = []
    if tokenizer.splitting == "qwen35":
        lines.append("vowel signs and other combining marks belong to words here, as in Qwen3.5; each digit is a token")
    if tokenizer.normalizer is not None:
        lines.append("letters with separate accents (NFD) are composed into one (NFC), in prompts too")
    return lines
