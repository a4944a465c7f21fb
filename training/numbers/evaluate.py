"""What a model has learned: validation loss, bits per byte, and prompts with expected answers."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.chat import Message
from common.errors import DataError, is_out_of_memory
from common.files import read_text
from common.machine import exact_device
from generation.decoding import ROWS_AT_ONCE, Completion, generate
from generation.sampling import Sampling
from model import IGNORE_INDEX, TransformerLanguageModel
from tokenizer_base import UnknownCharacterError
from training.config import TrainConfig
from training.machine import processes
from training.machine.hardware import Hardware, return_freed_memory
from training.numbers.data import TokenData
from training.numbers.step import pad_rows

ANSWER_TOKENS = 64


@torch.no_grad()
def validation_loss(
    model: TransformerLanguageModel,
    step_model: Callable[..., torch.Tensor],
    data: TokenData,
    config: TrainConfig,
    hardware: Hardware,
    between: Callable[[], None] = lambda: None,
) -> float:
    """Mean cross-entropy in nats per token over a fixed set of validation windows; draws no random numbers. Tokens that
    the loss is not over do not count.

    `step_model` is the model as it trains, compiled or not. Every batch has the same shape, so that it is compiled for
    evaluation once: the rows missing from the last one repeat the first and do not count. Processes take batches in
    turn. `between` is called between two batches, in all of them at the same time, and may raise to give the evaluation
    up.
    """
    windows = evaluated_windows(data, config)
    rows = config.rows_at_once
    exact = exact_device(data.device)
    total = torch.zeros((), device=exact, dtype=torch.float64)
    counted: int | torch.Tensor = 0
    model.eval()
    try:
        for round_begins in range(0, windows, rows * processes.count()):
            between()
            first = round_begins + rows * processes.rank()
            here = min(rows, windows - first)
            if here <= 0:
                continue
            batch = data.validation_batch(first, here, windows)
            count = (batch[1] != IGNORE_INDEX).sum() if data.layout.has_mask else here
            with hardware.autocast():
                total += step_model(*pad_rows(batch, rows)).to(exact).double() * count
            counted += count
    finally:
        model.train()
    total, counts = processes.added_up(total), processes.added_up(torch.as_tensor(counted, device=data.device))
    return (total / counts).item()


def evaluated_windows(data: TokenData, config: TrainConfig) -> int:
    """Windows an evaluation takes: `eval_batches` batches, or the whole split."""
    return min(config.eval_batches * config.batch_size, data.val_windows) or data.val_windows


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, data: TokenData) -> float | None:
    """Loss in bits per byte of text: comparable across tokenizers. None where the metadata does not count the bytes."""
    per_byte = data.layout.val_tokens_per_byte
    return None if per_byte is None else loss / math.log(2) * per_byte


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
        """Exact match, white space around it aside; None where no answer is expected."""
        return None if self.prompt.expected is None else self.text.strip() == self.prompt.expected.strip()


def accuracy(answers: Sequence[Answer]) -> tuple[int, int]:
    """(exactly right, with a known answer)"""
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
    """Raises DataError for a prompt the tokenizer cannot express: now, not at the first evaluation."""
    for prompt in prompts:
        try:
            data.tokenizer.encode(prompt.text)
        except UnknownCharacterError as problem:
            named = ", ".join(map(repr, problem.characters))
            raise DataError(
                f"--eval_prompts: the prompt {prompt.text!r} has characters the tokenizer does not know: {named}."
            ) from None


def asked_as_trained(text: str, data: TokenData) -> str | list[int]:
    """A prompt in the template of the conversations that are trained on; as it is, where it is text."""
    template = data.metadata.chat_template
    return text if template is None else template.prompt_ids(data.tokenizer, [Message("user", text)])


def answer_prompts(
    model: TransformerLanguageModel,
    data: TokenData,
    prompts: list[Prompt],
    between: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """The model's most likely continuation of each prompt. `between` is called at each token, and may raise.

    Where memory runs out, fewer prompts are answered at once. None are answered where one alone does not fit: that is
    no reason to end the training.
    """
    sampling = Sampling(max_new_tokens=ANSWER_TOKENS, temperature=0)
    asked = [asked_as_trained(prompt.text, data) for prompt in prompts]
    completions: list[Completion] = []
    at_once = min(ROWS_AT_ONCE, len(prompts))
    while len(completions) < len(prompts):
        rows = asked[len(completions) : len(completions) + at_once]
        try:
            completions += generate(model, data.tokenizer, rows, sampling, on_text=lambda index, piece: between())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the cache
            if at_once == 1:
                text = prompts[len(completions)].text
                print(
                    f"Warning: memory is too short to answer --eval_prompts: not even {text[:40]!r} ({len(text):,} "
                    f"characters) fits alone. The training goes on without answers; shorter prompts would help.",
                    file=sys.stderr,
                )
                return []
            at_once = at_once // 2
            return_freed_memory(model.device)
    return [Answer(prompt, completion.text) for prompt, completion in zip(prompts, completions, strict=True)]
