"""Spans that stand in the training text, against a search by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.passages import read_held_out
from generation.trace import MIN_SPAN_WORDS, Span, TracedText, describe_share
from tests.helpers import generated_text
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import tokenize

WORDS = st.sampled_from(["we", "saw", "the", "whale", "don't", "मछली", "naïve", "1851"])


def traced(folder: Path, *texts: str) -> TracedText:
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return TracedText.read({"input": str(folder)}, {})


def longest(text: list[str], there: list[str]) -> int:
    """Words at the begin of `text` that follow each other somewhere in `there`."""
    return max(
        next((k for k in range(len(text)) if there[i + k : i + k + 1] != text[k : k + 1]), len(text))
        for i in range(len(there))
    )


@given(st.lists(WORDS, min_size=1, max_size=200), st.lists(WORDS, max_size=60), st.integers(0, 190))
def test_every_span_is_found_and_as_long_as_it_can_be(
    tmp_path_factory: object, there: list[str], written: list[str], start: int
) -> None:
    folder = tmp_path_factory.mktemp("text")  # type: ignore[attr-defined]
    written += there[start : start + 30]
    expected, position = [], 0
    while position < len(written):
        length = longest(written[position:], there)
        if length >= MIN_SPAN_WORDS:
            expected.append(written[position : position + length])
        position += length if length >= MIN_SPAN_WORDS else 1
    found = traced(folder, "\n".join(there)).find_spans(", ".join(written).upper())
    assert [span.text.lower().split(", ") for span in found] == expected
    for span in found:  # each word of the file has its line
        line = int(span.place.removeprefix("0.txt, line "))
        assert there[line - 1 : line - 1 + span.words] == span.text.lower().split(", ")


def test_the_file_and_the_line_are_named_whatever_the_line_breaks_and_the_case(tmp_path: Path) -> None:
    text = "Call me\nIshmael. Some years ago -- never mind\nhow long precisely -- having little money\n"
    training_text = traced(tmp_path, "Nothing is here.\n", text)
    (span,) = training_text.find_spans('He said: "some YEARS ago, never mind how\n  long precisely". So.')
    assert span == Span("some YEARS ago, never mind how\n  long precisely", 8, "1.txt, line 2", False)
    assert describe_share([span], ["x " * 16]).startswith("50% of its words, in runs of 8 or more")
    assert training_text.find_spans("never mind how long precisely having little") == []


def test_a_chinese_character_is_a_word(tmp_path: Path) -> None:
    training_text = traced(tmp_path, "道可道。非常道。名可名。非常名。")
    (span,) = training_text.find_spans("老子說。道可道非常道名可也")
    assert (span.text, span.words) == ("道可道非常道名可", 8)


def test_texts_without_words(tmp_path: Path) -> None:
    assert traced(tmp_path, "one two\n").find_spans("") == []
    assert traced(tmp_path, "...\n").find_spans("one two three four five six seven eight nine") == []


def test_the_line_of_a_record_is_named(tmp_path: Path) -> None:
    texts = ["First line.\\nSecond line.\\nThird line.", "one two three four\\nfive six seven eight nine"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    (span,) = TracedText.read({"input": str(tmp_path)}, {}).find_spans("two three four five six seven eight nine")
    assert span.place == "a.jsonl, line 2"


def test_the_companion_is_searched_unless_it_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("nothing is here\n")
    (tmp_path / "other.txt").write_text("one two three four five six seven eight nine\n")
    config = {"input": str(tmp_path / "mine.txt"), "companion": str(tmp_path / "other.txt")}
    (span,) = TracedText.read(config, {}).find_spans("so: one two three four five six seven eight")
    assert span.place == "other.txt, line 1"
    large = TracedText.read(config, {}, max_companion=10)
    assert large.find_spans("one two three four five six seven eight") == []
    assert str(tmp_path / "other.txt") in large.notes[0]


def test_passages_that_were_not_trained_on_are_named_and_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text(generated_text(80_000))
    metadata = TokenMetadata.read(tokenize(["mine.txt"], quiet=True))
    (held_out, *_), config = read_held_out(metadata), {"input": "mine.txt"}
    training_text = TracedText.read(config, {"tokens_sha256": metadata.tokens_sha256})
    spans = training_text.find_spans(held_out.text[:500])
    assert spans[0].is_held_out and describe_share(spans[:1], [held_out.text]).startswith("nothing")
    assert not training_text.notes
    (tmp_path / "mine.txt").write_text(generated_text(90_000, seed=2))
    (note,) = TracedText.read(config, {"tokens_sha256": metadata.tokens_sha256}).notes
    assert "mine.txt" in note
