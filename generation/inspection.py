"""A continuation token by token, with what the model thought: how likely each token was and what else it considered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from generation.decoding import continuations, unused_ids
from generation.sampling import Sampling, draws
from generation.text_stream import TextStream
from model import TransformerLanguageModel
from tokenizer import Tokenizer

CONSIDERED = 8  # tokens that are listed


class Chosen(NamedTuple):
    """A token, and the model's own probabilities in its place: before temperature, penalty, top-k and top-p."""

    token: int
    text: str  # that it completes; empty where it ends inside a character
    probability: float
    rank: int  # 1: the model thought no other likelier
    likeliest: list[tuple[int, float]]  # (token, probability), likeliest first


@torch.inference_mode()
def inspect(
    model: TransformerLanguageModel, tokenizer: Tokenizer, prompt: list[int], sampling: Sampling
) -> Iterator[Chosen]:
    """What `generate` makes of the prompt's ids, as far as it is asked for; the last may be the end-of-text token.

    A character that the text leaves unfinished, or the beginning of a stop string, is no part of it.
    """
    stream = TextStream(tokenizer, sampling.stop)
    looks: list[tuple[float, int, list[tuple[int, float]]]] = []

    def look(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        chosen = logits[0, tokens[0]]
        probabilities = logits[0].softmax(dim=-1)  # (V,)
        values, places = probabilities.topk(min(CONSIDERED, len(probabilities)))
        rank = 1 + int((logits[0] > chosen).sum())
        likeliest = list(zip(places.tolist(), values.tolist(), strict=True))
        looks.append((float(probabilities[tokens[0]]), rank, likeliest))

    uniforms = draws(sampling, 0)[None].to(model.device)  # (1, max_new_tokens)
    for (token,) in continuations(model, [prompt], unused_ids(model, tokenizer), uniforms, sampling, look):
        ends = token == tokenizer.end_of_text_id
        yield Chosen(token, "" if ends else stream.push(token), *looks.pop())
        if ends or stream.stopped:
            return


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """A token as it can be shown alone: its text, or the bytes of a part of a character."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text
    return " ".join(f"{byte:02X}" for byte in tokenizer.decode_bytes([token]))
