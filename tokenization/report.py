"""data_report.md: what each file gave, and what was left out and why."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.output import byte_size, cell, table_row
from tokenization.corpus import NOT_READ, Source, unpacked_blocks
from tokenization.dedup import EXAMPLES, Repeats
from tokenization.encoding import Reader, Text, begins_document
from tokenization.held_out import HeldOut

LISTED, LISTED_BRIEFLY = 1000, 12  # files; lines
NAMED = 5  # of the files that are left out for the same reason, in the terminal


@dataclass
class OfFile:
    documents: int = 0
    bytes: int = 0


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
        self.words: list[str] = []  # how the vocabulary cuts words, where it is not GPT-2's way

    def counting(self, read: Reader) -> Reader:
        """A reader of the same text that counts it."""

        def counted(on_read: Callable[[int], None]) -> Iterator[Text]:
            for piece in read(on_read):
                of_file = self.files[piece.source]
                of_file.documents += begins_document(piece)
                of_file.bytes += len(piece.text.encode())
                yield piece

        return counted

    @property
    def documents(self) -> int:
        return sum(of_file.documents for of_file in self.files.values())

    def held_out_share(self, share: float) -> str:
        """For the terminal: the share of the tokens that is held out, and that of each file's text."""
        return (
            self.held_out.describe() if self.held_out else f"Held out for validation: the end of the text ({share:.1%})"
        )

    def held_share(self, source: Source) -> str:
        return f"{self.held_out.share_of(source):.0%}" if self.held_out else ""

    def found(self, most: int) -> list[tuple[str, str]]:
        """What a user may want to act on, each with its kind; of the files that are left out for one reason, `most`
        names."""
        found = [("Words", line) for line in self.words]
        found += [("Repeated", f"left out: {self.repeats.describe()}")] if self.repeats else []
        converted = [source for source in self.files if source.is_converted]
        found += [("Converted", f"{source.name}: {source.note}") for source in converted]
        for source in self.files:
            if source.inline_marks:
                times = f"its mark of a document's end stands {source.inline_marks:,} times inside lines"
                found.append(
                    ("Note", f"{source.name}: {times}, where it separates nothing: it needs a line of its own")
                )
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
        lines += [f"- **{kind}**: {cell(line)}" for kind, line in self.found(LISTED)]
        if self.repeats:
            common = self.repeats.left_out.most_common(EXAMPLES)
            lines += [f"- **Repeated** {count:,} times: {cell(text)} ..." for text, count in common]
        lines.append("\n| file | made from | documents | bytes of text | held out |\n|---|---|---:|---:|---:|")
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
