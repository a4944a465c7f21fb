"""The metadata of a token folder: all fields of its JSON file, which the pre-tokenizer writes and the trainer reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from common.chat import ChatTemplate
from common.errors import DataError
from common.files import read_json, write_json
from common.validation import build, fields_of

FORMAT_VERSION = 1
LARGEST_UINT16_VOCABULARY = 1 << 16
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class TokenMetadata:
    """The description of a token file in its metadata JSON. The blog's files lack some fields; these take the blog's
    values, or None if nothing is known."""

    vocab_size: Count
    total_tokens: Count
    train_split_index: Count | None = None  # the training tokens come first; the rest is for validation
    train_split: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None  # as requested
    dtype: Literal["uint16", "int16", "int32"] = "int16"  # the pre-tokenizer writes uint16 and int32; the blog int16
    tokenizer_type: Literal["bpe", "character"] = "character"
    bin_file: str | None = None
    tokenizer_file: str | None = None
    tokens_sha256: str | None = None
    tokenizer_sha256: str | None = None
    val_bytes: Count | None = None  # UTF-8 bytes of the validation text
    train_bytes: Count | None = None
    documents: Count | None = None
    source_files: Any = ()  # name and size of each
    created: Any = None
    fingerprint: str | None = None  # hash of everything that the tokens depend on
    chat_template: ChatTemplate | None = None  # of conversations; None for text
    mask_file: str | None = None  # for conversations: one bit per token, 1 in answers
    mask_sha256: str | None = None
    path: Path = Path()  # of the JSON file

    @model_validator(mode="after")
    def checked(self) -> TokenMetadata:
        if self.train_split_index is None:
            if self.train_split is None:
                raise ValueError("train_split_index is missing")
            object.__setattr__(self, "train_split_index", int(self.total_tokens * self.train_split))
        if not 0 < self.train_tokens < self.total_tokens:
            raise ValueError(f"train_split_index is {self.train_tokens} of {self.total_tokens} tokens")
        if self.chat_template and not self.mask_file:
            raise ValueError("chat_template is there and mask_file is missing")
        return self

    @property
    def train_tokens(self) -> int:
        return self.train_split_index or 0

    @property
    def val_tokens(self) -> int:
        return self.total_tokens - self.train_tokens

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all text that was counted."""
        return (self.train_bytes or 0) + (self.val_bytes or 0)

    @property
    def source_names(self) -> list[str]:
        """Names of the files. Entries of another type are skipped, because training does not need them."""
        named = (source.get("name") for source in self.source_files if isinstance(source, dict))
        return [name for name in named if isinstance(name, str)]

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    def beside(self, key: str) -> Path:
        """The file that `bin_file`, `tokenizer_file` or `mask_file` names. It must be beside the metadata, so that a
        metadata file from a stranger cannot point anywhere else. Raises DataError."""
        name = getattr(self, key)
        if not name:
            raise DataError(f"{self.path} has no {key}; name the file with --{key}.")
        folder = self.path.parent.resolve()
        try:
            path = (folder / name).resolve()
            is_beside = path.parent == folder and not path.is_dir()
        except (OSError, ValueError):  # too long, or with characters that no file name can have
            is_beside = False
        if not is_beside:
            raise DataError(f"{key} in {self.path} is {name[:100]!r}, which is not a file beside it.")
        return self.path.parent / name

    @classmethod
    def read(cls, path: Path) -> TokenMetadata:
        """Raises DataError that lists everything that is missing or wrong."""
        values = read_json(path, DataError)
        try:
            return build(cls, {key: values[key] for key in fields_of(cls) if key in values} | {"path": path})
        except ValueError as problem:
            raise DataError(f"{path} is not usable: {problem}. Run tokenize_local_bpe.py again on your text.") from None

    def write(self, path: Path) -> None:
        """Write it to `path`, whole or not at all. Fields that are None are left out."""
        values = asdict(self) | {
            "format_version": FORMAT_VERSION,
            "bytes_per_token": self.numpy_dtype.itemsize,
            "train_tokens": self.train_tokens,
            "val_tokens": self.val_tokens,
        }
        del values["path"]
        write_json(path, {key: value for key, value in values.items() if value is not None})


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that the pre-tokenizer writes: the smallest that holds every id."""
    return np.dtype("<u2" if vocab_size <= LARGEST_UINT16_VOCABULARY else "<i4")


def metadata_files(folder: Path) -> list[Path]:
    """The metadata of every token file in a folder, sorted by name."""
    return sorted(folder.glob("*_metadata.json"))
