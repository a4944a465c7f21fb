"""Passages that are held out: the same for every run, scored as a program that works one by one would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.passages import (
    Passage,
    compare_scores,
    find_in_training,
    find_places,
    pick_evenly,
    read_held_out,
    score_next_sentences,
    score_passages,
)
from generation.scoring import Score
from model import TransformerLanguageModel
from tests.generation.helpers import random_model
from tests.helpers import generated_text
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import tokenize
from tokenizer import CharacterTokenizer
from tokenizer_bpe import BPETokenizer


def metadata_of(text: str, folder: Path, **options: Any) -> TokenMetadata:
    folder.mkdir()
    (folder / "text.txt").write_text(text)
    return TokenMetadata.read(tokenize([str(folder / "text.txt")], output_dir=folder / "tokens", quiet=True, **options))


@pytest.mark.parametrize("options", [{"vocab_size": 300}, {"tokenizer": "char"}], ids=["bpe", "characters"])
def test_held_out_passages_are_not_in_the_training_part_and_the_rest_is(options: dict, tmp_path: Path) -> None:
    text = generated_text(120_000, seed=3)
    held_out = read_held_out(metadata := metadata_of(text, tmp_path / "a", **options))
    assert held_out and all(passage.text.strip() in text for passage in held_out)
    whole = "".join(passage.text for passage in held_out)
    assert 0.04 < len(whole) / len(text) < 0.25
    assert not find_in_training(metadata, held_out)
    kept = [Passage(text[start : start + 500]) for start in (20_000, 80_000)]
    assert find_in_training(metadata, kept) == {passage.text for passage in kept}


def test_other_vocabularies_hold_out_the_same(tmp_path: Path) -> None:
    text = generated_text(120_000, seed=3)
    few, many = (metadata_of(text, tmp_path / str(size), vocab_size=size) for size in (300, 600))
    assert read_held_out(few) == read_held_out(many)


@settings(max_examples=30)
@given(st.data())
def test_the_error_of_a_difference_is_that_of_the_mean_for_passages_of_one_length(data: st.DataObject) -> None:
    count = data.draw(st.integers(50, 200))
    draws = np.random.RandomState(data.draw(st.integers(0, 99)))
    shared, own = 5 * draws.rand(count), draws.rand(count)
    one, other = ([Score(nats, 1, 100) for nats in values] for values in (shared + own, shared))
    found = compare_scores(one, other)
    per_byte = own / 100 / math.log(2)
    assert found.mean == pytest.approx(per_byte.mean())
    assert found.error == pytest.approx(2 * per_byte.std() / math.sqrt(count), rel=0.15), "what both share cancels out"
    assert compare_scores(one, one) == (0, 0) and not compare_scores(one, one).is_clear


def test_a_passage_with_an_unknown_character_is_refused_by_name(characters: CharacterTokenizer) -> None:
    with pytest.raises(ValueError, match="U\\+007A"):
        score_passages(random_model(8), characters, [Passage("abz")])


def test_the_true_next_sentence_is_compared_by_byte_with_one_as_long(bpe: BPETokenizer) -> None:
    model = random_model(bpe.vocab_size, max_seq_len=200)
    texts = [generated_text(900, seed=seed).replace(".\n", ". ") for seed in range(6)]
    guessed = score_next_sentences(model, bpe, texts)

    places = sorted((place for text in texts for place in find_places(text)), key=lambda place: len(place.sentence))
    right = of = 0
    for i, place in enumerate(places):
        other = places[i + 1 if i + 1 < len(places) else i - 1].sentence
        if other != place.sentence:
            bits = [per_byte(model, bpe, place.before, place.gap + sentence) for sentence in (place.sentence, other)]
            right, of = right + (bits[0] < bits[1]), of + 1
    assert (
        guessed == (right, of) and of > 20 and str(guessed) == f"{right} of {of} picked correctly (chance: {of / 2:g})"
    )


def per_byte(model: TransformerLanguageModel, bpe: BPETokenizer, before: str, after: str) -> float:
    """Nats of `after`, a token at a time."""
    ids, first = bpe.encode(before)[-128:].tolist(), len(bpe.encode(before)[-128:])
    ids += bpe.encode(after).tolist()
    with torch.no_grad():
        logs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    return -sum(logs[i - 1, ids[i]].item() for i in range(first, len(ids))) / len(after.encode())


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (f'{"x" * 100}. She said no. "He did not say anything!" Then they went home together. End.', 2),
        (f"{'x' * 100}. Short. Too short. No.", 0),
        (f"{'的' * 100}。{'是' * 30}。{'有' * 30}。", 2),
        ("no end at all", 0),
    ],
)
def test_sentences_end_as_people_end_them(text: str, sentences: int) -> None:
    found = list(find_places(text))
    assert len(found) == sentences
    assert all(place.before + place.gap + place.sentence in text for place in found)


@given(st.integers(0, 1000))
def test_items_are_spread_evenly(count: int) -> None:
    chosen = pick_evenly(list(range(count)))
    assert (
        len(chosen) == min(count, 200)
        and chosen[:1] + chosen[-1:] == ([0, count - 1] if count > 1 else [0, 0] * count)[:2]
    )
