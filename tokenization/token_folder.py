"""The token folder on disk: its file names, and how it has either a whole tokenization or none.

Unfinished files are in a work folder beside the result; `token_writer.py` appends the tokens there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import DataError
from common.files import atomic_write, read_json, sha256_file, sync_directory, write_json
from common.lock import FolderLock, holder, session
from tokenization.metadata import TokenMetadata, metadata_files
from tokenization.settings import DEFAULT_FOLDER as DEFAULT_FOLDER

if TYPE_CHECKING:
    from tokenization.corpus import Source

MARKER = "settings.json"  # in the work folder: the fingerprint of the tokenization, and its process


@dataclass(frozen=True)
class TokenFolder:
    """The files of one tokenization. `work` exists while it is unfinished."""

    folder: Path
    name: str
    tokenizer_name: str

    @classmethod
    def of(cls, folder: str | Path, kind: str, name: str | None = None) -> TokenFolder:
        default, tokenizer_name = ("tokens_bpe", "bpe_tokenizer") if kind == "bpe" else ("tokens", "tokenizer")
        name = name or default
        return cls(Path(folder), name, tokenizer_name if name == default else f"{name}_tokenizer")

    @property
    def bin(self) -> Path:
        return self.folder / f"{self.name}.bin"

    @property
    def packed(self) -> Path:
        return self.folder / f"{self.name}.bin.gz"

    @property
    def tokenizer(self) -> Path:
        return self.folder / f"{self.tokenizer_name}.json"

    @property
    def mask(self) -> Path:
        """For conversations: one bit per token, 1 in answers; the first token is the highest bit of the first byte."""
        return self.folder / f"{self.name}_mask.bin"

    @property
    def metadata(self) -> Path:
        return self.folder / f"{self.name}_metadata.json"

    @property
    def work(self) -> Path:
        return self.folder / f".{self.name}.partial"

    @property
    def document_ends(self) -> Path:
        """Little-endian int64: where each document ends, in tokens."""
        return self.work / "document_ends.bin"

    @property
    def in_answer(self) -> Path:
        """One byte per token, 0 or 1; packed, they become the mask."""
        return self.work / "in_answer.bin"

    def in_work(self, path: Path) -> Path:
        """The path of the unfinished form of a file."""
        return self.work / path.name

    def complete_metadata(self, fingerprint: str) -> TokenMetadata | None:
        """The metadata if it has this fingerprint and the files it describes are whole, else None."""
        try:
            metadata = TokenMetadata.read(self.metadata)
            if metadata.fingerprint != fingerprint:
                return None
            whole = (
                sha256_file(self.bin) == metadata.tokens_sha256
                and sha256_file(self.tokenizer) == metadata.tokenizer_sha256
                and (metadata.mask_file is None or sha256_file(self.mask) == metadata.mask_sha256)
            )
        except (DataError, OSError):
            return None
        return metadata if whole else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if it does not exist, and keep other tokenizations out of it.

        Raises DataError that says which process is writing into it, and since when.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise DataError(f"{self.folder} is a file, or a part of its path is; choose another folder.") from None
        with FolderLock(being_written) as lock:
            lock.take(self.folder)
            yield

    def open_work(self, fingerprint: str, say: Callable[[str], None]) -> None:
        """Create the work folder. If an interrupted tokenization of the same text and settings left one, keep it."""
        marker = self.work / MARKER
        described = {"fingerprint": fingerprint, "session": session()}
        if self.work.exists():
            try:
                kept = read_json(marker, DataError).get("fingerprint") == fingerprint
            except DataError:
                kept = False
            if kept:
                write_json(marker, described)
                say(f"Continuing the interrupted tokenization (its work is in {self.work}).")
                return
            say("The text or the settings have changed since the interrupted tokenization: starting over.")
            shutil.rmtree(self.work)
        self.work.mkdir(parents=True)
        write_json(marker, described)

    def discard_leftovers(self) -> None:
        """Remove the work folder of a process that was killed just after publishing, unless another process uses it."""
        if self.work.exists():
            with contextlib.suppress(DataError), self.locked():
                shutil.rmtree(self.work, ignore_errors=True)

    def discard_work(self) -> None:
        """Remove the work folder, and the folder around it if that leaves it empty."""
        shutil.rmtree(self.work)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @property
    def awaits_publishing(self) -> bool:
        return self.in_work(self.metadata).exists()

    def prepare_publishing(self, metadata: TokenMetadata, compress: bool) -> None:
        """Write the metadata to the work folder, which marks it as done: `publish` then only has to move files."""
        if compress:
            pack(self.in_work(self.bin), self.in_work(self.packed))
        metadata.write(self.in_work(self.metadata))

    def publish(self) -> TokenMetadata:
        """Move the finished files to their places and return the metadata. If it is killed midway, the next call
        completes it.

        The old metadata is removed first and the new one is written last, so metadata never describes other bytes.
        """
        metadata = TokenMetadata.read(self.in_work(self.metadata))
        self.metadata.unlink(missing_ok=True)
        sync_directory(self.folder)
        if self.in_work(self.bin).exists():
            self.packed.unlink(missing_ok=True)  # it has the old tokens
            self.mask.unlink(missing_ok=True)
        for path in (self.bin, self.packed, self.mask, self.tokenizer):
            if self.in_work(path).exists():
                os.replace(self.in_work(path), path)
        sync_directory(self.folder)
        metadata.write(self.metadata)
        shutil.rmtree(self.work)
        return dataclasses.replace(metadata, path=self.metadata)


def being_written(folder: Path) -> DataError:
    who = ""
    with contextlib.suppress(OSError, ValueError):  # it has just ended, or only just begun
        who = holder(max(folder.glob(f".*.partial/{MARKER}"), key=lambda path: path.stat().st_mtime))
    return DataError(
        f"{folder} is being written by another tokenization{who}. Wait for it and run the same command again, stop it, "
        f"or choose another folder (--output_dir here, --data_dir in training)."
    )


def folder_of_text(text: str, tokenizer: str, vocab_size: int) -> str:
    """The token folder for the trainer's `--input`: one for each path of a text and each tokenizer."""
    name = re.sub(r"[^\w.-]+", "_", Path(text).stem)  # without the * of a pattern
    identity = [str(Path(text).resolve()), tokenizer, vocab_size]
    return str(Path(DEFAULT_FOLDER) / f"{name}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}")


