"""Token folders of random ids: speed does not depend on the text. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from common.files import sha256_file
from tokenization.metadata import TokenMetadata
from tokenizer import CharacterTokenizer

BLOCK_TOKENS = 8_000_003  # random ids drawn once and repeated; a prime, so that windows of one epoch differ


def write_random_tokens(folder: Path, tokens: int, vocab_size: int) -> Path:
    """Write a complete token folder of `tokens` random ids (uint16), like the pre-tokenizer's, and return `folder`.

    The vocabulary consists of characters, so it may have any size up to 55,000.
    """
    folder.mkdir(parents=True)
    tokenizer = CharacterTokenizer([chr(256 + i) for i in range(vocab_size)])
    tokenizer.save(folder / "tokenizer.json")
    block = np.random.RandomState(0).randint(0, vocab_size, min(tokens, BLOCK_TOKENS)).astype("<u2")
    sha256 = hashlib.sha256()
    with open(folder / "tokens.bin", "wb") as file:
        for start in range(0, tokens, len(block)):
            part = block[: tokens - start].tobytes()
            sha256.update(part)
            file.write(part)
    metadata = TokenMetadata(
        path=folder / "tokens_metadata.json",
        vocab_size=vocab_size,
        total_tokens=tokens,
        train_tokens=tokens * 9 // 10,
        dtype="uint16",
        tokenizer_type="character",
        bin_file="tokens.bin",
        tokenizer_file="tokenizer.json",
        tokens_sha256=sha256.hexdigest(),
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        val_bytes=None,
    )
    metadata.write(metadata.path)
    return folder
