"""How likely the model thought each token of a text, recorded by `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from generation.scoring import LOGITS_AT_ONCE
from model import TransformerLanguageModel


class Likelihood(NamedTuple):
    """A token, and what the model said in its place, before temperature, penalties, top-k and top-p. Logarithms are
    natural, and of probabilities over the whole vocabulary."""

    token: int
    logprob: float | None  # None: nothing stands before it
    likeliest: list[tuple[int, float]]  # (token, logprob), likeliest first, of tokens that stand for text


@dataclass
class Likelihoods:
    """What `generate` is to tell, and what it told. A token is here before `on_text` is called with its text."""

    count: int  # of the likeliest tokens in each place
    of_prompts: bool
    prompts: list[list[Likelihood]] = field(default_factory=list)  # for each prompt, at most the context's last tokens
    texts: list[list[Likelihood]] = field(default_factory=list)  # for each completion, without the end-of-text token


def likelihoods(logits: torch.Tensor, tokens: torch.Tensor, count: int, unused: torch.Tensor) -> list[Likelihood]:
    """The tokens (N,) and the `count` likeliest in their places. `logits` (N, V), in fp32, are made -inf at `unused`:
    the ids that stand for no text."""
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
    """Those of each prompt's tokens, from what the model made of the prompts: hidden (B, T, C), padded on the right."""
    at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    told = []
    for row, prompt in zip(hidden, prompts, strict=True):
        told.append([Likelihood(prompt[0], None, [])])
        tokens = torch.tensor(prompt[1:], dtype=torch.long, device=unused.device)
        for part, targets in zip(row[: len(tokens)].split(at_once), tokens.split(at_once), strict=True):
            logits = model.logits(part).to(unused.device).float()  # (N, V)
            told[-1] += likelihoods(logits, targets, count, unused)
    return told
