"""What is held out for validation: whole documents by a hash, the same ones when text is added, named."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import WORDS
from tokenization.corpus import Piece, find_sources, read_pieces
from tokenization.held_out import MOST_BYTES, HeldOut, choose_held_out
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import main
from tokenizer import load_tokenizer

SEPARATOR = "\n<|endoftext|>\n"


def story(number: int, words: int = 60) -> str:
    return f"{number}: " + " ".join(random.Random(number).choices(WORDS, k=words))


def reference_hash(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text[:4096].encode(), digest_size=8).digest(), "big") / 2**64


def chosen(path: Path, share: float = 0.1, most: int = MOST_BYTES) -> HeldOut | None:
    sources = find_sources([str(path)])
    size = sum(source.size for source in sources)
    return choose_held_out(lambda on_read: read_pieces(sources, on_read=on_read), share, size, most)


def splits(folder: Path, *inputs: Path) -> tuple[list[str], list[str]]:
    """The documents of both splits, in the order of the token file."""
    words = ["--vocab_size", "300", "--output_dir", str(folder)]
    assert main(["--input", *map(str, inputs), *words]) == 0
    metadata = TokenMetadata.read(folder / "tokens_bpe_metadata.json")
    tokens = np.fromfile(folder / "tokens_bpe.bin", metadata.numpy_dtype)
    tokenizer = load_tokenizer(folder / "bpe_tokenizer.json")
    ends = np.flatnonzero(tokens == 0)
    texts = [tokenizer.decode(tokens[a:b]) for a, b in zip([0, *(ends[:-1] + 1)], ends, strict=True)]
    count = int((ends < metadata.train_tokens).sum())
    return texts[:count], texts[count:]


def test_documents_are_held_out_by_their_hash_and_stay_so_when_text_is_added(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    texts = [story(number) for number in range(300)]
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text(SEPARATOR.join(texts[:150]))
    expected = [text for text in texts if reference_hash(text) < 1 - 0.9]
    trained, held_out = splits(tmp_path / "one", first)
    assert held_out == [text for text in expected if text in texts[:150]]
    assert trained == [text for text in texts[:150] if text not in held_out]
    out = capsys.readouterr().out
    assert f"Held out for validation: {len(held_out)} of 150 documents, in first.txt" in out

    second.write_text(SEPARATOR.join(texts[150:]))
    trained, both = splits(tmp_path / "two", second, first)  # in front of the old ones
    assert set(both) == set(expected) and set(held_out) < set(both) and len(trained) == 300 - len(both)
    assert "first.txt" in (out := capsys.readouterr().out) and "second.txt" in out


@given(st.lists(st.integers(20, 4000), min_size=3, max_size=30), st.integers(0, 10_000))
def test_what_is_chosen_is_whole_and_never_nothing_nor_too_much(sizes: list[int], seed: int) -> None:
    """In a folder of books, too, where chance may choose none."""
    texts = [story(seed + number, words) for number, words in enumerate(sizes)]
    total = sum(map(len, texts))
    source = find_sources([__file__])[0]
    pieces = [Piece(text, True, True, "", source, 1) for text in texts]
    held_out = choose_held_out(lambda on_read: iter(pieces), 0.1, total)
    if held_out is None:
        assert all(len(text) > 0.2 * total for text in texts)
        return
    ordered = [piece.text for piece in held_out.last(lambda on_read: iter(pieces))(lambda count: None)]
    last = ordered[len(ordered) - held_out.documents :]
    assert sorted(ordered) == sorted(texts) and 0 < held_out.documents < len(texts)
    assert sum(map(len, last)) <= 0.2 * total + 1
    assert [held_out.has(text) for text in ordered] == [text in last for text in ordered]


def test_of_ten_books_one_is_held_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for number in range(10):
        (books / f"book{number}.txt").write_text(story(number, 3000))
    trained, held_out = splits(tmp_path / "out", books)
    assert 1 <= len(held_out) <= 2 and len(trained) == 10 - len(held_out)
    said = capsys.readouterr().out.split("Held out for validation: ")[1].splitlines()[0]
    assert all(f"book{text.partition(':')[0]}.txt" in said for text in held_out)


@pytest.mark.parametrize("count", [1, 2])
def test_of_one_or_two_documents_the_end_is_held_out(count: int, tmp_path: Path) -> None:
    texts = [story(number, 1000) for number in range(count)]
    (tmp_path / "text.txt").write_text(SEPARATOR.join(texts))
    assert chosen(tmp_path / "text.txt") is None
    assert (
        main(["--input", str(tmp_path / "text.txt"), "--output_dir", str(tmp_path / "out"), "--vocab_size", "300"]) == 0
    )
    metadata = TokenMetadata.read(tmp_path / "out" / "tokens_bpe_metadata.json")
    assert metadata.train_tokens == pytest.approx(0.9 * metadata.total_tokens, abs=2)


def test_a_large_text_holds_out_no_more_than_fits_in_memory(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(SEPARATOR.join(story(number) for number in range(300)))
    few = chosen(tmp_path / "text.txt", most=1000)
    many = chosen(tmp_path / "text.txt")
    assert few and many and few.limit < 0.05 < many.limit


def test_copies_of_a_document_are_on_one_side(tmp_path: Path) -> None:
    texts = [story(number) for number in range(10)] * 20
    (tmp_path / "text.txt").write_text(SEPARATOR.join(texts))
    trained, held_out = splits(tmp_path / "out", tmp_path / "text.txt")
    assert len(trained) + len(held_out) == 200 and len(held_out) in (20, 40) and not {*trained} & {*held_out}