def require_tokens_of(folder: Path, inputs: Sequence[str], sources: Sequence[Source], kind: str) -> None:
    """Raises DataError if a folder has tokens of another kind, or of other files than `sources` (those of `inputs`),
    compared by names and sizes."""
    files = [{"name": source.name, "size": source.size} for source in sources]
    for path in metadata_files(folder):
        metadata = TokenMetadata.read(path)
        if metadata.tokenizer_type != kind or list(metadata.source_files) != files:
            raise holds_others(metadata, f"not {kind} tokens of {', '.join(inputs)} as it is now")


def require_the_same(folder: TokenFolder, inputs: Sequence[str], metadata: TokenMetadata) -> None:
    """Raises DataError if a folder has other tokens than `metadata` describes, which are those of `inputs`."""
    if folder.metadata.exists():
        there = TokenMetadata.read(folder.metadata)
        keys = ("tokens_sha256", "tokenizer_sha256", "train_tokens")
        if any(getattr(there, key) != getattr(metadata, key) for key in keys):
            raise holds_others(there, f"and {', '.join(inputs)} gives other ones now ({counts_of(metadata)})")


def holds_others(metadata: TokenMetadata, asked_for: str) -> DataError:
    names = metadata.source_names
    files = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more files" if len(names) > 3 else "")
    return DataError(
        f"{metadata.path.parent} holds {metadata.tokenizer_type} tokens of {files or 'another text'} "
        f"({counts_of(metadata)}), {asked_for}. The old tokens stay, because a run may need them. Name another "
        f"--data_dir, or leave --input out to train on the old tokens."
    )


def counts_of(metadata: TokenMetadata) -> str:
    return f"{metadata.vocab_size:,} ids, {metadata.total_tokens:,} tokens"


def holds_unfinished(folder: Path) -> bool:
    """Whether a tokenization into `folder` was interrupted."""
    return any(folder.glob(".*.partial"))


def pack(path: Path, packed: Path) -> None:
    """Compress `path` into `packed`; the same content gives the same bytes."""
    with (
        open(path, "rb") as source,
        atomic_write(packed) as target,
        gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)
