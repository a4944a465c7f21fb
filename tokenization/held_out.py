"""Choose the validation passages, a few thousand characters each, by a hash of their text. So each file contributes its
share, copies land in the same split, and adding or removing text moves no other passage."""

from __future__ import annotations

import hashlib
import re
import string
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from common.output import cell
from tokenization.conversations import Conversation
from tokenization.corpus import Source
from tokenization.documents import PIECE_CHARACTERS, Piece, find_cut, find_letter_boundary
from tokenization.encoding import Reader, SourceText, begins_document

MIN_PASSAGE, MAX_PASSAGE = 2500, 8000  # characters; the last passage of a document may be shorter
EXTRA_CHARACTERS = 1500  # mean number of characters beyond MIN_PASSAGE
TYPICAL_PASSAGE = 4000  # characters
MAX_HELD_OUT_BYTES = 40_000_000  # about ten million tokens, kept in memory until all else is encoded
MAX_CHECKED_CHARACTERS = 200_000_000  # characters in which the share is checked; in a small text it can be far off
MAX_SHARE_FACTOR = 2.5  # a share larger or smaller than requested by this factor is rejected
REPETITIVE_SHARE = 0.5  # text with a smaller share of unique passages is repetitive
MIN_COPIED_SHARE, MIN_COPIED_CHARACTERS = 0.1, 1000  # of a file; less is not reported
MAX_LISTED_FILES = 5
BLANK_LINES, LINE_END = re.compile(r"\n[ \t]*\n\s*"), re.compile(r"\n")
WHITE_SPACE = string.whitespace.encode()


