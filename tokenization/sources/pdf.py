"""Text of PDF files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from tokenization.sources.archives import Unreadable

DIVIDED = "\x02"
LEAST_CHARACTERS = 20  # of a page, on average: a scan has none, or only the scanner's mark


def pdf_documents(file: BinaryIO) -> Iterator[str]:
    """A PDF is one document."""
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(file) as document:
            pages = [page.get_textpage().get_text_bounded() for page in document]
    except pypdfium2.PdfiumError as error:
        has_password = "password" in str(error).lower()
        raise Unreadable("it has a password" if has_password else f"it is damaged ({error})") from None
    text = "\n".join(page.replace("\r\n", "\n").strip() for page in pages)
    if len(text) < LEAST_CHARACTERS * len(pages):
        raise Unreadable("its pages are pictures (a scan); a program for OCR reads the text out of it")
    yield joined(text)


def joined(text: str) -> str:
    """The text without the line breaks within its sentences. pdfium joins divided words and leaves a mark."""
    return re.sub(r"\n(?=[^\W\d_A-Z])", " ", text.replace(DIVIDED, ""))
