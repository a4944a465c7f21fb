"""Token probabilities during generation equal those of a full pass over prompt and text, and of the score."""

from __future__ import annotations

import pytest
import torch

from generation.completion import generate
from generation.scoring import Likelihood, compute_likelihoods
from generation.stream import forbid_unused_ids, stream
from tests.generation.helpers import GREEDY, SAMPLED, changed

PROMPTS = [[1, 4, 0], [7], [2, 2, 5, 3, 1]]
COUNT = 3


def logprobs_of(model, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the next token after each id, (T, V)."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(dim=-1)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SAMPLED, changed(SAMPLED, repetition_penalty=1.7)],
    ids=["greedy", "sampled", "penalties"],
)
def test_logprobs_are_those_of_the_model_whatever_the_sampling(model, characters, sampling):
    bias = forbid_unused_ids(model, characters)
    made: list[list[Likelihood]] = [[] for _ in PROMPTS]
    for tokens, logits in stream(model, PROMPTS, sampling, bias):
        for row, one in zip(made, compute_likelihoods(logits, tokens, COUNT, bias), strict=True):
            row.append(one)
    completions = generate(model, characters, PROMPTS, sampling)
    for prompt, of_text, completion in zip(PROMPTS, made, completions, strict=True):
        assert characters.decode([said.token for said in of_text]) == completion.text
        rows = logprobs_of(model, [*prompt, *(one.token for one in of_text)])[len(prompt) - 1 :]
        for one, row in zip(of_text, rows, strict=False):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-5)
            likeliest = row.argsort(descending=True)[:COUNT].tolist()
            assert one.likeliest == [(i, pytest.approx(float(row[i]), abs=1e-5)) for i in likeliest]
