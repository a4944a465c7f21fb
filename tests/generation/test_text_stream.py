"""Text as it comes, however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from generation.completion import Completion


class Pieces:
    """A tokenizer whose tokens are given strings."""

    def __init__(self, pieces: Sequence[str]):
        self.pieces = pieces

    end_ids = frozenset()

    def decoder(self):
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Read character by character; where a stop string has just been completed, the text ends before it."""
    for end in range(len(text) + 1):
        ending = [len(word) for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(ending)], True
    return text, False


words = st.text("ab\n", max_size=5)


@settings(max_examples=500)
@given(st.lists(words, max_size=8), st.lists(words.filter(bool), max_size=3))
def test_streamed_text_ends_before_the_first_stop_string(pieces, stop):
    """However the text is cut into tokens: what was shown is the final text, and none of the stop string with it."""
    stream = Completion(Pieces(pieces), tuple(stop))
    expected, stops = until_stop("".join(pieces), stop)
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        assert expected.startswith(shown)
        if stream.ended:
            break
    shown += stream.finish()
    assert (shown, stream.text, stream.ended) == (expected, expected, stops)
