"""The token folder on disk: its file names, and how it holds a complete tokenization or none.

Unfinished files are in a work folder beside the result, to which `encoding.py` appends tokens.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from common.errors import DataError
from common.files import (
    atomic_write,
    describe_holder,
    describe_session,
    locked,
    make_folder,
    name_in_errors,
    read_json,
    rename,
    sha256_file,
    write_json,
)
from common.output import log
from tokenization.metadata import TokenMetadata, find_metadata
from tokenization.settings import DEFAULT_FOLDER as DEFAULT_FOLDER

if TYPE_CHECKING:
    from tokenization.corpus import Source

REPORT = "data_report.md"
WORK_MARKER = "settings.json"  # holds the fingerprint of the tokenization, and its process
COUNT_BLOCK_TOKENS = 1 << 16


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
        """One bit per token of conversations, 1 in answers; the first token is the highest bit of the first byte."""
        return self.folder / f"{self.name}_mask.bin"

    @property
    def report(self) -> Path:
        """The data report."""
        return self.folder / REPORT

    @property
    def metadata(self) -> Path:
        return self.folder / f"{self.name}_metadata.json"

    @property
    def work(self) -> Path:
        return self.folder / f".{self.name}.partial"

    @property
    def document_ends(self) -> Path:
        """The end of each document in tokens, little-endian int64."""
        return self.work / "document_ends.bin"

    @property
    def in_answer(self) -> Path:
        """One byte per token, 0 or 1, from which the mask is packed."""
        return self.work / "in_answer.bin"

    def in_work(self, path: Path) -> Path:
        """Return the path of a file while it is unfinished."""
        return self.work / path.name

    def complete_metadata(self, fingerprint: str) -> TokenMetadata | None:
        """Return the metadata if it has this fingerprint and its files are intact, else None."""
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
        """Create the folder if needed, and lock it. Raises DataError with the process that holds the lock, if any."""
        try:
            make_folder(self.folder)
        except (FileExistsError, NotADirectoryError):
            raise DataError(f"{self.folder}, or a part of its path, is a file. Choose another folder.") from None
        with locked(self.folder, lambda: _in_use_error(self.folder)):
            yield

    def open_work(self, fingerprint: str) -> None:
        """Create the work folder, or keep that of an interrupted tokenization of the same text and settings."""
        marker = self.work / WORK_MARKER
        described = {"fingerprint": fingerprint, "session": describe_session()}
        if self.work.exists():
            try:
                kept = read_json(marker, DataError).get("fingerprint") == fingerprint
            except DataError:
                kept = False
            if kept:
                write_json(marker, described)
                log.info(f"Continuing the interrupted tokenization in {self.work}.")
                return
            log.info("Starting over, because the text or the settings have changed since the interrupted tokenization.")
            shutil.rmtree(self.work)
        self.work.mkdir(parents=True)
        write_json(marker, described)

    def discard_leftovers(self) -> None:
        """Delete the work folder of a process that was killed just after publishing, unless another process uses it."""
        if self.work.exists():
            with contextlib.suppress(DataError), self.locked():
                shutil.rmtree(self.work, ignore_errors=True)

    def discard_work(self) -> None:
        """Delete the work folder, and its parent if that is then empty."""
        shutil.rmtree(self.work)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @property
    def awaits_publishing(self) -> bool:
        return self.in_work(self.metadata).exists()

    def prepare_publishing(self, metadata: TokenMetadata, report: str, compress: bool) -> None:
        """Write report and metadata to the work folder. Then it is done, and `publish` only has to move files."""
        if compress:
            pack(self.in_work(self.bin), self.in_work(self.packed))
        with atomic_write(self.in_work(self.report)) as file:
            file.write(report.encode(errors="replace"))
        metadata.write(self.in_work(self.metadata))

    def publish(self) -> TokenMetadata:
        """Move the finished files to their places and return the metadata. If killed midway, the next call completes
        it.

        The old metadata is deleted first and the new one written last, so metadata never describes other tokens.
        """
        metadata = TokenMetadata.read(self.in_work(self.metadata))
        self.metadata.unlink(missing_ok=True)
        if self.in_work(self.bin).exists():
            self.packed.unlink(missing_ok=True)  # holds the old tokens
            self.mask.unlink(missing_ok=True)
        for path in (self.bin, self.packed, self.mask, self.tokenizer, self.report):
            if self.in_work(path).exists():
                rename(self.in_work(path), path)
        metadata.write(self.metadata)
        shutil.rmtree(self.work)
        return dataclasses.replace(metadata, path=self.metadata)


def _in_use_error(folder: Path) -> DataError:
    who = ""
    with contextlib.suppress(OSError, ValueError):  # the other process has just ended or begun
        who = describe_holder(max(folder.glob(f".*.partial/{WORK_MARKER}"), key=lambda path: path.stat().st_mtime))
    return DataError(
        f"Another tokenization{who} is writing to {folder}. Wait for it and run the same command again, stop it, or "
        "choose another folder (--output_dir here, --data_dir in training)."
    )


def find_tokens(sha256: str, folder: str | None = None) -> TokenMetadata | None:
    """Return the metadata of tokens with this hash, if they are in `folder` or below DEFAULT_FOLDER; else None."""
    paths = find_metadata(Path(folder)) if folder else []
    for path in [*paths, *sorted(Path(DEFAULT_FOLDER).glob("**/*_metadata.json"))]:
        with contextlib.suppress(DataError):
            if (metadata := TokenMetadata.read(path)).tokens_sha256 == sha256:
                return metadata
    return None


def require_same_files(folder: Path, inputs: Sequence[str], sources: Sequence[Source], kind: str) -> None:
    """Raise DataError if a folder has tokens of another kind, of other files than `sources` (by name and size; those of
    `inputs`), or without metadata."""
    files = [{"name": source.name, "size": source.size} for source in sources]
    existing = find_metadata(folder)
    lost = [] if existing or holds_unfinished(folder) else sorted(path.name for path in folder.glob("*.bin*"))
    if lost:
        raise DataError(
            f"{folder} holds {', '.join(lost)} without metadata. They are kept, because a run may need them. Restore "
            "their *_metadata.json, or choose another --data_dir."
        )
    for path in existing:
        metadata = TokenMetadata.read(path)
        if metadata.tokenizer_type != kind or list(metadata.source_files) != files:
            raise _other_tokens_error(metadata, f"not {kind} tokens of the current {', '.join(inputs)}")


def require_same_tokens(folder: TokenFolder, inputs: Sequence[str], metadata: TokenMetadata) -> None:
    """Raise DataError if a folder has other tokens than `metadata` describes (those of `inputs`)."""
    if folder.metadata.exists():
        existing = TokenMetadata.read(folder.metadata)
        keys = ("tokens_sha256", "tokenizer_sha256", "train_tokens")
        if any(getattr(existing, key) != getattr(metadata, key) for key in keys):
            raise _other_tokens_error(
                existing, f"not those of the current {', '.join(inputs)} ({_describe_counts(metadata)})"
            )


def _other_tokens_error(metadata: TokenMetadata, asked_for: str) -> DataError:
    names = metadata.source_names
    files = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more files" if len(names) > 3 else "")
    return DataError(
        f"{metadata.path.parent} holds {metadata.tokenizer_type} tokens of {files or 'another text'} "
        f"({_describe_counts(metadata)}), {asked_for}. They are kept, because a run may need them. Choose another "
        "--data_dir, or leave --input out to train on the old tokens."
    )


def _describe_counts(metadata: TokenMetadata) -> str:
    return f"{metadata.vocab_size:,} ids, {metadata.total_tokens:,} tokens"


def holds_unfinished(folder: Path) -> bool:
    """Return whether a tokenization into `folder` was interrupted."""
    return any(folder.glob(".*.partial"))


def pack(path: Path, packed: Path) -> None:
    """Compress `path` to `packed`. The result depends on the content only."""
    with (
        open(path, "rb") as source,
        atomic_write(packed) as target,
        gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)


def pack_mask(folder: TokenFolder) -> str:
    """Write the mask of conversations to the work folder. Return its SHA-256."""
    packed = np.packbits(np.memmap(folder.in_answer, bool, "r")).tobytes()
    with atomic_write(folder.in_work(folder.mask)) as file:
        file.write(packed)
    return hashlib.sha256(packed).hexdigest()


class TokenWriter:
    """Appends chunks of tokens to the token file in the work folder. When reopened, continues after the last whole
    chunk.

    A chunk is whole if its line is in the journal and its checksum matches; anything after it is cut off. Computes what
    the metadata needs on the way, so that the file need not be read again: `sha256` of its bytes, and `chunk_ends`, the
    (tokens, UTF-8 bytes of text) up to the end of each chunk.
    """

    def __init__(self, files: Sequence[BinaryIO], dtype: np.dtype, byte_lengths: np.ndarray) -> None:
        """`files`: tokens, document ends, answers, journal. `byte_lengths`: the tokenizer's."""
        self.files = files
        self.dtype, self.byte_lengths = dtype, byte_lengths
        self.documents = 0
        self.sha256 = hashlib.sha256()
        self.chunk_ends = [(0, 0)]
        *contents_of, journal = files
        ends = [0, 0, 0, 0]
        for line in journal:
            if not line.endswith(b"\n"):  # killed while writing this line
                break
            entry = json.loads(line)
            sizes = (entry["tokens"] * dtype.itemsize, entry["documents"] * 8, entry.get("answer_bytes", 0))
            contents = [file.read(size) for file, size in zip(contents_of, sizes, strict=True)]
            if _compute_checksum(contents) != entry["crc32"]:
                break
            ends = [end + size for end, size in zip(ends, (*sizes, len(line)), strict=True)]
            self.count(contents[0], entry["documents"])
        for file, end in zip(self.files, ends, strict=True):
            file.truncate(end)
            file.seek(end)

    def append(self, tokens: np.ndarray, document_ends: np.ndarray, in_answer: np.ndarray | None = None) -> None:
        """Append a chunk: its tokens, the ends of its documents from the start of the chunk, (documents,) int64, and
        for conversations which tokens are in answers, (tokens,) bool."""
        contents = [
            tokens.tobytes(),
            (document_ends + self.tokens).astype("<i8").tobytes(),
            b"" if in_answer is None else in_answer.tobytes(),
        ]
        entry = {"tokens": len(tokens), "documents": len(document_ends), "answer_bytes": len(contents[2])}
        entry["crc32"] = _compute_checksum(contents)
        contents.append((json.dumps(entry) + "\n").encode())
        for file, content in zip(self.files, contents, strict=True):
            file.write(content)
            file.flush()
        self.count(contents[0], len(document_ends))

    def count(self, content: bytes, documents: int) -> None:
        """Count a whole chunk; `content` holds the bytes of its tokens."""
        self.sha256.update(content)
        tokens = np.frombuffer(content, self.dtype)
        self.chunk_ends.append((self.tokens + len(tokens), self.text_bytes + count_length(tokens, self.byte_lengths)))
        self.documents += documents

    @property
    def chunks(self) -> int:
        return len(self.chunk_ends) - 1

    @property
    def tokens(self) -> int:
        return self.chunk_ends[-1][0]

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all text."""
        return self.chunk_ends[-1][1]

    def text_bytes_before(self, token: int, path: Path) -> int:
        """Return the UTF-8 bytes of the text before `token`. Reads only its chunk from the token file `path`."""
        whole = bisect.bisect_right(self.chunk_ends, token, key=lambda end: end[0]) - 1
        start, counted = self.chunk_ends[whole]
        rest = np.memmap(path, self.dtype, "r")[start:token]
        return counted + count_length(rest, self.byte_lengths)


def _compute_checksum(contents: Sequence[bytes]) -> int:
    return functools.reduce(lambda checksum, content: zlib.crc32(content, checksum), contents, 0)


def count_length(tokens: np.ndarray, lengths: np.ndarray) -> int:
    """Return the sum of `lengths` (bytes or characters per id) over tokens. Works in blocks to save memory."""
    return sum(
        int(lengths[tokens[i : i + COUNT_BLOCK_TOKENS]].sum()) for i in range(0, len(tokens), COUNT_BLOCK_TOKENS)
    )


@contextlib.contextmanager
def open_writer(folder: TokenFolder, dtype: np.dtype, byte_lengths: np.ndarray) -> Iterator[TokenWriter]:
    """Open a TokenWriter on the work folder. When the block ends without an error, its tokens are on disk."""
    paths = (folder.in_work(folder.bin), folder.document_ends, folder.in_answer, folder.work / "chunks.jsonl")
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.touch()
        stack.enter_context(name_in_errors(paths[0]))
        files = [stack.enter_context(open(path, "r+b")) for path in paths]
        yield TokenWriter(files, dtype, byte_lengths)
        os.fsync(files[0].fileno())
