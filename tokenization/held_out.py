"""Which documents are held out for validation: whole ones, by a hash of how they begin, so that the same ones stay held
out when text is added."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from common.output import printable
from tokenization.encoding import Reader, Text

HASHED_CHARACTERS = 4096
FEWEST_DOCUMENTS = 3
MOST_BYTES = 40_000_000  # about ten million tokens; they stay in memory until all else is encoded
LARGEST = 2.0  # times what is to be held out: a document that is larger is not held out
LOWEST = 1000  # documents with the lowest hashes, which count if chance chooses too little or too much
NAMES = 5  # that are listed


class Document(NamedTuple):
    hash: float  # from 0 to 1
    bytes: int
    file: str


class HeldOut(NamedTuple):
    """The documents with a hash below `limit`, except those that are `too_large`."""

    limit: float
    too_large: frozenset[float]
    by_file: Counter[str]  # how many, by the name of their file
    of_documents: int

    @property
    def documents(self) -> int:
        return self.by_file.total()

    def has(self, text: str) -> bool:
        """Whether the document that begins with `text` is held out."""
        hashed = hash_of(text)
        return hashed < self.limit and hashed not in self.too_large

    def describe(self) -> str:
        names = [printable(name.encode(errors="replace").decode()) for name, _ in self.by_file.most_common()]
        more = f" and {len(names) - NAMES} more files" if len(names) > NAMES else ""
        of = f"{self.documents:,} of {self.of_documents:,} documents, in {', '.join(names[:NAMES])}{more}"
        return f"Held out for validation: {of}"


def choose_held_out(read: Reader, share: float, total_bytes: int) -> HeldOut | None:
    """Choose about `share` of the text, MOST_BYTES at most. Reads all of it.

    None if there are few documents, or only such as are too large: then the end of the text is held out.
    """
    wanted = min(share * total_bytes, MOST_BYTES)
    share = wanted / total_bytes
    too_large: set[float] = set()
    by_chance: Counter[str] = Counter()
    count = chosen_bytes = 0
    lowest: list[tuple[float, Document]] = []  # a heap whose first has the highest hash
    for document in documents(read(lambda count: None)):
        count += 1
        if document.bytes > LARGEST * wanted:
            too_large.add(document.hash)
            continue
        if document.hash < share:
            by_chance[document.file] += 1
            chosen_bytes += document.bytes
        (heapq.heappush if len(lowest) < LOWEST else heapq.heappushpop)(lowest, (-document.hash, document))
    if count < FEWEST_DOCUMENTS or not lowest:
        return None
    if wanted / LARGEST <= chosen_bytes <= LARGEST * wanted:
        held_out = HeldOut(share, frozenset(too_large), by_chance, count)
    else:
        taken: list[Document] = []
        for document in sorted(document for _, document in lowest):
            if taken and sum(each.bytes for each in taken) + document.bytes > wanted:
                break
            taken.append(document)
        limit = math.nextafter(taken[-1].hash, 1)
        held_out = HeldOut(limit, frozenset(too_large), Counter(document.file for document in taken), count)
    return held_out if held_out.documents < count else None


def held_out_last(read: Reader, held_out: HeldOut) -> Reader:
    """A reader of the same text that gives the documents that are held out after all others."""

    def reordered(on_read: Callable[[int], None]) -> Iterator[Text]:
        waiting: list[Text] = []
        waits = False
        for piece in read(on_read):
            if begins_document(piece):
                waits = held_out.has(piece.text)
            if waits:
                waiting.append(piece)
            else:
                yield piece
        yield from waiting

    return reordered


def documents(pieces: Iterable[Text]) -> Iterator[Document]:
    document: Document | None = None
    for piece in pieces:
        if document is None or begins_document(piece):
            if document:
                yield document
            document = Document(hash_of(piece.text), 0, piece.source.name)
        document = document._replace(bytes=document.bytes + len(piece.text.encode()))
    if document:
        yield document


def begins_document(piece: Text) -> bool:
    return getattr(piece, "begins_document", True)  # a conversation is whole


def hash_of(text: str) -> float:
    digest = hashlib.blake2b(text[:HASHED_CHARACTERS].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
