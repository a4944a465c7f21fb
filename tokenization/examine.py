"""Look for signs that a text is not what somebody wrote, whatever file it comes from."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tokenization.corpus import UnreadableError
from tokenization.settings import DOCUMENT_SEPARATOR

EXAMINED, EVERY = 1 << 15, 1 << 18  # characters: so many are examined of so many, which is fast and finds a habit
MIN_CHARACTERS = 1000  # a shorter text shows no habit
MAX_BROKEN_SHARE = 0.01
BROKEN_CHARACTER = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd]")  # control or undecodable
MIN_LINE, MIN_REPEATS = 10, 5  # characters and occurrences of a repeated line
EXAMPLE_LETTERS = 60
LIGATURES, MOJIBAKE = r"[\ufb00-\ufb06]", r"[ÂÃâÐÑ][\u0080-\u00bf€‚„…†‡‰Š‹ŒŽ’“”•–—™š›œžŸ]+"

# Tags, entities, links and templates of wikis, commands of LaTeX.
MARKUP = "|".join(
    (
        r"<[a-zA-Z!?/][^<>\n]{0,300}>",
        r"&(?:[a-zA-Z]{2,8}|#x?[0-9a-fA-F]{2,6});",
        r"\[\[[^\]\n]*\]\]|\{\{[^}\n]*\}\}|\\[a-zA-Z]+\{",
    )
)
NUMBERED = r"^\W{0,3}\d{1,4}[./:-]\d{1,2}(?:[./:-]\d{1,4})?\b.*$|^.{0,40}\b\d{1,2}:\d\d(?::\d\d)?\W*$"


class Sign(NamedTuple):
    """Something that people do not write, or not so often."""

    name: str
    pattern: str
    hurts_from: float  # share of the characters
    advice: str
    left_out_from: float = 0.3


SIGNS = (
    Sign("markup", MARKUP, 0.01, "save it as the file that it is, such as .html or .tex"),
    Sign("JSON", r"""^[ \t]*[{\[]*[ \t]*(["'])[^"'\n]{1,60}\1[ \t]*:.*$""", 0.02, "save it as .jsonl"),
    Sign("base64", r"[A-Za-z0-9+/]{60,}", 0.01, "remove it"),
    Sign("dates, times or numbers before lines", NUMBERED, 0.05, "remove them"),
    Sign("quoted mail", r"^(?:> ?.*|(?:From|Sent|To|Cc|Subject|Date): .*|On .* wrote:)$", 0.05, "save it as .mbox"),
    Sign("cells of a table", r"\t[^\t\n]*\t.*|(?<=\S) {3}.*", 0.3, "save it as .tsv"),
    Sign("symbols", r"[/\\|=_~^*#@{}\[\]$%+]", 0.06, "look whether they belong to the text", 1.0),
    Sign("divided words", r"-\n[^\W\d_A-Z]\w*", 0.002, "join them"),
    Sign("licences", r"[PCA](?:roject Gutenberg|reative Commons|ll rights|ermission is).*", 0.01, "try --dedup exact"),
    Sign("readings", r"《[^》\n]{1,20}》|［＃[^］\n]*］", 0.005, "remove them"),
    Sign("ligatures", LIGATURES, 0.0005, "`pip install ftfy` splits them"),
    Sign("mojibake", MOJIBAKE, 0.001, "`pip install ftfy` repairs it"),
    Sign("lines broken inside sentences", r"^.{50,90}\n(?=[^\W\d_A-Z])", 0.5, "join them, or they are learned", 1.0),
)
REPEATED = Sign("the same lines again and again", "", 0.1, "try --dedup exact", 1.0)
BY_NAME = {sign.name: sign for sign in (*SIGNS, REPEATED)}


class Finding(NamedTuple):
    share: float  # of the characters
    example: str
    sign: Sign

    @property
    def hurts(self) -> bool:
        return self.share >= self.sign.hurts_from

    @property
    def description(self) -> str:
        return f'{self.share:.{0 if self.share >= 0.01 else 2}%} of it is {self.sign.name}, such as "{self.example}"'


def read_findings(signs: str) -> list[Finding]:
    """Return the findings of a Source, whatever it was read from."""
    rows = (line.split("\t", 2) for line in signs.splitlines())
    return [Finding(float(share), example, BY_NAME[name]) for name, share, example in rows]


class Examination:
    """Counts the characters of each sign in a sample of a text."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.size = self.characters = self.broken = 0
        self.found: Counter[Sign] = Counter()
        self.lines: Counter[str] = Counter()
        self.examples: dict[Sign, str] = {}

    def add(self, text: str) -> str:
        """Return the text itself."""
        for start in range(0, len(text), EVERY):
            self.waiting.append(text[start : start + EXAMINED])
            self.size += min(EVERY, len(text) - start)
            if self.size >= EVERY:
                self.examine_waiting()
        return text

    def examine_waiting(self) -> None:
        text = "\n".join(self.waiting)[:EXAMINED]
        self.waiting, self.size = [], 0
        self.characters += len(text)
        self.broken += len(BROKEN_CHARACTER.findall(text))
        for sign in SIGNS:
            for match in re.finditer(sign.pattern, text, re.M):
                self.found[sign] += len(match[0])
                self.examples.setdefault(sign, match[0])
        self.lines.update(line for line in text.split("\n") if len(line) >= MIN_LINE and line != DOCUMENT_SEPARATOR)

    def finish(self) -> str:
        """Return the findings as text, for a Source. Raises UnreadableError if too many characters are not text."""
        self.examine_waiting()
        if self.broken > MAX_BROKEN_SHARE * self.characters:
            share = f"{self.broken / self.characters:.0%}"
            raise UnreadableError(
                f"{share} of its characters are not text: it is damaged, encrypted or in an unknown encoding"
            )
        for line, count in self.lines.items():
            if count >= MIN_REPEATS:
                self.found[REPEATED] += count * len(line)
                self.examples.setdefault(REPEATED, line)
        if self.characters < MIN_CHARACTERS:
            return ""
        shares = {sign: count / self.characters for sign, count in self.found.most_common()}
        return "\n".join(
            f"{sign.name}\t{share:.5f}\t{shorten(self.examples[sign])}"
            for sign, share in shares.items()
            if share >= sign.hurts_from / 10
        )


def shorten(example: str) -> str:
    return " ".join(example.split())[:EXAMPLE_LETTERS]
