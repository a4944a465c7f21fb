"""Extract the text of EPUB and HTML files."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from tokenization.corpus import UnreadableError
from tokenization.encodings import decode
from tokenization.sources.archives import open_zip, read_member

HIDDEN_ELEMENTS = {"head", "script", "style", "nav", "svg"}  # elements with invisible text
NOTE_MARKS = ("noteref", "doc-noteref", "doc-backlink")  # links to notes, and back
BLOCK_ELEMENTS = re.compile(
    "address|article|aside|blockquote|dd|div|dl|dt|figcaption|figure|footer|h[1-6r]|header|li|main|ol|p|pre|section|"
    "table|tr|ul"
)
READINGS = ("rt", "rp")  # furigana; their end tags may be missing
MIN_PROSE, MAX_MISSING = 60, 1 / 3  # characters of a paragraph; share of these that a page's main text may lack
BREAK = "\x1e"  # a line break of the layout, unlike those in <pre>
# Encryption of embedded fonts. The text of such a book is not encrypted.
FONT_ENCRYPTION = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
DECLARED_ENCODING = re.compile(rb"""<(?:\?xml|meta)\s[^>]*?(?:encoding|charset)\s*=\s*["']?\s*([\w.:-]+)""", re.I)


class HTMLText(HTMLParser):
    """Collects the text of a page, with a blank line between blocks, and one space for white space except in <pre>."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = self.preformatted = 0
        self.note = self.reading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in HIDDEN_ELEMENTS
        self.preformatted += tag == "pre"
        self.reading = tag in READINGS
        self.note = tag == "a" and any(key in ("epub:type", "role") and value in NOTE_MARKS for key, value in attrs)
        self.parts.append(BREAK if tag == "br" else 2 * BREAK if BLOCK_ELEMENTS.fullmatch(tag) else "")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.parts.append(BREAK if tag == "br" else "")  # <script/> and <p/> are empty in XHTML

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in HIDDEN_ELEMENTS))
        self.preformatted = max(0, self.preformatted - (tag == "pre"))
        self.note = False
        self.reading = self.reading and tag not in (*READINGS, "ruby")
        self.parts.append("\t" if tag in ("td", "th") else 2 * BREAK if BLOCK_ELEMENTS.fullmatch(tag) else "")

    def handle_data(self, data: str) -> None:
        if not (self.hidden or self.note or self.reading):
            self.parts.append(data if self.preformatted else re.sub(r"[ \t\r\n]+", " ", data))

    @property
    def text(self) -> str:
        spaced = re.sub(f"[ \\t]*{BREAK}[ \\t]*", BREAK, "".join(self.parts))
        return re.sub(f"{BREAK}{{3,}}", 2 * BREAK, spaced).replace(BREAK, "\n").strip()


def html_to_text(page: str) -> str:
    parser = HTMLText()
    parser.feed(page)
    parser.close()
    return parser.text


def read_epub(file: BinaryIO) -> Iterator[str]:
    """Yield a book as one document: the parts of its spine, in order, without its table of contents."""
    with open_zip(file) as book:
        root = _parse_xml(book, "META-INF/container.xml").find(".//{*}rootfile")
        package_name = "" if root is None else root.get("full-path", "")
        package = _parse_xml(book, package_name)
        contents = {item.get("href") for item in package.iterfind("{*}guide/{*}reference[@type='toc']")}
        names = {
            item.get("id"): unquote(item.get("href", ""))
            for item in package.iterfind("{*}manifest/{*}item")
            if "nav" not in item.get("properties", "").split() and item.get("href") not in contents
        }
        order = [item.get("idref") for item in package.iterfind("{*}spine/{*}itemref")]
        spine = [names[part] for part in order if part in names]
        if not spine:
            raise UnreadableError("it has no spine, which gives the order of its parts")
        folder = posixpath.dirname(package_name)
        paths = [posixpath.normpath(posixpath.join(folder, name)) for name in spine]
        if _find_encrypted_parts(book) & set(paths):
            raise UnreadableError("it is copy-protected (DRM)")
        entries = set(book.namelist())  # cover pages may be missing
        pages = (_decode_page(read_member(book, path)) for path in paths if path in entries)
        yield "\n\n".join(filter(None, map(html_to_text, pages)))


def _find_encrypted_parts(book: zipfile.ZipFile) -> set[str]:
    """Return the parts that only the shop's own reader can decrypt."""
    if "META-INF/encryption.xml" not in book.namelist():
        return set()
    parts = set()
    for entry in _parse_xml(book, "META-INF/encryption.xml").iterfind(".//{*}EncryptedData"):
        method, reference = entry.find("{*}EncryptionMethod"), entry.find(".//{*}CipherReference")
        if reference is not None and (method is None or method.get("Algorithm") not in FONT_ENCRYPTION):
            parts.add(unquote(reference.get("URI", "")).lstrip("/"))
    return parts


def _decode_page(page: bytes) -> str:
    declared = DECLARED_ENCODING.search(page[:2048])
    return decode(page, declared[1].decode("ascii") if declared else "")


def _parse_xml(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(read_member(archive, name))
    except ElementTree.ParseError as error:
        raise UnreadableError(f"its part {name} is not XML ({error})") from None


def read_html(file: BinaryIO) -> Iterator[str]:
    """Yield the main text of a saved page, without menus and footers; all of it if that lacks many of its paragraphs,
    such as the posts of a forum."""
    import trafilatura

    page = file.read()
    main, whole = trafilatura.extract(page, include_comments=False) or "", html_to_text(_decode_page(page))
    main = re.sub(r"[ \t]+$", "", main, flags=re.M)
    paragraphs = [text for text in whole.split("\n\n") if len(text) >= MIN_PROSE]
    known = squeeze(main)
    missing = sum(len(text) for text in paragraphs if squeeze(text)[: MIN_PROSE // 2] not in known)
    yield whole if missing > MAX_MISSING * sum(map(len, paragraphs)) else main


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)
