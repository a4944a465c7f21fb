"""What the pre-tokenizer can be told: defaults, ranges and help of its flags."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

DOCUMENT_SEPARATOR = "<|endoftext|>"  # a line between two documents; as a special token it ends each of them
CHOICES = {"tokenizer": ("bpe", "char"), "format": ("text", "chat"), "unknown": ("error", "drop")}


@dataclass(frozen=True)
class Settings:
    """How text becomes tokens; every field is a flag of the same name."""

    output_name: str | None = None  # None: tokens_bpe, or tokens for characters
    tokenizer: str | None = None  # "bpe" or "char"; None: the kind of tokenizer_file, else "bpe"
    tokenizer_file: str | None = None
    vocab_size: int = 32000
    min_frequency: int = 2
    vocab_sample_mb: float = 500
    train_split: float = 0.9
    format: str = "text"
    skip_bad_records: bool = False
    text_key: str = "text"
    document_separator: str = DOCUMENT_SEPARATOR
    unknown: str = "error"
    compress: bool = False
    chunk_size_mb: float = 4
    num_workers: int = 0  # 0: one per core

    def __post_init__(self) -> None:
        """Raises ConfigError that lists every value out of range."""
        problems = [
            f"--{name} is {getattr(self, name)!r}; use {' or '.join(choices)}"
            for name, choices in CHOICES.items()
            if getattr(self, name) not in choices and (name, self.tokenizer) != ("tokenizer", None)
        ]
        if self.skip_bad_records and self.format != "chat":
            problems.append("--skip_bad_records is for --format chat; leave it out")
        if self.format == "chat" and self.tokenizer == "char":
            problems.append(
                "--tokenizer char cannot express conversations: no character would end an answer. Use bpe, the default"
            )
        if self.tokenizer != "char" and not self.tokenizer_file:
            from tokenizer_bpe import LARGEST_VOCABULARY, SMALLEST_VOCABULARY

            if self.vocab_size < SMALLEST_VOCABULARY:
                problems.append(
                    f"--vocab_size is {self.vocab_size}; at least {SMALLEST_VOCABULARY} are needed "
                    f"for the 256 bytes and the special tokens"
                )
            if self.vocab_size > LARGEST_VOCABULARY:
                problems.append(f"--vocab_size is {self.vocab_size}; use {LARGEST_VOCABULARY} at most")
        if not 1 <= self.min_frequency < 1 << 63:
            problems.append(f"--min_frequency is {self.min_frequency}; use 1 or more, such as 2")
        if self.tokenizer_file == "":
            problems.append("--tokenizer_file is empty; name a file, or leave it out to learn a vocabulary")
        if not 0 < self.train_split < 1:
            problems.append(f"--train_split is {self.train_split}; use a share between 0 and 1, such as 0.9")
        if not self.chunk_size_mb > 0:
            problems.append(f"--chunk_size_mb is {self.chunk_size_mb}; use more than 0")
        if not self.vocab_sample_mb > 0:
            problems.append(f"--vocab_sample_mb is {self.vocab_sample_mb}; use more than 0")
        if not 0 <= self.num_workers <= 1000:  # each holds a chunk in memory
            problems.append(f"--num_workers is {self.num_workers}; use 1 to 1000, or 0 for one per core")
        if "\n" in self.document_separator or "\r" in self.document_separator:
            problems.append('--document_separator has to be a single line ("" is a blank line)')
        if self.output_name is not None and (not self.output_name or Path(self.output_name).name != self.output_name):
            problems.append(f"--output_name is {self.output_name!r}; use a file name without folders or suffix")
        elif self.output_name and len(os.fsencode(self.output_name)) > 200:  # its suffixes make up to 255
            problems.append("--output_name is longer than 200 bytes; use a shorter one")
        if problems:
            raise ConfigError("\n".join(problems))


HELP = {
    "output_name": "name of the token file, without .bin [tokens_bpe, or tokens for characters]",
    "tokenizer": "bpe: byte-level BPE; char: one token per character [bpe]",
    "tokenizer_file": "use this vocabulary, of either kind, instead of learning one",
    "vocab_size": "tokens in the vocabulary to learn",
    "min_frequency": "learn only pairs that occur this often",
    "vocab_sample_mb": "learn from at most this much text, spread evenly over the whole input",
    "train_split": "share of the tokens to train on, the rest validates; moved to the nearest end of a document",
    "format": "text, or chat: conversations in .jsonl or .json, of which training learns the answers",
    "skip_bad_records": "count the records that are no conversation, and go on",
    "text_key": "key that holds the text in a .jsonl file",
    "document_separator": 'line that stands between documents; "" is a blank line',
    "unknown": "what to do with characters that the character vocabulary lacks: error or drop",
    "compress": "write a .bin.gz beside the .bin",
    "chunk_size_mb": "text that a thread encodes at a time; the result does not depend on it",
    "num_workers": "threads that encode; 0: one per core",
}
