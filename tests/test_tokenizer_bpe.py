from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tokenizer_bpe import (
    MAX_WHITESPACE,
    PROBE_TEXT,
    SPECIAL_TOKENS,
    WORD_BLOCK,
    BPETokenizer,
    TokenizerError,
    cut_long_words,
)

pytestmark = pytest.mark.quick

WORDS = "the cat sat on the mat; it's a naïve café, 12 345 déjà vu!\n\n    def f(x): return x**2\n 日本語 текст 😀 "
TEXT = " ".join(random.Random(1).choices(WORDS.split(" "), k=5000)) + PROBE_TEXT
BPE = BPETokenizer.train([TEXT], vocab_size=600)

# Characters that matter to GPT-2's pre-tokenizer, beside any others.
mixed_text = st.text(st.sampled_from(" \n\t\r\u00a0\u3000'sdlve019.,aéл日\x1c\u0301😀") | st.characters(codec="utf-8"))


HF = tokenizers.Tokenizer.from_str(BPE.backend.to_str())
HF.encode_special_tokens = True


@given(mixed_text)
@settings(max_examples=300)
def test_any_text_round_trips_with_the_ids_of_tokenizers(text: str) -> None:
    ids = BPE.encode(text)
    assert ids.dtype == np.int32
    assert BPE.decode(ids) == text
    assert ids.tolist() == HF.encode(text).ids
    assert int(BPE.byte_lengths[ids].sum()) == len(text.encode())


@given(mixed_text, st.lists(st.integers(0, 4)))
def test_incremental_decoding_never_splits_a_character(text: str, sizes: list[int]) -> None:
    ids, decoder = BPE.encode(text), BPE.decoder()
    pieces, position = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(decoder.push(ids[position : position + size]))
        position += size
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_have_the_first_ids() -> None:
    assert [BPE.token_bytes(i).decode() for i in range(3)] == list(SPECIAL_TOKENS)
    assert (BPE.end_of_text_id, BPE.unused_ids) == (0, [1, 2])
    assert BPE.byte_lengths[:3].tolist() == [0, 0, 0]
    assert sorted(BPE.token_bytes(i) for i in range(3, 259)) == [bytes([byte]) for byte in range(256)]


def test_the_name_of_a_special_token_in_text_is_ordinary_text() -> None:
    text = "a<|endoftext|>b<|pad|>"
    ids = BPE.encode(text)
    assert not set(ids.tolist()) & {0, 1, 2}
    assert BPE.decode(ids) == text


@pytest.mark.parametrize("end", ["", "x", " x", "\x1cx", "\u3000", "\n\n'"])
@pytest.mark.parametrize("extra", [-1, 0, 1, MAX_WHITESPACE])
def test_cutting_long_whitespace_changes_no_id(extra: int, end: str) -> None:
    text = f"a{' ' * (MAX_WHITESPACE + extra)}{end}"
    assert BPE.encode(text).tolist() == HF.encode(text).ids


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    assert BPE.decode(BPE.encode("a\ud83d b\udc00")) == "a\ufffd b\ufffd"
    assert BPE.decode(BPE.encode("\ud83d\ude00")) == "😀"
    BPETokenizer.train(["\ud800"], vocab_size=259)


