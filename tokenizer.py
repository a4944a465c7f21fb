"""Text to token ids and back: the character tokenizer, and `load_tokenizer` for a tokenizer file of either kind."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from tokenizer_bpe import BPETokenizer

END_OF_TEXT = "<|endoftext|>"
CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)

TokenIds = Sequence[int] | np.ndarray
Tokenizer: TypeAlias = "CharacterTokenizer | BPETokenizer"


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used, text the vocabulary cannot express, or ids it does not have."""

    exit_code = 3


class UnknownCharacterError(TokenizerError):
    """Text with characters that a character vocabulary lacks; at `line` and `column` (from 1; 0: not known)."""

    def __init__(self, characters: Sequence[str], line: int, column: int, source: str = "") -> None:
        super().__init__(characters, line, column, source)
        self.characters, self.line, self.column = characters, line, column
        named = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in characters[:5])
        more = f" and {len(characters) - 5} more" if len(characters) > 5 else ""
        place = f"line {line}, column {column}" if column else f"line {line}"
        noun = "character is" if len(characters) == 1 else "characters are"
        self.finding = f"{len(characters)} {noun} not in the vocabulary: {named}{more}; the first stands at {place}"
        self.message = (
            f"{source + ': ' if source else ''}{self.finding}. Take it out of the text, or add `--unknown drop` to "
            "drop what is unknown."
        )

    def __str__(self) -> str:
        return self.message


class IncrementalDecoder:
    """Decodes ids as they arrive; text that is still incomplete waits until the ids that complete it are pushed.

    The pieces joined are what `decode` gives for all ids at once.
    """

    def __init__(self, decode_bytes: Callable[[TokenIds], bytes], encoding: str) -> None:
        self.decode_bytes = decode_bytes
        self.text_decoder = codecs.getincrementaldecoder(encoding)("replace")

    def push(self, ids: TokenIds) -> str:
        return self.text_decoder.decode(self.decode_bytes(ids))

    def flush(self) -> str:
        """What is left when no more ids come: "" or a replacement character for an unfinished sequence."""
        return self.text_decoder.decode(b"", final=True)


class CharacterTokenizer:
    """One token per Unicode code point; ids follow the code points' order."""

    kind = "character"
    end_of_text_id: int | None = None

    def __init__(self, characters: Sequence[str]) -> None:
        """`characters[i]` is the character with id i. Raises TokenizerError if one comes twice or is no character."""
        if not characters:
            raise TokenizerError("A character vocabulary needs at least one character.")
        for character in characters:
            if not isinstance(character, str) or len(character) != 1 or ord(character) in SURROGATES:
                raise TokenizerError(f"{character!r} is not a single Unicode character.")
        self.codes = np.array([ord(character) for character in characters], dtype="<u4")  # id -> code point
        # One slot more than the largest code point: everything above it is looked up there, and is unknown.
        self.ids = np.full(int(self.codes.max()) + 2, -1, dtype=np.int32)  # code point -> id
        self.ids[self.codes] = np.arange(len(characters), dtype=np.int32)
        if np.count_nonzero(self.ids >= 0) != len(characters):
            raise TokenizerError("A character stands twice in the vocabulary.")

    @classmethod
    def from_characters(cls, characters: Iterable[str]) -> CharacterTokenizer:
        return cls(sorted(set(characters)))

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharacterTokenizer:
        """Collect the characters of a stream of texts; memory does not grow with the stream."""
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
            raise TokenizerError(f'{path} has no "char_to_idx" table; it is not a character tokenizer.')
        if sorted(to_id.values(), key=str) != sorted(range(len(to_id)), key=str):
            raise TokenizerError(f'{path}: the ids in "char_to_idx" are not 0 to {len(to_id) - 1}, each once.')
        if content.get("vocab_size", len(to_id)) != len(to_id):
            raise TokenizerError(
                f'{path} says "vocab_size" {content["vocab_size"]}, but "char_to_idx" holds {len(to_id)} characters.'
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
        """The blog's form of a character tokenizer."""
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
        """Ids that are never to be sampled: none here."""
        return []

    @property
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int32: UTF-8 bytes of text that each id stands for."""
        return np.digitize(self.codes, [0x80, 0x800, 0x10000]).astype(np.int32) + 1

    def encode(self, text: str, unknown: str = "error") -> np.ndarray:
        """Ids of the text's characters, (characters,) int32.

        `unknown` says what becomes of characters outside the vocabulary: "error" raises UnknownCharacterError, "drop"
        leaves them out.
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
        """Text of the ids. Raises TokenizerError for an id outside the vocabulary."""
        return self.decode_bytes(ids).decode("utf-32-le")

    def decode_bytes(self, ids: TokenIds) -> bytes:
        array = check_ids(ids, self.vocab_size)
        return self.codes[array].tobytes()

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of the id's character."""
        return self.decode([token_id]).encode()

    def decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self.decode_bytes, "utf-32-le")


def check_ids(ids: TokenIds, vocab_size: int) -> np.ndarray:
    """The ids as an int64 array. Raises TokenizerError for one outside 0 .. vocab_size - 1."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise TokenizerError(f"Token id {wrong} is outside the vocabulary (0 to {vocab_size - 1}).")
    return array


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer file of either kind, recognised by its content. Raises TokenizerError naming the file."""
    content = read_tokenizer_json(path)
    if "char_to_idx" in content or content.get("type") == "character":
        return CharacterTokenizer.from_json(content, path)
    if "model" in content:
        from tokenizer_bpe import BPETokenizer

        return BPETokenizer.load(path)
    raise TokenizerError(
        f'{path} is no tokenizer this toolkit knows: it has neither "char_to_idx" (a character tokenizer) nor "model" '
        f"(a Hugging Face tokenizers file)."
    )


def valid_unicode(text: str) -> str:
    """The text with lone surrogates, which can come from JSON escapes, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def code_points(text: str) -> np.ndarray:
    """(characters,) uint32. A lone surrogate, which is no character, keeps its own code and so is never known."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def read_tokenizer_json(path: str | Path) -> dict[str, Any]:
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # a pipe waits for its writer
        raise TokenizerError(f"The tokenizer file {path} is not a regular file: write what it holds to one first.")
    try:
        content = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise TokenizerError(f"There is no tokenizer file {path}.") from None
    except OSError as error:
        raise TokenizerError(f"The tokenizer file {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON; thousands of open brackets
        raise TokenizerError(f"The tokenizer file {path} is not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"The tokenizer file {path} holds a JSON {type(content).__name__}, not an object.")
    return content
