"""Clean plain text: subtitles, Markdown notes (Obsidian's), books of Project Gutenberg, and WhatsApp's chat exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from tokenization.encodings import decode
from tokenization.settings import DOCUMENT_SEPARATOR

# Subtitles

CUE_TIMES = re.compile(r"^\s*(\d+:)?\d+:\d+[,.]\d+\s*-->")
CUE_MARKUP = re.compile(r"<[^>\n]*>|\{\\[^}\n]*\}")


def read_subtitles(file: BinaryIO) -> Iterator[str]:
    """Yield the text of the cues of .srt and .vtt files, without consecutive repeats."""
    cues: list[str] = []
    text = decode(file.read()).replace("\r\n", "\n").replace("\r", "\n")
    for block in re.split(r"\n[ \t]*\n", text):
        lines = block.split("\n")
        times = next((number for number, line in enumerate(lines) if CUE_TIMES.match(line)), None)
        if times is None:  # header, style or note
            continue
        said = "\n".join(filter(None, (CUE_MARKUP.sub("", line).strip() for line in lines[times + 1 :])))
        if said and said not in cues[-1:]:
            cues.append(said)
    yield "\n".join(cues)


# Cleaners of .txt and .md files

FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?=[\w-]+[ \t]*:).*?\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S)
OBSIDIAN_MARKUP = re.compile(
    r"^%%[ \t]*\n.*?\n%%[ \t]*$"  # comment of several lines
    r"|%%[^%\n]+%%"
    r"|^```(?:dataview|dataviewjs|tasks|query)\b.*?^```[ \t]*$"
    r"|!\[\[[^\]\n]*\]\]"  # embedded file
    r"|[ \t]+\^(?=[\w-]*[A-Za-z])[\w-]{2,}$",  # name of a paragraph
    re.S | re.M,
)
LINK = re.compile(r"\[\[(?!\s)(?:[^\]|\n]*\|)?([^\]|\n]+)\]\]")

GUTENBERG = re.compile(r"^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*\*\*[ \t]*$", re.M | re.S)
GUTENBERG_END = re.compile(r"^(?:\*\*\* ?END OF (?:THE|THIS)|End of (?:the )?)\s?PROJECT GUTENBERG", re.M | re.I)
SEPARATOR_LINE = f"\n{DOCUMENT_SEPARATOR}\n"
MIN_PROSE_LINE = 50  # median characters per line; prose is broken at about 72

DATE, TIME = r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}", r"\d{1,2}[:.]\d\d(?:[:.]\d\d)?(?:\s?[AaPp]\.?[Mm]\.?)?"
WHATSAPP = re.compile(rf"[\u200e\u200f]*\[?{DATE},? {TIME}(?:\]| -) ")
WRITER = re.compile(r"([^:\n]{1,60}): ")
SYSTEM_MESSAGE = re.compile(
    r"<[^<>]*>|(?:\w+ )?\w+ omitted|(?:This message was|You) deleted(?: this message)?\.?", re.I
)


def choose_cleaner(beginning: str, suffix: str) -> tuple[Callable[[str], str], str] | None:
    """Return the cleaner for a text with this beginning, and its description; None if it needs none."""
    if suffix == ".md":
        return clean_markdown, "without front matter, comments and the marks of links"
    if GUTENBERG.search(beginning):
        return clean_gutenberg, "without Project Gutenberg's licence and line breaks inside paragraphs"
    lines = [line for line in beginning.split("\n") if line.strip()]
    if len(lines) > 4 and sum(bool(WHATSAPP.match(line)) for line in lines) > len(lines) / 2:
        return clean_whatsapp, "WhatsApp chat, without dates"
    return None


def clean_markdown(text: str) -> str:
    return LINK.sub(r"\1", OBSIDIAN_MARKUP.sub("", FRONT_MATTER.sub("", text)))


def clean_gutenberg(text: str) -> str:
    """Clean the books in a file, which may hold several, and other documents."""
    return SEPARATOR_LINE.join(book for document in text.split(SEPARATOR_LINE) for book in split_books(document))


def split_books(document: str) -> Iterator[str]:
    start = GUTENBERG.search(document)
    if start is None:
        yield document
    while start:
        end = GUTENBERG_END.search(document, start.end())
        own = document[start.end() : end.start() if end else None].strip()
        yield "\n\n".join(map(unwrap, re.split(r"\n(?:[ \t]*\n)+", own))) + "\n"
        start = GUTENBERG.search(document, end.end()) if end else None


def unwrap(paragraph: str) -> str:
    """Join the lines of a paragraph of prose. Verse has shorter or indented lines, or ones that begin with a
    capital."""
    lines = paragraph.split("\n")
    lengths = sorted(map(len, lines[:-1])) or [0]
    capitals = sum(line[:1].isupper() for line in lines)
    is_verse = any(line.startswith("  ") for line in lines) or (len(lines) > 2 and capitals > 0.8 * len(lines))
    return (
        paragraph
        if lengths[len(lengths) // 2] < MIN_PROSE_LINE or is_verse
        else " ".join(line.strip() for line in lines)
    )


def clean_whatsapp(text: str) -> str:
    said: list[str] = []
    for line in text.split("\n"):
        if match := WHATSAPP.match(line):
            writer = WRITER.match(line, match.end())  # None for notices, such as joining
            words = line[writer.end() :].strip("\u200e\u200f ") if writer else ""
            is_said = writer is not None and words and not SYSTEM_MESSAGE.fullmatch(words)
            said.append(f"{writer[1].strip()}: {words}" if writer and is_said else "")
        elif said and said[-1] and line.strip():  # continues the message
            said[-1] += f"\n{line.strip()}"
    return "\n".join(filter(None, said)) + "\n"
