"""Prompts that a run answers at each evaluation, and its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import DataError
from common.files import read_text
from tokenizer_base import UnknownCharacterError
from training.numbers.data import TokenData


@dataclass(frozen=True)
class Prompt:
    text: str
    expected: str | None = None


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    text: str

    @property
    def right(self) -> bool | None:
        """Whether it matches exactly, except for white space around it; None if no answer is expected."""
        return None if self.prompt.expected is None else self.text.strip() == self.prompt.expected.strip()


def accuracy(answers: Sequence[Answer]) -> tuple[int, int]:
    """(number of right answers, number of prompts with an expected answer)"""
    judged = [answer.right for answer in answers if answer.right is not None]
    return sum(judged), len(judged)


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
    """Raises DataError for a prompt that the tokenizer cannot encode, before the training starts."""
    for prompt in prompts:
        try:
            data.tokenizer.encode(prompt.text)
        except UnknownCharacterError as problem:
            named = ", ".join(map(repr, problem.characters))
            raise DataError(
                f"--eval_prompts: the prompt {prompt.text!r} has characters the tokenizer does not know: {named}."
            ) from None
