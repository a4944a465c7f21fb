"""How hard a text is to predict beside English books, measured on a sample of it by a model of three tokens."""

from __future__ import annotations

import re

import numpy as np

from tokenization.scripts import word_form
from tokenizer_bpe import BPETokenizer

CJK = re.compile("[\u3000-\ud7ff]")
CJK_LETTERS = 1.75  # letters of English that say as much as a Chinese, Japanese or Korean character

VOCABULARY_SIZE, ORDER = 512, 3
PASSAGE, HELD_OUT = 2500, 10  # characters; one passage of so many is predicted
# Bits per letter of passages of 222 English books, by letters of the sample: a power law through 30 samples of 10,000
# to a million, from which none is further than 6%.
ENGLISH_BITS, ENGLISH_POWER = 8.98, 0.103


def count_letters(text: str) -> float:
    """Count characters, each Chinese, Japanese or Korean one as CJK_LETTERS. In other scripts a text has about as many
    as in English, whatever bytes they take."""
    return len(text) + (CJK_LETTERS - 1) * len(CJK.findall(text))


def difficulty(sample: str) -> float:
    """Return how many bits a letter of the sample takes, as a multiple of what one of English books does.

    Predicts a tenth of its passages from the others, so text that repeats itself, or is of one author, is easy.
    """
    if len(sample) < 2 * HELD_OUT:
        return 1.0
    length = min(PASSAGE, max(1, len(sample) // (2 * HELD_OUT)))
    passages = [sample[start : start + length] for start in range(0, len(sample), length)]
    held_out = passages[HELD_OUT // 2 :: HELD_OUT]
    known = [passage for i, passage in enumerate(passages) if i % HELD_OUT != HELD_OUT // 2]
    tokenizer = BPETokenizer.train(known, VOCABULARY_SIZE, 2, *word_form(known))
    read, asked = (np.concatenate([tokenizer.encode(text) for text in part]) for part in (known, held_out))
    bits = predicted_bits(read, asked, tokenizer.vocab_size) / count_letters("".join(held_out))
    return float(bits / (ENGLISH_BITS * count_letters(sample) ** -ENGLISH_POWER))


def predicted_bits(known: np.ndarray, ids: np.ndarray, vocab_size: int) -> float:
    """Return the bits of `ids` by the counts of up to ORDER tokens in `known`, interpolated after Witten and Bell 1991.

    Both are (tokens,).
    """
    probability = np.full(len(ids), 1 / vocab_size)
    for length in range(1, ORDER + 1):
        grams, counts = np.unique(endings(known, length, vocab_size), return_counts=True)
        contexts, owners = np.unique(grams // vocab_size, return_inverse=True)
        wanted = endings(ids, length, vocab_size)
        seen = look_up(grams, counts, wanted)
        total = look_up(contexts, np.bincount(owners, counts), wanted // vocab_size)
        kinds = look_up(contexts, np.bincount(owners), wanted // vocab_size)
        probability = np.where(total > 0, (seen + kinds * probability) / np.maximum(1, total + kinds), probability)
    return float(-np.log2(probability).sum())


def endings(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Return a number for the `length` tokens that end at each place, (tokens,) int64."""
    padded = np.concatenate([np.zeros(length - 1, np.int64), ids.astype(np.int64)])
    keys = np.zeros(len(ids), np.int64)
    for start in range(length):
        keys = keys * vocab_size + padded[start : start + len(ids)]
    return keys


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 for one that is not among the sorted `keys`."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
