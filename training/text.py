"""What there is to learn from: how much text, how many tokens, how hard to predict."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from tokenization.corpus import BLOCK_BYTES, Source, unpacked_blocks
from tokenization.documents import read_pieces
from tokenization.extract import find, format_of, readable
from tokenization.metadata import TokenMetadata, metadata_files, read_tokens
from tokenization.scripts import word_form
from tokenization.settings import HUB, Settings
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer
from training.config import REPOSITORY, Config

CJK = re.compile("[\u3000-\ud7ff]")
CJK_LETTERS = 1.75  # letters of English that say as much as a Chinese, Japanese or Korean character

ORDER = 3  # tokens that are counted together
SMALL_VOCABULARY, LARGE_VOCABULARY = 512, 1024  # the latter for samples of LARGE_SAMPLE characters and more
LARGE_SAMPLE = 500_000
OTHER_VOCABULARY = 4096
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
    size = SMALL_VOCABULARY if len(sample) < LARGE_SAMPLE else LARGE_VOCABULARY
    tokenizer = BPETokenizer.train(known, size, 2, *word_form(known))
    read, asked = (np.concatenate([tokenizer.encode(text) for text in part]) for part in (known, held_out))
    bits = predicted_bits(read, asked, tokenizer.vocab_size) / count_letters("".join(held_out))
    return float(bits / (ENGLISH_BITS * count_letters(sample) ** -ENGLISH_POWER))


def token_ratio(sample: str, other: str) -> float:
    """Return how many times as many tokens a letter of either text takes with a vocabulary learned from the other, as
    the geometric mean of both directions: 1.1 to 1.2 for two books, over 1.5 for two languages.

    A vocabulary is learned from every other passage, and counted on those between.
    """
    size, ratio = min(len(sample), len(other)), 1.0
    length = min(PASSAGE, max(1, size // 2))
    parts = [[text[start : start + length] for start in range(0, size, length)] for text in (sample, other)]
    for mine, theirs in (parts, parts[::-1]):
        known = mine[::2]
        tokenizer = BPETokenizer.train(known, OTHER_VOCABULARY, 2, *word_form(known))
        of_mine, of_theirs = (
            sum(len(tokenizer.encode(text)) for text in part[1::2]) / count_letters("".join(part[1::2]))
            for part in (mine, theirs)
        )
        ratio *= of_theirs / of_mine
    return math.sqrt(ratio)


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


EXAMPLE = "builtin:conversations"  # the quickstart's text, and questions that it does not ask in these words
EXAMPLES = REPOSITORY / "examples"
LISTED_FILES = 3  # of those that changed
MIN_BYTES = 2_000  # of a text
TRAIN_SHARE = 0.9  # of the text
SAMPLE_BYTES = 1_000_000
HUB_SAMPLE_MB = 2.0
ONE_BYTE_EACH = 1.1  # bytes a letter, up to which a text is mostly in Latin letters
OTHER_ALPHABET = 0.15  # bits per letter by which the loss may be off in others


class Vocabulary(NamedTuple):
    max_bytes: float  # of a text that it is for: letters of three bytes take more of its ids than those of one
    size: int
    letters_per_token: float  # of English books


VOCABULARIES = (
    Vocabulary(2e5, 512, 2.1),
    Vocabulary(6e5, 1024, 2.6),
    Vocabulary(2e6, 2048, 3.1),
    Vocabulary(3e7, 4096, 3.5),
    Vocabulary(2e8, 8192, 3.9),
    Vocabulary(math.inf, 32_000, 4.4),
)


class Text(NamedTuple):
    name: str
    files: int
    bytes: int
    letters: float  # as `count_letters` counts them
    tokens: float
    vocab_size: int
    is_chat: bool
    difficulty: float  # how much harder it is to predict than English books
    sample: str = ""
    is_tokenized: bool = False

    @property
    def doubt(self) -> float:
        """How far the loss may be off because this is no English book, in bits per letter: by what 17 texts of 15
        languages show (docs/benchmarks/scripts.md)."""
        is_other_alphabet = self.bytes > ONE_BYTE_EACH * self.letters
        return max(abs(1 - self.difficulty), OTHER_ALPHABET if is_other_alphabet else 0.0)

    @property
    def train_tokens(self) -> float:
        return TRAIN_SHARE * self.tokens

    def with_vocabulary(self, vocabulary: Vocabulary) -> Text:
        return self._replace(tokens=self.letters / vocabulary.letters_per_token, vocab_size=vocabulary.size)


def input_settings(config: Config) -> Settings:
    """Return how `input` is read."""
    assert config.input is not None
    text = str(EXAMPLES / "conversations.txt.gz") if config.input == EXAMPLE else config.input
    settings = Settings(input=(text,), text_key=config.text_key, max_mb=config.max_mb if text.startswith(HUB) else None)
    return replace(settings, format=format_of(find(settings), config.text_key))


def vocabulary_for(text_bytes: float) -> Vocabulary:
    return next(vocabulary for vocabulary in VOCABULARIES if text_bytes <= vocabulary.max_bytes)


def measure_text(config: Config) -> Text:
    """Measure how much there is to learn from, and how hard it is."""
    if not config.input:
        return measure_tokens(config)
    settings = input_settings(config)
    found = find(settings)
    is_on_hub = config.input.startswith(HUB)
    sources = readable(find(replace(settings, max_mb=HUB_SAMPLE_MB)) if is_on_hub else found, settings).sources
    size = round(sum(min(source.size, source.most_bytes) for source in found))  # on the hub some of it may be packed
    if not is_on_hub:
        size = sum(source.text_bytes for source in sources)
    if size < MIN_BYTES:
        raise DataError(f"{config.input} holds {size:,} bytes of text: too few to learn from and to hold some out.")
    share = max(1, SAMPLE_BYTES // len(sources))
    sample = "".join(beginning_of(source, settings, share) for source in sources)
    of_a_byte = 1 / max(1, len(sample.encode()))
    letters = size * count_letters(sample) * of_a_byte
    vocabulary = vocabulary_for(size)
    tokens = letters / vocabulary.letters_per_token
    if config.is_explicit("vocab_size"):
        vocabulary = vocabulary._replace(size=config.vocab_size)
    elif config.tokenizer == "char":
        vocabulary, tokens = Vocabulary(size, len(set(sample)), 1.0), size * len(sample) * of_a_byte
    return Text(
        config.input,
        len(found if is_on_hub else sources),
        size,
        letters,
        tokens,
        vocabulary.size,
        settings.format == "chat",
        difficulty(sample),
        sample,
    )


def beginning_of(source: Source, settings: Settings, size: int) -> str:
    """Return about `size` bytes of text from the beginning of a file; conversations as they stand in it."""
    if settings.format == "chat":
        blocks = islice(unpacked_blocks(source), math.ceil(size / BLOCK_BYTES))
        return b"".join(blocks)[:size].decode(errors="ignore")
    text = b""
    for piece in read_pieces([source], settings.document_separator, settings.text_key):
        text += piece.text.encode() + b"\n"
        if len(text) >= size:
            break
    return text[:size].decode(errors="ignore")


def measure_tokens(config: Config) -> Text:
    """Measure tokens that are there in the same way."""
    folder = Path(config.data_dir or "")
    paths = [Path(config.metadata_file)] if config.metadata_file else metadata_files(folder)
    if len(paths) != 1:
        raise DataError(f"{folder} holds the tokens of {len(paths)} texts; one is needed.")
    metadata = TokenMetadata.read(paths[0])
    bin_file = Path(config.bin_file) if config.bin_file else metadata.beside("bin_file")
    tokenizer = load_tokenizer(config.tokenizer_file or metadata.beside("tokenizer_file"))
    ids = read_tokens(bin_file, metadata, mapped=True)[: SAMPLE_BYTES // 4]
    sample = tokenizer.decode(ids)
    size = metadata.text_bytes or round(len(sample.encode()) / len(ids) * metadata.total_tokens)
    files, is_chat = max(1, len(metadata.source_files)), metadata.chat_template is not None
    return Text(
        str(paths[0].parent),
        files,
        size,
        size * count_letters(sample) / max(1, len(sample.encode())),
        metadata.total_tokens,
        metadata.vocab_size,
        is_chat,
        difficulty(sample),
        sample,
        is_tokenized=True,
    )


def changes(then: TokenMetadata, now: TokenMetadata) -> str:
    """Say which files are new, have another size or are gone, and the share of the new ones in the text."""
    before, after = ({file["name"]: file["size"] for file in each.source_files} for each in (then, now))
    kinds = {
        "new": [name for name in after if name not in before],
        "changed": [name for name in after if after[name] != before.get(name, after[name])],
        "gone": [name for name in before if name not in after],
    }
    if not any(kinds.values()):
        return "none is new or has another size: some of the text was edited"
    said = [
        f"{len(names)} {kind} ({', '.join(names[:LISTED_FILES])}{', ...' if len(names) > LISTED_FILES else ''})"
        for kind, names in kinds.items()
        if names
    ]
    share = sum(after[name] for name in (*kinds["new"], *kinds["changed"])) / max(1, sum(after.values()))
    return f"{', '.join(said)}: {share:.0%} of the text is in files that are new or changed"
