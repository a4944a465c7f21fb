"""Measure a training text: its size, its tokens, and how hard it is to predict."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from tokenization.corpus import BLOCK_BYTES, Source, read_blocks
from tokenization.documents import read_pieces
from tokenization.extract import detect_format, find_files, make_readable
from tokenization.metadata import TokenMetadata, find_metadata, read_tokens
from tokenization.scripts import choose_word_form
from tokenization.settings import HUB, Settings
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer
from training.config import BUILTIN_CONVERSATIONS, REPOSITORY, Config

CJK = re.compile("[\u3000-\ud7ff]")
CJK_LETTERS = 1.75  # English letters per Chinese, Japanese or Korean character of the same text
# English letters in as many tokens as one of these characters, within 10% at 512 to 4,096 tokens: 30 Japanese books and
# Dream of the Red Chamber.
HAN, HAN_IN_TOKENS = re.compile("[\u3400-\u9fff]"), 3.1
KANA, KANA_IN_TOKENS = re.compile("[\u3000-\u33ff]"), 2.1

NGRAM_TOKENS = 3  # n of the longest n-grams
SMALL_VOCABULARY, LARGE_VOCABULARY = 512, 1024
LARGE_SAMPLE = 500_000  # characters; from here on LARGE_VOCABULARY
RATIO_VOCABULARY = 4096
PASSAGE_CHARACTERS, HELD_OUT_EVERY = 2500, 10  # every tenth passage is predicted
# Bits per letter of 222 English books by letters of the sample: a power law fitted to 30 samples of 10,000 to a million
# letters, all within 6%.
ENGLISH_BITS, ENGLISH_POWER = 8.98, 0.103


def _count_letters(text: str) -> float:
    """Count characters, Chinese, Japanese and Korean ones as CJK_LETTERS each. In other scripts a text has about as
    many characters as in English, whatever their bytes."""
    return len(text) + (CJK_LETTERS - 1) * len(CJK.findall(text))


def _count_letters_in_tokens(text: str) -> float:
    """Count characters as `_count_letters` does, but by the tokens that they take."""
    han, kana = len(HAN.findall(text)), len(KANA.findall(text))
    return _count_letters(text) + (HAN_IN_TOKENS - CJK_LETTERS) * han + (KANA_IN_TOKENS - CJK_LETTERS) * kana


def measure_difficulty(sample: str) -> float:
    """Return the bits per letter of the sample relative to English books.

    Predicts a tenth of the passages from the others, so repetitive text, or text by one author, is easy.
    """
    if len(sample) < 2 * HELD_OUT_EVERY:
        return 1.0
    length = min(PASSAGE_CHARACTERS, max(1, len(sample) // (2 * HELD_OUT_EVERY)))
    passages = [sample[start : start + length] for start in range(0, len(sample), length)]
    held_out = passages[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    known = [passage for i, passage in enumerate(passages) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    size = SMALL_VOCABULARY if len(sample) < LARGE_SAMPLE else LARGE_VOCABULARY
    tokenizer = BPETokenizer.train(known, size, 2, *choose_word_form(known))
    known_ids, held_out_ids = (np.concatenate([tokenizer.encode(text) for text in part]) for part in (known, held_out))
    bits = count_predicted_bits(known_ids, held_out_ids, tokenizer.vocab_size) / _count_letters("".join(held_out))
    return float(bits / (ENGLISH_BITS * _count_letters(sample) ** -ENGLISH_POWER))


def measure_token_ratio(sample: str, other: str) -> float:
    """Return the tokens per letter with a vocabulary learned from the other text, relative to the text's own: the
    geometric mean of both directions. 1.1 to 1.2 for two books, over 1.5 for two languages.

    A vocabulary is learned from every second passage, and tokens are counted on the others.
    """
    size, ratio = min(len(sample), len(other)), 1.0
    length = min(PASSAGE_CHARACTERS, max(1, size // 2))
    parts = [[text[start : start + length] for start in range(0, size, length)] for text in (sample, other)]
    for first, second in (parts, parts[::-1]):
        known = first[::2]
        tokenizer = BPETokenizer.train(known, RATIO_VOCABULARY, 2, *choose_word_form(known))
        own_rate, other_rate = (
            sum(len(tokenizer.encode(text)) for text in part[1::2]) / _count_letters("".join(part[1::2]))
            for part in (first, second)
        )
        ratio *= other_rate / own_rate
    return math.sqrt(ratio)


def count_predicted_bits(known: np.ndarray, ids: np.ndarray, vocab_size: int) -> float:
    """Return the bits of `ids`, (tokens,), by the n-gram counts of `known`, (tokens,), interpolated after Witten and
    Bell 1991.
    """
    probability = np.full(len(ids), 1 / vocab_size)
    for length in range(1, NGRAM_TOKENS + 1):
        grams, counts = np.unique(_number_ngrams(known, length, vocab_size), return_counts=True)
        contexts, owners = np.unique(grams // vocab_size, return_inverse=True)
        wanted = _number_ngrams(ids, length, vocab_size)
        seen = _look_up(grams, counts, wanted)
        total = _look_up(contexts, np.bincount(owners, counts), wanted // vocab_size)
        kinds = _look_up(contexts, np.bincount(owners), wanted // vocab_size)
        probability = np.where(total > 0, (seen + kinds * probability) / np.maximum(1, total + kinds), probability)
    return float(-np.log2(probability).sum())


def _number_ngrams(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Return a number for the n-gram of `length` tokens that ends at each position, (tokens,) int64."""
    padded = np.concatenate([np.zeros(length - 1, np.int64), ids.astype(np.int64)])
    keys = np.zeros(len(ids), np.int64)
    for start in range(length):
        keys = keys * vocab_size + padded[start : start + len(ids)]
    return keys


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 for keys missing from the sorted `keys`."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[at] == queries, values[at], 0)


