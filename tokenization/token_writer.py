"""Writing tokens chunk by chunk, each with a line in a journal. A process that is killed loses at most one chunk."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tokenization.token_folder import TokenFolder

BLOCK = 1 << 16  # tokens whose text is counted at a time


class TokenWriter:
    """Appends chunks of tokens to the work folder's token file. Opened again, it continues after the last whole chunk.

    A chunk counts if its line is in the journal and its checksum is right; everything after it is cut off. What the
    metadata needs is computed on the way, so that the file is not read again: `sha256` of its bytes, and `chunk_ends`,
    (tokens, UTF-8 bytes of their text) from the start of the file to the end of each chunk.
    """

    def __init__(self, files: Sequence[BinaryIO], dtype: np.dtype, byte_lengths: np.ndarray) -> None:
        """`files`: tokens, ends of documents, answers, journal. `byte_lengths` are those of the tokenizer."""
        self.files = files
        self.dtype, self.byte_lengths = dtype, byte_lengths
        self.documents = 0
        self.sha256 = hashlib.sha256()
        self.chunk_ends = [(0, 0)]
        *contents_of, journal = files
        ends = [0, 0, 0, 0]
        for line in journal:
            if not line.endswith(b"\n"):  # the process was killed while it wrote this line
                break
            entry = json.loads(line)
            sizes = (entry["tokens"] * dtype.itemsize, entry["documents"] * 8, entry.get("answer_bytes", 0))
            contents = [file.read(size) for file, size in zip(contents_of, sizes, strict=True)]
            if checksum_of(contents) != entry["crc32"]:
                break
            ends = [end + size for end, size in zip(ends, (*sizes, len(line)), strict=True)]
            self.count(contents[0], entry["documents"])
        for file, end in zip(self.files, ends, strict=True):
            file.truncate(end)
            file.seek(end)

    def append(self, tokens: np.ndarray, document_ends: np.ndarray, in_answer: np.ndarray | None = None) -> None:
        """Add a chunk's tokens, and the ends of its documents, (documents,) int64, counted from the chunk's start. For
        conversations also which tokens are in answers, (tokens,) bool."""
        contents = [
            tokens.tobytes(),
            (document_ends + self.tokens).astype("<i8").tobytes(),
            b"" if in_answer is None else in_answer.tobytes(),
        ]
        entry = {"tokens": len(tokens), "documents": len(document_ends), "answer_bytes": len(contents[2])}
        entry["crc32"] = checksum_of(contents)
        contents.append((json.dumps(entry) + "\n").encode())
        for file, content in zip(self.files, contents, strict=True):
            file.write(content)
            file.flush()
        self.count(contents[0], len(document_ends))

    def count(self, content: bytes, documents: int) -> None:
        """Count a whole chunk: `content` is the bytes of its tokens."""
        self.sha256.update(content)
        tokens = np.frombuffer(content, self.dtype)
        self.chunk_ends.append((self.tokens + len(tokens), self.text_bytes + text_bytes(tokens, self.byte_lengths)))
        self.documents += documents

    @property
    def chunks(self) -> int:
        return len(self.chunk_ends) - 1

    @property
    def tokens(self) -> int:
        return self.chunk_ends[-1][0]

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text of all tokens."""
        return self.chunk_ends[-1][1]

    def text_bytes_before(self, token: int, path: Path) -> int:
        """UTF-8 bytes of the text before `token`. Reads only the chunk around it, from the token file `path`."""
        whole = bisect.bisect_right(self.chunk_ends, token, key=lambda end: end[0]) - 1
        start, counted = self.chunk_ends[whole]
        rest = np.memmap(path, self.dtype, "r")[start:token]
        return counted + text_bytes(rest, self.byte_lengths)


def checksum_of(contents: Sequence[bytes]) -> int:
    return functools.reduce(lambda checksum, content: zlib.crc32(content, checksum), contents, 0)


def text_bytes(tokens: np.ndarray, byte_lengths: np.ndarray) -> int:
    """UTF-8 bytes of the text of tokens. Computed in blocks, because the lengths take more memory than the tokens."""
    return sum(int(byte_lengths[tokens[i : i + BLOCK]].sum()) for i in range(0, len(tokens), BLOCK))


@contextlib.contextmanager
def open_writer(folder: TokenFolder, dtype: np.dtype, byte_lengths: np.ndarray) -> Iterator[TokenWriter]:
    """A TokenWriter on the work folder. When the block ends without an error, its tokens are on disk."""
    paths = (folder.in_work(folder.bin), folder.document_ends, folder.in_answer, folder.work / "chunks.jsonl")
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.touch()
        files = [stack.enter_context(open(path, "r+b")) for path in paths]
        yield TokenWriter(files, dtype, byte_lengths)
        os.fsync(files[0].fileno())
