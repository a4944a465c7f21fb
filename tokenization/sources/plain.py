"""Plain text that carries something else: subtitles, Markdown of a notebook like Obsidian's, books of Project
Gutenberg, and chats that WhatsApp has exported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from tokenization.encodings import decoded
from tokenization.settings import DOCUMENT_SEPARATOR

# Subtitles

CUE_TIMES = re.compile(r"^\s*(\d+:)?\d+:\d+[,.]\d+\s*-->")
CUE_MARKUP = re.compile(r"<[^>\n]*>|\{\\[^}\n]*\}")


def subtitle_documents(file: BinaryIO) -> Iterator[str]:
    """The text of the cues of .srt and .vtt files, a cue a paragraph of its own lines; one that is repeated counts
    once."""
    cues: list[str] = []
    text = decoded(file.read()).replace("\r\n", "\n").replace("\r", "\n")
    for block in re.split(r"\n[ \t]*\n", text):
        lines = block.split("\n")
        times = next((number for number, line in enumerate(lines) if CUE_TIMES.match(line)), None)
        if times is None:  # the header, a style or a note
            continue
        said = "\n".join(filter(None, (CUE_MARKUP.sub("", line).strip() for line in lines[times + 1 :])))
        if said and said not in cues[-1:]:
            cues.append(said)
    yield "\n".join(cues)


# What is taken out of .txt and .md files

FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?=[\w-]+[ \t]*:).*?\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S)
OF_OBSIDIAN = re.compile(
    r"^%%[ \t]*\n.*?\n%%[ \t]*$"  # a comment of several lines
    r"|%%[^%\n]+%%"
    r"|^```(?:dataview|dataviewjs|tasks|query)\b.*?^```[ \t]*$"
    r"|!\[\[[^\]\n]*\]\]"  # something that is shown here
    r"|[ \t]+\^(?=[\w-]*[A-Za-z])[\w-]{2,}$",  # the name of a paragraph
    re.S | re.M,
)
LINK = re.compile(r"\[\[(?!\s)(?:[^\]|\n]*\|)?([^\]|\n]+)\]\]")

GUTENBERG = re.compile(r"^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*\*\*[ \t]*$", re.M | re.S)
GUTENBERG_END = re.compile(r"^(?:\*\*\* ?END OF (?:THE|THIS)|End of (?:the )?)\s?PROJECT GUTENBERG", re.M | re.I)
SEPARATOR = f"\n{DOCUMENT_SEPARATOR}\n"
FULL = 50  # characters of a line of prose, which is broken at about 72 there

DATE, TIME = r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}", r"\d{1,2}[:.]\d\d(?:[:.]\d\d)?(?:\s?[AaPp]\.?[Mm]\.?)?"
WHATSAPP = re.compile(rf"[\u200e\u200f]*\[?{DATE},? {TIME}(?:\]| -) ")
WRITER = re.compile(r"([^:\n]{1,60}): ")
NOT_SAID = re.compile(r"<[^<>]*>|(?:\w+ )?\w+ omitted|(?:This message was|You) deleted(?: this message)?\.?", re.I)


def cleaner_of(beginning: str, suffix: str) -> tuple[Callable[[str], str], str] | None:
    """Return what takes out of a text that begins so what is not its own, and its description; None if nothing has
    to."""
    if suffix == ".md":
        return markdown_text, "without front matter, comments and the marks of links"
    if GUTENBERG.search(beginning):
        return gutenberg_text, "without the licence of Project Gutenberg and the line breaks in its paragraphs"
    lines = [line for line in beginning.split("\n") if line.strip()]
    if len(lines) > 4 and sum(bool(WHATSAPP.match(line)) for line in lines) > len(lines) / 2:
        return whatsapp_text, "a chat of WhatsApp, without dates"
    return None


def markdown_text(text: str) -> str:
    return LINK.sub(r"\1", OF_OBSIDIAN.sub("", FRONT_MATTER.sub("", text)))


def gutenberg_text(text: str) -> str:
    """A file may hold several books, and other documents beside them."""
    return SEPARATOR.join(book for document in text.split(SEPARATOR) for book in books_in(document))


def books_in(document: str) -> Iterator[str]:
    start = GUTENBERG.search(document)
    if start is None:
        yield document
    while start:
        end = GUTENBERG_END.search(document, start.end())
        own = document[start.end() : end.start() if end else None].strip()
        yield "\n\n".join(map(unwrapped, re.split(r"\n(?:[ \t]*\n)+", own))) + "\n"
        start = GUTENBERG.search(document, end.end()) if end else None


def unwrapped(paragraph: str) -> str:
    """Join the lines of a paragraph of prose. Lines of verse are shorter, indented, or begin with a capital letter."""
    lines = paragraph.split("\n")
    lengths = sorted(map(len, lines[:-1])) or [0]
    capitals = sum(line[:1].isupper() for line in lines)
    is_verse = any(line.startswith("  ") for line in lines) or (len(lines) > 2 and capitals > 0.8 * len(lines))
    return paragraph if lengths[len(lengths) // 2] < FULL or is_verse else " ".join(line.strip() for line in lines)


def whatsapp_text(text: str) -> str:
    said: list[str] = []
    for line in text.split("\n"):
        if match := WHATSAPP.match(line):
            writer = WRITER.match(line, match.end())  # else somebody joined, say
            words = line[writer.end() :].strip("\u200e\u200f ") if writer else ""
            is_said = writer is not None and words and not NOT_SAID.fullmatch(words)
            said.append(f"{writer[1].strip()}: {words}" if writer and is_said else "")
        elif said and said[-1] and line.strip():  # the message goes on
            said[-1] += f"\n{line.strip()}"
    return "\n".join(filter(None, said)) + "\n"
