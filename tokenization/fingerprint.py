"""What the tokens of a text depend on, as a hash by which a complete token folder is recognised."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.chat import ChatTemplate
from common.errors import ConfigError
from common.files import name_input, sha256_file
from tokenization.corpus import Source
from tokenization.documents import PIECE_CHARACTERS
from tokenization.extract import find_files, find_missing_packages
from tokenization.held_out import MAX_PASSAGE, MIN_PASSAGE
from tokenization.metadata import FORMAT_VERSION, TokenMetadata
from tokenization.settings import DEFAULT_FOLDER, Settings
from tokenization.token_folder import TokenFolder
from tokenizer import load_tokenizer


def choose_kind(settings: Settings) -> str:
    """Return "bpe" or "character". Raises ConfigError if the flags contradict each other."""
    if not settings.tokenizer_file:
        return "character" if settings.tokenizer == "char" else "bpe"
    kind = load_tokenizer(settings.tokenizer_file).kind
    if settings.tokenizer and not kind.startswith(settings.tokenizer):
        raise ConfigError(f"--tokenizer is {settings.tokenizer}, but {settings.tokenizer_file} is a {kind} tokenizer.")
    return kind


def choose_folder(settings: Settings) -> str:
    """Return the token folder for the trainer's `--input`, one per state of the text and vocabulary."""
    name, kind = name_input(settings.input[0]), choose_kind(settings)
    return str(Path(DEFAULT_FOLDER) / f"{name}-{compute_fingerprint(find_files(settings), settings, kind)[:8]}")


def compute_fingerprint(sources: Sequence[Source], settings: Settings, kind: str) -> str:
    """Return a hash of everything the tokens depend on: the content of the files, and the settings. So a text that was
    copied or moved is not tokenized again."""
    parts = [FORMAT_VERSION, kind, settings.train_split, settings.text_key, settings.document_separator]
    if settings.format == "chat":
        parts += ["chat", ChatTemplate().to_dict()]
    if settings.tokenizer_file:
        parts += [sha256_file(settings.tokenizer_file), settings.unknown]
    elif kind == "bpe":
        parts += [settings.vocab_size, settings.min_frequency, settings.vocab_sample_mb]
    parts += [value for value in (settings.encoding, settings.dedup, *find_missing_packages(sources)) if value]
    named_count = sum(source.is_named for source in sources)  # these are read though they have signs that are left out
    parts += [f"{named_count} named"] if named_count and len(sources) > 1 else []
    parts += sorted({source.max_bytes for source in sources} - {math.inf})
    own = find_files(settings.for_own_text()) if settings.own_text else []
    parts += ["companion of", len(own)] if own else []
    return digest([parts, [_hash_file(source.path, source.size, source.modified_ns) for source in (*sources, *own)]])


@functools.cache
def _hash_file(path: Path, size: int, modified_ns: int) -> str:
    """Return a hash of a file's content and suffix, which decides how it is read; of a folder or a file that cannot be
    read, one of its size and date."""
    try:
        content = sha256_file(path)
    except OSError:
        content = f"{path} {size} {modified_ns}"
    return f"{path.suffix} {content}"


def work_fingerprint(fingerprint: str, settings: Settings) -> str:
    """Return a hash of what the chunks of an unfinished token file depend on."""
    return digest([fingerprint, settings.chunk_size_mb, PIECE_CHARACTERS, MIN_PASSAGE, MAX_PASSAGE])


def find_complete(
    folder: TokenFolder, sources: Sequence[Source], settings: Settings, kind: str
) -> TokenMetadata | None:
    """Return the metadata if the folder is complete for this text and these settings, else None. A vocabulary learned
    from the text counts if it equals `tokenizer_file`."""
    metadata = folder.complete_metadata(compute_fingerprint(sources, settings, kind))
    if metadata is None and settings.tokenizer_file:
        learned = folder.complete_metadata(compute_fingerprint(sources, replace(settings, tokenizer_file=None), kind))
        if learned and learned.tokenizer_sha256 == sha256_file(settings.tokenizer_file):
            return learned
    return metadata


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
