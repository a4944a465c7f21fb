"""A continuation that shows what the model thought, against `generate` and a full pass over its text."""

from __future__ import annotations

import pytest
import torch

from generation.decoding import generate
from generation.inspection import CONSIDERED, inspect, token_label
from generation.sampling import Sampling
from tests.generation.helpers import FAR, GREEDY, SAMPLED, changed, random_model
from tokenizer import CharacterTokenizer


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SAMPLED,
        changed(SAMPLED, repetition_penalty=1.7),
        changed(SAMPLED, **FAR),
        changed(SAMPLED, stop=("ab",)),
    ],
    ids=["greedy", "sampled", "penalty", "past_the_context", "stop"],
)
def test_the_text_is_that_of_generate(model, characters, sampling):
    chosen = list(inspect(model, characters, [1, 4, 0], sampling))
    (completion,) = generate(model, characters, [[1, 4, 0]], sampling)
    assert "".join(piece.text for piece in chosen) == completion.text
    assert len(chosen) == completion.tokens


@pytest.mark.parametrize("sampling", [GREEDY, changed(SAMPLED, repetition_penalty=1.7)], ids=["greedy", "sampled"])
def test_probabilities_are_those_of_the_model_whatever_the_sampling(model, characters, sampling):
    prompt = [1, 4, 0]
    chosen = list(inspect(model, characters, prompt, sampling))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + [piece.token for piece in chosen]]))[0]
    expected = logits[len(prompt) - 1 : -1].softmax(dim=-1)  # (new, V)
    for piece, row in zip(chosen, expected, strict=True):
        assert piece.probability == pytest.approx(float(row[piece.token]), abs=1e-6)
        assert piece.likeliest == [(i, pytest.approx(float(row[i]), abs=1e-6)) for i in row.argsort(descending=True)]
        assert piece.rank == 1 + [i for i, _ in piece.likeliest].index(piece.token)
    assert (max(piece.rank for piece in chosen) > 1) == (sampling is not GREEDY)


def test_only_the_likeliest_tokens_are_listed_and_none_without_a_text(bpe):
    model = random_model(bpe.vocab_size + 5)
    pieces = list(inspect(model, bpe, [9], Sampling(max_new_tokens=30, temperature=5.0, top_p=1.0)))
    never = {*bpe.unused_ids, *range(bpe.vocab_size, bpe.vocab_size + 5)}
    for piece in pieces:
        assert len(piece.likeliest) == CONSIDERED and not never & {token for token, _ in piece.likeliest}
    assert any(piece.rank > CONSIDERED for piece in pieces)


def test_a_token_is_shown_as_text_or_as_bytes(bpe, characters):
    assert token_label(characters, 2) == "c"
    assert token_label(CharacterTokenizer.train("\ufffd"), 0) == "\ufffd"
    euro = bpe.encode("\u20ac").tolist()
    assert [token_label(bpe, token) for token in euro] == ["E2", "82", "AC"]
    assert token_label(bpe, bpe.encode(" the").tolist()[0]) == " the"
    assert token_label(bpe, bpe.end_of_text_id) == "<|endoftext|>"


def test_it_goes_no_further_than_it_is_asked(model, characters):
    passes = []
    hook = model.ln_f.register_forward_hook(lambda *_: passes.append(1))
    stream = inspect(model, characters, [1], changed(SAMPLED, max_new_tokens=1_000))
    for _ in range(3):
        next(stream)
    stream.close()
    hook.remove()
    assert len(passes) == 3
