"""Repeated documents, and paragraphs that stand in many documents, such as licences: found in two passes, and left out
of the others. Memory grows with what is repeated, not with the text."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tokenization.documents import PIECE_CHARACTERS, Piece

MANY = 5  # documents: a paragraph in so many is left out
FEWEST_CHARACTERS = 60  # of such a paragraph; shorter ones, such as "Chapter I", belong to the text
CELLS = 1 << 26  # of the sketch, a byte each
EXAMPLES = 5
BLANK_LINES = re.compile(r"(\n[ \t]*(?:\n[ \t]*)+)")


class Repeats:
    """What `read` repeats.

    The first pass counts hashes in a table of fixed size, where several may share a cell. The second one counts exactly
    those whose cell says that they may be repeated.
    """

    def __init__(self, read: Callable[[Callable[[int], None]], Iterator[Piece]], cells: int = CELLS):
        """`cells`: of the table."""
        self.read = read
        self.paragraphs: Counter[int] = Counter()  # documents that have it, by the hash of the paragraph
        self.documents: set[int] = set()  # numbers of those that are copies of earlier ones
        self.left_out: Counter[str] = Counter()  # beginnings of paragraphs, for the report
        sketch = np.zeros(cells, np.uint8)
        for document, paragraphs in self.hashes():
            for hashed in (document, *paragraphs):
                sketch[hashed % cells] += sketch[hashed % cells] < MANY
        first: set[int] = set()
        for number, (document, paragraphs) in enumerate(self.hashes()):
            if document in first:
                self.documents.add(number)
                continue
            if sketch[document % cells] > 1:
                first.add(document)
            self.paragraphs.update(hashed for hashed in paragraphs if sketch[hashed % cells] >= MANY)
        self.paragraphs = Counter({hashed: count for hashed, count in self.paragraphs.items() if count >= MANY})

    def hashes(self) -> Iterator[tuple[int, set[int]]]:
        """Of each document, and of its paragraphs."""
        for piece in whole_paragraphs(self.read(lambda count: None)):
            if piece.begins_document:
                document, paragraphs = hashlib.blake2b(digest_size=8), set[int]()
            document.update("".join(f"{word} " for word in piece.text.split()).encode())  # in other line ends, too
            paragraphs.update(paragraph_hash(text) for text in BLANK_LINES.split(piece.text)[::2] if is_long(text))
            if piece.ends_document:
                yield int.from_bytes(document.digest(), "big"), paragraphs

    def without(self, on_read: Callable[[int], None]) -> Iterator[Piece]:
        """The text without them."""
        self.left_out.clear()
        number, has_begun = -1, False
        for piece in whole_paragraphs(self.read(on_read)):
            if piece.begins_document:
                number, has_begun = number + 1, False
            if number in self.documents:
                continue
            text = self.kept(piece.text)
            if not has_begun:
                text = text.lstrip("\n")  # before which a paragraph may have stood
            if text.strip() or has_begun:
                yield piece._replace(text=text, begins_document=not has_begun)
                has_begun = True

    def kept(self, text: str) -> str:
        """Without the paragraphs that are left out, and the blank lines before them."""
        split = ["", *BLANK_LINES.split(text)]
        kept = []
        for blank, paragraph in zip(split[::2], split[1::2], strict=True):
            if is_long(paragraph) and paragraph_hash(paragraph) in self.paragraphs:
                self.left_out[" ".join(paragraph.split())[:FEWEST_CHARACTERS]] += 1
            else:
                kept += [blank, paragraph]
        return "".join(kept)

    def describe(self) -> str:
        return (
            f"{len(self.documents):,} documents that are copies of others, and {self.left_out.total():,} paragraphs "
            f"that stand in {MANY} documents or more"
        )


def is_long(paragraph: str) -> bool:
    return len(paragraph) >= FEWEST_CHARACTERS


def paragraph_hash(paragraph: str) -> int:
    """The same where the lines break elsewhere."""
    return int.from_bytes(hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=8).digest(), "big")


def whole_paragraphs(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same text in pieces that end before blank lines, unless a paragraph is longer than a piece."""
    rest: Piece | None = None
    for piece in pieces:
        if rest is not None:
            piece = piece._replace(text=rest.text + piece.text, begins_document=rest.begins_document, line=rest.line)
        rest = None
        if not piece.ends_document:
            cut = max((found.start() for found in BLANK_LINES.finditer(piece.text)), default=0)
            if cut > 0 or len(piece.text) < 2 * PIECE_CHARACTERS:
                line = piece.line + piece.text.count("\n", 0, cut)
                rest = piece._replace(
                    text=piece.text[cut:], begins_document=piece.begins_document and not cut, line=line
                )
                piece = piece._replace(text=piece.text[:cut])
        if piece.text or rest is None:
            yield piece
