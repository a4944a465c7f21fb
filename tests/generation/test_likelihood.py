"""What is told of tokens while they are made, against a full pass over prompt and text, and against the score."""

from __future__ import annotations

import math

import pytest
import torch

from generation import scoring
from generation.decoding import generate
from generation.sampling import Sampling
from generation.scoring import Likelihoods, score_documents
from tests.generation.helpers import CONTEXT, GREEDY, SAMPLED, changed, random_model

PROMPTS = [[1, 4, 0], [7], [2, 2, 5, 3, 1]]
COUNT = 3


def logprobs_of(model, ids: list[int]) -> torch.Tensor:
    """Of the token after each of the ids, (T, V)."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(dim=-1)


@pytest.mark.parametrize("logits_at_once", [1, 20, 1 << 24])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SAMPLED, changed(SAMPLED, repetition_penalty=1.7, frequency_penalty=1.5, presence_penalty=-1.0)],
    ids=["greedy", "sampled", "penalties"],
)
def test_logprobs_are_those_of_the_model_whatever_the_sampling(
    model, characters, sampling, logits_at_once, monkeypatch
):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", logits_at_once)
    told = Likelihoods(COUNT, of_prompts=True)
    shown: list[int] = [0] * len(PROMPTS)

    def on_text(i: int, piece: str) -> None:
        shown[i] += len(piece)
        assert len(told.texts[i]) == shown[i], "a token is told before its text"

    completions = generate(model, characters, PROMPTS, sampling, on_text, told=told)
    assert completions == generate(model, characters, PROMPTS, sampling)
    for prompt, of_prompt, of_text, completion in zip(PROMPTS, told.prompts, told.texts, completions, strict=True):
        assert [said.token for said in of_prompt] == prompt
        assert characters.decode([said.token for said in of_text]) == completion.text
        assert (of_prompt[0].logprob, of_prompt[0].likeliest) == (None, [])
        said = [*of_prompt[1:], *of_text]
        for one, row in zip(said, logprobs_of(model, [*prompt, *(one.token for one in of_text)]), strict=False):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-5)
            likeliest = row.argsort(descending=True)[:COUNT].tolist()
            assert one.likeliest == [(i, pytest.approx(float(row[i]), abs=1e-5)) for i in likeliest]


def test_they_are_of_the_whole_vocabulary_and_name_no_id_without_a_text(bpe):
    model = random_model(bpe.vocab_size + 5)
    unused = {*bpe.unused_ids, *range(bpe.vocab_size, bpe.vocab_size + 5)}
    told = Likelihoods(model.config.vocab_size, of_prompts=True)
    generate(model, bpe, [[bpe.end_of_text_id, 1, 9]], changed(GREEDY, max_new_tokens=1), told=told)
    rows = logprobs_of(model, [bpe.end_of_text_id, 1, 9])
    for said, row in zip([*told.prompts[0][1:], *told.texts[0]], rows, strict=True):
        assert {token for token, _ in said.likeliest} == {*range(len(row))} - unused
        assert said.logprob == pytest.approx(float(row[said.token]), abs=1e-5)
        assert sum(math.exp(logprob) for _, logprob in said.likeliest) < 1 - 1e-5


@pytest.mark.parametrize("count", [0, 1])
def test_of_a_prompt_without_a_text_they_are_its_score(bpe, count):
    model = random_model(bpe.vocab_size)
    ids = bpe.encode("the cat and the dog")[: CONTEXT - 1]
    told = Likelihoods(count, of_prompts=True)
    generate(model, bpe, [[bpe.end_of_text_id, *ids.tolist()]], Sampling(max_new_tokens=0), told=told)
    (score,) = score_documents(model, bpe, [[ids]], CONTEXT)
    logprobs = [said.logprob for said in told.prompts[0][1:]]
    assert told.texts == [[]] and len(logprobs) == score.tokens
    assert -sum(logprobs) == pytest.approx(score.nats, abs=1e-5)


def test_a_token_that_is_no_text_is_not_told(bpe):
    """Nor are prompts, unless they are asked for. Of one longer than the context, its end is what the model reads."""
    model = random_model(bpe.vocab_size)
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1.0)
        model.head.weight[bpe.end_of_text_id] = 10.0
    told = Likelihoods(0, of_prompts=False)
    (completion,) = generate(model, bpe, ["the"], GREEDY, told=told)
    assert (completion.ended, completion.tokens, told.texts, told.prompts) == (True, 1, [[]], [])
    told = Likelihoods(0, of_prompts=True)
    generate(model, bpe, [[*range(5, 5 + 2 * CONTEXT)]], GREEDY, told=told)
    assert [said.token for said in told.prompts[0]] == [*range(5 + CONTEXT, 5 + 2 * CONTEXT)]
