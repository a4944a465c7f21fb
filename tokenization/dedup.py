"""Find and remove repeated documents, and paragraphs that occur in many documents, such as licences. Takes two passes;
memory grows with the repeated text only. From a companion, remove passages that occur twice or in one's own text."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tokenization.documents import PIECE_CHARACTERS, Piece
from tokenization.encoding import Reader, SourceText
from tokenization.held_out import hash_passage, join_passages, split_passages

MIN_DOCUMENTS = 5  # a paragraph in this many documents is removed
MIN_PARAGRAPH_CHARACTERS = 60  # shorter ones, such as "Chapter I", belong to the text
SKETCH_CELLS = 1 << 26  # a byte each
NUM_EXAMPLES = 5
BLANK_LINES = re.compile(r"(\n[ \t]*(?:\n[ \t]*)+)")


class Repeats:
    """The repeated documents and paragraphs in the text of `read`.

    The first pass counts hashes in a table of fixed size, where several may share a cell. The second counts exactly
    those whose cell says that they may be repeated.
    """

    def __init__(self, read: Callable[[Callable[[int], None]], Iterator[Piece]], cells: int = SKETCH_CELLS):
        """`cells`: size of the table."""
        self.read = read
        self.paragraphs: Counter[int] = Counter()  # hash of a paragraph -> number of documents
        self.documents: set[int] = set()  # numbers of copies of earlier documents
        self.left_out: Counter[str] = Counter()  # beginnings of removed paragraphs, for the report
        sketch = np.zeros(cells, np.uint8)
        for document, paragraphs in self.hashes():
            for hashed in (document, *paragraphs):
                sketch[hashed % cells] += sketch[hashed % cells] < MIN_DOCUMENTS
        first: set[int] = set()
        for number, (document, paragraphs) in enumerate(self.hashes()):
            if document in first:
                self.documents.add(number)
                continue
            if sketch[document % cells] > 1:
                first.add(document)
            self.paragraphs.update(hashed for hashed in paragraphs if sketch[hashed % cells] >= MIN_DOCUMENTS)
        self.paragraphs = Counter(
            {hashed: count for hashed, count in self.paragraphs.items() if count >= MIN_DOCUMENTS}
        )

    def hashes(self) -> Iterator[tuple[int, set[int]]]:
        """Yield the hash of each document, and those of its paragraphs."""
        for piece in _whole_paragraphs(self.read(lambda count: None)):
            if piece.begins_document:
                document, paragraphs = hashlib.blake2b(digest_size=8), set[int]()
            document.update("".join(f"{word} " for word in piece.text.split()).encode())  # line breaks do not matter
            paragraphs.update(_hash_paragraph(text) for text in BLANK_LINES.split(piece.text)[::2] if is_long(text))
            if piece.ends_document:
                yield int.from_bytes(document.digest(), "big"), paragraphs

    def remove(self, on_read: Callable[[int], None]) -> Iterator[Piece]:
        """Yield the text without repeats."""
        self.left_out.clear()
        number, has_begun = -1, False
        for piece in _whole_paragraphs(self.read(on_read)):
            if piece.begins_document:
                number, has_begun = number + 1, False
            if number in self.documents:
                continue
            text = self.remove_paragraphs(piece.text)
            if not has_begun:
                text = text.lstrip("\n")  # a removed paragraph may have stood before it
            if text.strip() or has_begun:
                yield piece._replace(text=text, begins_document=not has_begun)
                has_begun = True

    def remove_paragraphs(self, text: str) -> str:
        """Return the text without repeated paragraphs and the blank lines before them."""
        split = ["", *BLANK_LINES.split(text)]
        kept = []
        for blank, paragraph in zip(split[::2], split[1::2], strict=True):
            if is_long(paragraph) and _hash_paragraph(paragraph) in self.paragraphs:
                self.left_out[" ".join(paragraph.split())[:MIN_PARAGRAPH_CHARACTERS]] += 1
            else:
                kept += [blank, paragraph]
        return "".join(kept)

    def describe(self) -> str:
        return (
            f"{len(self.documents):,} copies of other documents, and {self.left_out.total():,} paragraphs that occur "
            f"in {MIN_DOCUMENTS} documents or more"
        )


class Copies:
    """The passages of a companion that occur in it before, or in one's own text. Takes one pass; memory grows with the
    number of passages."""

    def __init__(self, read: Reader, own: Reader):
        self.read = read
        self.own = {hash_passage(passage.text) for passage in split_passages(own(lambda count: None))}
        self.characters: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()  # beginnings of removed passages, for the report

    def remove(self, on_read: Callable[[int], None]) -> Iterator[SourceText]:
        """Yield the text without copies. A document ends before a removed passage."""
        yield from (text for text, is_copy in join_passages(self.mark_copies(on_read)) if not is_copy)

    def mark_copies(self, on_read: Callable[[int], None]) -> Iterator[tuple[SourceText, bool]]:
        """Yield (passage, is_copy)."""
        self.characters.clear()
        self.left_out.clear()
        seen: set[float] = set()
        for passage in split_passages(self.read(on_read)):
            digest, text = hash_passage(passage.text), passage.text
            kind = "own" if digest in self.own else "twice" if digest in seen else "unique"
            if len(text) < MIN_PARAGRAPH_CHARACTERS:
                kind = "unique"
            seen.add(digest)
            self.characters[kind] += len(text)
            if kind != "unique":
                self.left_out[" ".join(text.split())[:MIN_PARAGRAPH_CHARACTERS]] += 1
            yield passage, kind != "unique"

    def describe(self) -> str:
        total = max(1, self.characters.total())
        kinds = {"twice": "occur twice", "own": "are in your own text"}
        shares = {text: self.characters[kind] / total for kind, text in kinds.items()}
        found = [f"{text} ({share:.1%})" for text, share in shares.items() if share]
        return f"passages of this text that {' or '.join(found)}" if found else ""


def is_long(paragraph: str) -> bool:
    return len(paragraph) >= MIN_PARAGRAPH_CHARACTERS


def _hash_paragraph(paragraph: str) -> int:
    """Return a hash that does not depend on line breaks."""
    return int.from_bytes(hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=8).digest(), "big")


def _whole_paragraphs(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the same text in pieces that end before blank lines, unless a paragraph is longer than a piece."""
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
