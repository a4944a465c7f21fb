from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer import CharacterTokenizer, load_tokenizer
from tokenizer_bpe import BPETokenizer, TokenizerError, UnknownCharacterError

pytestmark = pytest.mark.quick

ABC = CharacterTokenizer.train("abc\n")


@given(st.text(min_size=1))
def test_any_text_comes_back_from_its_own_vocabulary(text: str) -> None:
    tokenizer = CharacterTokenizer.train([text[: len(text) // 2], text[len(text) // 2 :]])
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(set(text))
    assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


@given(st.text(min_size=1), st.lists(st.integers(0, 5)))
def test_pieces_of_an_incremental_decoder_join_to_the_text(text: str, sizes: list[int]) -> None:
    tokenizer = CharacterTokenizer.train(text)
    ids, decoder = tokenizer.encode(text), tokenizer.decoder()
    pieces, position = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(decoder.push(ids[position : position + size]))
        position += size
    assert "".join(pieces) == text


def test_the_file_is_the_blogs_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    CharacterTokenizer.train(['"é\n']).save(path)
    assert json.loads(path.read_text("utf-8")) == {
        "type": "character",
        "vocab_size": 3,
        "char_to_idx": {"\n": 0, '"': 1, "é": 2},
        "idx_to_char": {"0": "\n", "1": '"', "2": "é"},
    }
    assert CharacterTokenizer.load(path).decode([2, 1, 0]) == 'é"\n'


def test_unknown_characters_are_named_with_their_place() -> None:
    with pytest.raises(UnknownCharacterError) as caught:
        ABC.encode("abc\nab€ x😀€")
    message = str(caught.value)
    assert caught.value.characters == [" ", "x", "€", "😀"]
    assert "4 characters" in message and "'€' (U+20AC)" in message and "'😀' (U+1F600)" in message
    assert "line 2, column 3" in message and "--unknown drop" in message
    assert caught.value.exit_code == 3


def test_unknown_characters_can_be_dropped() -> None:
    assert ABC.decode(ABC.encode("a€b\U0010ffffc", unknown="drop")) == "abc"


def test_a_lone_surrogate_is_an_unknown_character() -> None:
    with pytest.raises(TokenizerError, match=r"U\+D800"):
        ABC.encode("a\ud800")
    with pytest.raises(TokenizerError, match="not a single Unicode character"):
        CharacterTokenizer.train(["a\udfff"])


@pytest.mark.parametrize("ids", [[0, 4], [-1], np.array([70000])])
def test_an_id_out_of_range_is_an_error(ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        ABC.decode(ids)


def test_load_tokenizer_recognises_both_kinds(tmp_path: Path) -> None:
    ABC.save(tmp_path / "one.json")
    BPETokenizer.train(["some words"], vocab_size=260).save(tmp_path / "two.json")
    assert load_tokenizer(tmp_path / "one.json").kind == "character"
    assert load_tokenizer(tmp_path / "two.json").kind == "bpe"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "is not a tokenizer"),
        ('{"type": "character"}', "char_to_idx"),
        ('{"char_to_idx": {"a": 0, "b": 2}}', "not 0 to 1"),
        ('{"char_to_idx": {"a": 0, "b": "1"}}', "not 0 to 1"),
        ('{"char_to_idx": {"a": 0, "bc": 1}}', "not a single Unicode character"),
        ('{"char_to_idx": {"a": 0}, "vocab_size": 2}', '"vocab_size" 2'),
        ('{"char_to_idx": {"a": 0}, "idx_to_char": {"0": "b"}}', "contradict"),
        ('{"model": {"type": "BPE"}}', "cannot read"),
        ('{"model": 5}', "cannot read"),
        ("[" * 100_000, "not valid JSON"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "continuing_subword_prefix": "##", "merges": [["a", "a"]]}}',
            "only byte-level BPE is supported",
        ),
    ],
)
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=complaint) as caught:
        load_tokenizer(path)
    assert "broken.json" in str(caught.value)


def test_a_tokenizer_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"No tokenizer file .*nowhere\.json"):
        load_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(tmp_path)
