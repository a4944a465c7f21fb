"""Texts of many scripts: words are whole, cuts fall between letters, decomposed letters are composed."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenize_local_bpe
from tests.helpers import run_script
from tests.languages import COMPOSED, MARKED, PLAIN
from tokenization.corpus import find_sources
from tokenization.documents import PIECE_CHARACTERS, find_letter_boundary, read_pieces
from tokenization.held_out import find_passage_end
from tokenization.scripts import WordForm, choose_word_form
from tokenizer import character_counts
from tokenizer_bpe import BPETokenizer

WITHOUT_SPACES = ("Thai", "Lao", "Khmer")


@pytest.mark.parametrize("language", MARKED)
def test_words_with_marks_are_whole(language: str) -> None:
    """GPT-2's pattern would make each mark a token of its own."""
    text = MARKED[language]
    form = choose_word_form([text])
    assert form == WordForm("qwen35")
    learned, before = (BPETokenizer.train([f"{text}\n" * 3], 2_000, 2, *each) for each in (form, WordForm()))
    assert learned.fast is not None and learned.decode(learned.encode(text)) == text
    assert learned.encode(text).tolist() == learned.backend.encode(text, add_special_tokens=False).ids
    parts = len(text.split()) + sum(text.count(end) for end in ".।။៖។\u200c")
    assert len(learned.encode(text)) <= parts + 2
    assert len(before.encode(text)) > (1.1 if language == "Persian" else 1.4) * len(learned.encode(text))


@pytest.mark.parametrize("language", PLAIN)
def test_other_texts_keep_gpt2s_pattern(language: str) -> None:
    """Includes the marks of emoji, and a word of another script among many."""
    assert choose_word_form([PLAIN[language]]) == WordForm()
    assert choose_word_form([*[PLAIN[language]] * 50, "हिन्दी"]) == WordForm()
    assert choose_word_form([PLAIN[language], MARKED["Hindi"]]) == WordForm("qwen35")


@pytest.mark.parametrize("language", COMPOSED)
def test_letters_with_separate_accents_are_composed_here_and_in_prompts(language: str) -> None:
    text = COMPOSED[language]
    apart = unicodedata.normalize("NFD", text)
    assert choose_word_form([text]) == WordForm() and choose_word_form([apart]) == WordForm("gpt-2", to_nfc=True)
    learned = BPETokenizer.train([apart + "\n"] * 3, 2_000, 2, "gpt-2", True)
    assert learned.encode(apart).tolist() == learned.encode(text).tolist()
    assert learned.decode(learned.encode(apart)) == text and learned.fast is not None


def test_marks_that_compose_to_nothing_stay() -> None:
    """NFC parts the letters of Hindi and of Hebrew that Unicode has in one; so they keep what the text has."""
    text = "\u0958\u093f\u0938\u094d\u092e \u0959\u093c\u0947\u0924 " * 50
    form = choose_word_form([text])
    assert form == WordForm("qwen35") and BPETokenizer.train([text], 400, 2, *form).normalizer is None


@pytest.mark.parametrize("language", [*WITHOUT_SPACES, "Burmese", "Japanese", "Chinese"])
def test_a_text_without_spaces_is_cut_between_letters(language: str, tmp_path: Path) -> None:
    letters = "".join((MARKED | PLAIN)[language].split()).replace("。", "")
    text = letters * (2 * PIECE_CHARACTERS // len(letters))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = [piece.text for piece in read_pieces(find_sources([str(tmp_path / "a.txt")]))]
    assert len(pieces) > 1 and "".join(pieces) == text
    start, passages = 0, []
    while end := find_passage_end(text, start, is_whole=True):
        passages.append(text[start:end])
        start = end
    assert not any(is_mark(part[0]) for part in [*pieces, *passages])


def is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"


def test_a_row_of_marks_alone_is_cut_somewhere() -> None:
    assert find_letter_boundary("a" + "\u0301" * 100, 90) == 90
    assert find_letter_boundary("xक्\u200dष", 4) == 1, "the joiner belongs to both letters"


@pytest.mark.parametrize("language", ["Thai", "Burmese", "Chinese"])
def test_learning_from_endless_words_stays_fast(language: str) -> None:
    """The time to learn from a word grows with the square of its length: over a minute here, were it not cut."""
    letters = "".join((MARKED | PLAIN)[language].split())
    draw = np.random.RandomState(1)
    text = "".join(letters[i] for i in draw.randint(0, len(letters), 400_000))
    text = "".join(character for character in text if character.isalpha() or is_mark(character))
    began = time.monotonic()
    BPETokenizer.train([text], 600, 2, "qwen35")
    assert time.monotonic() - began < 20


def tokenized(folder: Path, text: str, *flags: str) -> tuple[dict[str, Any], Any, Path]:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    done = run_script(tokenize_local_bpe.main, "--input", folder / "a.txt", "--output_dir", folder / "out", *flags)
    assert done.code == 0, done.err
    return json.loads((folder / "out" / "tokens_bpe_metadata.json").read_text()), done, folder / "out"


def test_the_report_says_how_words_are_cut_and_that_letters_are_composed(tmp_path: Path) -> None:
    text = "".join(f"{unicodedata.normalize('NFD', sentence)}\n" for sentence in [*COMPOSED.values(), *MARKED.values()])
    _, done, folder = tokenized(tmp_path, text * 20, "--vocab_size", "600")
    report = (folder / "data_report.md").read_text(encoding="utf-8")
    for said in (done.err + done.out, report):
        assert "combining marks stay in words" in said and "NFC" in said


def test_the_metadata_counts_characters_and_what_is_printed_has_whole_ones(tmp_path: Path) -> None:
    metadata, done, folder = tokenized(tmp_path, f"{MARKED['Tamil']}\n" * 300, "--vocab_size", "500")
    tokenizer = BPETokenizer.load(folder / "bpe_tokenizer.json")
    tokens = np.fromfile(folder / "tokens_bpe.bin", np.uint16)[metadata["train_split_index"] :]
    text = tokenizer.decode(tokens[tokenizer.byte_lengths[tokens] > 0])
    assert (metadata["val_characters"], metadata["val_bytes"]) == (len(text), len(text.encode()))
    assert character_counts(tokenizer)[tokens, 0].sum() == len(text)
    assert "\ufffd" not in done.out and "Longest tokens" in done.out


def test_a_vocabulary_far_below_what_was_asked_says_why(tmp_path: Path) -> None:
    _, done, _ = tokenized(tmp_path, f"{MARKED['Hindi']}\n" * 30)
    said = " ".join((done.err + done.out).split())
    assert "not 32,000" in said and "occurs 2 times" in said