EXAMPLES_DIR = REPOSITORY / "examples"
MAX_LISTED_FILES = 3
MIN_TEXT_BYTES = 2_000
TRAIN_SHARE = 0.9
SAMPLE_BYTES = 1_000_000
HUB_SAMPLE_MB = 2.0
LATIN_BYTES_PER_LETTER = 1.1  # above, a text is mostly in another script
OTHER_ALPHABET_DOUBT = 0.15  # error of the forecast in other scripts, bits per letter


class Vocabulary(NamedTuple):
    max_bytes: float  # largest text; bytes, not letters, because letters of three bytes need more ids
    size: int
    letters_per_token: float  # English books


VOCABULARIES = (
    Vocabulary(2e5, 512, 2.1),
    Vocabulary(6e5, 1024, 2.6),
    Vocabulary(2e6, 2048, 3.1),
    Vocabulary(3e7, 4096, 3.5),
    Vocabulary(2e8, 8192, 3.9),
    Vocabulary(math.inf, 32_000, 4.4),
)


class TextStats(NamedTuple):
    name: str
    files: int
    bytes: int
    letters: float  # see `_count_letters`
    tokens: float
    vocab_size: int
    is_chat: bool
    difficulty: float  # bits per letter relative to English books
    sample: str = ""
    is_tokenized: bool = False
    letters_in_tokens: float = 0.0  # see `_count_letters_in_tokens`

    @property
    def difficulty_error(self) -> float:
        """Error of the forecast because the text is not an English book, bits per letter. From 17 texts in 15 languages
        (docs/benchmarks/scripts.md)."""
        is_other_alphabet = self.bytes > LATIN_BYTES_PER_LETTER * self.letters
        return max(abs(1 - self.difficulty), OTHER_ALPHABET_DOUBT if is_other_alphabet else 0.0)

    @property
    def train_tokens(self) -> float:
        return TRAIN_SHARE * self.tokens

    def with_vocabulary(self, vocabulary: Vocabulary) -> TextStats:
        letters = self.letters_in_tokens or self.letters
        return self._replace(tokens=letters / vocabulary.letters_per_token, vocab_size=vocabulary.size)


def input_settings(config: Config) -> Settings:
    """Return the settings for reading `input`."""
    assert config.input is not None
    text = str(EXAMPLES_DIR / "conversations.txt.gz") if config.input == BUILTIN_CONVERSATIONS else config.input
    settings = Settings(input=(text,), text_key=config.text_key, max_mb=config.max_mb if text.startswith(HUB) else None)
    return replace(settings, format=detect_format(find_files(settings), config.text_key))


def choose_vocabulary(text_bytes: float) -> Vocabulary:
    return next(vocabulary for vocabulary in VOCABULARIES if text_bytes <= vocabulary.max_bytes)


