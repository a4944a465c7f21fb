"""A continuation token by token: the probability of each token, and the likeliest alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from common.machine import exact_device
from generation.decoding import TextStream, continuations, unused_ids
from generation.sampling import Sampling, draws
from generation.scoring import likelihoods
from model import TransformerLanguageModel
from tokenizer import Tokenizer

CONSIDERED = 8  # likeliest tokens that are listed


class Chosen(NamedTuple):
    """A token, and the model's probabilities at its place, before temperature, penalty, top-k and top-p."""

    token: int
    text: str  # the text that it completes; empty if it ends inside a character
    probability: float
    rank: int  # 1: no other token was likelier
    likeliest: list[tuple[int, float]]  # (token, probability), likeliest first


@torch.inference_mode()
def inspect(
    model: TransformerLanguageModel, tokenizer: Tokenizer, prompt: list[int], sampling: Sampling
) -> Iterator[Chosen]:
    """Yields each token of the continuation that `generate` gives for the prompt's ids, with the end-of-text token if
    there is one. The text leaves out an unfinished character at the end, and the beginning of a stop string."""
    stream = TextStream(tokenizer, sampling.stop)
    looks: list[tuple[float, int, list[tuple[int, float]]]] = []
    unused = unused_ids(model, tokenizer)
    forbidden = torch.tensor(unused, dtype=torch.long, device=exact_device(model.device))

    def look(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        (chosen,) = likelihoods(logits, tokens, CONSIDERED, forbidden)
        assert chosen.logprob is not None
        rank = 1 + int((logits[0] > logits[0, tokens[0]]).sum())
        looks.append((math.exp(chosen.logprob), rank, [(i, math.exp(logprob)) for i, logprob in chosen.likeliest]))

    uniforms = draws(sampling, 0)[None].to(exact_device(model.device))  # (1, max_new_tokens)
    for (token,) in continuations(model, [prompt], unused, uniforms, sampling, look):
        ends = token in tokenizer.end_ids
        yield Chosen(token, "" if ends else stream.push(token), *looks.pop())
        if ends or stream.stopped:
            return


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """How to show a token alone: its text, or the hexadecimal bytes of a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex(" ").upper()
