"""Clean plain text: subtitles, Markdown notes (Obsidian's), books of Project Gutenberg and Aozora Bunko, articles of
Wikipedia, and WhatsApp's chat exports."""

from __future__ import annotations

import functools
import html
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from tokenization.encodings import decode
from tokenization.examine import LIGATURES, MOJIBAKE
from tokenization.settings import DOCUMENT_SEPARATOR

# Subtitles

CUE_TIMES = re.compile(r"^\s*(\d+:)?\d+:\d+[,.]\d+\s*-->")
CUE_MARKUP = re.compile(r"<[^>\n]*>|\{\\[^}\n]*\}")


def read_subtitles(file: BinaryIO) -> Iterator[str]:
    """Yield the text of the cues of .srt and .vtt files. A cue repeats lines of the one before while they scroll."""
    texts: list[str] = []
    before: list[str] = []
    text = decode(file.read()).replace("\r\n", "\n").replace("\r", "\n")
    for block in re.split(r"\n[ \t]*\n", text):
        lines = block.split("\n")
        times = next((number for number, line in enumerate(lines) if CUE_TIMES.match(line)), None)
        if times is None:  # header, style or note
            continue
        cue = [words for line in lines[times + 1 :] if (words := html.unescape(CUE_MARKUP.sub("", line)).strip())]
        texts += cue[max(size for size in range(len(cue) + 1) if cue[:size] == before[len(before) - size :]) :]
        before = cue or before
    yield "\n".join(texts)


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
# Aozora Bunko: the key to the marks, readings and notes on layout, and the colophon.
AOZORA = re.compile(
    r"^-{9,}\n【テキスト中に現れる記号について】.*?^-{9,}\n|《[^》\n]*》|［＃[^］\n]*］|｜|^底本：.*\Z", re.M | re.S
)
ARTICLE = re.compile(r"^<doc id=[^>\n]*>\n|\n*^</doc>\n*", re.M)  # WikiExtractor's
SEPARATOR_LINE = f"\n{DOCUMENT_SEPARATOR}\n"
MIN_FLAWS = 3  # in the beginning of a text, which is repaired then
MIN_PROSE_LINE = 50  # median characters per line; prose is broken at about 72

# A date, a time and a dash or bracket, with the words of any language between them.
TIME = r"\d{1,2}[:.]\d\d(?:[:.]\d\d)?[^:\n]{0,12}?(?:\]| [-–]) "
WHATSAPP = re.compile(rf"[\u200e\u200f]*\[?\d{{1,4}}\D{{1,3}}\d{{1,2}}\D{{1,3}}\d{{1,4}}\D{{1,12}}{TIME}")
WRITER = re.compile(r"([^:\n]{1,60}): ")
SYSTEM_MESSAGE = re.compile(
    r"<[^<>]*>|\S+\.\w{2,4} \([^()]*\)|(?:\w+ )?\w+ omitted|(?:This message was|You) deleted(?: this message)?\.?"
    r"|(?:Esta )?mensagem (?:foi )?apagada\.?|(?:Se eliminó|Eliminaste) este mensaje\.?"
    r"|(?:Diese Nachricht wurde|Du hast diese Nachricht) gelöscht\.?|Ce message a été supprimé\.?",
    re.I,
)
EDITED = re.compile(r"\s*\u200e?<[^<>]*>$")  # "<This message was edited>", in any language


def choose_cleaner(beginning: str, suffix: str) -> tuple[Callable[[str], str], str] | None:
    """Return the cleaner for a text with this beginning, and its description; None if it needs none."""
    if suffix == ".md":
        return _clean_markdown, "without front matter, comments and the marks of links"
    if GUTENBERG.search(beginning):
        return _clean_gutenberg, "without Project Gutenberg's licence and line breaks inside paragraphs"
    if ARTICLE.match(beginning):
        return _clean_articles, "articles without tags"
    if "【テキスト中に現れる記号について】" in beginning or ("《" in beginning and "［＃" in beginning):
        return functools.partial(AOZORA.sub, ""), "without Aozora Bunko's readings and notes"
    lines = [line for line in beginning.split("\n") if line.strip()]
    chat = [line for line in lines if (match := WHATSAPP.match(line)) and WRITER.match(line, match.end())]
    if len(lines) > 4 and len(chat) > len(lines) / 2:
        return _clean_whatsapp, "WhatsApp chat, without dates"
    if len(re.findall(f"{LIGATURES}|{MOJIBAKE}", beginning)) >= MIN_FLAWS and importlib.util.find_spec("ftfy"):
        return _repair_letters, "repaired by ftfy"
    return None


def _repair_letters(text: str) -> str:
    """Repair text that was decoded wrong, and split ligatures; change nothing else."""
    import ftfy

    others = ("unescape_html", "remove_terminal_escapes", "fix_character_width", "uncurl_quotes", "fix_line_breaks")
    kept = dict.fromkeys((*others, "fix_surrogates", "remove_control_chars"), False)
    return ftfy.fix_text(text, ftfy.TextFixerConfig(**kept, normalization=None))


def _clean_markdown(text: str) -> str:
    return LINK.sub(r"\1", OBSIDIAN_MARKUP.sub("", FRONT_MATTER.sub("", text)))


def _clean_articles(text: str) -> str:
    return html.unescape(ARTICLE.sub(lambda tag: "" if "id=" in tag[0] else f"\n{DOCUMENT_SEPARATOR}\n", text))


def _clean_gutenberg(text: str) -> str:
    """Clean the books in a file, which may hold several, and other documents."""
    return SEPARATOR_LINE.join(book for document in text.split(SEPARATOR_LINE) for book in _split_books(document))


def _split_books(document: str) -> Iterator[str]:
    start = GUTENBERG.search(document)
    if start is None:
        yield document
    while start:
        end = GUTENBERG_END.search(document, start.end())
        content = document[start.end() : end.start() if end else None].strip()
        yield "\n\n".join(map(_unwrap, re.split(r"\n(?:[ \t]*\n)+", content))) + "\n"
        start = GUTENBERG.search(document, end.end()) if end else None


def _unwrap(paragraph: str) -> str:
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


def _clean_whatsapp(text: str) -> str:
    texts: list[str] = []
    for line in text.split("\n"):
        if match := WHATSAPP.match(line):
            writer = WRITER.match(line, match.end())  # None for notices, such as joining
            words = line[writer.end() :] if writer else ""
            is_notice = words.startswith("\u200e")  # as an iPhone marks them, in any language
            words = EDITED.sub("", words.strip("\u200e\u200f "))
            is_said = writer is not None and words and not is_notice and not SYSTEM_MESSAGE.fullmatch(words)
            texts.append(f"{writer[1].strip()}: {words}" if writer and is_said else "")
        elif texts and texts[-1] and line.strip():  # continues the message
            texts[-1] += f"\n{line.strip()}"
    return "\n".join(filter(None, texts)) + "\n"
