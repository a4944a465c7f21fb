"""Text of PDF files: its lines, joined to paragraphs where the page shows none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Any, BinaryIO, NamedTuple

from tokenization.corpus import Unreadable

DIVIDED = "\ufffe"  # pdfium's mark for a hyphen at the end of a line, whose halves it joins
LEAST_CHARACTERS = 20  # of a page, on average: a scan has none, or only the scanner's mark
EDGE, NEAR = 2, (-2, -1, 1, 2)  # lines of a page that may be its header or footer; pages that may repeat it
INDENT = (0.5, 3.0)  # of a line's height
APART = 1.4  # times the usual distance of lines


class Line(NamedTuple):
    """Places are in points, from the lower left corner of the page."""

    text: str
    left: float
    right: float  # of its last character, as is `last`: the halves of a divided word are in one line here
    first: float  # bottom of its first character
    last: float
    height: float

    @property
    def key(self) -> str:
        return re.sub(r"[\d\s]+", "", self.text)


def pdf_documents(file: BinaryIO) -> Iterator[str]:
    """A PDF is one document."""
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(file) as document:
            pages = [lines_of(page.get_textpage()) for page in document]
    except pypdfium2.PdfiumError as error:
        has_password = "password" in str(error).lower()
        raise Unreadable("it has a password" if has_password else f"it is damaged ({error})") from None
    if sum(len(line.text) for lines in pages for line in lines) < LEAST_CHARACTERS * len(pages):
        raise Unreadable("its pages are pictures (a scan); a program for OCR reads the text out of it")
    yield joined(list(without_edges(pages)))


def lines_of(page: Any) -> list[Line]:
    """In the order of reading, as pdfium finds it."""
    lines, start = [], 0
    for text in page.get_text_range().split("\r\n"):
        if stripped := text.strip():
            first = start + text.index(stripped[0])
            left, bottom, _, top = page.get_charbox(first, loose=True)
            _, last, right, _ = page.get_charbox(first + len(stripped) - 1, loose=True)
            height = max(1.0, top - bottom)
            lines.append(Line(stripped.replace(DIVIDED, ""), left, right, bottom, last, height))
        start += len(text) + len("\r\n")
    return lines


def without_edges(pages: Sequence[list[Line]]) -> Iterator[list[Line]]:
    """The pages without headers and footers: lines at an edge that a page nearby has too, numbers aside."""
    tops = [{line.key for line in lines[:EDGE]} for lines in pages]
    bottoms = [{line.key for line in lines[-EDGE:]} for lines in pages]
    for number, lines in enumerate(pages):
        near = [number + step for step in NEAR if 0 <= number + step < len(pages)]
        top, bottom = (set().union(*(edges[i] for i in near)) for edges in (tops, bottoms))
        yield [
            line
            for i, line in enumerate(lines)
            if not (i < EDGE and line.key in top) and not (i >= len(lines) - EDGE and line.key in bottom)
        ]


def joined(pages: Sequence[list[Line]]) -> str:
    """The text: a blank line before what is indented, set apart or of another size; a line break after a line that is
    shorter than it had to be."""
    apart = [above.last - line.first for lines in pages for above, line in pairwise(lines)]
    apart = [distance for distance in apart if distance > 0]
    usual = quantiles(apart, n=4)[0] if len(apart) > 1 else 0.0
    parts: list[str] = []
    above: Line | None = None
    for lines in pages:
        for line in lines:
            least, most = (share * line.height for share in INDENT)
            beside = [other for other in lines if abs(other.left - line.left) <= most]
            is_new = any(least < line.left - other.left < most for other in beside)
            if above is not None:
                is_new |= above.last - line.first > APART * usual or not 0.8 < above.height / line.height < 1.25
                room = max(other.right for other in beside) - above.right
                word = len(line.text.split()[0]) + 1
                is_short = room > 1.5 * word * (line.right - line.left) / len(line.text)
                parts.append("\n\n" if is_new else "\n" if is_short else " ")
            parts.append(line.text)
            above = line
    return "".join(parts)