class HeldOut:
    """The held-out passages: those with a hash below `limit` (0 to 1), which is about their share of the text.

    If no passage of a document is chosen and its share is at least a typical passage, its last one is held out.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.characters: Counter[Source] = Counter()  # characters read
        self.held: Counter[Source] = Counter()  # characters held out
        self.documents = 0  # held-out documents; consecutive passages are one

    @property
    def share(self) -> float:
        return self.held.total() / max(1, self.characters.total())

    def share_of(self, source: Source) -> float:
        return self.held[source] / max(1, self.characters[source])

    def move_to_end(self, read: Reader) -> Reader:
        """Return a reader of the same text with the held-out passages at the end."""

        def reordered(on_read: Callable[[int], None]) -> Iterator[SourceText]:
            self.characters.clear()
            self.held.clear()
            waiting: list[SourceText] = []
            self.documents = 0
            for piece, is_held in join_passages(self.mark_passages(read(on_read))):
                if is_held:
                    waiting.append(piece)
                    self.documents += isinstance(piece, Conversation) or piece.ends_document
                else:
                    yield piece
            yield from waiting

        return reordered

    def mark_passages(self, texts: Iterable[SourceText]) -> Iterator[tuple[SourceText, bool]]:
        """Yield (passage, is_held_out)."""
        read = held = 0  # characters in this document
        for passage in split_passages(texts):
            size = len(passage.text)
            if begins_document(passage):
                read = held = 0
            read += size
            is_held = hash_passage(passage.text) < self.limit
            if not held and isinstance(passage, Piece) and passage.ends_document:
                is_held = is_held or self.limit * read >= TYPICAL_PASSAGE
            held += size * is_held
            self.characters[passage.source] += size
            self.held[passage.source] += size * is_held
            yield passage, is_held

    def describe(self) -> str:
        """Describe the share of the text, and of each file if there are few."""
        shares = ", ".join(f"{self.share_of(source):.0%} of {cell(source.name)}" for source in self.characters)
        of_files = f" ({shares})" if 1 < len(self.characters) <= MAX_LISTED_FILES else ""
        text = f"Held out for validation: {self.share:.1%} of the text{of_files}"
        return text.encode(errors="replace").decode()  # file names may hold any bytes


def choose_held_out(
    read: Reader, share: float, total_bytes: int
) -> tuple[HeldOut | None, str, dict[tuple[Source, Source], float]]:
    """Choose about `share` of the text, at most MAX_HELD_OUT_BYTES; `total_bytes` is its size or more. Return the
    choice, a note on repetitive text, and for each file the share of its text that an earlier one holds, too.

    The choice is None if chance gives far more or less than `share` of a small or repetitive text; then the end of the
    text is held out.
    """
    limit = min(share, MAX_HELD_OUT_BYTES / total_bytes)
    held_out, unique, checked, first = HeldOut(limit), 0, 0, dict[float, Source]()
    copied: Counter[tuple[Source, Source]] = Counter()
    for passage, _ in held_out.mark_passages(read(lambda count: None)):
        size, digest = len(passage.text), hash_passage(passage.text)
        checked += size
        unique += 0 if digest in first else size
        earlier = first.setdefault(digest, passage.source)
        if earlier != passage.source:
            copied[passage.source, earlier] += size
        if checked >= MAX_CHECKED_CHARACTERS:
            break
    shares = {pair: size / held_out.characters[pair[0]] for pair, size in copied.items()}
    note = ""
    if unique < REPETITIVE_SHARE * checked:
        note = f"Much of this text is repeated: only {unique / checked:.0%} of it is unique"
    is_far_off = not limit / MAX_SHARE_FACTOR <= held_out.share <= limit * MAX_SHARE_FACTOR
    is_small_share = limit < share and not note  # a huge text: few of the checked passages are held out
    chosen = None if is_far_off and not is_small_share else held_out
    return (
        chosen,
        note,
        {
            pair: share
            for pair, share in shares.items()
            if share >= MIN_COPIED_SHARE and copied[pair] >= MIN_COPIED_CHARACTERS
        },
    )


def split_passages(texts: Iterable[SourceText]) -> Iterator[SourceText]:
    """Yield the same text, a passage at a time. A conversation is one passage."""
    rest: Piece | None = None
    for text in texts:
        if isinstance(text, Conversation):
            yield text
            continue
        if rest is not None:
            text = text._replace(text=rest.text + text.text, begins_document=rest.begins_document, line=rest.line)
        start, rest = 0, text
        while end := find_passage_end(text.text, start, text.ends_document):
            is_last = end == len(text.text) and text.ends_document
            passage = rest._replace(
                text=text.text[start:end], ends_document=is_last, line_break=text.line_break if is_last else ""
            )
            yield passage
            rest = rest._replace(begins_document=False, line=rest.line + passage.text.count("\n"))
            start = end
        rest = None if text.ends_document else rest._replace(text=text.text[start:])


def find_passage_end(text: str, start: int, is_whole: bool) -> int:
    """Return the end of the passage that begins at `start`; 0 if more text is needed, or none is left.

    A hash of a paragraph decides whether a passage ends with it, so an insertion moves only the next few ends. Without
    blank lines, each line is a paragraph.
    """
    if len(text) - start <= MAX_PASSAGE:
        return len(text) if is_whole and start < len(text) else 0
    limit = start + MAX_PASSAGE
    for paragraph_end in (BLANK_LINES, LINE_END):
        before = end = 0
        for match in paragraph_end.finditer(text, start + MIN_PASSAGE, limit):
            before, end = end, match.end()
            letters = _encode_letters(text[before:end]) if before else b""
            if zlib.crc32(letters) % EXTRA_CHARACTERS < len(letters):
                return end
        if before:
            break
    return end or text.rfind(" ", start + MIN_PASSAGE, limit) + 1 or find_letter_boundary(text, limit)


def join_passages(chosen: Iterable[tuple[SourceText, bool]]) -> Iterator[tuple[SourceText, bool]]:
    """Join consecutive passages of a document that are chosen alike, and yield them in pieces, cut where it changes no
    token. A document ends where the choice changes. `chosen`: (passage, choice)."""
    pending: list[Piece] = []
    is_validation, length = False, 0

    def piece(text: str, ends: bool) -> Piece:
        first, last = pending[0], pending[-1]
        return Piece(text, first.begins_document, ends, last.line_break if ends else "", first.source, first.line)

    for passage, is_held in chosen:
        if pending and (begins_document(passage) or is_held != is_validation):
            yield piece("".join(each.text for each in pending), True), is_validation
            pending, length = [], 0
        if isinstance(passage, Conversation):
            yield passage, is_held
            continue
        if not pending:
            passage, is_validation = passage._replace(begins_document=True), is_held
        pending.append(passage)
        length += len(passage.text)
        if length > PIECE_CHARACTERS + MAX_PASSAGE:
            text = "".join(each.text for each in pending)
            cut = find_cut(text, PIECE_CHARACTERS) or find_letter_boundary(text, PIECE_CHARACTERS)
            yield piece(text[:cut], False), is_validation
            line = pending[0].line + text.count("\n", 0, cut)
            pending = [passage._replace(text=text[cut:], begins_document=False, line=line)]
            length = len(text) - cut
    if pending:
        yield piece("".join(each.text for each in pending), True), is_validation


def hash_passage(text: str) -> float:
    """Return a hash from 0 to 1. White space does not matter, so neither do the line breaks of a book's formats."""
    digest = hashlib.blake2b(_encode_letters(text), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _encode_letters(text: str) -> bytes:
    """Return a text without its white space."""
    return text.encode().translate(None, WHITE_SPACE)
