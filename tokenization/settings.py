"""The flags of the pre-tokenizer: defaults, ranges, help, and which of them contradict each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.flags import check_values, option, options_of

DEFAULT_FOLDER = "datasets_cache"
DOCUMENT_SEPARATOR = "<|endoftext|>"  # a line between two documents; as a special token it ends each of them


@dataclass(frozen=True)
class Settings:
    """How text becomes tokens; every field is a flag of the same name."""

    input: tuple[str, ...] = option(
        (),
        "text",
        "files, folders or patterns: .txt, .md, .jsonl (chat: .jsonl, .json), also as .gz",
        many=True,
        empty=True,  # find_sources has the better message
        metavar="PATH",
    )
    format: str = option(
        "text",
        "text",
        "text, or chat: conversations in .jsonl or .json; training learns their answers",
        choices=("text", "chat"),
    )
    skip_bad_records: bool = option(False, "text", "leave out and count records that are not conversations")
    text_key: str = option("text", "text", "key that holds the text in a .jsonl file", empty=True)
    document_separator: str = option(
        DOCUMENT_SEPARATOR, "text", 'line between two documents; "" is a blank line', empty=True
    )

    tokenizer: str | None = option(  # None: the kind of tokenizer_file, else "bpe"
        None, "vocabulary", "bpe: byte-level BPE; char: one token per character [bpe]", choices=("bpe", "char")
    )
    tokenizer_file: str | None = option(
        None, "vocabulary", "use this vocabulary, of either kind, instead of learning one", metavar="FILE"
    )
    vocab_size: int = option(  # the limits are those of BPETokenizer.train
        32_000, "vocabulary", "tokens in the vocabulary to learn", low=259, high=10_000_000
    )
    min_frequency: int = option(2, "vocabulary", "learn only pairs that occur this often", low=1, high=10**9)
    vocab_sample_mb: float = option(  # 500, not 500.0: fingerprints of earlier versions hold it so
        500, "vocabulary", "learn from at most this much text, spread evenly over the whole input", above=0
    )
    unknown: str = option(
        "error",
        "vocabulary",
        "what to do with characters that the character vocabulary lacks",
        choices=("error", "drop"),
    )

    output_dir: str = option(DEFAULT_FOLDER, "output", "where the files go", metavar="FOLDER")
    output_name: str | None = option(
        None, "output", "name of the token file, without .bin [tokens_bpe, or tokens for characters]"
    )
    train_split: float = option(
        0.9,
        "output",
        "share of the tokens for training, the rest is for validation; moved to the nearest end of a document",
        above=0,
        below=1,
    )
    compress: bool = option(False, "output", "write a .bin.gz beside the .bin")

    chunk_size_mb: float = option(
        4, "speed", "text that a thread encodes at a time; the result does not depend on it", above=0
    )
    num_workers: int = option(  # at most 1000: each holds a chunk in memory
        0, "speed", "threads that encode; 0: one per core", low=0, high=1000
    )


FLAGS = options_of(Settings)


def settings_of(given: Mapping[str, Any], problems: list[str]) -> Settings:
    """The settings for typed flags, or for values. Adds what is wrong with them to `problems`."""
    settings = Settings(**check_values(given, FLAGS, problems))
    problems += contradictions(settings)
    return settings


def contradictions(s: Settings) -> list[str]:
    """Values that contradict each other, and names that no file can have."""
    problems = []
    if s.skip_bad_records and s.format != "chat":
        problems.append("--skip_bad_records is for --format chat; leave it out")
    if s.format == "chat" and s.tokenizer == "char":
        problems.append(
            "--tokenizer char cannot express conversations: no character would end an answer. Use bpe, the default"
        )
    if "\n" in s.document_separator or "\r" in s.document_separator:
        problems.append('--document_separator must be a single line ("" is a blank line)')
    if s.output_name and Path(s.output_name).name != s.output_name:
        problems.append(f"--output_name is {s.output_name!r}; use a file name without folders or suffix")
    elif s.output_name and len(os.fsencode(s.output_name)) > 200:  # its suffixes make up to 255
        problems.append("--output_name is longer than 200 bytes; use a shorter one")
    return problems


def without_effect(given: Mapping[str, Any]) -> list[str]:
    """Typed flags that have no effect together with the others."""
    problems = []
    if "tokenizer_file" in given or given.get("tokenizer") == "char":
        reason = "with --tokenizer_file" if "tokenizer_file" in given else "with --tokenizer char"
        learning = ("vocab_size", "min_frequency", "vocab_sample_mb")
        problems += [f"--{name} has no effect {reason}; leave it out" for name in learning if name in given]
    if given.get("format") == "chat":
        of_text = ("text_key", "document_separator", "unknown")
        problems += [f"--{name} is for --format text; leave it out" for name in of_text if name in given]
    if given.get("unknown") == "drop" and given.get("tokenizer") == "char" and "tokenizer_file" not in given:
        problems.append("--unknown drop has no effect if the vocabulary is learned from the text; leave it out")
    return problems
