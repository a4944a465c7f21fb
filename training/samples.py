"""What a trained model writes without being asked, and how much of it stands word for word in the training text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from generation.sampling import Sampling
from training.data import TokenData
from training.evaluate import Answer, continuations
from training.step import Prompt, Trainer

SAMPLES = 3
PROMPT_TOKENS, SAMPLE_TOKENS = 12, 100
PASSAGE = 12  # tokens
BLOCK = 1 << 20  # tokens at a time
FACTOR = 0x9E3779B97F4A7C15  # odd, with bits everywhere
BUCKET_BITS = 20


def sample(trainer: Trainer) -> list[Answer]:
    """What follows the beginnings of SAMPLES held-out documents, by generate.py's defaults. Every process must call
    this. None of conversations, which `eval_prompts` ask better."""
    data = trainer.data
    if data.layout.has_mask:
        return []
    prompts = beginnings(data)
    begin = [] if data.tokenizer.bos_id is None else [data.tokenizer.bos_id]
    texts = continuations(trainer, [begin + ids for ids in prompts], Sampling(max_new_tokens=SAMPLE_TOKENS))
    return [Answer(Prompt(data.tokenizer.decode(ids)), text) for ids, text in zip(prompts, texts, strict=False)]


def beginnings(data: TokenData) -> list[list[int]]:
    """The first ids of documents of the validation split, evenly spread over it; of one long document, ids from three
    places. They have text, and end where their document ends."""
    held_out = whole_numbers(data, data.layout.val_start, data.metadata.total_tokens)
    starts = np.flatnonzero(held_out[: -2 * PROMPT_TOKENS] == data.tokenizer.end_of_text_id) + 1
    if len(starts) < SAMPLES:
        starts = np.linspace(0, max(0, len(held_out) - 2 * PROMPT_TOKENS), SAMPLES).astype(int)
    chosen = starts[np.linspace(0, len(starts) - 1, SAMPLES).astype(int)]
    special = set(data.tokenizer.special_ids.values())

    def text_at(start: int) -> list[int]:
        ids = held_out[start : start + PROMPT_TOKENS].tolist()
        first = next((i for i, token in enumerate(ids) if token not in special), len(ids))
        return list(itertools.takewhile(lambda token: token not in special, ids[first:])) or [ids[-1]]

    return [text_at(start) for start in chosen]


def whole_numbers(data: TokenData, first: int, end: int) -> np.ndarray:
    """The ids of a range of the tokens, as they are read by everyone but PyTorch."""
    tokens = data.tokens[first:end].cpu().numpy()
    if data.layout.has_mask:
        tokens = np.where(tokens < 0, ~tokens, tokens)
    return tokens.view(np.uint16) if data.is_16_bit else tokens


def copied(texts: Sequence[np.ndarray], tokens: np.ndarray) -> tuple[float, int]:
    """How much of the texts, arrays of ids, stands in `tokens`: the share that lies in passages of PASSAGE or more ids
    that stand there too, and the length of the longest such passage. By hashes of 64 bits."""
    wanted = np.unique(np.concatenate([hashes(text) for text in texts] or [np.empty(0, np.uint64)]))
    is_wanted = np.zeros(1 << BUCKET_BITS, bool)
    is_wanted[bucket(wanted)] = True
    found = [np.empty(0, np.uint64)]
    for first in range(0, len(tokens), BLOCK):
        there = hashes(tokens[first : first + BLOCK + PASSAGE - 1])
        near = there[is_wanted[bucket(there)]]
        found.append(np.intersect1d(near, wanted))
    known, inside, longest = np.concatenate(found), 0, 0
    for text in texts:
        begins = np.isin(hashes(text), known)
        covered = np.convolve(begins, np.ones(PASSAGE, int)) > 0 if len(begins) else begins
        inside += int(covered.sum())
        edges = np.flatnonzero(np.diff(np.concatenate([[False], begins, [False]]).astype(int)))
        longest = max([longest, *(edges[1::2] - edges[::2] + PASSAGE - 1).tolist()])
    return inside / max(1, sum(map(len, texts))), longest


def hashes(tokens: np.ndarray) -> np.ndarray:
    """The hash of each PASSAGE consecutive ids, (n - PASSAGE + 1,) uint64: a polynomial of them modulo 2^64, from
    those of 1, 2, 4 and 8."""
    if len(tokens) < PASSAGE:
        return np.empty(0, np.uint64)
    factor, two, four = (np.uint64(pow(FACTOR, power, 2**64)) for power in (1, 2, 4))
    one = (tokens.astype(np.uint64) + np.uint64(1)) * factor
    pairs = one[:-1] * factor + one[1:]
    fours = pairs[:-2] * two + pairs[2:]
    eights = fours[:-4] * four + fours[4:]
    return eights[:-4] * four + fours[8:]


def bucket(values: np.ndarray) -> np.ndarray:
    return values >> np.uint64(64 - BUCKET_BITS)
