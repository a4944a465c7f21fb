"""Look for signs that a text is not what somebody wrote, whatever file it comes from."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tokenization.corpus import UnreadableError
from tokenization.settings import DOCUMENT_SEPARATOR

# Four pieces of each block of text are examined, which is fast and finds a habit.
BLOCK_CHARACTERS, PIECES, PIECE_CHARACTERS = 1 << 18, 4, 1 << 11
MIN_CHARACTERS = 1000  # a shorter text shows no habit
MAX_BROKEN_SHARE = 0.01
BROKEN_CHARACTER = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd]")  # control or undecodable
MIN_LINE, MIN_REPEATS = 10, 5  # characters and occurrences of a repeated line
EXAMPLE_LETTERS = 60
LIGATURES, MOJIBAKE = r"[\ufb00-\ufb06]", r"[ÂÃâÐÑ][\u0080-\u00bf€‚„…†‡‰Š‹ŒŽ’“”•–—™š›œžŸ]+"
SIGNS_IN_WORDS = r"[¡-©«¬®-´¶¸¹»-¿](?<=[^\W\d_].)(?=[^\W\d_])"
# What stands in the same order at the beginning of many lines: dates, numbers, columns and labels.
# Numbers that one or two characters separate, as in a date, are not the numbers of a sentence.
HEAD_CHARACTERS, HEAD_MARKS, HEAD_MARK = 40, 3, re.compile(r"\d+(?:\W|[^\d.?!]{2})(?=\d)|\d+|[\[\]|\t]")

# Tags, entities, links and templates of wikis, tags of forums, commands of LaTeX.
MARKUP = "|".join(
    (
        r"<[a-zA-Z!?/][^<>\n]{0,300}>",
        r"&(?:[a-zA-Z]{2,8}|#x?[0-9a-fA-F]{2,6});",
        r"\[\[[^\]\n]*\]\]|\{\{[^}\n]*\}\}|\[/[a-z]+\]|\[[a-z]+=[^\]\n]*\]|\\[a-zA-Z]+\{",
    )
)
INLINE_SEPARATOR = r"<\|endoftext\|>(?:(?<=.<\|endoftext\|>)|(?=.))"
LICENCE = r"(?:Project Gutenberg(?:™|-tm|(?:'s)? Lic| Lit)|Creative Commons|All rights reserved|Permission is hereby).*"
JSON_FIELD = r"""^[ \t]*[{\[]*[ \t]*(["'])[\w $.@-]{1,40}\1[ \t]*:[ \t]*["'{\[\dtfn-].*$"""


class Sign(NamedTuple):
    """Something that people do not write, or not so often."""

    name: str
    pattern: str
    hurts_from: float  # share of the characters
    advice: str
    left_out_from: float = 0.3  # above 1: never


SIGNS = (
    Sign("markup", MARKUP, 0.01, "remove it, or save it as the file that it is, such as .html or .tex"),
    Sign("JSON", JSON_FIELD, 0.1, "save it as .jsonl"),
    Sign("base64", r"[A-Za-z0-9+/]{60,}", 0.01, "remove it"),
    Sign("quoted mail", r"^(?:> ?.*|(?:From|Sent|To|Cc|Subject|Date): .*|On .* wrote:)$", 0.05, "save it as .mbox"),
    Sign("cells of a table", r"(?:\t(?<=\S\t)[^\t\n]+\t|   (?<=\S   )).*", 0.1, "keep only the column with the text"),
    Sign("symbols", r"[/\\|=_~^*#@{}\[\]$%+]", 0.06, "look whether they belong to the text", 2),
    Sign("divided words", r"-\n[^\W\d_A-Z]\w*", 0.002, "join them"),
    Sign("licences", LICENCE, 0.01, "try --dedup exact"),
    Sign("readings", r"《[ぁ-ヿ]{1,20}》|［＃[^］\n]*］", 0.005, "remove them"),
    Sign("ligatures", LIGATURES, 0.0005, "`pip install ftfy` splits them"),
    Sign("mojibake", rf"{MOJIBAKE}|{SIGNS_IN_WORDS}", 0.001, "try `pip install ftfy`, or save it again as UTF-8"),
    Sign(
        "separators inside lines",
        INLINE_SEPARATOR,
        0,
        f"to separate documents, put {DOCUMENT_SEPARATOR} on its own line",
        2,
    ),
    Sign("lines broken inside sentences", r"^.{50,90}\n(?=[^\W\d_A-Z])", 0.5, "join them, or they are learned", 2),
)
REPEATED = Sign("the same lines again and again", "", 0.1, "remove them, or long paragraphs by --dedup exact", 2)
HEADS = Sign("lines that begin with a date, a time or a name", "", 0.15, "remove what people did not write", 0.6)
LABELS = Sign("lines that begin with a number or a label", "", 0.3, "remove what people did not write", 2)
BY_NAME = {sign.name: sign for sign in (*SIGNS, REPEATED, HEADS, LABELS)}


class Finding(NamedTuple):
    share: float  # of the characters, or of the lines
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
        self.heads: Counter[str] = Counter()
        self.head_examples: dict[str, str] = {}
        self.examples: dict[Sign, str] = {}

    def add(self, text: str) -> str:
        """Return the text itself."""
        for start in range(0, len(text), BLOCK_CHARACTERS):
            block = text[start : start + BLOCK_CHARACTERS]
            self.waiting.append(block)
            self.size += len(block)
            if self.size >= BLOCK_CHARACTERS:
                self.examine_waiting()
        return text

    def examine_waiting(self) -> None:
        text = _choose_pieces("\n".join(self.waiting))
        self.waiting, self.size = [], 0
        self.characters += len(text)
        self.broken += len(BROKEN_CHARACTER.findall(text))
        for sign in SIGNS:
            for match in re.finditer(sign.pattern, text, re.M):
                self.found[sign] += len(match[0])
                start = match.start() if len(match[0]) > 2 else max(0, match.start() - EXAMPLE_LETTERS // 2)
                self.examples.setdefault(sign, text[start : start + EXAMPLE_LETTERS])
        for line in text.split("\n"):
            if line.strip() and line != DOCUMENT_SEPARATOR:
                marks = HEAD_MARK.findall(line.strip()[:HEAD_CHARACTERS])[:HEAD_MARKS]
                head = "".join(("0" if mark.isdigit() else ":") if mark[0].isdigit() else mark for mark in marks)
                self.heads[head] += 1
                self.head_examples.setdefault(head, line)
                self.lines[line] += len(line) >= MIN_LINE

    def finish(self) -> str:
        """Return the findings as text, for a Source. Raises UnreadableError if too many characters are not text."""
        findings = self.list_findings()
        if self.broken > MAX_BROKEN_SHARE * self.characters:
            share = f"{self.broken / self.characters:.0%}"
            raise UnreadableError(
                f"{share} of its characters are not text: it is damaged, encrypted or in an unknown encoding"
            )
        return findings

    def list_findings(self) -> str:
        self.examine_waiting()
        if self.characters < MIN_CHARACTERS:
            return ""
        shares = {sign: count / self.characters for sign, count in self.found.items()}
        repeated = {line: count * len(line) for line, count in self.lines.items() if count >= MIN_REPEATS}
        if repeated:
            shares[REPEATED] = sum(repeated.values()) / self.characters
            self.examples[REPEATED] = max(repeated, key=lambda line: repeated[line])
        for head, count in reversed(self.heads.most_common()):
            if count >= MIN_REPEATS and (len(head) == 1 or set(head) - {"0"}):
                sign = HEADS if len(head) > 1 else LABELS
                shares[sign], self.examples[sign] = count / self.heads.total(), self.head_examples[head]
        return "\n".join(
            f"{sign.name}\t{share:.5f}\t{shorten(self.examples[sign])}"
            for sign, share in sorted(shares.items(), key=lambda pair: -pair[1])
            if share >= sign.hurts_from / 10
        )


def _choose_pieces(block: str) -> str:
    """Return pieces of a text that begin with lines."""
    if len(block) <= PIECES * PIECE_CHARACTERS:
        return block
    pieces = [block[start : start + PIECE_CHARACTERS] for start in range(0, len(block), len(block) // PIECES)]
    return "\n".join([pieces[0], *(piece[piece.find("\n") + 1 :] for piece in pieces[1:])])


def shorten(example: str) -> str:
    return " ".join(example.split())[:EXAMPLE_LETTERS]
