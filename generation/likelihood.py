"""The probability of each token of a text, recorded by `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from generation.scoring import LOGITS_AT_ONCE
from model import TransformerLanguageModel


class Likelihood(NamedTuple):
    """A token, and the model's probabilities at its place: over the whole vocabulary, before temperature, penalties,
    top-k and top-p. Logarithms are natural."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    likeliest: list[tuple[int, float]]  # (token, logprob), likeliest first, only tokens with text


@dataclass
class Likelihoods:
    """What `generate` records. A token is here before `on_text` is called with its text."""

    count: int  # length of `likeliest` for each token
    of_prompts: bool  # whether to record the prompts' tokens too
    prompts: list[list[Likelihood]] = field(default_factory=list)  # for each prompt, its last max_seq_len tokens
    texts: list[list[Likelihood]] = field(default_factory=list)  # for each completion, without the end-of-text token


def likelihoods(logits: torch.Tensor, tokens: torch.Tensor, count: int, unused: torch.Tensor) -> list[Likelihood]:
    """The Likelihood of each of the tokens (N,). `logits` (N, V) are fp32; they become -inf at `unused`, the ids that
    have no text."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, tokens[:, None]) - total).squeeze(1)
    count = min(count, logits.size(1) - len(unused))
    values, ids = logits.index_fill_(1, unused, -torch.inf).topk(count, dim=-1)
    rows = zip(tokens.tolist(), chosen.tolist(), ids.tolist(), (values - total).tolist(), strict=True)
    return [Likelihood(token, logprob, list(zip(*likeliest, strict=True))) for token, logprob, *likeliest in rows]


def prompt_likelihoods(
    model: TransformerLanguageModel,
    hidden: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    count: int,
    unused: torch.Tensor,
) -> list[list[Likelihood]]:
    """The Likelihood of each prompt's tokens. hidden (B, T, C): the input of the head for the prompts, padded on the
    right."""
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    found = []
    for row, prompt in zip(hidden, prompts, strict=True):
        found.append([Likelihood(prompt[0], None, [])])
        tokens = torch.tensor(prompt[1:], dtype=torch.long, device=unused.device)
        for part, targets in zip(row[: len(tokens)].split(at_once), tokens.split(at_once), strict=True):
            logits = model.logits(part).to(unused.device).float()  # (N, V)
            found[-1] += likelihoods(logits, targets, count, unused)
    return found
