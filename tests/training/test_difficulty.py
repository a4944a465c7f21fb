"""How hard a text is to predict: the counting model against a plain one, and texts whose order is known."""

from __future__ import annotations

import gzip
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import ROOT
from training.config import parse_config
from training.text import TextStats, choose_vocabulary, count_predicted_bits, measure_difficulty, measure_text


def one_by_one(known: list[int], ids: list[int], vocab_size: int) -> float:
    """Witten and Bell's interpolation of one, two and three tokens, as their paper has it. Nothing is before the first
    token but zeros."""
    counts: Counter[tuple[int, ...]] = Counter()
    for length in (1, 2, 3):
        padded = [0] * (length - 1) + known
        counts.update(tuple(padded[i : i + length]) for i in range(len(known)))

    def probability(context: tuple[int, ...], token: int) -> float:
        shorter = probability(context[1:], token) if context else 1 / vocab_size
        after = {gram: n for gram, n in counts.items() if len(gram) == len(context) + 1 and gram[:-1] == context}
        total, kinds = sum(after.values()), len(after)
        return (counts[(*context, token)] + kinds * shorter) / (total + kinds) if total else shorter

    padded = [0, 0, *ids]
    return -sum(math.log2(probability((padded[i], padded[i + 1]), token)) for i, token in enumerate(ids))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_counts_of_three_tokens_predict_as_in_the_paper(known: list[int], ids: list[int]) -> None:
    said = count_predicted_bits(np.array(known, np.int32), np.array(ids, np.int32), 6)
    assert said == pytest.approx(one_by_one(known, ids, 6))


def conversations() -> str:
    return gzip.decompress((ROOT / "examples" / "conversations.txt.gz").read_bytes()).decode()


DEVANAGARI = "".join(map(chr, range(0x0915, 0x0915 + 26)))
IN_HINDI = str.maketrans("abcdefghijklmnopqrstuvwxyz", DEVANAGARI)


def test_texts_are_ranked_by_difficulty() -> None:
    draw = random.Random(1)
    noise = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=100_000))
    words = " ".join(draw.choices(noise.split(), k=15_000))
    line = "the same line of a few words again and again\n" * 2000
    hard = [measure_difficulty(text) for text in (noise, words, conversations()[:100_000], line)]
    assert hard == sorted(hard, reverse=True) and hard[0] > 1.5 and hard[-1] < 0.1


def test_the_script_of_a_text_makes_it_neither_easier_nor_longer(tmp_path: Path) -> None:
    """The same text in letters of three bytes: it teaches as much."""
    english = conversations()[:200_000].lower()
    hindi = english.translate(IN_HINDI)
    assert measure_difficulty(hindi) == pytest.approx(measure_difficulty(english), rel=0.08)

    def measured(text: str) -> TextStats:
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        return measure_text(parse_config(["--input", str(tmp_path / "a.txt"), "--minutes", "1"]))

    one, other = measured(english), measured(hindi)
    assert other.bytes > 2 * one.bytes and other.letters == pytest.approx(one.letters, rel=1e-3)
    assert one.tokens == one.letters / choose_vocabulary(one.bytes).letters_per_token
    assert other.tokens == other.letters / choose_vocabulary(other.bytes).letters_per_token