def measure_text(config: Config) -> TextStats:
    """Measure the text or tokens of a configuration. Raises DataError if the text is too short."""
    if not config.input:
        return measure_tokens(config)
    settings = input_settings(config)
    found = find_files(settings)
    is_on_hub = config.input.startswith(HUB)
    sources = make_readable(
        find_files(replace(settings, max_mb=HUB_SAMPLE_MB)) if is_on_hub else found, settings
    ).sources
    size = round(sum(min(source.size, source.max_bytes) for source in found))  # on the hub, some files may be packed
    if not is_on_hub:
        size = sum(source.text_bytes for source in sources)
    if size < MIN_TEXT_BYTES:
        raise DataError(f"{config.input} has only {size:,} bytes of text. Training needs at least {MIN_TEXT_BYTES:,}.")
    share = max(1, SAMPLE_BYTES // len(sources))
    sample = "".join(_sample_beginning(source, settings, share) for source in sources)
    scale = size / max(1, len(sample.encode()))
    letters = _count_letters(sample) * scale
    vocabulary = choose_vocabulary(size)
    letters_in_tokens = _count_letters_in_tokens(sample) * scale
    tokens = letters_in_tokens / vocabulary.letters_per_token
    if config.is_explicit("vocab_size"):
        vocabulary = vocabulary._replace(size=config.vocab_size)
    elif config.tokenizer == "char":
        vocabulary, tokens = Vocabulary(size, len(set(sample)), 1.0), len(sample) * scale
    return TextStats(
        config.input,
        len(found if is_on_hub else sources),
        size,
        letters,
        tokens,
        vocabulary.size,
        settings.format == "chat",
        measure_difficulty(sample),
        sample,
        letters_in_tokens=letters_in_tokens,
    )


def _sample_beginning(source: Source, settings: Settings, size: int) -> str:
    """Return about `size` bytes of text from the beginning of a file; conversations as raw JSON."""
    if settings.format == "chat":
        blocks = islice(read_blocks(source), math.ceil(size / BLOCK_BYTES))
        return b"".join(blocks)[:size].decode(errors="ignore")
    text = b""
    for piece in read_pieces([source], settings.document_separator, settings.text_key):
        text += piece.text.encode() + b"\n"
        if len(text) >= size:
            break
    return text[:size].decode(errors="ignore")


def measure_tokens(config: Config) -> TextStats:
    """Measure an existing token folder as `measure_text` does a text."""
    folder = Path(config.data_dir or "")
    paths = [Path(config.metadata_file)] if config.metadata_file else find_metadata(folder)
    if len(paths) != 1:
        raise DataError(f"{folder} holds {len(paths)} token files; it should hold one.")
    metadata = TokenMetadata.read(paths[0])
    bin_file = Path(config.bin_file) if config.bin_file else metadata.path_beside("bin_file")
    tokenizer = load_tokenizer(config.tokenizer_file or metadata.path_beside("tokenizer_file"))
    ids = read_tokens(bin_file, metadata, mapped=True)[: SAMPLE_BYTES // 4]
    sample = tokenizer.decode(ids)
    size = metadata.text_bytes or round(len(sample.encode()) / len(ids) * metadata.total_tokens)
    files, is_chat = max(1, len(metadata.source_files)), metadata.chat_template is not None
    return TextStats(
        str(paths[0].parent),
        files,
        size,
        size * _count_letters(sample) / max(1, len(sample.encode())),
        metadata.total_tokens,
        metadata.vocab_size,
        is_chat,
        measure_difficulty(sample),
        sample,
        is_tokenized=True,
    )


def describe_changes(old: TokenMetadata, new: TokenMetadata) -> str:
    """Describe which files are new, changed in size or gone, and the share of new and changed ones in the text."""
    before, after = ({file["name"]: file["size"] for file in metadata.source_files} for metadata in (old, new))
    kinds = {
        "new": [name for name in after if name not in before],
        "changed": [name for name in after if after[name] != before.get(name, after[name])],
        "gone": [name for name in before if name not in after],
    }
    if not any(kinds.values()):
        return "none is new or changed in size; some text was edited"
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:MAX_LISTED_FILES])}{', ...' if len(names) > MAX_LISTED_FILES else ''})"
        for kind, names in kinds.items()
        if names
    ]
    share = sum(after[name] for name in (*kinds["new"], *kinds["changed"])) / max(1, sum(after.values()))
    return f"{', '.join(parts)}: {share:.0%} of the text is in new or changed files"
