"""Text of EPUB, Word and HTML files."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from tokenization.sources.archives import Unreadable, opened, read_member

HIDDEN = {"head", "script", "style", "nav", "svg"}  # elements whose text nobody reads
BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "section", "table"}
BREAK = "\x1e"  # a line break of the layout; those within <pre> belong to the text
WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
BREAKS = {f"{WORD}tab": "\t", f"{WORD}br": "\n", f"{WORD}cr": "\n"}


class TextOfHTML(HTMLParser):
    """Collects the text of a book's part: a blank line between blocks, one space for white space, except in <pre>."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in HIDDEN
        self.preformatted += tag == "pre"
        self.parts.append(BREAK if tag == "br" else 2 * BREAK if tag in BLOCKS else "")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.parts.append(BREAK if tag == "br" else "")  # in XHTML <script/> and <p/> are empty

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in HIDDEN))
        self.preformatted = max(0, self.preformatted - (tag == "pre"))
        self.parts.append(2 * BREAK if tag in BLOCKS else "")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.preformatted else re.sub(r"[ \t\r\n]+", " ", data))

    @property
    def text(self) -> str:
        spaced = re.sub(f" *{BREAK} *", BREAK, "".join(self.parts))
        return re.sub(f"{BREAK}{{3,}}", 2 * BREAK, spaced).replace(BREAK, "\n").strip()


def epub_documents(file: BinaryIO, size: int) -> Iterator[str]:
    """A book is one document: the parts of its spine, in order."""
    with opened(file, size) as book:
        root = parsed(book, "META-INF/container.xml").find(".//{*}rootfile")
        package_name = "" if root is None else root.get("full-path", "")
        package = parsed(book, package_name)
        names = {item.get("id"): unquote(item.get("href", "")) for item in package.iterfind("{*}manifest/{*}item")}
        spine = [names.get(part.get("idref"), "") for part in package.iterfind("{*}spine/{*}itemref")]
        if not spine:
            raise Unreadable("it has no spine, so the order of its parts is unknown")
        folder = posixpath.dirname(package_name)
        parts = []
        for name in spine:
            parser = TextOfHTML()
            parser.feed(read_member(book, posixpath.normpath(posixpath.join(folder, name))).decode(errors="replace"))
            parser.close()
            parts.append(parser.text)
    yield "\n\n".join(filter(None, parts))


def docx_documents(file: BinaryIO, size: int) -> Iterator[str]:
    with opened(file, size) as document:
        body = parsed(document, "word/document.xml")
    paragraphs = ("".join(map(text_of_run, paragraph.iter())) for paragraph in body.iter(f"{WORD}p"))
    yield "\n\n".join(filter(str.strip, paragraphs))


def text_of_run(element: ElementTree.Element) -> str:
    return element.text or "" if element.tag == f"{WORD}t" else BREAKS.get(element.tag, "")


def parsed(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(read_member(archive, name))
    except ElementTree.ParseError as error:
        raise Unreadable(f"its part {name} is not XML ({error})") from None


def html_documents(file: BinaryIO) -> Iterator[str]:
    """The main text of a saved page, without menus and footers."""
    import trafilatura

    yield trafilatura.extract(file.read(), include_comments=False) or ""
