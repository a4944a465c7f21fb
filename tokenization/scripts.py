"""Choose how a new vocabulary splits text into words, and whether it composes letters, by the scripts of the text.

GPT-2's pattern ends a word at each combining mark: at every vowel sign in most Asian scripts, and at every accent in
Unicode's decomposed form (NFD).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

from tokenizer_bpe import BPETokenizer, joining_character_class

MIN_MARKED_SHARE = 0.005  # share of the letters; stray marks in other text do not count
SAMPLE_CHARACTERS = 8e6


class WordForm(NamedTuple):
    """The arguments of `BPETokenizer.train` that depend on the scripts of a text."""

    splitting: str = "gpt-2"
    to_nfc: bool = False


def choose_word_form(texts: Iterable[str]) -> WordForm:
    """Choose the word form of texts. Only marks inside words count, not those of an emoji."""
    marked_letter = re.compile(rf"[^\W\d_][{joining_character_class()}]+")

    def count_marks(text: str) -> int:
        return sum(len(found) - 1 for found in marked_letter.findall(text))

    letters = marks = marks_in_nfc = composed = 0
    for text in texts:
        letters += sum(map(str.isalpha, text))
        if text.isascii():
            continue
        nfc, found = unicodedata.normalize("NFC", text), count_marks(text)
        marks += found
        marks_in_nfc += found if nfc == text else count_marks(nfc)
        composed += len(text) - len(nfc)
    to_nfc = composed > MIN_MARKED_SHARE * letters
    has_marks = (marks_in_nfc if to_nfc else marks) > MIN_MARKED_SHARE * letters
    return WordForm("qwen35" if has_marks else "gpt-2", to_nfc)


def describe_word_form(tokenizer: BPETokenizer) -> list[str]:
    """Return a line for each difference of a learned vocabulary from GPT-2's."""
    lines = []
    if tokenizer.splitting == "qwen35":
        lines.append("vowel signs and other combining marks stay in words, as in Qwen3.5; each digit is a token")
    if tokenizer.normalizer is not None:
        lines.append("letters with separate accents (NFD) are composed (NFC), also in prompts")
    return lines