@pytest.mark.parametrize("ids", [[BPE.vocab_size], [-1], [5, 2**40]])
def test_an_id_out_of_range_is_an_error(ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        BPE.decode(ids)


def test_a_vocabulary_below_the_byte_alphabet_is_a_usage_error() -> None:
    with pytest.raises(TokenizerError, match="259") as caught:
        BPETokenizer.train(["text"], vocab_size=258)
    assert caught.value.exit_code == 2
    assert BPETokenizer.train(["text"], vocab_size=259).vocab_size == 259


def learned_by_tokenizers(texts: list[str], vocab_size: int) -> str:
    """The file of the vocabulary that `tokenizers` learns from whole words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL_TOKENS)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return tokenizer.to_str(pretty=True)


def test_learning_from_ordinary_text_is_that_of_tokenizers() -> None:
    lines = [
        "-" * 300,
        "=" * (WORD_BLOCK - 1),
        "a" * (WORD_BLOCK - 1),
        "日本語の文章。" * 400,
        " " * (WORD_BLOCK - 1) + "x",
        "12 34 " * 200,
    ]
    texts = [TEXT, "\n".join(lines)]
    assert BPETokenizer.train(texts, 600).to_json() == learned_by_tokenizers(texts, 600)


@pytest.mark.parametrize("word", ["ACGT", "7", "=-_", "\t ", "é"])
@pytest.mark.parametrize("length", [WORD_BLOCK - 1, 2 * WORD_BLOCK, 10 * WORD_BLOCK + 7])
def test_only_long_words_are_cut_for_training(word: str, length: int) -> None:
    run = (word * length)[:length]
    text = f"it's {run}x 'll" if word == "7" else f"it's 1{run}1 'll"
    parts = list(cut_long_words(text))
    assert "".join(parts) == text
    assert (len(parts) == 1) == (length < WORD_BLOCK)
    assert all(len(part) < 2 * WORD_BLOCK for part in parts)
    assert all(part.startswith(tuple(word)) for part in parts[1:]), "a cut inside the run"


@pytest.mark.extras("transformers")
def test_the_file_loads_in_transformers(tmp_path: Path) -> None:
    import transformers

    path = tmp_path / "bpe_tokenizer.json"
    BPE.save(path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert len(theirs) == BPE.vocab_size
    assert theirs.encode(WORDS) == BPE.encode(WORDS).tolist()
    assert theirs.decode(theirs.encode(WORDS)) == WORDS
    assert theirs.encode("<|endoftext|>") == [0]


def test_a_saved_tokenizer_is_the_same_when_loaded(tmp_path: Path) -> None:
    path = tmp_path / "bpe_tokenizer.json"
    BPE.save(path)
    loaded = BPETokenizer.load(path)
    assert loaded.fast and not loaded.encoder_note
    assert loaded.encode(TEXT).tolist() == BPE.encode(TEXT).tolist()
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_merges_in_the_older_form_of_the_file(tmp_path: Path) -> None:
    content = json.loads(BPE.backend.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    path = tmp_path / "older.json"
    path.write_text(json.dumps(content))
    loaded = BPETokenizer.load(path)
    assert loaded.fast and not loaded.encoder_note
    assert loaded.encode(TEXT).tolist() == BPE.encode(TEXT).tolist()


@pytest.mark.parametrize("way", ["truncation", "padding", "dropout"])
def test_how_others_fill_their_batches_changes_no_id(tmp_path: Path, way: str) -> None:
    theirs = tokenizers.Tokenizer.from_str(BPE.backend.to_str())
    if way == "truncation":
        theirs.enable_truncation(max_length=4)
    elif way == "padding":
        theirs.enable_padding(length=50_000)
    else:
        theirs.model.dropout = 0.5
    theirs.save(str(tmp_path / "theirs.json"))
    assert BPETokenizer.load(tmp_path / "theirs.json").encode(TEXT).tolist() == BPE.encode(TEXT).tolist()


def blog_tokenizer(**options: object) -> tokenizers.Tokenizer:
    """The blog's: byte-level BPE whose alphabet is only what its text held."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 10, trainer)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (blog_tokenizer(), "lacks some of the 256 bytes"),
        (blog_tokenizer(use_regex=False), "its way of splitting text is unknown"),
    ],
)
def test_tokenizers_encodes_if_tiktoken_cannot(tmp_path: Path, tokenizer: tokenizers.Tokenizer, reason: str) -> None:
    path = tmp_path / "blog.json"
    tokenizer.save(str(path))
    loaded = BPETokenizer.load(path)
    assert loaded.fast is None and reason in loaded.encoder_note
    assert loaded.decode(loaded.encode("the mat sat on")) == "the mat sat on"
    assert 2 in loaded.unused_ids and loaded.end_of_text_id == 0


def test_merges_out_of_order_are_left_to_tokenizers(tmp_path: Path) -> None:
    content = json.loads(BPE.backend.to_str())
    vocab = content["model"]["vocab"]
    names = {i: token for token, i in vocab.items()}
    first, last = 259, BPE.vocab_size - 1
    vocab[names[first]], vocab[names[last]] = last, first
    path = tmp_path / "shuffled.json"
    path.write_text(json.dumps(content))
    loaded = BPETokenizer.load(path)
    assert loaded.fast is None and "order" in loaded.encoder_note
    assert loaded.decode(loaded.encode(TEXT)) == TEXT


def test_another_kind_of_tokenizers_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(TokenizerError, match=r"words\.json: .*; only byte-level BPE is supported"):
        BPETokenizer.load(path)
