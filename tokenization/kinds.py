"""Recognize the kind of a file by its first bytes. Its name decides only where they do not: tables, LaTeX, Markdown,
Org and plain text."""

from __future__ import annotations

import codecs
import json
import os
import re

PLAIN_SUFFIXES = (".txt", ".md", ".jsonl")
DOCUMENT_SUFFIXES = (".epub", ".docx", ".odt", ".rtf", ".html", ".htm", ".pdf", ".mbox", ".eml", ".srt", ".vtt")
MARKUP_SUFFIXES = (".tex", ".ipynb", ".fb2", ".org", ".rst", ".csv", ".tsv", ".parquet", ".arrow", ".json", ".zip")
TEXT_SUFFIXES = (*PLAIN_SUFFIXES, *DOCUMENT_SUFFIXES, *MARKUP_SUFFIXES)
OTHER_SUFFIXES = {".markdown": ".md", ".docm": ".docx", ".xhtml": ".html", ".tab": ".tsv"}
SNIFFED_BYTES = 4096
UNKNOWN_SUFFIX = "not text, by its name"
UNPACK = "unpack it"
# Unsupported documents, and what to do with them.
ADVICE = {
    (".doc", ".wpd", ".wps", ".pages"): "save it as .docx",
    (".ppt", ".pptx", ".odp", ".key"): "save it as .pdf",
    (".xls", ".xlsx", ".ods", ".numbers"): "save it as .csv",
    (".mobi", ".azw", ".azw3", ".lit"): "convert it to .epub",
    (".djvu", ".ps", ".xps"): "convert it to .pdf",
    (".rar", ".7z", ".tar", ".tgz", ".bz2", ".xz"): UNPACK,
}
SIGNATURES = (  # first bytes, and the kind, or why it is not read
    (rb"%PDF-", ".pdf"),
    (rb"\{\\rtf", ".rtf"),
    (rb"PAR1", ".parquet"),
    (rb"ARROW1|\xff{4}.{8}", ".arrow"),
    (rb"PK\x03\x04.*?mimetypeapplication/epub", ".epub"),
    (rb"PK\x03\x04.*?mimetypeapplication/vnd.oasis.opendocument.text", ".odt"),
    (rb"PK\x03\x04.*?word/", ".docx"),
    (rb"PK\x03\x04.*?(?:xl/|opendocument.spreadsheet)", ".xlsx"),
    (rb"PK\x03\x04.*?(?:ppt/|opendocument.presentation)", ".pptx"),
    (rb"PK\x03\x04.*?collection\.anki", "an Anki deck; export its notes as text"),
    (rb"PK(?:\x03\x04|\x05\x06)", ".zip"),
    (rb"\xd0\xcf\x11\xe0", "it has a password, or an older format than its name says; save it again as .docx"),
    (rb".{60}(?:BOOKMOBI|TEXtREAd)", ".mobi"),
    (rb"Rar!|7z\xbc\xaf|\xfd7zXZ|BZh\d1AY|.{257}ustar", ".7z"),
    (rb"SQLite format 3", "a database; export its texts as .csv"),
)
HEADERS = r"(?:>?[A-Za-z][\w-]*:.*\n(?:[ \t].*\n)*)"
XML_BEGINNING = r"(?is)(?:<\?xml[^>]*>\s*|<!--.*?-->\s*|<!doctype[^>[]*(?:\[.*?\])?\s*>\s*)*"
JSON_BEGINNING = re.compile(r'\{\s*(?:"[^"\n]{1,200}"\s*:|\})|\[\s*(?:\{\s*"|\[?\s*")')
BEGINNINGS = (
    (rf"From .*\n{HEADERS}{{2}}", ".mbox"),
    (rf"(?=(?:.*\n)*?(?:Message-ID|MIME-Version|Received):){HEADERS}{{3}}", ".eml"),
    (r"WEBVTT\b", ".vtt"),
    (r"(?:\d+\s*\n)?\s*\d+:\d+:\d+[,.]\d+\s*-->", ".srt"),
    (r"(?:%.*\n|\s)*\\documentclass\b", ".tex"),
    (r"(?is)(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(?:!doctype html|html)\b", ".html"),
    (rf"{XML_BEGINNING}<FictionBook\b", ".fb2"),
    (r'<doc id="', ".txt"),  # WikiExtractor's
    (rf"{XML_BEGINNING}<mediawiki\b", "an XML dump of MediaWiki; extract its articles with WikiExtractor"),
    (rf"{XML_BEGINNING}<en-export\b", "an export of Evernote; export it as HTML"),
    (r"window\.(?:YTD|__THAR)", "a program in JavaScript with an export of X (Twitter); extract its texts as .jsonl"),
    (r"// <!-- <mdb:mork", "an index of a mailbox, without its mails"),
    (r"\[Script Info\]", "subtitles in .ass; convert them to .srt"),
    (r"BEGIN:V(?:CARD|CALENDAR)", "contacts or a calendar"),
)


def recognize(beginning: bytes, name: str) -> tuple[str, str]:
    """Return (kind, refusal). The kind is the suffix of such files, "" for text of an unknown kind. The refusal says
    why a file is not read, and what to do.

    `name`: the unpacked file's.
    """
    suffix = os.path.splitext(name.lower())[1]
    suffix = OTHER_SUFFIXES.get(suffix, suffix)
    known = suffix if suffix in TEXT_SUFFIXES else ""
    text = _decode_beginning(beginning)
    kind = next((kind for signature, kind in SIGNATURES if re.match(signature, beginning, re.S)), "")
    if kind == ".zip" and suffix != kind:  # a document whose parts are in another order
        kind = known if suffix in (".epub", ".docx", ".odt") else suffix if _advise(suffix) else kind
    elif not kind and JSON_BEGINNING.match(text):
        kind = suffix if suffix in (".json", ".jsonl", ".ipynb") else _choose_json(text)
    kind = kind or next((kind for pattern, kind in BEGINNINGS if re.match(pattern, text)), "")
    root = re.match(rf"{XML_BEGINNING}<([a-z][\w:.-]*)", text)
    if not kind and root and (text.startswith("<?xml") or suffix == ".xml"):
        kind = f"XML (<{root[1]}>), whose meaning is not known; extract its texts as .txt or .jsonl"
    if kind and not kind.startswith("."):
        return "", kind
    kind = kind or suffix
    return (kind, "") if kind in TEXT_SUFFIXES else ("", _advise(kind))


def _advise(suffix: str) -> str:
    return next((advice for suffixes, advice in ADVICE.items() if suffix in suffixes), "")


def _decode_beginning(beginning: bytes) -> str:
    is_utf16 = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = beginning.decode("utf-16" if is_utf16 else "utf-8", "ignore")
    return text.lstrip("\ufeff \t\r\n").replace("\r\n", "\n")


def _choose_json(text: str) -> str:
    """Return whether a file with this beginning has one object per line, or other JSON."""
    try:
        return ".jsonl" if isinstance(json.loads(text.split("\n", 1)[0]), dict) else ".json"
    except (ValueError, RecursionError):
        return ".json" if "\n" in text or text.startswith("[") else ".jsonl"


def holds_prose(beginning: bytes) -> bool:
    """Return whether a file begins with text in UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning)  # the last character may be incomplete
    except UnicodeDecodeError:
        return False
    return bool(text.strip()) and "\0" not in text
