"""The character tokenizer, and `load_tokenizer` for a tokenizer file of either kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from tokenizer_bpe import BPETokenizer, IncrementalDecoder, TokenIds, check_ids, read_tokenizer_json
from tokenizer_bpe import TokenizerError as TokenizerError  # re-exported for callers that catch it
from tokenizer_bpe import UnknownCharacterError as UnknownCharacterError

CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)

Tokenizer: TypeAlias = "CharacterTokenizer | BPETokenizer"


class CharacterTokenizer:
    """One token per Unicode code point, with ids in the order of code points."""

    kind = "character"
    bos_id: int | None = None
    start_id: int | None = None
    end_of_text_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    special_ids: ClassVar[dict[str, int]] = {}

    def __init__(self, characters: Sequence[str]) -> None:
        """`characters[i]` gets id i. Raises TokenizerError for a duplicate or an invalid character."""
        if not characters:
            raise TokenizerError("A character vocabulary needs at least one character.")
        for character in characters:
            if not isinstance(character, str) or len(character) != 1 or ord(character) in SURROGATES:
                raise TokenizerError(f"{character!r} is not a single Unicode character.")
        self.codes = np.array([ord(character) for character in characters], dtype="<u4")  # id -> code point
        # The slot after the largest code point is for all larger ones, which are unknown.
        self.ids = np.full(int(self.codes.max()) + 2, -1, dtype=np.int32)  # code point -> id
        self.ids[self.codes] = np.arange(len(characters), dtype=np.int32)
        if np.count_nonzero(self.ids >= 0) != len(characters):
            raise TokenizerError("A character occurs twice in the vocabulary.")

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharacterTokenizer:
        """Build the vocabulary from a stream of texts, in constant memory."""
        seen = np.zeros(CODE_POINTS, dtype=bool)
        for text in texts:
            seen[code_points(text)] = True
        return cls([chr(code) for code in np.flatnonzero(seen)])

    @classmethod
    def load(cls, path: str | Path) -> CharacterTokenizer:
        return cls.from_json(read_tokenizer_json(path), path)

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str | Path) -> CharacterTokenizer:
        to_id = content.get("char_to_idx")
        if not isinstance(to_id, dict) or not to_id:
            raise TokenizerError(f'{path} is not a character tokenizer: it has no "char_to_idx" table.')
        if sorted(to_id.values(), key=str) != sorted(range(len(to_id)), key=str):
            raise TokenizerError(f'{path}: the ids in "char_to_idx" are not 0 to {len(to_id) - 1}, each once.')
        if content.get("vocab_size", len(to_id)) != len(to_id):
            raise TokenizerError(
                f'{path} has "vocab_size" {content["vocab_size"]}, but {len(to_id)} characters in "char_to_idx".'
            )
        characters = sorted(to_id, key=to_id.__getitem__)
        to_character = content.get("idx_to_char")
        if to_character is not None and to_character != {str(i): char for i, char in enumerate(characters)}:
            raise TokenizerError(f'{path}: "idx_to_char" and "char_to_idx" contradict each other.')
        try:
            return cls(characters)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return the tokenizer as JSON in the blog's format."""
        characters = [chr(code) for code in self.codes]
        content = {
            "type": self.kind,
            "vocab_size": self.vocab_size,
            "char_to_idx": {character: i for i, character in enumerate(characters)},
            "idx_to_char": {str(i): character for i, character in enumerate(characters)},
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @property
    def vocab_size(self) -> int:
        return len(self.codes)

    @property
    def unused_ids(self) -> list[int]:
        """Ids that must never be sampled; none here."""
        return []

    @property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each id's character, (vocab_size,) int32."""
        return np.digitize(self.codes, [0x80, 0x800, 0x10000]).astype(np.int32) + 1

    def encode(self, text: str, unknown: str = "error") -> np.ndarray:
        """Return the ids of the text, (characters,) int32.

        Unknown characters raise UnknownCharacterError, or are left out with `unknown` "drop".
        """
        if unknown not in ("error", "drop"):
            raise ValueError(f'unknown={unknown!r}; use "error" or "drop"')
        codes = code_points(text)
        ids = self.ids[np.minimum(codes, len(self.ids) - 1)]
        known = ids >= 0
        if known.all():
            return ids
        if unknown == "drop":
            return ids[known]
        first = int(np.argmin(known))
        missing = sorted({int(code) for code in codes[~known]})
        line_start = text.rfind("\n", 0, first) + 1
        raise UnknownCharacterError(
            [chr(code) for code in missing], text.count("\n", 0, first) + 1, first - line_start + 1
        )

    def decode(self, ids: TokenIds) -> str:
        """Return the text of the ids. Raises TokenizerError for an id outside the vocabulary."""
        return self.decode_bytes(ids).decode("utf-32-le")

    def decode_bytes(self, ids: TokenIds) -> bytes:
        array = check_ids(ids, self.vocab_size)
        return self.codes[array].tobytes()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of an id's character."""
        return self.decode([token_id]).encode()

    def decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self.decode_bytes, "utf-32-le")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer file of either kind, recognised by its content. Raises TokenizerError with its name."""
    content = read_tokenizer_json(path)
    if "char_to_idx" in content or content.get("type") == "character":
        return CharacterTokenizer.from_json(content, path)
    if "model" in content:
        return BPETokenizer.load(path)
    raise TokenizerError(
        f'{path} is not a tokenizer: it has neither "char_to_idx" (a character tokenizer) nor "model" (a Hugging Face '
        f"tokenizers file)."
    )


def character_counts(tokenizer: Tokenizer) -> np.ndarray:
    """Count the characters that begin in each id's text, and those of them that are Chinese, Japanese or Korean, which
    stand for a syllable or word each. Returns (vocab_size, 2) int64."""
    lengths = tokenizer.byte_lengths
    texts = [tokenizer.token_bytes(i) if length else b"" for i, length in enumerate(lengths)]
    read = np.frombuffer(b"".join(texts), np.uint8)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    begins = (read & 0xC0) != 0x80
    is_cjk = (read >= 0xE3) & (read <= 0xED)  # the first bytes of U+3000 to U+DFFF in UTF-8
    return np.stack([np.bincount(owners[which], minlength=len(lengths)) for which in (begins, is_cjk)], axis=1)


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, (characters,) uint32. A lone surrogate keeps its code, which no vocabulary
    has."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
