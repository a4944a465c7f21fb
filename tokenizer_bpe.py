"""Byte-level BPE: training and file format by Hugging Face `tokenizers`, fast encoding by `tiktoken`.

What both kinds of tokenizer share is here, too: errors, incremental decoding, checks of ids, reading a file.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# The token that ends a document in GPT-2, SmolLM2 and Qwen; Llama 3; DeepSeek; Mistral; nanochat. The first that a
# tokenizer has counts.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<|bos|>")
# Tokens that end an answer in imported chat models. Generation stops at each of them.
END_OF_ANSWER_NAMES = ("<|im_end|>", "<|eot_id|>", "<|assistant_end|>")

TokenIds = Sequence[int] | np.ndarray
END_NAMES = (*END_OF_TEXT_NAMES, *END_OF_ANSWER_NAMES)
SPECIAL_TOKENS = (END_OF_TEXT, "<|pad|>", "<|unk|>")  # ids 0, 1, 2
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256
MAX_UNUSED_IDS = 65_536  # plus one per token; each takes memory here and in a model
MAX_VOCABULARY = 10_000_000  # beyond any in use: `tokenizers` ends the process if memory runs out

# GPT-2's pre-tokenizer. Possessive quantifiers match the same as GPT-2's own pattern, without backtracking.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# Copied from the files of Llama 3, and of Qwen2 and Qwen3.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
# Copied from the files of Qwen3.5. Combining marks belong to words, as most Asian scripts need it.
QWEN35_PATTERN = QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)

# Known ways of splitting text into words, by llama.cpp's names: the stages of a `tokenizers` file (without
# "trim_offsets", which changes no id), and the equivalent pattern for tiktoken. There is none for SmolLM2, which splits
# digits: `tokenizers` and tiktoken know the digits of different Unicode versions.
GPT2_STAGE = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES_STAGE = {**GPT2_STAGE, "use_regex": False}
NFC = {"type": "NFC"}  # normalizer of Qwen2 and Qwen3
DIGITS_STAGE = {"type": "Digits", "individual_digits": True}


class TokenizerError(ValueError):
    """An unusable tokenizer file, text that the vocabulary cannot encode, or ids outside it."""

    exit_code = 3


class UnknownCharacterError(TokenizerError):
    """Characters outside a character vocabulary. `line` and `column` count from 1; 0 if unknown."""

    def __init__(self, characters: Sequence[str], line: int, column: int, source: str = "") -> None:
        super().__init__(characters, line, column, source)
        self.characters, self.line, self.column = characters, line, column
        named = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in characters[:5])
        more = f" and {len(characters) - 5} more" if len(characters) > 5 else ""
        place = f"line {line}, column {column}" if column else f"line {line}"
        noun = "character is" if len(characters) == 1 else "characters are"
        self.finding = f"{len(characters)} {noun} not in the vocabulary: {named}{more}; the first is at {place}"
        self.message = (
            f"{source + ': ' if source else ''}{self.finding}. Remove it from the text, or add `--unknown drop` to "
            "leave unknown characters out."
        )

    def __str__(self) -> str:
        return self.message


class IncrementalDecoder:
    """Decodes ids as they arrive. An incomplete character waits for the ids that complete it.

    The joined pieces equal `decode` of all ids, without an unfinished character at the end.
    """

    def __init__(self, decode_bytes: Callable[[TokenIds], bytes], encoding: str) -> None:
        self.decode_bytes = decode_bytes
        self.text_decoder = codecs.getincrementaldecoder(encoding)("replace")

    def push(self, ids: TokenIds) -> str:
        return self.text_decoder.decode(self.decode_bytes(ids))


def check_ids(ids: TokenIds, vocab_size: int) -> np.ndarray:
    """Return the ids as an int64 array. Raises TokenizerError for an id outside 0 .. vocab_size - 1."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise TokenizerError(f"Token id {wrong} is outside the vocabulary (0 to {vocab_size - 1}).")
    return array


