"""Models and settings that the tests of generation share."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from generation.sampling import Sampling
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import with_large_weights

CONTEXT = 16
CHARACTERS = "abcdefgh"
GREEDY = Sampling(max_new_tokens=10, temperature=0)
SAMPLED = Sampling(max_new_tokens=10, temperature=1.3, top_k=6, top_p=0.95, seed=11)
FAR = {"max_new_tokens": 3 * CONTEXT}
either_way = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def changed(sampling: Sampling, **values) -> Sampling:
    return dataclasses.replace(sampling, **values)


def random_model(vocab_size: int, **changes) -> TransformerLanguageModel:
    """Large random weights, so that the text depends on all of the context; float64, so that a batch rounds as one
    row does."""
    torch.manual_seed(0)
    shape = {"embed_dim": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": CONTEXT}
    config = ModelConfig(vocab_size, **shape | changes)
    model = TransformerLanguageModel(config).double().eval()
    return with_large_weights(model)


def texts(completions) -> list[str]:
    return [completion.text for completion in completions]


def next_token(logits: torch.Tensor, uniform: float, sampling: Sampling) -> int:
    """`choose` for one row, token by token as the papers describe it."""
    weights = sorted(((value / sampling.temperature, -i) for i, value in enumerate(logits.tolist())), reverse=True)
    weights = weights[: sampling.top_k or None]
    largest = weights[0][0]
    probabilities = [(-i, math.exp(value - largest)) for value, i in weights]
    total = sum(p for _, p in probabilities)
    nucleus, mass = [], 0.0
    for token, p in probabilities:
        if mass >= sampling.top_p * total:
            break
        nucleus.append((token, p))
        mass += p
    target = uniform * mass
    for token, p in nucleus:
        target -= p
        if target < 0:
            return token
    return nucleus[-1][0]
