"""--dedup exact: against a simple reference, and on a licence that stands in ten books."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenize_local_bpe
from tests.tokenization.test_extract import documents, report
from tokenization.corpus import Source
from tokenization.dedup import Copies, Repeats
from tokenization.documents import Piece

LICENCE = (
    "This book is for the use of anyone anywhere, at no cost and with almost no restrictions whatsoever.",
    "You may copy it, give it away or use it again under the terms of the licence that stands at its end.",
)
SOURCE = Source(Path("a.txt"), "a.txt", 0, 0)
Read = Callable[[Callable[[int], None]], Iterator[Piece]]


def reading(texts: list[list[str]]) -> Read:
    """Documents, each given as its pieces."""

    def read(on_read: Callable[[int], None]) -> Iterator[Piece]:
        for pieces in texts:
            for number, text in enumerate(pieces):
                yield Piece(text, number == 0, number == len(pieces) - 1, "", SOURCE, 1)

    return read


def joined(pieces: Iterator[Piece]) -> list[str]:
    texts: list[str] = []
    is_open = False
    for piece in pieces:
        assert piece.begins_document != is_open
        texts += [piece.text] if piece.begins_document else []
        texts[-1] += "" if piece.begins_document else piece.text
        is_open = not piece.ends_document
    assert not is_open
    return texts


def seen(texts: list[str]) -> set[str]:
    return {" ".join(text.split()) for text in texts}


def expected(texts: list[str]) -> list[str]:
    """Return the remaining documents."""
    kept = [text for number, text in enumerate(texts) if " ".join(text.split()) not in seen(texts[:number])]
    split = [re.split(r"(\n[ \t]*(?:\n[ \t]*)+)", text) for text in kept]
    words = [[" ".join(part.split()) if len(part) >= 60 else "" for part in parts[::2]] for parts in split]
    found = Counter(paragraph for paragraphs in words for paragraph in set(paragraphs) - {""})
    many = {paragraph for paragraph, count in found.items() if count >= 5}
    left = []
    for parts, paragraphs in zip(split, words, strict=True):
        blanks = ["", *parts[1::2]]
        kept = zip(blanks, parts[::2], paragraphs, strict=True)
        text = "".join(blank + part for blank, part, paragraph in kept if paragraph not in many)
        left.append(text.lstrip("\n"))
    return [text for text in left if text.strip()]


PARAGRAPHS = st.sampled_from([*LICENCE, LICENCE[0].replace(" at", "\nat"), "Chapter I", "A short one.", "x" * 60, ""])
DOCUMENTS = st.lists(st.lists(PARAGRAPHS, min_size=1, max_size=6), max_size=14)


@given(DOCUMENTS, st.sampled_from(["\n\n", "\n \n\n"]), st.integers(5, 200))
def test_it_leaves_what_a_simple_reference_leaves(made: list[list[str]], blank: str, size: int) -> None:
    texts = [text for paragraphs in made if (text := blank.join(paragraphs))]
    pieces = [[text[start : start + size] for start in range(0, len(text), size)] for text in texts]
    repeats = Repeats(reading(pieces))
    assert [text for text in joined(repeats.remove(lambda count: None)) if text.strip()] == expected(texts)


def test_hashes_that_share_a_cell_are_told_apart() -> None:
    texts = [f"{LICENCE[0]}\n\nParagraph {i} stands in this document alone, as its own number shows." for i in range(9)]
    left = joined(Repeats(reading([[text] for text in [*texts, texts[3]]]), cells=2).remove(lambda count: None))
    assert [text.split()[1] for text in left] == [str(i) for i in range(9)]


def test_a_licence_in_ten_books_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for i in range(10):
        licence = [paragraph.replace(" ", "\r\n", i % 3) for paragraph in LICENCE]
        body = [
            f"Chapter {n}\n\nBook {i} goes on with a paragraph of its own, number {n}, of some length."
            for n in range(9)
        ]
        Path(f"in/{i}.txt").write_text("\n\n".join([licence[0], *body, licence[1], "THE END"]))
    text = Path("in/0.txt").read_text()
    Path("in/copy.txt").write_text(text)
    Path("in/of_windows.txt").write_text(f"\n{text}", newline="\r\n")
    flags = ["--input", "in", "--output_dir", "out", "--vocab_size", "300"]
    assert tokenize_local_bpe.main(flags) == 0
    assert sum("restrictions" in text for text in documents()) == 12
    assert tokenize_local_bpe.main([*flags, "--dedup", "exact"]) == 0
    texts = documents()
    assert len(texts) == 10 and all(text.startswith("Chapter 0") and text.endswith("THE END") for text in texts)
    assert "2 copies of other documents, and 20 paragraphs that occur in 5 documents" in report()
    assert "**Repeated** 10 times: This book is for the use of anyone" in report()


def test_a_companion_loses_what_occurs_twice_or_in_the_own_text() -> None:
    unique, twice, own = ("x".join(letter * 80) for letter in "abc")
    documents = [[unique + "\n"], [twice], ["short"], ["short"], [twice], [own, " and its end"]]
    copies = Copies(reading(documents), reading([[own + " and\nits end"]]))
    assert joined(copies.remove(lambda count: None)) == [unique + "\n", twice, "short", "short"]
    assert "occur twice (" in copies.describe() and "own text (" in copies.describe()
    alone = Copies(reading(documents[:2]), reading([[own]]))
    assert joined(alone.remove(lambda count: None)) == [unique + "\n", twice] and alone.describe() == ""
