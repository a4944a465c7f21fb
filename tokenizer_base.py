"""Shared by both kinds of tokenizer: errors, incremental decoding, checks of ids and text, reading a tokenizer file."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"
# The token that ends a document in GPT-2, SmolLM2 and Qwen; Llama 3; DeepSeek; Mistral; nanochat. The first that a
# tokenizer has counts.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<|bos|>")
# Tokens that end an answer in imported chat models. Generation stops at each of them.
END_OF_ANSWER_NAMES = ("<|im_end|>", "<|eot_id|>", "<|assistant_end|>")

TokenIds = Sequence[int] | np.ndarray


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
