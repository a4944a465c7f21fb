"""Extract the text of PDF files: join lines into paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, BinaryIO, NamedTuple

from tokenization.corpus import UnreadableError

HYPHEN_MARK = "\ufffe"  # pdfium's mark for a hyphen at a line end, where it joins the halves
MIN_CHARACTERS_PER_PAGE = 20  # a scan has none, or only the scanner's mark
EDGE_LINES = 2  # lines of a page that may be its header or footer
JUDGED_LINES = 10  # at the top of a page, which show whether it has columns
NEARBY_PAGES = (-2, -1, 1, 2)  # offsets of pages that may repeat it
INDENT_RANGE = (0.5, 3.0)  # relative to the height of a line
PARAGRAPH_DISTANCE = 1.4  # relative to the usual distance of lines


class Line(NamedTuple):
    """A line of a page. Positions are in points, from the lower left corner."""

    text: str
    left: float
    right: float  # right edge of its last character, which may be in the next line of the page (a divided word)
    first: float  # bottom of its first character
    last: float  # bottom of its last character
    height: float

    @property
    def key(self) -> str:
        return re.sub(r"[\d\s]+", "", self.text)


def read_pdf(file: BinaryIO) -> Iterator[str]:
    """Yield a PDF as one document."""
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(file) as document:
            pages = [read_lines(page.get_textpage()) for page in document]
    except pypdfium2.PdfiumError as error:
        has_password = "password" in str(error).lower()
        raise UnreadableError("it has a password" if has_password else f"it is damaged ({error})") from None
    if sum(len(line.text) for lines in pages for line in lines) < MIN_CHARACTERS_PER_PAGE * len(pages):
        raise UnreadableError("its pages are pictures (a scan); use an OCR program first")
    yield _join_lines(list(_remove_edges(pages)))


def read_lines(page: Any) -> list[Line]:
    """Return the lines of a page in reading order, as pdfium finds it, but one column after the other."""
    spans, start = [], 0  # (index of its first character, text)
    for text in page.get_text_range().split("\r\n"):
        if stripped := text.strip():
            spans.append((start + text.index(stripped[0]), stripped))
        start += len(text) + len("\r\n")
    return [_measure_line(page, first, text) for first, text in _split_columns(page, spans)]


def _measure_line(page: Any, first: int, text: str) -> Line:
    left, bottom, _, top = page.get_charbox(first, loose=True)
    _, last, right, _ = page.get_charbox(first + len(text) - 1, loose=True)
    return Line(text.replace(HYPHEN_MARK, ""), left, right, bottom, last, max(1.0, top - bottom))


def _split_columns(page: Any, spans: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the lines of a page, those of the right column last if most lines go across both, which begin at one
    place."""
    if sum(bool(_find_gap(page, *span)) for span in spans[:JUDGED_LINES]) <= min(JUDGED_LINES, len(spans)) / 2:
        return spans
    gaps = [_find_gap(page, *span) for span in spans]
    places = [page.get_charbox(first + gap)[0] for (first, _), gap in zip(spans, gaps, strict=True) if gap]
    gutter = median(places) - 1
    if sum(abs(place - gutter) < 3 for place in places) < len(spans) / 2:
        return spans
    left, right = [], []
    for (first, text), gap in zip(spans, gaps, strict=True):
        if gap:
            left.append((first, text[:gap].rstrip()))
            right.append((first + gap, text[gap:]))
        else:
            (right if page.get_charbox(first)[0] >= gutter else left).append((first, text))
    return left + right


def _find_gap(page: Any, first: int, text: str) -> int:
    """Return the index of the text after a space that is wider than the line is high; 0 if there is none."""
    for space in (place for place, letter in enumerate(text) if letter == " "):
        _, bottom, end, top = page.get_charbox(first + space - 1, loose=True)
        if page.get_charbox(first + space + 1, loose=True)[0] - end > top - bottom:
            return space + 1
    return 0


def _remove_edges(pages: Sequence[list[Line]]) -> Iterator[list[Line]]:
    """Yield the pages without headers and footers: edge lines that a nearby page has too, except for numbers."""
    tops = [{line.key for line in lines[:EDGE_LINES]} for lines in pages]
    bottoms = [{line.key for line in lines[-EDGE_LINES:]} for lines in pages]
    for number, lines in enumerate(pages):
        near = [number + step for step in NEARBY_PAGES if 0 <= number + step < len(pages)]
        top, bottom = (set().union(*(edges[i] for i in near)) for edges in (tops, bottoms))
        yield [
            line
            for i, line in enumerate(lines)
            if not (i < EDGE_LINES and line.key in top) and not (i >= len(lines) - EDGE_LINES and line.key in bottom)
        ]


def _join_lines(pages: Sequence[list[Line]]) -> str:
    """Join lines into text, with a blank line before one that is indented, set apart or of another size, and a line
    break after one that is shorter than it had to be."""
    apart = [above.last - line.first for lines in pages for above, line in pairwise(lines)]
    apart = [distance for distance in apart if distance > 0]
    usual = quantiles(apart, n=4)[0] if len(apart) > 1 else 0.0
    parts: list[str] = []
    above: Line | None = None
    for lines in pages:
        for line in lines:
            smallest, largest = (share * line.height for share in INDENT_RANGE)
            beside = [neighbour for neighbour in lines if abs(neighbour.left - line.left) <= largest]
            is_new = any(smallest < line.left - neighbour.left < largest for neighbour in beside)
            if above is not None:
                is_new |= (
                    above.last - line.first > PARAGRAPH_DISTANCE * usual or not 0.8 < above.height / line.height < 1.25
                )
                room = max(neighbour.right for neighbour in beside) - above.right
                word = len(line.text.split()[0]) + 1
                is_short = room > 1.5 * word * (line.right - line.left) / len(line.text)
                parts.append("\n\n" if is_new else "\n" if is_short else " ")
            parts.append(line.text)
            above = line
    return "".join(parts)
