"""Which text is held out for validation: passages of a few thousand characters, chosen by a hash of each. So every file
gives its share, copies are on one side, and nothing moves when text is added or taken away."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from common.output import byte_size, cell
from tokenization.conversations import Conversation
from tokenization.corpus import Source
from tokenization.documents import PIECE_CHARACTERS, Piece, between_letters, cut_point
from tokenization.encoding import Reader, Text, begins_document

FEWEST, MOST = 2500, 8000  # characters of a passage; the last of a document may be shorter
FURTHER = 1500  # characters, on average, from the fewest to the line that ends a passage
TYPICAL = 4000  # characters
MOST_BYTES = 40_000_000  # about ten million tokens; they stay in memory until all else is encoded
CHECKED = 200_000_000  # characters, in which the share is checked: in a small or repetitive text it may be far off
FURTHEST = 2.5  # times the share that is asked for, or so much less
REPETITIVE = 0.5  # share of different passages in a text that says so
NAMES = 5  # that are listed


class HeldOut:
    """Passages with a hash below `limit`: from 0 to 1, about their share of the text.

    A document whose share is a passage or more gives its last one if chance chooses none.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.characters: Counter[Source] = Counter()  # that have been read
        self.held: Counter[Source] = Counter()  # of these, held out
        self.documents = 0  # that the held-out text makes, one each time that passages follow each other

    @property
    def share(self) -> float:
        return self.held.total() / max(1, self.characters.total())

    def share_of(self, source: Source) -> float:
        return self.held[source] / max(1, self.characters[source])

    def last(self, read: Reader) -> Reader:
        """A reader of the same text that gives the passages that are held out after all others."""

        def reordered(on_read: Callable[[int], None]) -> Iterator[Text]:
            self.characters.clear()
            self.held.clear()
            waiting: list[Text] = []
            self.documents = 0
            for piece, is_held in joined(self.chosen(read(on_read))):
                if is_held:
                    waiting.append(piece)
                    self.documents += isinstance(piece, Conversation) or piece.ends_document
                else:
                    yield piece
            yield from waiting

        return reordered

    def chosen(self, texts: Iterable[Text]) -> Iterator[tuple[Text, bool]]:
        """Each passage, and whether it is held out."""
        read = held = 0  # characters of the document
        for passage in passages(texts):
            size = len(passage.text)
            if begins_document(passage):
                read = held = 0
            read += size
            is_held = passage_hash(passage.text) < self.limit
            if not held and isinstance(passage, Piece) and passage.ends_document:
                is_held = is_held or self.limit * read >= TYPICAL
            held += size * is_held
            self.characters[passage.source] += size
            self.held[passage.source] += size * is_held
            yield passage, is_held

    def describe(self) -> str:
        """Of each file its share."""
        sources = list(self.characters)
        named = ", ".join(f"{self.share_of(source):.0%} of {cell(source.name)}" for source in sources[:NAMES])
        more = f"; of {len(sources) - NAMES:,} more files in data_report.md" if len(sources) > NAMES else ""
        said = f"Held out for validation: {self.share:.1%} of the text: {named}{more}"
        return said.encode(errors="replace").decode()  # names may be any bytes


def choose_held_out(read: Reader, share: float, total_bytes: int) -> tuple[HeldOut | None, str]:
    """Return what holds out about `share` of the text, MOST_BYTES of it at most; `total_bytes` is its size or more.
    None if chance leaves a small or repetitive text with far less or more: then its end is held out. And a note on a
    text that repeats itself.
    """
    limit = min(share, MOST_BYTES / total_bytes)
    held_out, different, checked, hashes = HeldOut(limit), 0, 0, set[float]()
    for passage, _ in held_out.chosen(read(lambda count: None)):
        checked += len(passage.text)
        name = passage_hash(passage.text)
        different += 0 if name in hashes else len(passage.text)
        hashes.add(name)
        if checked >= CHECKED:
            break
    note = ""
    if different < REPETITIVE * checked:
        note = f"Much of this text is repeated: {byte_size(different)} of {byte_size(checked)} is different"
    is_far_off = not limit / FURTHEST <= held_out.share <= limit * FURTHEST
    is_small_share = limit < share and not note  # of a huge text, and few passages of what was checked
    return None if is_far_off and not is_small_share else held_out, note


def passages(texts: Iterable[Text]) -> Iterator[Text]:
    """The same text, a passage at a time. A conversation is one."""
    rest: Piece | None = None
    for text in texts:
        if isinstance(text, Conversation):
            yield text
            continue
        if rest is not None:
            text = text._replace(text=rest.text + text.text, begins_document=rest.begins_document, line=rest.line)
        start, rest = 0, text
        while end := passage_end(text.text, start, text.ends_document):
            is_last = end == len(text.text) and text.ends_document
            passage = rest._replace(
                text=text.text[start:end], ends_document=is_last, line_break=text.line_break if is_last else ""
            )
            yield passage
            rest = rest._replace(begins_document=False, line=rest.line + passage.text.count("\n"))
            start = end
        rest = None if text.ends_document else rest._replace(text=text.text[start:])


def passage_end(text: str, start: int, is_whole: bool) -> int:
    """Where the passage that begins at `start` ends; 0 if more text is needed to know, or none is left.

    It ends with a line whose own text says so, by a hash. So an insertion moves the next few ends, and no others.
    """
    if len(text) - start <= MOST:
        return len(text) if is_whole and start < len(text) else 0
    end = text.find("\n", start + FEWEST) + 1
    while 0 < end <= start + MOST:
        line = end
        end = text.find("\n", line) + 1
        if zlib.crc32(text[line:end].encode()) % FURTHER < end - line and end <= start + MOST:
            return end
    passage = text[start : start + MOST]
    end = passage.rfind("\n", FEWEST) + 1 or passage.rfind(" ", FEWEST) + 1
    return start + end if end else between_letters(text, start + MOST)


def joined(chosen: Iterable[tuple[Text, bool]]) -> Iterator[tuple[Text, bool]]:
    """Join the passages of a document that follow each other on one side, and give them in pieces that are cut where it
    changes no token. Where the side changes, a document ends."""
    run: list[Piece] = []
    side, length = False, 0

    def piece(text: str, ends: bool) -> Piece:
        first, last = run[0], run[-1]
        return Piece(text, first.begins_document, ends, last.line_break if ends else "", first.source, first.line)

    for passage, is_held in chosen:
        if run and (begins_document(passage) or is_held != side):
            yield piece("".join(each.text for each in run), True), side
            run, length = [], 0
        if isinstance(passage, Conversation):
            yield passage, is_held
            continue
        if not run:
            passage, side = passage._replace(begins_document=True), is_held
        run.append(passage)
        length += len(passage.text)
        if length > PIECE_CHARACTERS + MOST:
            text = "".join(each.text for each in run)
            cut = cut_point(text, PIECE_CHARACTERS) or between_letters(text, PIECE_CHARACTERS)
            yield piece(text[:cut], False), side
            line = run[0].line + text.count("\n", 0, cut)
            run = [passage._replace(text=text[cut:], begins_document=False, line=line)]
            length = len(text) - cut
    if run:
        yield piece("".join(each.text for each in run), True), side


def passage_hash(text: str) -> float:
    """From 0 to 1; white space around the text does not count."""
    return int.from_bytes(hashlib.blake2b(text.strip().encode(), digest_size=8).digest(), "big") / 2**64
