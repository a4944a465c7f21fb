"""What is told of tokens while they are made, against a full pass over prompt and text, and against the score."""

from __future__ import annotations

import math

import pytest
import torch

from generation import scoring
from generation.completion import generate
from generation.scoring import Likelihood, likelihoods, prompt_likelihoods, score_documents
from generation.stream import only_text, stream
from tests.generation.helpers import CONTEXT, GREEDY, SAMPLED, changed, random_model

PROMPTS = [[1, 4, 0], [7], [2, 2, 5, 3, 1]]
COUNT = 3


def logprobs_of(model, ids: list[int]) -> torch.Tensor:
    """Of the token after each of the ids, (T, V)."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(dim=-1)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SAMPLED, changed(SAMPLED, repetition_penalty=1.7, frequency_penalty=1.5, presence_penalty=-1.0)],
    ids=["greedy", "sampled", "penalties"],
)
def test_logprobs_are_those_of_the_model_whatever_the_sampling(model, characters, sampling):
    bias = only_text(model, characters)
    made: list[list[Likelihood]] = [[] for _ in PROMPTS]
    for tokens, logits in stream(model, PROMPTS, sampling, bias):
        for row, one in zip(made, likelihoods(logits, tokens, COUNT, bias), strict=True):
            row.append(one)
    completions = generate(model, characters, PROMPTS, sampling)
    for prompt, of_text, completion in zip(PROMPTS, made, completions, strict=True):
        assert characters.decode([said.token for said in of_text]) == completion.text
        rows = logprobs_of(model, [*prompt, *(one.token for one in of_text)])[len(prompt) - 1 :]
        for one, row in zip(of_text, rows, strict=False):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-5)
            likeliest = row.argsort(descending=True)[:COUNT].tolist()
            assert one.likeliest == [(i, pytest.approx(float(row[i]), abs=1e-5)) for i in likeliest]


@pytest.mark.parametrize("logits_at_once", [1, 20, 1 << 24])
def test_of_a_prompt_they_are_of_the_whole_vocabulary_and_name_no_id_without_a_text(bpe, logits_at_once, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", logits_at_once)
    model = random_model(bpe.vocab_size + 5)
    unused = {*bpe.unused_ids, *range(bpe.vocab_size, bpe.vocab_size + 5)}
    prompt = [bpe.end_of_text_id, 1, 9]
    first, *rest = prompt_likelihoods(model, prompt, model.config.vocab_size, only_text(model, bpe))
    assert (first.token, first.logprob, first.likeliest) == (prompt[0], None, [])
    for token, said, row in zip(prompt[1:], rest, logprobs_of(model, prompt), strict=False):
        assert said.token == token
        assert {token for token, _ in said.likeliest} == {*range(len(row))} - unused
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert sum(math.exp(logprob) for _, logprob in said.likeliest) < 1 - 1e-5


@pytest.mark.parametrize("count", [0, 1])
def test_of_a_prompt_they_are_its_score(bpe, count):
    model = random_model(bpe.vocab_size)
    ids = bpe.encode("the cat and the dog")[: CONTEXT - 1]
    said = prompt_likelihoods(model, [bpe.end_of_text_id, *ids.tolist()], count, only_text(model, bpe))
    (score,) = score_documents(model, bpe, [[ids]], CONTEXT)
    assert len(said) == 1 + score.tokens
    assert -sum(each.logprob for each in said[1:]) == pytest.approx(score.nats, abs=1e-5)


def test_of_a_prompt_longer_than_the_context_its_end_is_read(bpe):
    model = random_model(bpe.vocab_size)
    said = prompt_likelihoods(model, [*range(5, 5 + 2 * CONTEXT)], 0, only_text(model, bpe))
    assert [each.token for each in said] == [*range(5 + CONTEXT, 5 + 2 * CONTEXT)]
