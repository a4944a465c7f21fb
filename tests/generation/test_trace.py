"""Spans that stand in the training text, against a search by hand."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from generation.trace import MIN_SPAN_WORDS, Span, TracedText, describe_share, read_training_text

WORDS = st.sampled_from(["we", "saw", "the", "whale", "don't", "मछली", "naïve", "1851"])


def traced(folder: Path, *texts: str) -> TracedText:
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return TracedText(read_training_text({"input": str(folder)}))


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
    assert span == Span("some YEARS ago, never mind how\n  long precisely", 8, "1.txt, line 2")
    assert describe_share([span], ["x " * 16]).startswith("50% of its words, in runs of 8 or more")
    assert training_text.find_spans("never mind how long precisely having little") == []


def test_a_chinese_character_is_a_word(tmp_path: Path) -> None:
    training_text = traced(tmp_path, "道可道。非常道。名可名。非常名。")
    (span,) = training_text.find_spans("老子說。道可道非常道名可也")
    assert (span.text, span.words) == ("道可道非常道名可", 8)


def test_texts_without_words(tmp_path: Path) -> None:
    assert traced(tmp_path, "one two\n").find_spans("") == []
    assert traced(tmp_path, "...\n").find_spans("one two three four five six seven eight nine") == []
