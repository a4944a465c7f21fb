"""data_report.md: what each file gave, what was left out and why, and documents to look at."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.output import byte_size, cell, table_row
from tokenization.corpus import NOT_READ, Source, unpacked_blocks
from tokenization.dedup import EXAMPLES, Repeats
from tokenization.encoding import Reader, Text, begins_document
from tokenization.held_out import HeldOut

LISTED, LISTED_BRIEFLY = 1000, 12  # files; lines
LOOKED_AT = 1000  # documents of each file that are compressed, their beginnings
COMPRESSED = 4096  # characters
LANGUAGES_OF = 5  # documents of each file
MOST_LANGUAGES = 2000  # documents whose language is guessed: each takes a millisecond
NAMED = 5  # of the files that are left out for the same reason, in the terminal
QUOTED = 100  # characters


@dataclass
class OfFile:
    documents: int = 0
    bytes: int = 0


@dataclass
class Found:
    """A document to look at."""

    number: float = 0.0
    name: str = ""
    beginning: str = ""

    def quoted(self) -> str:
        return f'in {cell(self.name)}: "{cell(self.beginning[:QUOTED])} ..."'


class Report:
    """Collects while the text is encoded."""

    def __init__(
        self,
        sources: Sequence[Source],
        skipped: Sequence[tuple[str, str]],
        repeats: Repeats | None,
        held_out: HeldOut | None,
    ):
        """`skipped`: names of files that give no text, and why. `held_out` is None if the end of the text is."""
        self.files = {source: OfFile() for source in sources}
        self.skipped, self.repeats, self.held_out = skipped, repeats, held_out
        self.copies = [] if repeats else copies(sources)
        self.longest, self.least_packed = Found(), Found()
        self.languages: Counter[str] = Counter()

    def counting(self, read: Reader) -> Reader:
        """A reader of the same text that counts it."""

        def counted(on_read: Callable[[int], None]) -> Iterator[Text]:
            document = Found()
            for piece in read(on_read):
                of_file, text = self.files[piece.source], piece.text
                if begins_document(piece):
                    of_file.documents += 1
                    document = Found(0, piece.source.name, text[:COMPRESSED])
                    self.look_at(document, of_file.documents)
                size = len(text.encode())
                of_file.bytes += size
                document.number += size
                if document.number > self.longest.number:
                    self.longest = document
                yield piece

        return counted

    def look_at(self, document: Found, number: int) -> None:
        """The `number`th document of its file begins."""
        if number <= LOOKED_AT and len(document.beginning) >= COMPRESSED // 4:
            content = document.beginning.encode()
            packed = len(zlib.compress(content, 1)) / len(content)
            if packed > self.least_packed.number:
                self.least_packed = Found(packed, document.name, document.beginning)
        if number <= LANGUAGES_OF and self.languages.total() < MOST_LANGUAGES:
            self.languages[language_of(document.beginning[: COMPRESSED // 4])] += 1

    @property
    def documents(self) -> int:
        return sum(of_file.documents for of_file in self.files.values())

    def held_share(self, source: Source) -> str:
        return f"{self.held_out.share_of(source):.0%}" if self.held_out else ""

    def found(self, most: int) -> list[tuple[str, str]]:
        """What a user may want to act on, each with its kind; of the files that are left out for one reason, `most`
        names."""
        found = [("Repeated", f"left out: {self.repeats.describe()}")] if self.repeats else []
        converted = [source for source in self.files if source.is_converted]
        found += [("Converted", f"{source.name}: {source.note}") for source in converted]
        for copy, first in self.copies:
            earlier = first.place if first.name == copy.name else first.name
            found.append(("Twice", f"{copy.name} has the same content as {earlier}"))
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in sorted(self.skipped, key=lambda one: one[1] == NOT_READ):  # last
            by_reason[reason].append(name)
        return found + [("Left out", f"{named(names, most)}: {reason}") for reason, names in by_reason.items()]

    def brief(self) -> str:
        """For the terminal."""
        lines = [f"{kind:<10} {cell(line)}" for kind, line in self.found(NAMED)]
        more = [f"           and {len(lines) - LISTED_BRIEFLY:,} more lines, in data_report.md"]
        lines = lines[:LISTED_BRIEFLY] + more * (len(lines) > LISTED_BRIEFLY)
        return "\n".join(lines).encode(errors="replace").decode()  # names may be any bytes

    def markdown(self) -> str:
        """The whole report."""
        gave = [of_file for of_file in self.files.values() if of_file.documents]
        size = sum(each.bytes for each in gave)
        lines = [f"- **Read**: {len(gave):,} files: {byte_size(size)} of text in {self.documents:,} documents"]
        if known := [f"{name} {n / self.languages.total():.0%}" for name, n in self.languages.most_common(5) if name]:
            lines.append(f"- **Languages**: {', '.join(known)}")
        lines += [f"- **{kind}**: {cell(line)}" for kind, line in self.found(LISTED)]
        if self.repeats:
            common = self.repeats.left_out.most_common(EXAMPLES)
            lines += [f"- **Repeated** {count:,} times: {cell(text)} ..." for text, count in common]
        hard = f"{self.least_packed.number:.2f} of its size when compressed; English has about 0.5, noise 0.8"
        lines += [
            f"- **Longest document**: {byte_size(int(self.longest.number))}, {self.longest.quoted()}",
            f"- **Hardest document**: {hard}, {self.least_packed.quoted()}",
            "\n| file | made from | documents | bytes of text | held out |\n|---|---|---:|---:|---:|",
        ]
        lines += [
            table_row(
                [
                    cell(source.name),
                    cell(source.note) or "text",
                    f"{each.documents:,}",
                    f"{each.bytes:,}",
                    self.held_share(source),
                ]
            )
            for source, each in itertools.islice(self.files.items(), LISTED)
        ]
        return "\n".join(["# Data report\n", *lines]) + "\n"


def named(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def language_of(text: str) -> str:
    """Its code, or "" if py3langid is not there."""
    try:
        from py3langid import classify
    except ImportError:
        return ""
    return str(classify(text)[0])


def copies(sources: Iterable[Source]) -> list[tuple[Source, Source]]:
    """Each file with the content of an earlier one, and that one. Only files of the same size are read."""
    sizes: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        sizes[source.text_bytes].append(source)
    first: dict[bytes, Source] = {}
    pairs = []
    for source in itertools.chain.from_iterable(group for group in sizes.values() if len(group) > 1):
        digest = hashlib.sha256()
        for block in unpacked_blocks(source):
            digest.update(block)
        pairs.append((source, first.setdefault(digest.digest(), source)))
    return [(source, earlier) for source, earlier in pairs if source != earlier]
