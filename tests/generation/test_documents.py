"""The documents of `tokenization/corpus.py`, whatever the sizes at which a file is read and cut."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from generation import documents
from generation.documents import check_files, encode_piece, read_documents
from tokenization.corpus import find_sources, read_pieces
from tokenizer import CharacterTokenizer, TokenizerError

LINES = [
    "<|endoftext|>",
    "<|endoftext|> ",
    "a",
    "bc  d",
    "",
    " ",
    "é\t😀",
    "word " * 5,
    "x" * 30,
    "\r",
    "a\rb",
    "\u2028",
]
BREAKS = ["\n", "\r\n"]
# A block has room for a byte order mark, a separator and its line break.
# A block has room for a byte order mark, a separator and its line break.
SIZES = {
    "BLOCK_BYTES": st.integers(18, 40),
    "PIECE_CHARACTERS": st.integers(2, 40),
    "LONGEST_PIECE": st.integers(41, 60),
}
texts = st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(BREAKS)), max_size=12).map(
    lambda lines: "".join(line + end for line, end in lines)
)


def theirs(path: Path) -> list[tuple[str, int]]:
    """(text, line of its first character) of each document, as the pre-tokenizer reads them."""
    found, begun = [], None
    for piece in read_pieces(find_sources([str(path)])):
        begun = (begun[0] + piece.text, begun[1]) if begun else (piece.text, piece.line)
        if piece.ends_document:
            found.append(begun)
            begun = None
    assert begun is None
    return found


def ours(path: Path) -> list[tuple[str, int]]:
    found = []
    for document in read_documents(path):
        pieces = list(document)
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        found.append(("".join(piece.text for piece in pieces), pieces[0].line))
    return found


@settings(max_examples=200, deadline=None)
@given(text=texts, cut=st.integers(0, 3), mark=st.booleans(), sizes=st.fixed_dictionaries(SIZES))
def test_text_is_split_as_the_pre_tokenizer_splits_it(tmp_path_factory, text, cut, mark, sizes) -> None:
    path = tmp_path_factory.getbasetemp() / "text.txt"
    path.write_bytes(codecs.BOM_UTF8 * mark + text[: len(text) - cut].encode())
    with mock.patch.multiple(documents, **sizes):
        assert ours(path) == theirs(path)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(texts, max_size=5), blank=st.booleans(), sizes=st.fixed_dictionaries(SIZES))
def test_jsonl_is_read_as_the_pre_tokenizer_reads_it(tmp_path_factory, values, blank, sizes) -> None:
    path = tmp_path_factory.getbasetemp() / "records.jsonl.gz"
    lines = [json.dumps({"id": 1, "text": value + "\ud800"}, ensure_ascii=blank) for value in values]
    data = ("\n\n" if blank else "\n").join(lines).encode(errors="surrogatepass" if blank else "replace")
    path.write_bytes(gzip.compress(data))
    with mock.patch.multiple(documents, **sizes):
        assert ours(path) == theirs(path)


@given(text=st.text("ab\n \r", max_size=60), sizes=st.fixed_dictionaries(SIZES))
def test_places_count_from_the_beginning_of_the_file(tmp_path_factory, text, sizes) -> None:
    path = tmp_path_factory.getbasetemp() / "strange.txt"
    path.write_bytes(f"{text}!".encode())
    tokenizer = CharacterTokenizer.from_characters("ab\n \r")
    place = f"line {text.count(chr(10)) + 1}, column {len(text) - text.rfind(chr(10))}."
    with mock.patch.multiple(documents, **sizes), pytest.raises(TokenizerError, match=place):
        for document in read_documents(path):
            for piece in document:
                encode_piece(tokenizer, piece)


def test_in_jsonl_the_line_is_told(tmp_path) -> None:
    path = tmp_path / "strange.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a\\n\\na!"}\n')
    tokenizer = CharacterTokenizer.from_characters("a\n")
    with pytest.raises(TokenizerError, match=r"strange.jsonl: .* at line 2\. "):
        [encode_piece(tokenizer, piece) for document in read_documents(path) for piece in document]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"abc\ncaf\xe9 au lait", "not UTF-8 text: .* at byte 7"),
        ("a.txt", b"caf\xc3", "not UTF-8 text: .* at byte 3"),
        ("a.txt.gz", b"no gzip", "not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"abc" * 100, mtime=0)[:-9], "not a whole gzip file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}', 'line 2: an object with a string under "text"'),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]', "line 3: an object"),
        ("a.jsonl", b'{"text": "a"', "line 1: not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: not valid JSON"),
    ],
    ids=["latin-1", "cut character", "no gzip", "cut gzip", "no string", "no object", "cut JSON", "deep JSON"],
)
def test_files_that_cannot_be_read(tmp_path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        ours(path)


def test_files_are_checked_before_they_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.txt").touch()
    assert check_files(["here.txt"]) == [Path("here.txt")]
    for name, said in (("there.txt", "no file there.txt"), (".", "is a folder"), ("", "empty name")):
        with pytest.raises(DataError, match=said):
            check_files(["here.txt", name])


def test_what_is_read_is_told(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("é\n" * 20_000, encoding="utf-8")
    counts: list[int] = []
    assert sum(len(piece.text) for document in read_documents(path, counts.append) for piece in document) == 40_000
    assert sum(counts) == 60_000
