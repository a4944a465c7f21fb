"""What the model is asked while it trains: the prompts of --eval_prompts, and the beginnings of held-out documents."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.files import read_text
from tokenizer_base import UnknownCharacterError
from training.data import TokenData

SAMPLES = 3
PROMPT_TOKENS = 12  # of a beginning


@dataclass(frozen=True)
class Prompt:
    """What the model is asked at each evaluation, and the right answer, if there is one."""

    text: str
    expected: str | None = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL file of {"prompt": ..., "answer": ... (optional)}. Raises DataError naming the line."""
    prompts = []
    for number, line in enumerate(read_text(path, DataError, "--eval_prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt = Prompt(value["prompt"], value.get("answer"))
            if not (isinstance(prompt.text, str) and isinstance(prompt.expected, str | None)):
                raise TypeError
            prompts.append(prompt)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise DataError(
                f'{path}, line {number}: {{"prompt": "...", "answer": "..."}} is expected (the answer may be left out).'
            ) from None
    if not prompts:
        raise DataError(f"{path} holds no prompts.")
    return prompts


def check_prompts(prompts: list[Prompt], data: TokenData) -> None:
    """Raise DataError for a prompt that the tokenizer cannot encode, before the training starts."""
    for prompt in prompts:
        try:
            data.tokenizer.encode(prompt.text)
        except UnknownCharacterError as problem:
            named = ", ".join(map(repr, problem.characters))
            raise DataError(
                f"--eval_prompts: the prompt {prompt.text!r} has characters the tokenizer does not know: {named}."
            ) from None


def beginnings(data: TokenData) -> list[list[int]]:
    """Take the first ids of documents of the validation split, evenly spread over it; of one long document, ids from
    three places. They have text, and end where their document ends."""
    held_out = data.tokens[data.layout.val_start : data.metadata.total_tokens].cpu().numpy()
    held_out = held_out.view(np.uint16) if data.is_16_bit else held_out
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
