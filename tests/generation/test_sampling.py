"""The choice of the next token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.validation import build
from generation import sampling as sampling_module
from generation.sampling import Penalties, Sampling, choose
from tests.generation.helpers import next_token

logit_rows = st.lists(
    st.floats(-20, 20, allow_nan=False) | st.sampled_from([0.0, 1.0, -math.inf]), min_size=2, max_size=12
).filter(lambda row: max(row) > -math.inf)


uniform = st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53)


@settings(max_examples=300)
@given(logit_rows, uniform, st.floats(0.05, 3), st.integers(0, 14), st.floats(0.01, 1))
def test_choose_never_leaves_what_top_k_and_top_p_allow(row, u, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token = int(choose(torch.tensor([row], dtype=torch.float64), torch.tensor([u], dtype=torch.float64), sampling))
    assert row[token] > -math.inf
    likelier = [value for value in row if value > row[token]]
    assert not top_k or len(likelier) < top_k
    weights = [math.exp((value - max(row)) / temperature) for value in sorted(row, reverse=True)[: top_k or None]]
    assert sum(weights[: len(likelier)]) < top_p * sum(weights) + 1e-9  # what is likelier does not fill the nucleus


@settings(max_examples=100)
@given(st.lists(logit_rows.filter(lambda row: len(row) >= 4).map(lambda row: row[:4]), min_size=2, max_size=5))
def test_choose_treats_each_row_on_its_own(rows):
    rows = [row if max(row) > -math.inf else [0.0] * 4 for row in rows]
    logits = torch.tensor(rows, dtype=torch.float64)
    uniforms = torch.linspace(0, 0.999, len(rows), dtype=torch.float64)
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9)
    together = choose(logits.clone(), uniforms, sampling).tolist()
    assert together == [int(choose(logits[i : i + 1], uniforms[i : i + 1], sampling)) for i in range(len(rows))]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_p=1.0), 6),
        (Sampling(temperature=0.5, top_p=1.0), 6),
        (Sampling(temperature=2.0, top_k=3, top_p=1.0), 3),
        (Sampling(temperature=1.0, top_p=0.75), 3),  # 0.40 + 0.30 falls short of 0.75
    ],
    ids=["plain", "cold", "top_k", "top_p"],
)
def test_choose_draws_from_the_softmax(sampling, kept):
    """Evenly spaced uniforms hit each token as often as its probability says, to within one."""
    probabilities = torch.tensor([0.03, 0.40, 0.10, 0.30, 0.15, 0.02], dtype=torch.float64)
    count = 2000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = choose(probabilities.log().expand(count, -1), uniforms, sampling)
    expected = probabilities ** (1 / sampling.temperature)
    expected[expected.argsort(descending=True)[kept:]] = 0
    expected /= expected.sum()
    assert (tokens.bincount(minlength=6) - count * expected).abs().max() <= 1


@settings(max_examples=300)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.booleans(),
    st.lists(uniform, min_size=3, max_size=3),
    st.floats(0.3, 3),
    st.integers(0, 10),
    st.floats(0.05, 1) | st.just(1.0),
)
def test_looking_at_the_most_likely_tokens_first_changes_no_choice(seed, spread, ties, us, temperature, top_k, top_p):
    """Peaked rows and flat ones, with equal logits and forbidden tokens."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * spread
    logits = logits.round() if ties else logits
    logits[:, ::7] = -torch.inf
    uniforms = torch.tensor(us, dtype=torch.float64)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    chosen = []
    for head in (6, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling_module, "NUM_SORTED_FIRST", head)
            chosen.append(choose(logits.clone(), uniforms, sampling).tolist())
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("top_k", [0, 3, 9])
@pytest.mark.parametrize("top_p", [0.3, 0.77, 1.0])
def test_choose_is_what_the_papers_describe(seed, top_k, top_p, monkeypatch):
    monkeypatch.setattr(
        sampling_module, "NUM_SORTED_FIRST", 6
    )  # so that the nucleus ends within it here, beyond it there
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 40, generator=random) * torch.tensor([0.3, 1.0, 2.0, 4.0, 9.0])[:, None]
    uniforms = torch.rand(5, generator=random, dtype=torch.float64)
    sampling = Sampling(temperature=0.8, top_k=top_k, top_p=top_p)
    expected = [next_token(row, u, sampling) for row, u in zip(logits, uniforms.tolist(), strict=True)]
    assert choose(logits, uniforms, sampling).tolist() == expected


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e300])
def test_choose_handles_extreme_temperatures(temperature):
    """Neither overflow nor -inf divided by it may let a forbidden token through."""
    logits = torch.tensor([[3.0, -torch.inf, 9.0, -torch.inf]]).expand(20, -1)
    uniforms = torch.linspace(0, 0.999, 20, dtype=torch.float64)
    tokens = set(choose(logits.clone(), uniforms, Sampling(temperature=temperature, top_p=1.0)).tolist())
    assert tokens == ({2} if temperature < 1 else {0, 2})


def test_repetition_penalty_is_ctrls():
    """Scores of tokens already there are divided by the penalty where positive, multiplied where negative."""
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0], [2.0, -2.0, 3.0, -3.0]])
    penalties = Penalties(Sampling(repetition_penalty=4.0), [[0, 1], [3]], torch.zeros(4))
    assert penalties.apply(logits).tolist() == [[0.5, -8.0, 3.0, -3.0], [2.0, -2.0, 3.0, -12.0]]


def test_the_bias_is_added_and_forbids():
    penalties = Penalties(Sampling(), [[0]], torch.tensor([0.0, 1.5, -math.inf]))
    assert penalties.apply(torch.tensor([[1.0, 2.0, 9.0]])).tolist() == [[1.0, 3.5, -math.inf]]


# Settings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is NaN; a number is needed"),
        ({"temperature": math.inf}, "temperature is Infinity; a number is needed"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is Infinity"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("",)}, 'stop is ""; a text is needed'),
        ({"stop": ""}, 'stop is ""; a text is needed'),
    ],
)
def test_settings_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError) as caught:
        build(Sampling, wrong)
    assert said in str(caught.value)
