"""Which documents are held out for validation: whole ones, by a hash of how they begin, so that the same ones stay held
out when text is added."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from common.output import printable
from tokenization.encoding import Reader, Text

HASHED_CHARACTERS = 4096
FEWEST_DOCUMENTS = 3
MOST_BYTES = 40_000_000  # about ten million tokens; they stay in memory until all else is encoded
LARGEST = 2.0  # times what is to be held out: what is larger is not
KEPT = 1000  # of the lowest hashes, for chance may choose too little or too much, and of the largest documents
NAMES = 5  # that are listed


class HeldOut:
    """Documents with a hash below `limit`, except those `too_large`: which have it, and how many have been read."""

    def __init__(self, limit: float, too_large: set[float]):
        self.limit, self.too_large = limit, too_large
        self.by_file: Counter[str] = Counter()  # how many, by the name of their file
        self.of_documents = 0

    @property
    def documents(self) -> int:
        return self.by_file.total()

    def has(self, text: str) -> bool:
        """Whether the document that begins with `text` is held out."""
        hashed = hash_of(text)
        return hashed < self.limit and hashed not in self.too_large

    def last(self, read: Reader) -> Reader:
        """A reader of the same text that gives the documents that are held out after all others."""

        def reordered(on_read: Callable[[int], None]) -> Iterator[Text]:
            self.by_file.clear()
            self.of_documents = 0
            waiting: list[Text] = []
            waits = False
            for piece in read(on_read):
                if begins_document(piece):
                    waits = self.has(piece.text)
                    self.of_documents += 1
                    self.by_file[piece.source.name] += waits
                if waits:
                    waiting.append(piece)
                else:
                    yield piece
            yield from waiting

        return reordered

    def describe(self) -> str:
        names = [printable(name.encode(errors="replace").decode()) for name, count in self.by_file.items() if count]
        more = f" and {len(names) - NAMES} more files" if len(names) > NAMES else ""
        of = f"{self.documents:,} of {self.of_documents:,} documents, in {', '.join(names[:NAMES])}{more}"
        return f"Held out for validation: {of}"


def choose_held_out(read: Reader, share: float, total_bytes: int, most: int = MOST_BYTES) -> HeldOut | None:
    """Choose about `share` of the text, `most` bytes of it at most. Reads all of it; `total_bytes` is its size or more.

    None if there are few documents, or only such as are too large: then the end of the text is held out.
    """
    limit = min(share, most / total_bytes)
    lowest: dict[float, int] = {}  # bytes of the documents with each of the lowest hashes: copies have the same
    heap: list[float] = []  # of these hashes, negative: the first is the highest
    largest: list[tuple[int, float]] = []  # a heap of sizes and hashes
    documents = chosen = text_bytes = 0
    for hashed, size in hashes(read(lambda count: None)):
        documents += 1
        text_bytes += size
        chosen += size * (hashed < limit)
        (heapq.heappush if len(largest) < KEPT else heapq.heappushpop)(largest, (size, hashed))
        if hashed in lowest:
            lowest[hashed] += size
        elif len(heap) < KEPT:
            heapq.heappush(heap, -hashed)
            lowest[hashed] = size
        elif hashed < -heap[0]:
            del lowest[-heapq.heappushpop(heap, -hashed)]
            lowest[hashed] = size
    wanted = min(share * text_bytes, most)
    too_large = {hashed for size, hashed in largest if size > LARGEST * wanted}
    too_large |= {hashed for hashed, size in lowest.items() if size > LARGEST * wanted}
    chosen -= sum(size for size, hashed in largest if hashed in too_large and hashed < limit)
    possible = sorted(lowest.keys() - too_large)
    if documents < FEWEST_DOCUMENTS or not possible or chosen == text_bytes:
        return None
    if not wanted / LARGEST <= chosen <= LARGEST * wanted:
        sizes = itertools.accumulate(lowest[hashed] for hashed in possible)
        fitting = max(1, sum(size <= wanted for size in sizes))
        limit = math.nextafter(possible[fitting - 1], 1)
    return HeldOut(limit, too_large)


def hashes(pieces: Iterable[Text]) -> Iterator[tuple[float, int]]:
    """The hash and the bytes of each document."""
    hashed, size = 0.0, -1
    for piece in pieces:
        if begins_document(piece):
            if size >= 0:
                yield hashed, size
            hashed, size = hash_of(piece.text), 0
        size += len(piece.text.encode())
    if size >= 0:
        yield hashed, size


def begins_document(piece: Text) -> bool:
    return getattr(piece, "begins_document", True)  # a conversation is whole


def hash_of(text: str) -> float:
    """From 0 to 1."""
    digest = hashlib.blake2b(text[:HASHED_CHARACTERS].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
