"""The metadata JSON of a token folder, which the pre-tokenizer writes and the trainer reads, and reading the files that
it describes, with checks."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from common.chat import ChatTemplate
from common.errors import DataError
from common.files import atomic_write, read_json, write_json
from common.validation import build, fields_of
from tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 1
MAX_UINT16_VOCABULARY = 1 << 16
MAX_COMPRESSION_RATIO = 1040  # gzip's maximum, rounded up
UNPACK_BLOCK_BYTES = 2**22
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class TokenMetadata:
    """The metadata of a token file. The blog's files lack some fields, which get the blog's values, or None if
    unknown."""

    vocab_size: Count
    total_tokens: Count
    train_split_index: Count | None = None  # training tokens come first, then validation
    train_split: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None  # requested share
    dtype: Literal["uint16", "int16", "int32"] = "int16"  # uint16 and int32, or the blog's int16
    tokenizer_type: Literal["bpe", "character"] = "character"
    bin_file: str | None = None
    tokenizer_file: str | None = None
    tokens_sha256: str | None = None
    tokenizer_sha256: str | None = None
    val_bytes: Count | None = None  # UTF-8 bytes of the validation text
    val_characters: Count | None = None
    train_bytes: Count | None = None
    documents: Count | None = None
    source_files: tuple[dict[str, Any], ...] = ()  # {"name", "size"} each
    created: Any = None
    fingerprint: str | None = None  # hash of everything the tokens depend on
    chat_template: ChatTemplate | None = None  # None for text
    mask_file: str | None = None  # conversations only: one bit per token, 1 in answers
    mask_sha256: str | None = None
    path: Path = Path()  # the JSON file itself

    @field_validator("source_files", mode="before")
    @classmethod
    def keep_usable(cls, value: Any) -> list[dict[str, Any]]:
        """Drop invalid entries, because training does not need them."""
        files = [file for file in value if isinstance(file, dict)] if isinstance(value, list | tuple) else []
        return [file for file in files if isinstance(file.get("name"), str) and isinstance(file.get("size"), int)]

    @model_validator(mode="after")
    def checked(self) -> TokenMetadata:
        if self.train_split_index is None:
            if self.train_split is None:
                raise ValueError("train_split_index is missing")
            object.__setattr__(self, "train_split_index", int(self.total_tokens * self.train_split))
        if not 0 < self.train_tokens < self.total_tokens:
            raise ValueError(f"train_split_index is {self.train_tokens} of {self.total_tokens} tokens")
        if self.chat_template and not self.mask_file:
            raise ValueError("mask_file is missing, but chat_template is set")
        return self

    @property
    def train_tokens(self) -> int:
        return self.train_split_index or 0

    @property
    def val_tokens(self) -> int:
        return self.total_tokens - self.train_tokens

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text, as far as they were counted."""
        return (self.train_bytes or 0) + (self.val_bytes or 0)

    @property
    def source_names(self) -> list[str]:
        return [file["name"] for file in self.source_files]

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    def path_beside(self, key: str) -> Path:
        """Return the path of `bin_file`, `tokenizer_file` or `mask_file`. It must be beside the metadata, so that a
        foreign metadata file cannot point elsewhere. Raises DataError."""
        name = getattr(self, key)
        if not name:
            raise DataError(f"{self.path} has no {key}. Name the file with --{key}.")
        folder = self.path.parent.resolve()
        try:
            path = (folder / name).resolve()
            is_beside = path.parent == folder and not path.is_dir()
        except (OSError, ValueError):  # too long, or with impossible characters
            is_beside = False
        if not is_beside:
            raise DataError(f"{key} in {self.path} is {name[:100]!r}, which is not a file in the same folder.")
        return self.path.parent / name

    @classmethod
    def read(cls, path: Path) -> TokenMetadata:
        """Read the metadata. Raises DataError listing everything that is missing or wrong."""
        values = read_json(path, DataError)
        try:
            return build(cls, {key: values[key] for key in fields_of(cls) if key in values} | {"path": path})
        except ValueError as problem:
            raise DataError(f"{path} is not valid: {problem}. Run tokenize_local_bpe.py again on your text.") from None

    def write(self, path: Path) -> None:
        """Write the metadata to `path` atomically, without fields that are None."""
        values = asdict(self) | {
            "format_version": FORMAT_VERSION,
            "bytes_per_token": self.numpy_dtype.itemsize,
            "train_tokens": self.train_tokens,
            "val_tokens": self.val_tokens,
        }
        del values["path"]
        write_json(path, {key: value for key, value in values.items() if value is not None})


