"""Held-out passages: chosen by a hash, a share of each file, the same ones when text is added."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import WORDS
from tokenization.corpus import Source, find_sources
from tokenization.documents import PIECE_CHARACTERS, Piece, read_pieces
from tokenization.encoding import SourceText
from tokenization.held_out import (
    MAX_HELD_OUT_BYTES,
    MAX_PASSAGE,
    HeldOut,
    choose_held_out,
    hash_passage,
    split_passages,
)
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import main
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer

SEPARATOR = "\n<|endoftext|>\n"
SOURCE = Source(Path("a.txt"), "a.txt", 0, 0)


def story(seed: int, characters: int = 300) -> str:
    """Paragraphs of lines of words."""
    draw = random.Random(seed)
    lines: list[str] = []
    length = 0
    while length < characters:
        lines.append(" ".join(draw.choices(WORDS, k=draw.randint(3, 18))) + draw.choice(["\n", "\n", ".\n\n"]))
        length += len(lines[-1])
    return "".join(lines)[:characters]


def pieces_of(texts: Sequence[str], size: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    for text in texts:
        cuts = range(0, len(text), size)
        for start in cuts:
            yield Piece(
                text[start : start + size], start == 0, start == cuts[-1], "\n" * (start == cuts[-1]), SOURCE, 1
            )


def split(
    texts: Sequence[str], limit: float = 0.1, size: int = PIECE_CHARACTERS
) -> tuple[list[SourceText], list[SourceText]]:
    """The pieces of both splits."""
    held_out = HeldOut(limit)
    ordered = list(held_out.move_to_end(lambda on_read: pieces_of(texts, size))(lambda count: None))
    ends = [number for number, piece in enumerate(ordered, 1) if piece.ends_document]
    cut = ([0, *ends])[len(ends) - held_out.documents]
    return ordered[:cut], ordered[cut:]


def cut_up(text: str) -> list[str]:
    return [piece.text for piece in split_passages(pieces_of([text]))]


@given(
    st.dictionaries(st.integers(0, 50), st.integers(1, 40_000), min_size=1, max_size=6),
    st.sampled_from([300, 5000, PIECE_CHARACTERS]),
)
def test_both_splits_together_are_the_text_however_it_is_read(shapes: dict[int, int], size: int) -> None:
    texts = [story(seed, characters) for seed, characters in shapes.items()]
    trained, held = split(texts, size=size)
    assert [piece.text for piece in trained] == [piece.text for piece in split(texts)[0]]
    whole = [piece.text for piece in split_passages(pieces_of(texts, size))]
    assert "".join(whole) == "".join(texts) and max(map(len, whole)) <= MAX_PASSAGE
    assert sum(len(piece.text) for piece in [*trained, *held]) == sum(map(len, texts))
    for side in (trained, held):  # each side is made of whole documents
        assert [piece.begins_document for piece in side] == [True, *(piece.ends_document for piece in side)][:-1]
        assert not side or side[-1].ends_document
    kept = "\0".join(piece.text for piece in trained)
    assert all(piece.text not in kept or piece.text in WORDS for piece in held if len(piece.text) > 1000)


@given(st.integers(0, 100), st.integers(1, 3000), st.integers(0, 200_000))
def test_an_insertion_moves_the_next_few_passages_alone(seed: int, added: int, place: int) -> None:
    text = story(seed, 200_000)
    before, after = cut_up(text), cut_up(text[:place] + story(seed + 1, added) + text[place:])
    assert len({*before} - {*after}) <= 25


def test_nothing_moves_when_files_are_added(tmp_path: Path) -> None:
    letters = [story(number, 2000 + 40 * number) for number in range(100)]
    novel = story(1000, 800_000)
    before, after = split(letters)[1], split([novel, *letters, *letters[:9]])[1]
    assert {piece.text for piece in before} <= {piece.text for piece in after}
    trained = {piece.text for piece in split(letters)[0]}
    assert not trained & {piece.text for piece in after}


@given(st.lists(st.integers(40_000, 400_000), min_size=1, max_size=3), st.integers(0, 1000))
def test_of_every_book_something_is_held_out(sizes: list[int], seed: int) -> None:
    texts = [story(seed + number, size) for number, size in enumerate(sizes)]
    for text, others in zip(texts, itertools.permutations(texts), strict=False):
        # Where the hash chooses nothing, it is the end of the book, which may be a short passage.
        assert any(piece.text in text for piece in split([text, *others])[1])


def test_copies_are_on_one_side_in_other_line_ends_and_beside_other_text() -> None:
    book = story(7, 300_000)
    alone = {piece.text.strip() for piece in split_passages(pieces_of([book]))}
    held = [text for text in alone if hash_passage(text) < 0.1]
    for other in (f"\n{book}", f"{story(8, 900)}{book}", book + story(9, 5000)):
        trained, validation = (" ".join(piece.text for piece in side) for side in split([book, other]))
        assert sum(text in trained for text in held) <= 3 and sum(text in validation for text in held) == len(held)


def tokens_of(folder: Path, *flags: str) -> tuple[TokenMetadata, np.ndarray, BPETokenizer]:
    assert main(["--vocab_size", "300", "--output_dir", str(folder), *flags]) == 0
    metadata = TokenMetadata.read(folder / "tokens_bpe_metadata.json")
    tokenizer = load_tokenizer(folder / "bpe_tokenizer.json")
    assert isinstance(tokenizer, BPETokenizer)
    return metadata, np.fromfile(folder / "tokens_bpe.bin", metadata.numpy_dtype), tokenizer


def test_two_novels_and_a_note_give_a_share_of_each_novel(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The note must neither be all of the validation text nor stop the training."""
    folder = tmp_path / "novels"
    folder.mkdir()
    novels = [story(number, 450_000) for number in range(2)]
    for number, novel in enumerate(novels):
        (folder / f"novel{number}.txt").write_text(novel)
    (folder / "README.md").write_text("These two novels were written by my grandmother.\n")
    metadata, tokens, tokenizer = tokens_of(tmp_path / "out", "--input", str(folder))
    assert metadata.documents == 3 and metadata.val_bytes and 0.06 < metadata.val_bytes / metadata.text_bytes < 0.14
    parts = tokenizer.decode(tokens[metadata.train_tokens :]).split("<|endoftext|>")
    shares = [sum(len(part) for part in parts if part in novel) / len(novel) for novel in novels]
    assert all(0.05 < share < 0.16 for share in shares)
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Held out"))
    assert f"0% of README.md, {shares[0]:.0%} of novel0.txt, {shares[1]:.0%} of novel1.txt" in said
    report = (tmp_path / "out" / "data_report.md").read_text()
    assert f"| novel1.txt | text | 1 | 450,000 | {shares[1]:.0%} |" in report


