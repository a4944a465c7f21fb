"""Choose the next token from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.machine import runs_ahead
from generation.request import Sampling as Sampling

NUM_SORTED_FIRST = 512  # other tokens are sorted only if the choice depends on it


def draw_uniforms(sampling: Sampling, index: int) -> torch.Tensor:
    """Return the random numbers of a prompt, (max_new_tokens,). Each prompt has its own stream on the CPU, so they
    depend neither on the batch nor on the device."""
    generator = torch.Generator().manual_seed((sampling.seed + index) % 2**63)
    return torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)


class Penalties:
    """Applies penalties and bias to logits before a token is chosen.

    `bias`, (V,), is added; -inf forbids a token. Tokens that a row already has become less likely by
    `repetition_penalty` (Keskar et al. 2019, "CTRL", section 4.1).
    """

    def __init__(self, sampling: Sampling, rows: Sequence[Sequence[int]], bias: torch.Tensor) -> None:
        self.sampling, self.bias = sampling, bias
        self.repeats = sampling.repetition_penalty != 1.0
        self.held = torch.zeros(len(rows), len(bias), dtype=torch.bool, device=bias.device)
        for held, row in zip(self.held, rows, strict=True):
            held[list(row)] = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the adjusted logits, (B, V) -> (B, V)."""
        logits = logits + self.bias
        if self.repeats:
            penalty = self.sampling.repetition_penalty
            logits = torch.where(self.held, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        return logits

    def count(self, tokens: torch.Tensor) -> None:
        """Record the chosen tokens, (B,)."""
        if self.repeats:
            self.held.scatter_(1, tokens[:, None], True)


def choose(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Choose a token per row: logits (B, V) and uniform numbers (B,) in [0, 1) -> (B,).

    Top-k, then nucleus sampling (Holtzman et al. 2020), drawn by inverting the cumulative distribution in descending
    order of probability.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # Sorting a large vocabulary takes longer than everything else here, and the tail's order seldom matters. On a GPU,
    # finding out whether it matters would mean waiting for the GPU.
    if not sampling.top_k < NUM_SORTED_FIRST < logits.size(1) or runs_ahead(logits.device):
        return _choose_among(logits.size(1), logits, uniforms, sampling)[0]
    tokens, certain = _choose_among(NUM_SORTED_FIRST, logits, uniforms, sampling)
    rest = (~certain).nonzero().squeeze(1)
    if len(rest):
        tokens[rest] = _choose_among(logits.size(1), logits[rest], uniforms[rest], sampling)[0]
    return tokens


def _choose_among(
    count: int, logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as `choose` does, but sort only the `count` largest logits.

    Return the tokens, (B,), and whether each is certain: sorting the other logits would not change it.
    """
    sorts_all = count == logits.size(1)
    if not sorts_all:
        order = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
        values, places = logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
        order = order.gather(1, places)  # equal logits by ascending id, as in the full sort
    else:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
    largest = values[:, :1].double()

    def weigh(values: torch.Tensor) -> torch.Tensor:  # at most 1 at any temperature, to avoid inf - inf
        return ((values.double() - largest) / sampling.temperature).exp()

    weights = weigh(values)[:, : sampling.top_k or None]  # (B, n)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:] if sampling.top_k or sorts_all else weigh(logits).sum(dim=-1, keepdim=True)
    before = cumulative - weights  # 0 for the likeliest token, which always stays
    kept = (before < sampling.top_p * total) & (weights > 0)
    last = kept.sum(dim=-1, keepdim=True) - 1  # index of the last token in the nucleus
    last = last.clamp(min=0)  # enormous finite weights give NaN logits: take any token
    everything = sampling.top_p == 1 and not sampling.top_k
    mass = total if everything else cumulative.gather(1, last)
    place = torch.searchsorted(cumulative, uniforms[:, None] * mass, right=True).minimum(last)
    # The other logits are at most the smallest value here, so they come after every larger value.
    certain = values.gather(1, place if everything else last) > values[:, -1:]
    return order.gather(1, place).squeeze(1), certain.squeeze(1)
