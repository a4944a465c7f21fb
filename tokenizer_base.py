"""What both kinds of tokenizer share: errors, decoding id by id, checks of ids and text, reading a tokenizer file."""

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
# Names of the token that ends a document: that of GPT-2, SmolLM2 and Qwen; Llama 3; DeepSeek; Mistral; nanochat. The
# first that a tokenizer has.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<|bos|>")
# And of those that end an answer, in chat models of others. Generation stops at each of them.
ENDS_OF_ANSWERS = ("<|im_end|>", "<|eot_id|>", "<|assistant_end|>")

TokenIds = Sequence[int] | np.ndarray


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used, text that the vocabulary cannot express, or ids that it does not have."""

    exit_code = 3


class UnknownCharacterError(TokenizerError):
    """Text with characters that a character vocabulary does not have. `line`, `column`: from 1, or 0 if unknown."""

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

    The joined pieces are equal to `decode` of all ids, without a character that the last ones leave unfinished.
    """

    def __init__(self, decode_bytes: Callable[[TokenIds], bytes], encoding: str) -> None:
        self.decode_bytes = decode_bytes
        self.text_decoder = codecs.getincrementaldecoder(encoding)("replace")

    def push(self, ids: TokenIds) -> str:
        return self.text_decoder.decode(self.decode_bytes(ids))


def check_ids(ids: TokenIds, vocab_size: int) -> np.ndarray:
    """The ids as an int64 array. Raises TokenizerError for one outside 0 .. vocab_size - 1."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise TokenizerError(f"Token id {wrong} is outside the vocabulary (0 to {vocab_size - 1}).")
    return array


@functools.cache
def joining_characters() -> str:
    """The content of a regular expression's character class: combining marks (vowel signs, accents), and the two
    characters of no width that join or part the letters of a word."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "M"]
    ranges = itertools.groupby(enumerate(marks), lambda numbered: numbered[1] - numbered[0])
    runs = [[code for _, code in run] for _, run in ranges]
    return "\u200c\u200d" + "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


def valid_unicode(text: str) -> str:
    """The text with lone surrogates, which can come from JSON escapes, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_tokenizer_json(path: str | Path) -> dict[str, Any]:
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # a pipe waits for its writer
        raise TokenizerError(f"The tokenizer file {path} is not a regular file. Write its content to one first.")
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