def test_tokens_are_those_of_the_whole_text_where_nothing_is_held_out(tmp_path: Path) -> None:
    """Passages are not encoded one by one, which would give other tokens where they meet."""
    text = story(3, 700_000)
    (tmp_path / "text.txt").write_text(text)
    metadata, tokens, tokenizer = tokens_of(tmp_path / "out", "--input", str(tmp_path / "text.txt"))
    ends = np.flatnonzero(tokens == 0)
    for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
        assert tokens[start:end].tolist() == tokenizer.encode(tokenizer.decode(tokens[start:end])).tolist()
    assert metadata.documents == 1 and metadata.text_bytes == 700_000


@pytest.mark.parametrize("text", [story(1, 6000), "the same line\n" * 600, "x" * 500_000], ids=["short", "lines", "x"])
def test_the_end_of_a_very_short_text_is_held_out(text: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text.txt").write_text(text)
    metadata, _, _ = tokens_of(tmp_path / "out", "--input", str(tmp_path / "text.txt"))
    assert metadata.train_tokens == pytest.approx(0.9 * metadata.total_tokens, abs=2)
    assert "the end of the text" in capsys.readouterr().out


def test_a_text_of_any_size_that_repeats_itself_says_so_and_keeps_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("The old miller carried the silver lamp over the\n" * 120_000)
    metadata, _, _ = tokens_of(tmp_path / "out", "--input", str(tmp_path / "text.txt"))
    assert metadata.train_tokens == pytest.approx(0.9 * metadata.total_tokens, abs=20)
    out = capsys.readouterr().out
    assert "the end of the text (10.0%)" in out
    assert re.search(r"Much of this text is repeated: only \d+% of it is unique", out)


def test_a_large_text_holds_out_no_more_than_fits_in_memory(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(SEPARATOR.join(story(number) for number in range(300)))
    sources = find_sources([str(tmp_path / "text.txt")])

    def read(on_read: object) -> Iterator[Piece]:
        return read_pieces(sources)

    of_100_gb, of_100_mb = (choose_held_out(read, 0.1, size)[0] for size in (10**11, 10**8))
    assert of_100_gb and of_100_mb
    assert of_100_gb.limit == MAX_HELD_OUT_BYTES / 10**11 and of_100_mb.limit == 0.1