@functools.cache
def joining_character_class() -> str:
    """Return the content of a regular expression's character class for combining marks (vowel signs, accents) and the
    two zero-width joiners."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "M"]
    ranges = itertools.groupby(enumerate(marks), lambda numbered: numbered[1] - numbered[0])
    runs = [[code for _, code in run] for _, run in ranges]
    return "\u200c\u200d" + "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which can come from JSON escapes, by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_tokenizer_json(path: str | Path) -> dict[str, Any]:
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # reading a pipe may never end
        raise TokenizerError(f"The tokenizer file {path} is not a regular file. Write its content to a file first.")
    try:
        content = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise TokenizerError(f"No tokenizer file {path}.") from None
    except OSError as error:
        raise TokenizerError(f"The tokenizer file {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise TokenizerError(f"The tokenizer file {path} is not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"The tokenizer file {path} holds a JSON {type(content).__name__}, not an object.")
    return content


def pattern_stage(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SPLITTINGS = {
    "gpt-2": ([GPT2_STAGE], GPT2_PATTERN),
    "smollm": ([DIGITS_STAGE, GPT2_STAGE], ""),
    "llama-bpe": ([pattern_stage(LLAMA3_PATTERN), BYTES_STAGE], LLAMA3_PATTERN),
    "qwen2": ([pattern_stage(QWEN_PATTERN), BYTES_STAGE], QWEN_PATTERN),
    "qwen35": ([pattern_stage(QWEN35_PATTERN), BYTES_STAGE], QWEN35_PATTERN),
}

# `\s+(?!\S)` backtracks by one character, with a stack entry per character: tiktoken panics if text follows a run of
# some 500,000 whitespace characters. Such a run is cut where the match would end.
MAX_WHITESPACE = 100_000
SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # \s above; Python's own has more
# The lookbehind makes a match start only where a run begins; without it, time is quadratic in the length of the run.
LONG_WHITESPACE = re.compile(rf"(?<!{SPACE}){SPACE}{{{MAX_WHITESPACE},}}+")

# Training time grows with the square of a word's length: hours for a genome. So training cuts words of two blocks or
# more. Encoding is not quadratic, and cuts nothing.
WORD_BLOCK = 500

PROBE_TEXT = (
    "The quick brown fox didn't jump; it's 12,345.67 o'clock -- we'll see they've I'M you'RE ''s 'sa.\n\n\n"
    "HE'D we'Ll 1234567 in   2026: 3rd!!\n\n ?\r\n \n  12\n\t9\t\tx\n   y\n"
    "  two   spaces \t\ttabs\r\n\r\n  trailing   \n def f(x):\n    return x**2 != 0x1F  # comment\n"
    "naïve façade Übergröße ÀÉÎ þórr Ελληνικά кириллица 中文字符測試 日本語テキスト かな 한국어 עברית العربية\n"
    "हिन्दी ไทย ½²³ Ⅷ ٣٤٥ 😀👩\u200d👩\u200d👧\u200d👦🇫🇷 e\u0301\n"
    "\u00a0nbsp\u2003em\u3000ideographic \x00\x1c\x7f\u200b\ufeff\ufffd<|endoftext|><|pad|>"
    " aaaaaaaaaaaaaaaa           x "
)

NOT_BYTE_LEVEL = "{}; only byte-level BPE is supported, as in GPT-2, SmolLM2, Llama 3, Qwen2 and Qwen3."


class VocabularySizeError(TokenizerError):
    """A vocabulary size that is too small for the byte alphabet, or far too large."""

    exit_code = 2


class BPETokenizer:
    """Byte-level BPE. Any text round-trips, except with some imported files: a normalizer may change text (Qwen's NFC),
    or the vocabulary may lack some bytes.

    `encode` treats everything as ordinary text, even the characters "<|endoftext|>": special tokens enter a sequence
    only by id, so no document can forge one. `decode` returns a special token's name as text. Added tokens that are not
    special (Qwen's "<tool_call>") are found in the text, as in `transformers`.

    `bos_id` is the id before each text (Llama 3's "<|begin_of_text|>"), if the file defines one. `encode` leaves it
    out, because it may encode the middle of a text.
    """

    kind = "bpe"

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raise TokenizerError if the tokenizer is not byte-level BPE."""
        from tokenizers import models

        # A file may set truncation, padding or BPE dropout, which would cut or pad text, or make ids random.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None
        content = json.loads(tokenizer.to_str())
        self.backend = tokenizer
        self.backend.encode_special_tokens = True  # encodes their names as ordinary text
        self.table = build_token_table(content)
        added = content.get("added_tokens") or []
        self.special_ids = {token["content"]: token["id"] for token in added if token.get("special")}
        self.found_in_text = [token["content"] for token in added if not token.get("special")]
        self.splitting = find_splitting(content)
        self.normalizer = tokenizer.normalizer
        self.bos_id = find_bos_id(tokenizer)
        self.fast: tiktoken.Encoding | None = None
        obstacle = find_tiktoken_obstacle(content)
        if not obstacle:
            fast = build_tiktoken(content, self.table, SPLITTINGS[self.splitting][1])
            text = self.probe()
            if self.encode_fast(fast, text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids:
                self.fast = fast
            else:
                obstacle = "tiktoken gives different ids for the test text"
        slow = f"Encoding with `tokenizers`, several times slower than tiktoken: {obstacle}."
        self.encoder_note = slow if obstacle else ""

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int = 32000,
        min_frequency: int = 2,
        splitting: str = "gpt-2",
        to_nfc: bool = False,
    ) -> BPETokenizer:
        """Learn merges from a stream of texts, keeping only word counts in memory.

        `splitting` is "gpt-2", or "qwen35" for scripts with combining marks. With `to_nfc`, the tokenizer converts
        every text to Unicode's composed form first.

        The vocabulary is smaller than `vocab_size` if too few pairs occur `min_frequency` times. Words of many hundred
        characters (DNA) are cut into parts; text without them gives the same merges as `tokenizers`. Raises
        VocabularySizeError if `vocab_size` is too small for the 256 bytes and the special tokens, or far too large.
        """
        if vocab_size < MIN_VOCABULARY:
            raise VocabularySizeError(
                f"A vocabulary of {vocab_size} cannot hold the 256 bytes and {len(SPECIAL_TOKENS)} special tokens; "
                f"use a vocab_size of {MIN_VOCABULARY} or more."
            )
        if vocab_size > MAX_VOCABULARY:
            raise VocabularySizeError(f"A vocab_size of {vocab_size} is too large; use {MAX_VOCABULARY:,} at most.")
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        if splitting == "gpt-2":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            split = pre_tokenizers.Split(Regex(SPLITTINGS[splitting][1]), "isolated")
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        if to_nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        parts = (part for text in texts for part in cut_long_words(replace_surrogates(text)))
        tokenizer.train_from_iterator(parts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> BPETokenizer:
        """Load a Hugging Face `tokenizers` JSON file. Raises TokenizerError with the name of the file."""
        from tokenizers import Tokenizer

        content = read_tokenizer_json(path)
        if problem := find_fatal_problem(content):
            raise TokenizerError(f"{path}: {problem}")
        try:
            tokenizer = Tokenizer.from_str(json.dumps(content))
        except BaseException as error:  # `tokenizers` raises a bare Exception, or panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"`tokenizers` cannot read {path}: {error}.") from None
        try:
            require_same_ids(content, tokenizer)
            return cls(tokenizer)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return the tokenizer as a Hugging Face `tokenizers` file, for
        `PreTrainedTokenizerFast(tokenizer_file=...)`."""
        return self.backend.to_str(pretty=True)

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def end_of_text_id(self) -> int | None:
        """Id that ends a document; None if the tokenizer has none of END_OF_TEXT_NAMES."""
        return next((self.special_ids[name] for name in END_OF_TEXT_NAMES if name in self.special_ids), None)

    @property
    def start_id(self) -> int | None:
        """Id before the first token of a document: `bos_id`, else `end_of_text_id`."""
        return self.end_of_text_id if self.bos_id is None else self.bos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids at which generation stops."""
        return frozenset(self.special_ids[name] for name in END_NAMES if name in self.special_ids)

    @property
    def unused_ids(self) -> list[int]:
        """Ids that must never be sampled: special tokens other than `end_ids`, and ids without a token."""
        special = set(self.special_ids.values()) - self.end_ids
        return sorted(special | {i for i, token in enumerate(self.table) if not token})

    @property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each id's text, (vocab_size,) int32; 0 for special tokens."""
        lengths = np.array([len(token) for token in self.table], dtype=np.int32)
        lengths[list(self.special_ids.values())] = 0
        return lengths

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the text, (tokens,) int32. A lone surrogate becomes U+FFFD."""
        text = replace_surrogates(text)
        if self.fast is None or self.needs_tokenizers(text):
            return np.array(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        return self.encode_fast(self.fast, text)

    def encode_fast(self, fast: tiktoken.Encoding, text: str) -> np.ndarray:
        """Encode by tiktoken."""
        if self.normalizer is not None and not text.isascii():
            text = self.normalizer.normalize_str(text)
        pieces = [fast.encode_to_numpy(piece, disallowed_special=()) for piece in cut_whitespace(text)]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).astype(np.int32)

    def needs_tokenizers(self, text: str) -> bool:
        """Return whether tiktoken would fail or give different ids: for text with an added token, or with long
        whitespace, which can only be cut for GPT-2's pattern."""
        if any(name in text for name in self.found_in_text):
            return True
        return self.splitting != "gpt-2" and has_long_whitespace(text)

    def probe(self) -> str:
        """Return text that tests whether another program reads this tokenizer in the same way: text of many kinds, some
        four thousand tokens of the vocabulary and all its numbers, without the names of `found_in_text`."""
        found = {name.encode() for name in self.found_in_text}
        words = [token for token in self.table if token not in found]
        words = words[:: len(words) // 4000 + 1] + [token for token in words if token.isdigit()]
        # A word after a line break stays as it is; a space before it becomes a part of most words.
        listed = b"\n".join(words[::2]) + b" " + b" ".join(words[1::2])
        return PROBE_TEXT + listed.decode("utf-8", "replace")

    def decode(self, ids: TokenIds) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD. Raises TokenizerError for an id out of range."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: TokenIds) -> bytes:
        return b"".join([self.table[i] for i in check_ids(ids, self.vocab_size).tolist()])

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode_bytes([token_id])

    def decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self.decode_bytes, "utf-8")


def find_bos_id(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the id that a `tokenizers` file puts before each text, or None."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    return whole[0] if bare and whole[0] != bare[0] else None


def byte_alphabet() -> dict[str, int]:
    """Return {character: byte} for GPT-2's printable stand-ins (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def find_fatal_problem(content: dict[str, Any]) -> str:
    """Return why `tokenizers` would panic or end the process on this file; "" if it would not. The content is not yet
    checked."""
    model, added = content.get("model"), content.get("added_tokens")
    model = model if isinstance(model, dict) else {}
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):  # byte-level BPE has neither
        return NOT_BYTE_LEVEL.format(describe_kind(model))
    vocab = model.get("vocab")
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((i for i in ids if type(i) is int), default=0)
    if largest >= MAX_UNUSED_IDS + 2 * len(ids):  # `tokenizers` goes through all ids up to the largest
        return f"its largest token id is {largest:,}, but it has only {len(ids):,} tokens."
    return ""


def describe_kind(model: dict[str, Any]) -> str:
    """Return the common name of a tokenizer that is not byte-level BPE."""
    kind, vocab = model.get("type"), model.get("vocab")
    if kind == "Unigram":
        return "SentencePiece's Unigram"
    if kind == "BPE" and (model.get("byte_fallback") or (isinstance(vocab, dict) and "\u2581" in vocab)):
        return "SentencePiece's BPE (as in Llama 2, TinyLlama and Mistral)"
    known = {"WordPiece": "WordPiece (as in BERT)", "WordLevel": "a list of words", "BPE": "BPE of characters"}
    return known.get(str(kind), f"a model of type {kind!r:.40}")


def require_same_ids(content: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> None:
    """Raise TokenizerError if a file gives two tokens one id, or an added token an impossible id. `tokenizers` silently
    drops such a token, or changes its id."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict) and len(set(vocab.values())) < len(vocab):
        twice = Counter(vocab.values()).most_common(1)[0][0]
        raise TokenizerError(f"two of its tokens have the id {twice}.")
    for token in content.get("added_tokens") or []:
        if (found := tokenizer.token_to_id(token["content"])) != token["id"]:
            raise TokenizerError(
                f"its added token {token['content']!r:.60} has the id {token['id']}, which is taken or leaves a gap, "
                f"so `tokenizers` uses {found}. Use the tokenizer.json that belongs to the model."
            )


def build_token_table(content: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each id; b"" for an id without a token."""
    # A stage before the model must be ByteLevel. With only a byte-level decoder, characters outside the vocabulary
    # would be lost.
    stages = [content.get("pre_tokenizer") or {}, content.get("normalizer") or {}]
    stages += [inner for stage in stages for inner in stage.get("pretokenizers", []) + stage.get("normalizers", [])]
    if content["model"].get("type") != "BPE" or not any(stage.get("type") == "ByteLevel" for stage in stages):
        raise TokenizerError(NOT_BYTE_LEVEL.format(describe_kind(content["model"])))
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    vocab = content["model"]["vocab"] | added
    if not vocab:
        raise TokenizerError("the vocabulary is empty.")
    table = [b""] * (max(vocab.values()) + 1)
    alphabet = byte_alphabet()
    for token, token_id in vocab.items():
        if table[token_id]:
            raise TokenizerError(f"two of its tokens have the id {token_id}.")
        byte_level = token not in added and all(character in alphabet for character in token)
        table[token_id] = bytes(alphabet[character] for character in token) if byte_level else token.encode()
    return table


def find_splitting(content: dict[str, Any]) -> str:
    """Return the name in SPLITTINGS of a `tokenizers` file's way of splitting; "" if it is unknown."""
    pre_tokenizer = content.get("pre_tokenizer") or {}
    stages = [
        {key: value for key, value in stage.items() if key != "trim_offsets"}
        for stage in pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    ]
    return next((name for name, (known, _) in SPLITTINGS.items() if stages == known), "")


def build_tiktoken(content: dict[str, Any], table: list[bytes], pattern: str) -> tiktoken.Encoding:
    """Build a tiktoken encoding. Requires that `find_tiktoken_obstacle` finds none."""
    import tiktoken

    added = {token["content"] for token in content.get("added_tokens") or []}
    ranks = {table[i]: i for token, i in content["model"]["vocab"].items() if token not in added}
    # tiktoken needs a special token, although none is ever encoded.
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(table)})


def find_tiktoken_obstacle(content: dict[str, Any]) -> str:
    """Return why tiktoken cannot encode for this tokenizer; "" if it can."""
    model = content["model"]
    splitting = find_splitting(content)
    if splitting and not SPLITTINGS[splitting][1]:
        return "it splits digits, which tiktoken does differently"
    if not splitting:
        return f"its way of splitting text is unknown ({shorten_stage(content.get('pre_tokenizer'))})"
    if content.get("normalizer") not in (None, NFC):
        return f"it normalizes the text ({shorten_stage(content['normalizer'])})"
    if any(token.get("normalized") for token in content.get("added_tokens") or [] if not token.get("special")):
        return "it has added tokens that are searched in normalized text"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "the BPE model has options that tiktoken lacks"
    vocab, alphabet = model["vocab"], byte_alphabet()
    if any(character not in vocab for character in alphabet):
        return "the vocabulary lacks some of the 256 bytes, so text with them does not round-trip"
    # tiktoken merges in the order of ids, `tokenizers` in the order of the list; the two must agree.
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merged = [vocab.get("".join(pair), -1) for pair in pairs]
    first = max(vocab[character] for character in alphabet)
    if any(later <= earlier for earlier, later in zip([first, *merged], merged, strict=False)):
        return "its ids are not in the order of its merges"
    special = {token["content"] for token in content.get("added_tokens") or []}
    if len(merged) + len(alphabet) != sum(token not in special for token in vocab):
        return "it has tokens that no merge creates"
    return ""


def shorten_stage(stage: Any) -> str:
    return f"{json.dumps(stage, ensure_ascii=False):.200}"


def has_long_whitespace(text: str) -> bool:
    """Return False if no run of whitespace is longer than MAX_WHITESPACE. True means that one may be."""
    half = MAX_WHITESPACE // 2  # a longer run covers at least one such block, which is quick to test
    return len(text) > MAX_WHITESPACE and any(text[i : i + half].isspace() for i in range(0, len(text), half))


def cut_whitespace(text: str) -> Iterator[str]:
    """Yield the text in pieces, with the same ids by GPT-2's pattern as the whole, and without whitespace that
    overflows tiktoken's stack."""
    start = 0
    if has_long_whitespace(text):
        for match in LONG_WHITESPACE.finditer(text):
            if match.end() < len(text):
                yield text[start : match.end() - 1]
                start = match.end() - 1
    yield text[start:]


def cut_long_words(text: str) -> Iterator[str]:
    """Yield the text in parts. Words of WORD_BLOCK characters and more are cut, so that none has twice as many."""
    start, block_of_a_word = 0, block_pattern()
    # A word twice as long covers at least one block, which is quick to test.
    for block in range(0, len(text), WORD_BLOCK):
        if block_of_a_word.match(text, block):
            yield text[start : block + WORD_BLOCK // 2]
            start = block + WORD_BLOCK // 2
    yield text[start:]


@functools.cache
def block_pattern() -> re.Pattern[str]:
    """Return a pattern for WORD_BLOCK characters of one kind, which may be in one word: letters with marks, digits,
    punctuation, whitespace."""
    kinds = (rf"(?:[^\W\d_]|[{joining_character_class()}])", r"\d", r"(?:[^\w\s]|_)", r"\s")
    return re.compile("|".join(rf"{kind}{{{WORD_BLOCK}}}" for kind in kinds))
