"""Text of EPUB, Word, OpenDocument, RTF and HTML files."""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from tokenization.corpus import Unreadable
from tokenization.sources.archives import opened, read_member

HIDDEN = {"head", "script", "style", "nav", "svg"}  # elements whose text nobody reads
NOTES = ("noteref", "doc-noteref", "doc-backlink")  # marks of notes, and the way back
BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "section", "table"}
BREAK = "\x1e"  # a line break of the layout; those within <pre> belong to the text
WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # the same text for old programs
BREAKS = {f"{WORD}tab": "\t", f"{WORD}br": "\n", f"{WORD}cr": "\n"}
OF_ODT = {"tab": "\t", "line-break": "\n", "s": " "}


class TextOfHTML(HTMLParser):
    """Collects the text of a page: a blank line between blocks, one space for white space, except in <pre>."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = self.preformatted = 0
        self.note = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in HIDDEN
        self.preformatted += tag == "pre"
        self.note = tag == "a" and any(key in ("epub:type", "role") and value in NOTES for key, value in attrs)
        self.parts.append(BREAK if tag == "br" else 2 * BREAK if tag in BLOCKS else "")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.parts.append(BREAK if tag == "br" else "")  # in XHTML <script/> and <p/> are empty

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in HIDDEN))
        self.preformatted = max(0, self.preformatted - (tag == "pre"))
        self.note = False
        self.parts.append(2 * BREAK if tag in BLOCKS else "")

    def handle_data(self, data: str) -> None:
        if not self.hidden and not self.note:
            self.parts.append(data if self.preformatted else re.sub(r"[ \t\r\n]+", " ", data))

    @property
    def text(self) -> str:
        spaced = re.sub(f" *{BREAK} *", BREAK, "".join(self.parts))
        return re.sub(f"{BREAK}{{3,}}", 2 * BREAK, spaced).replace(BREAK, "\n").strip()


def text_of_html(page: str) -> str:
    parser = TextOfHTML()
    parser.feed(page)
    parser.close()
    return parser.text


def epub_documents(file: BinaryIO) -> Iterator[str]:
    """A book is one document: the parts of its spine, in order, without its table of contents."""
    with opened(file) as book:
        root = parsed(book, "META-INF/container.xml").find(".//{*}rootfile")
        package_name = "" if root is None else root.get("full-path", "")
        package = parsed(book, package_name)
        contents = {item.get("href") for item in package.iterfind("{*}guide/{*}reference[@type='toc']")}
        names = {
            item.get("id"): unquote(item.get("href", ""))
            for item in package.iterfind("{*}manifest/{*}item")
            if "nav" not in item.get("properties", "").split() and item.get("href") not in contents
        }
        order = [item.get("idref") for item in package.iterfind("{*}spine/{*}itemref")]
        spine = [names[part] for part in order if part in names]
        if not spine:
            raise Unreadable("it has no spine, so the order of its parts is unknown")
        folder = posixpath.dirname(package_name)
        pages = (read_member(book, posixpath.normpath(posixpath.join(folder, name))) for name in spine)
        yield "\n\n".join(filter(None, (text_of_html(page.decode(errors="replace")) for page in pages)))


def parsed(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(read_member(archive, name))
    except ElementTree.ParseError as error:
        raise Unreadable(f"its part {name} is not XML ({error})") from None


def docx_documents(file: BinaryIO) -> Iterator[str]:
    """The paragraphs; those of a text box stand for themselves, once."""
    unfinished: list[list[str]] = []
    done: list[str] = []
    skipped = 0
    with opened(file) as archive, io.BytesIO(read_member(archive, "word/document.xml")) as content:
        try:
            for event, element in ElementTree.iterparse(content, ("start", "end")):
                if element.tag == FALLBACK:
                    skipped += 1 if event == "start" else -1
                elif skipped:
                    continue
                elif element.tag == f"{WORD}p" and event == "start":
                    unfinished.append([])
                elif element.tag == f"{WORD}p":
                    done.append("".join(unfinished.pop()))
                elif event == "end" and unfinished:
                    is_text = element.tag == f"{WORD}t"
                    unfinished[-1].append(element.text or "" if is_text else BREAKS.get(element.tag, ""))
        except ElementTree.ParseError as error:
            raise Unreadable(f"its part word/document.xml is not XML ({error})") from None
    yield "\n\n".join(filter(str.strip, done))


def odt_documents(file: BinaryIO) -> Iterator[str]:
    with opened(file) as archive:
        body = parsed(archive, "content.xml").find(".//{*}body")
    text = "" if body is None else "".join(text_of_odt(body))
    yield re.sub(r"\n{3,}", "\n\n", re.sub(r" *\n *", "\n", text)).strip()


def text_of_odt(element: ElementTree.Element) -> Iterator[str]:
    """Without notes and comments. White space counts once, except where an element says how often."""
    yield re.sub(r"\s+", " ", element.text or "")
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag in OF_ODT:
            count = next((int(value) for key, value in child.attrib.items() if key.endswith("}c")), 1)
            yield OF_ODT[tag] * count
        elif tag not in ("note", "annotation", "tracked-changes"):
            yield from text_of_odt(child)
        yield ("\n\n" if tag in ("p", "h") else "") + re.sub(r"\s+", " ", child.tail or "")


def rtf_documents(file: BinaryIO) -> Iterator[str]:
    from striprtf.striprtf import rtf_to_text

    text: str = rtf_to_text(file.read().decode("cp1252", "replace"), errors="replace")  # type: ignore[no-untyped-call]
    yield text.strip()


def html_documents(file: BinaryIO) -> Iterator[str]:
    """The main text of a saved page, without menus and footers."""
    import trafilatura

    yield trafilatura.extract(file.read(), include_comments=False) or ""
