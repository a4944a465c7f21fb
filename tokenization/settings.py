"""The flags of the pre-tokenizer: defaults, ranges, help texts, contradictions, parsing."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.flags import Parser
from common.validation import STRICT, NonEmptyText, check, option, options_of

DEFAULT_FOLDER = "datasets_cache"
HUB = "hf://"  # prefix of an input on the Hugging Face hub
EXTRACTED = Path(DEFAULT_FOLDER) / "extracted"  # text extracted from other files
MAX_NAME_BYTES = 200  # file systems allow 255, including suffixes
DOCUMENT_SEPARATOR = "<|endoftext|>"  # a line between documents, and the special token that ends each


@dataclass(frozen=True, config=STRICT)
class Settings:
    """How text becomes tokens; every field is a flag of the same name."""

    input: tuple[str, ...] = option(
        (),
        "text",
        "files, folders or patterns: text, books, documents, tables, archives; or hf://datasets/OWNER/NAME/PATTERN",
        many=True,
        min_length=1,
        metavar="PATH",
    )
    format: Literal["text", "chat"] = option(
        "text", "text", "text, or chat: conversations in .jsonl or .json; training learns their answers"
    )
    text_key: str = option("text", "text", "key or column that holds the text in a .jsonl file or a table")
    encoding: NonEmptyText | None = option(
        None, "text", "encoding of text files that are not UTF-8 [guessed]", metavar="NAME"
    )
    dedup: Literal["exact"] | None = option(
        None, "text", "exact: drop repeated documents, and paragraphs that occur in five documents or more"
    )
    max_mb: float | None = option(
        None, "text", "megabytes of text to take from an hf:// input, spread over its files", gt=0
    )
    document_separator: str = option(DOCUMENT_SEPARATOR, "text", 'line between two documents; "" is a blank line')

    tokenizer: Literal["bpe", "char"] | None = option(  # default: the kind of tokenizer_file, else "bpe"
        None, "vocabulary", "bpe: byte-level BPE; char: one token per character [bpe]"
    )
    tokenizer_file: NonEmptyText | None = option(
        None, "vocabulary", "use this vocabulary, of either kind, instead of learning one", metavar="FILE"
    )
    vocab_size: int = option(  # same limits as BPETokenizer.train
        32_000, "vocabulary", "tokens in the vocabulary to learn", ge=259, le=10_000_000
    )
    min_frequency: int = option(2, "vocabulary", "learn only pairs that occur this often", ge=1, le=10**9)
    vocab_sample_mb: float = option(
        500.0, "vocabulary", "learn from at most this much text, spread evenly over the whole input", gt=0
    )
    unknown: Literal["error", "drop"] = option(
        "error", "vocabulary", "what to do with characters outside a character vocabulary"
    )

    output_dir: NonEmptyText = option(DEFAULT_FOLDER, "output", "where the files go", metavar="FOLDER")
    output_name: NonEmptyText | None = option(
        None, "output", "name of the token file, without .bin [tokens_bpe, or tokens for characters]"
    )
    train_split: float = option(
        0.9,
        "output",
        "fraction of the text for training; passages chosen by a hash are held out for validation",
        gt=0,
        lt=1,
    )
    compress: bool = option(False, "output", "write a .bin.gz beside the .bin")
    # The text that `input` is a companion of (--companion of the trainer). It counts for the vocabulary, and its
    # passages are left out. Not a flag.
    own_text: NonEmptyText | None = None

    chunk_size_mb: float = option(
        4.0, "speed", "text that a thread encodes at a time; does not change the result", gt=0
    )
    num_workers: int = option(  # at most 1000: each holds a chunk in memory
        0, "speed", "threads for encoding; 0: one per core", ge=0, le=1000
    )

    @model_validator(mode="after")
    def checked(self) -> Settings:
        problems = []
        if self.format == "chat" and self.tokenizer == "char":
            problems.append(
                "--tokenizer char cannot encode conversations, because no character would end an answer. Leave it out"
            )
        if self.max_mb and not all(given.startswith(HUB) for given in self.input):
            problems.append("--max_mb applies only to inputs that begin with hf://; leave it out")
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError:
            problems.append(f"--encoding is {self.encoding}, which Python does not know; examples: cp1252, utf-16")
        if "\n" in self.document_separator or "\r" in self.document_separator:
            problems.append('--document_separator must be a single line ("" is a blank line)')
        if self.output_name and Path(self.output_name).name != self.output_name:
            problems.append(f"--output_name is {self.output_name!r}; use a file name without folders or suffix")
        elif self.output_name and len(os.fsencode(self.output_name)) > MAX_NAME_BYTES:
            problems.append(f"--output_name is longer than {MAX_NAME_BYTES} bytes; use a shorter one")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def for_own_text(self) -> Settings:
        """Return the settings with which `own_text` is read."""
        assert self.own_text is not None
        max_mb = self.max_mb if self.own_text.startswith(HUB) else None
        return replace(self, input=(self.own_text,), own_text=None, max_mb=max_mb)


FLAGS = options_of(Settings)


def parse_arguments(argv: Sequence[str] | None) -> Settings:
    """Parse the command line. Raises ConfigError listing unknown flags, invalid values and flags without effect."""
    parser = Parser(
        prog="tokenize_local_bpe.py",
        description="Turn text into a token folder: a binary token file, its tokenizer, and metadata.",
        epilog="Example: python tokenize_local_bpe.py --input my_text.txt",
    )
    parser.add_options(FLAGS)
    problems: list[str] = []
    flags = parser.read(argv, problems)
    if "input" not in flags:
        problems.append("--input is missing. Name the text to tokenize, as in --input my_text.txt")
    settings = check(Settings, flags, problems, {key: f"--{key}" for key in flags})
    parser.require_none(problems + _list_without_effect(flags))
    assert settings is not None
    return settings


def _list_without_effect(flags: Mapping[str, Any]) -> list[str]:
    """Return a problem for each given flag that has no effect with the others."""
    problems = []
    if "tokenizer_file" in flags or flags.get("tokenizer") == "char":
        reason = "with --tokenizer_file" if "tokenizer_file" in flags else "with --tokenizer char"
        learning = ("vocab_size", "min_frequency", "vocab_sample_mb")
        problems += [f"--{name} has no effect {reason}; leave it out" for name in learning if name in flags]
    if flags.get("format") == "chat":
        text_only = ("text_key", "document_separator", "unknown", "dedup")
        problems += [f"--{name} applies only with --format text; leave it out" for name in text_only if name in flags]
    if flags.get("unknown") == "drop" and flags.get("tokenizer") == "char" and "tokenizer_file" not in flags:
        problems.append("--unknown drop has no effect on a vocabulary learned from the text; leave it out")
    return problems
