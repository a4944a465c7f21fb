"""The metadata of a token folder: all fields of its JSON file, which the pre-tokenizer writes and the trainer reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import DataError
from common.files import read_json, write_json

if TYPE_CHECKING:
    import numpy as np

    from common.chat import ChatTemplate

FORMAT_VERSION = 1
LARGEST_UINT16_VOCABULARY = 1 << 16
DTYPES = ("uint16", "int16", "int32")  # the pre-tokenizer writes uint16 and int32; the blog wrote int16


@dataclass(frozen=True)
class TokenMetadata:
    """The description of a token file in its metadata JSON. The blog's files lack some fields; these take the blog's
    values, or None if nothing is known."""

    path: Path  # of the JSON file
    vocab_size: int
    total_tokens: int
    train_tokens: int  # the first ones; the rest is for validation
    dtype: str
    tokenizer_type: str  # "bpe" or "character"
    bin_file: str | None
    tokenizer_file: str | None
    tokens_sha256: str | None
    tokenizer_sha256: str | None
    val_bytes: int | None  # UTF-8 bytes of the validation text
    train_bytes: int | None = None
    train_split: float = 0.9  # as requested; the actual split is train_tokens
    documents: int | None = None
    source_files: tuple[dict[str, Any], ...] = ()  # name and size of each
    created: str | None = None
    fingerprint: str | None = None  # hash of everything that the tokens depend on
    chat_template: ChatTemplate | None = None  # of conversations; None for text
    mask_file: str | None = None  # for conversations: one bit per token, 1 in answers
    mask_sha256: str | None = None

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
        import numpy as np  # here, because --help does not need it

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
        from common.chat import ChatTemplate

        values = read_json(path, DataError)
        problems = [f"{key} is missing" for key in ("vocab_size", "total_tokens") if key not in values]
        if "train_split_index" not in values and "train_split" not in values:
            problems.append("train_split_index is missing")
        for key in ("vocab_size", "total_tokens", "train_split_index", "val_bytes"):
            if key in values and (type(values[key]) is not int or not 0 <= values[key] < 2**63):
                problems.append(f"{key} is {values[key]!r:.100}; a whole number is needed")
        split = values.get("train_split", 0.9)
        if not isinstance(split, int | float) or not 0 < split < 1:
            problems.append(f"train_split is {split!r}; a number between 0 and 1 is needed")
        dtype, kind = values.get("dtype", "int16"), values.get("tokenizer_type", "character")
        if dtype not in DTYPES:
            problems.append(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        if kind not in ("bpe", "character"):
            problems.append(f"tokenizer_type is {kind!r}; allowed: bpe, character")
        template = None
        try:
            template = ChatTemplate.from_dict(values["chat_template"]) if "chat_template" in values else None
        except ValueError as problem:
            problems.append(str(problem))
        if template and not values.get("mask_file"):
            problems.append("chat_template is there and mask_file is missing")
        for key in ("bin_file", "tokenizer_file", "mask_file", "tokens_sha256", "tokenizer_sha256", "mask_sha256"):
            if not isinstance(values.get(key), str | None):
                problems.append(f"{key} is {values[key]!r}; a text is needed")
        if not problems:
            train_tokens = values.get("train_split_index", int(values["total_tokens"] * split))
            if not 0 < train_tokens < values["total_tokens"]:
                problems.append(f"train_split_index is {train_tokens} of {values['total_tokens']} tokens")
        if problems:
            raise DataError(
                f"{path} is not usable: {'; '.join(problems)}. Run tokenize_local_bpe.py again on your text."
            )

        def optional(key: str, kind: type) -> Any:  # training does not need it: a wrong type is not an error
            return values[key] if type(values.get(key)) is kind else None

        return cls(
            path=path,
            vocab_size=values["vocab_size"],
            total_tokens=values["total_tokens"],
            train_tokens=train_tokens,
            dtype=dtype,
            tokenizer_type=kind,
            bin_file=values.get("bin_file"),
            tokenizer_file=values.get("tokenizer_file"),
            tokens_sha256=values.get("tokens_sha256"),
            tokenizer_sha256=values.get("tokenizer_sha256"),
            val_bytes=values.get("val_bytes"),
            train_bytes=optional("train_bytes", int),
            train_split=split,
            documents=optional("documents", int),
            source_files=tuple(optional("source_files", list) or ()),
            created=optional("created", str),
            fingerprint=optional("fingerprint", str),
            chat_template=template,
            mask_file=values.get("mask_file"),
            mask_sha256=values.get("mask_sha256"),
        )

    def write(self, path: Path) -> None:
        """Write it to `path`, whole or not at all. Fields that are None are left out."""
        values = {
            "format_version": FORMAT_VERSION,
            "tokenizer_type": self.tokenizer_type,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "bytes_per_token": self.numpy_dtype.itemsize,
            "total_tokens": self.total_tokens,
            "train_split": self.train_split,
            "train_split_index": self.train_tokens,
            "train_tokens": self.train_tokens,
            "val_tokens": self.val_tokens,
            "train_bytes": self.train_bytes,
            "val_bytes": self.val_bytes,
            "documents": self.documents,
            "source_files": self.source_files,
            "bin_file": self.bin_file,
            "tokenizer_file": self.tokenizer_file,
            "tokens_sha256": self.tokens_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "created": self.created,
            "fingerprint": self.fingerprint,
            "chat_template": self.chat_template and self.chat_template.to_dict(),
            "mask_file": self.mask_file,
            "mask_sha256": self.mask_sha256,
        }
        write_json(path, {key: value for key, value in values.items() if value is not None})


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that the pre-tokenizer writes: the smallest of DTYPES that holds every id."""
    import numpy as np

    return np.dtype("<u2" if vocab_size <= LARGEST_UINT16_VOCABULARY else "<i4")


def metadata_files(folder: Path) -> list[Path]:
    """The metadata of every token file in a folder, sorted by name."""
    return sorted(folder.glob("*_metadata.json"))