def choose_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that holds every id: uint16 or int32, little-endian."""
    return np.dtype("<u2" if vocab_size <= MAX_UINT16_VOCABULARY else "<i4")


def find_metadata(folder: Path) -> list[Path]:
    """Return the metadata files in a folder, sorted by name."""
    return sorted(folder.glob("*_metadata.json"))


def read_tokens(bin_path: Path, metadata: TokenMetadata, mapped: bool) -> np.ndarray:
    """Return the tokens, (total_tokens,), of a token file, or of its `.gz` if it is missing; as a memory map if
    `mapped`. Raises DataError for a file that is missing, damaged or of the wrong size."""
    if not bin_path.exists() and mapped:
        unpack(_require_packed(bin_path, metadata), bin_path, metadata)
    if not bin_path.exists():  # it may be on Drive: read it once, and write nothing there
        return _read_packed(_require_packed(bin_path, metadata), metadata)
    check_size(bin_path, metadata)
    # Mode "c" maps private pages, because PyTorch needs writable memory and the file must not change.
    dtype = metadata.numpy_dtype
    return np.memmap(bin_path, dtype, mode="c") if mapped else np.fromfile(bin_path, dtype)


def _require_packed(bin_path: Path, metadata: TokenMetadata) -> Path:
    """Return the `.gz` to unpack because the token file is missing. Raises DataError if it is missing, too, or too
    small."""
    packed = Path(f"{bin_path}.gz")
    if not packed.exists():
        raise DataError(f"{bin_path} is missing, but {metadata.path} describes it.")
    size = metadata.total_tokens * metadata.numpy_dtype.itemsize
    if size > MAX_COMPRESSION_RATIO * packed.stat().st_size:
        raise DataError(
            f"{packed} is too small for the {metadata.total_tokens:,} tokens of {metadata.path.name}. Copy both again."
        )
    return packed


def _unpack_blocks(packed: Path, metadata: TokenMetadata) -> Iterator[bytes]:
    """Yield the bytes of a compressed token file. Raises DataError if it is damaged, or if its size differs from the
    metadata, so that a wrong file cannot fill the disk or the memory."""
    print(f"Unpacking  {packed} ...")
    missing = metadata.total_tokens * metadata.numpy_dtype.itemsize
    with gzip.open(packed, "rb") as source:
        try:
            while missing >= 0 and (piece := source.read(min(UNPACK_BLOCK_BYTES, missing + 1))):
                missing -= len(piece)
                if missing >= 0:
                    yield piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
            raise DataError(f"{packed} is damaged ({problem}). Copy it again.") from None
    if missing:
        amount = f"{missing:,} bytes fewer" if missing > 0 else "more bytes"
        raise DataError(
            f"{packed} holds {amount} than the {metadata.total_tokens:,} tokens ({metadata.dtype}) of "
            f"{metadata.path.name}. Copy both again, or run tokenize_local_bpe.py again."
        )


def unpack(packed: Path, bin_path: Path, metadata: TokenMetadata) -> None:
    with atomic_write(bin_path) as target:
        for piece in _unpack_blocks(packed, metadata):
            target.write(piece)


def _read_packed(packed: Path, metadata: TokenMetadata) -> np.ndarray:
    """Return the tokens, (total_tokens,), of a compressed token file."""
    tokens = np.empty(metadata.total_tokens, metadata.numpy_dtype)
    held, place = tokens.view(np.uint8), 0
    for piece in _unpack_blocks(packed, metadata):
        held[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
        place += len(piece)
    return tokens


def check_size(bin_path: Path, metadata: TokenMetadata) -> None:
    """Raise DataError if the size of a token file differs from its metadata."""
    size, itemsize = bin_path.stat().st_size, metadata.numpy_dtype.itemsize
    if size != metadata.total_tokens * itemsize:
        raise DataError(
            f"{bin_path} has {size:,} bytes, but {metadata.path.name} says {metadata.total_tokens:,} tokens of "
            f"{itemsize} bytes ({metadata.dtype}) = {metadata.total_tokens * itemsize:,}. Copy both again, or run "
            "tokenize_local_bpe.py again."
        )


def check_tokens(bin_path: Path, tokens: np.ndarray, metadata: TokenMetadata) -> str:
    """Return the SHA-256 of the tokens. Raises DataError if it, or an id, does not match the metadata."""
    sha256 = hashlib.sha256(tokens.data).hexdigest()
    if metadata.tokens_sha256 not in (None, sha256):
        raise DataError(
            f"{bin_path} does not match {metadata.path.name}: its SHA-256 is {sha256[:16]}..., expected "
            f"{metadata.tokens_sha256[:16]}.... Copy both again, or run tokenize_local_bpe.py again."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= metadata.vocab_size:
        raise DataError(
            f"{bin_path} holds token id {high if low >= 0 else low}, outside the vocabulary of {metadata.vocab_size:,} "
            f"in {metadata.path.name}. Its dtype is not {metadata.dtype}, or its tokenizer is another one. Run "
            "tokenize_local_bpe.py again."
        )
    return sha256


def check_tokenizer(path: Path, metadata: TokenMetadata) -> tuple[Tokenizer, bytes]:
    """Return the tokenizer and the content of its file. Raises DataError if it does not match the metadata."""
    tokenizer, content = load_tokenizer(path), path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if metadata.tokenizer_sha256 not in (None, sha256):
        raise DataError(
            f"{path} is not the tokenizer of these tokens: its SHA-256 is {sha256[:16]}..., but {metadata.path.name} "
            f"says {metadata.tokenizer_sha256[:16]}.... Use the one that was saved with the tokens."
        )
    if (tokenizer.kind, tokenizer.vocab_size) != (metadata.tokenizer_type, metadata.vocab_size):
        raise DataError(
            f"{path} is a {tokenizer.kind} tokenizer with {tokenizer.vocab_size:,} ids, but {metadata.path.name} says "
            f"{metadata.tokenizer_type} with {metadata.vocab_size:,}. Use the one written with the tokens."
        )
    return tokenizer, content


def read_mask(metadata: TokenMetadata) -> np.ndarray:
    """Return which tokens are in answers, (total_tokens,) bool. Raises DataError if the file does not match the
    metadata."""
    path = metadata.path_beside("mask_file")
    if not path.exists():
        raise DataError(f"{path} is missing, but {metadata.path} describes it.")
    size = (metadata.total_tokens + 7) // 8
    packed = np.fromfile(path, np.uint8) if path.stat().st_size == size else None
    if packed is None or metadata.mask_sha256 not in (None, hashlib.sha256(packed.data).hexdigest()):
        raise DataError(
            f"{path} does not match {metadata.path.name}. Copy both again, or run tokenize_local_bpe.py again."
        )
    return np.unpackbits(packed, count=metadata.total_tokens).astype(bool)
