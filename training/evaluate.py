"""Evaluate a run: validation loss, bits per byte, answers to --eval_prompts, and samples that continue held-out
documents."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.chat import Message
from common.errors import DataError
from common.files import read_text
from common.machine import exact_device
from common.output import log
from generation.completion import ROWS_AT_ONCE, generate
from generation.sampling import Sampling
from model import IGNORE_INDEX
from tokenizer import Tokenizer
from tokenizer_bpe import UnknownCharacterError, joining_character_class
from training import parallel
from training.config import Config
from training.data import TokenData
from training.memory import suppress_out_of_memory
from training.parallel import on_main_process
from training.run import Prompt, Run
from training.state import Start
from training.step import Batch, diverged, pad_rows

ANSWER_TOKENS, SAMPLE_TOKENS = 64, 100
NUM_SAMPLES = 3
SAMPLE_PROMPT_TOKENS = 12
EVALUATION_SPEEDUP = 3  # relative to training, which has a backward pass


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    text: str

    @property
    def right(self) -> bool | None:
        """Whether the text is the expected one, apart from white space around it; None if none is expected."""
        return None if self.prompt.expected is None else self.text.strip() == self.prompt.expected.strip()


class Evaluation(NamedTuple):
    val_loss: float  # nats per token
    bits_per_byte: float | None  # None if the metadata does not count the bytes
    windows: int  # validation windows in the loss
    answers: list[Answer]  # one per prompt of the run


def evaluate(run: Run) -> Evaluation:
    """Evaluate the current weights."""
    windows = evaluated_windows(run.data, run.config)
    loss = validation_loss(run, windows)
    return Evaluation(loss, bits_per_byte(loss, run.data), windows, answer_prompts(run))


@torch.no_grad()
def validation_loss(run: Run, windows: int | None = None) -> float:
    """Return the mean cross-entropy in nats per token over a fixed set of `windows` (default: `evaluated_windows`).
    Masked tokens do not count. Draws no random numbers.

    `pad_rows` gives every batch the same shape, so that torch.compile compiles the evaluation once. Processes take
    batches in turn.
    """
    model, data, rows = run.model, run.data, run.rows_at_once
    windows = windows or evaluated_windows(data, run.config)
    exact = exact_device(data.device)
    total = torch.zeros((), device=exact, dtype=torch.float64)
    counted: int | torch.Tensor = 0  # windows of this process, or unmasked tokens
    model.eval()
    try:
        together = rows * run.hardware.processes
        own, _ = parallel.own_rows(together)
        for first in range(own, windows + own, together):
            windows_here = max(0, min(rows, windows - first))
            # All processes must take equally many batches: one without windows computes one that does not count.
            batch = data.validation_batch(min(first, windows - 1), max(1, windows_here), windows)
            count = (batch[1] != IGNORE_INDEX).sum() if data.layout.has_mask and windows_here else windows_here
            with run.hardware.autocast():
                total += _batch_loss(run, pad_rows(batch, rows)).to(exact).double() * count
            counted += count
    finally:
        model.train()
    counts = parallel.sum_over_processes(torch.as_tensor(counted, device=data.device))
    return (parallel.sum_over_processes(total) / counts).item()


def _batch_loss(run: Run, batch: Batch) -> torch.Tensor:
    """Return the mean loss of a batch, (). The model has to be in `eval` mode, without gradients."""
    if run.captured is not None and run.config.eval_interval:
        loss: torch.Tensor = run.captured.evaluate(batch)
        return loss
    return run.step_model(*batch)


def answer_prompts(run: Run) -> list[Answer]:
    """Continue each prompt of the run with the most likely tokens. Every process must call this."""
    inputs = [apply_chat_template(prompt.text, run.data) for prompt in run.prompts]
    texts = _continue_prompts(run, inputs, Sampling(max_new_tokens=ANSWER_TOKENS, temperature=0))
    return [Answer(prompt, text) for prompt, text in zip(run.prompts, texts, strict=False)]


def _continue_prompts(
    run: Run, prompts: Sequence[str | list[int]], sampling: Sampling, deadline: float = math.inf
) -> list[str]:
    """Continue the prompts, at most `rows_at_once` together, until `deadline` (see `generate`). Return [] if memory
    runs out. The main process computes them; every process must call this."""
    if not prompts:
        return []
    model = run.model

    def generate_texts(rows: int) -> list[str]:
        batches = (prompts[first : first + rows] for first in range(0, len(prompts), rows))
        return [
            completion.text
            for batch in batches
            for completion in generate(model, run.data.tokenizer, batch, sampling, deadline)
        ]

    def generate_if_it_fits() -> list[str]:
        for rows in (min(ROWS_AT_ONCE, run.rows_at_once), 1):
            with suppress_out_of_memory():
                return generate_texts(rows)
        log.info(
            "Warning: out of memory while generating text. Answers and samples are left out; the training goes on."
        )
        return []

    texts = on_main_process(generate_if_it_fits)
    model.kept_decoder = None  # its memory is for steps
    return texts


def write_samples(run: Run, deadline: float) -> list[Answer]:
    """Continue the beginnings of NUM_SAMPLES held-out documents with generate.py's defaults, until `deadline` (see
    `generate`). Return [] for conversations, which `eval_prompts` test better. Every process must call this."""
    data = run.data
    if data.layout.has_mask:
        return []
    prompts = _choose_sample_prompts(data)
    begin = [] if data.tokenizer.bos_id is None else [data.tokenizer.bos_id]
    texts = _continue_prompts(run, [begin + ids for ids in prompts], Sampling(max_new_tokens=SAMPLE_TOKENS), deadline)
    return [Answer(Prompt(data.tokenizer.decode(ids)), text) for ids, text in zip(prompts, texts, strict=False)]


def record_evaluation(run: Run, evaluation: Evaluation, elapsed_seconds: float, is_too_early: bool) -> bool:
    """Record an evaluation in the state. Return whether these weights are to be saved: as the best so far, and at the
    end even if `is_too_early`.

    Raises ConfigError if the training diverged, because more steps would only waste time.
    """
    state, loss = run.state, evaluation.val_loss
    if not math.isfinite(loss):
        raise diverged(run, "the validation loss is not finite")
    state.elapsed_seconds, state.evaluated_step = elapsed_seconds, state.step
    is_lower = state.lowest_val_loss is None or loss < state.lowest_val_loss
    reads_companion = run.data.companion is not None and state.switch is None
    state.worse = 0 if is_lower or reads_companion else state.worse + 1
    if is_lower:
        state.lowest_val_loss = loss
    is_best = (state.best_val_loss is None or loss < state.best_val_loss) and (run.took_last_step or not is_too_early)
    if is_best:
        state.best_val_loss, state.best_step, state.best_windows = loss, state.step, evaluation.windows
    return is_best


def evaluate_before_steps(run: Run) -> None:
    """Evaluate the weights that a new run starts from. Evaluate the best weights again, if the validation windows have
    changed."""
    state, windows = run.state, evaluated_windows(run.data, run.config)
    if not run.config.eval_interval:
        return
    if state.initialized_from and state.step == 0 and state.start is None:
        result = evaluate(run)
        if not math.isfinite(result.val_loss):
            raise diverged(run, "the validation loss of the initial weights is not finite")
        prompts = [answer.prompt.text for answer in result.answers]
        state.start = Start(result.val_loss, prompts, [answer.text for answer in result.answers])
    if state.best_val_loss is not None and state.best_windows != windows:
        before = "others" if state.best_windows is None else f"{state.best_windows:,}"
        log.info(
            f"Evaluating the best weights (step {state.best_step:,}, {state.best_val_loss:.4f}) again, because the "
            f"validation windows have changed from {before} to {windows:,} ..."
        )
        with run.best_weights():
            loss = validation_loss(run)
        state.best_val_loss = state.lowest_val_loss = loss
        state.best_windows = windows
        log.info(f"step {state.best_step:,}, the best so far: validation loss {loss:.4f}")


def apply_chat_template(text: str, data: TokenData) -> str | list[int]:
    """Return the prompt's ids in the chat template of the training data; a text has none, so the prompt stays."""
    template = data.metadata.chat_template
    return text if template is None else template.prompt_ids(data.tokenizer, [Message("user", text)])


def evaluated_windows(data: TokenData, config: Config) -> int:
    """Return the number of windows in an evaluation: `eval_batches` batches, or the whole split."""
    return min(config.eval_batches * config.batch_size, data.val_windows) or data.val_windows


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, data: TokenData) -> float | None:
    """Convert a loss in nats per token to bits per byte, comparable across tokenizers; None if bytes were not
    counted."""
    per_byte = data.layout.val_tokens_per_byte
    return None if per_byte is None else loss / math.log(2) * per_byte


def accuracy(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the number of right answers, and of prompts with an expected answer."""
    judged = [answer.right for answer in answers if answer.right is not None]
    return sum(judged), len(judged)


# Prompts


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
                f'{path}, line {number}: expected {{"prompt": "...", "answer": "..."}}; the answer may be left out.'
            ) from None
    if not prompts:
        raise DataError(f"{path} holds no prompts.")
    return prompts


def check_prompts(prompts: list[Prompt], data: TokenData) -> None:
    """Raise DataError if the tokenizer cannot encode a prompt."""
    for prompt in prompts:
        try:
            data.tokenizer.encode(prompt.text)
        except UnknownCharacterError as problem:
            characters = ", ".join(map(repr, problem.characters))
            raise DataError(
                f"--eval_prompts: the tokenizer does not know these characters in the prompt {prompt.text!r}: "
                f"{characters}."
            ) from None


def _choose_sample_prompts(data: TokenData) -> list[list[int]]:
    """Return the first ids of NUM_SAMPLES documents spread evenly over the validation split, or ids from that many
    places of a single document. Each has text, and ends where its document ends."""
    held_out = data.tokens[data.layout.val_start : data.metadata.total_tokens].cpu().numpy()
    held_out = held_out.view(np.uint16) if data.is_16_bit else held_out
    starts = np.flatnonzero(held_out[: -2 * SAMPLE_PROMPT_TOKENS] == data.tokenizer.end_of_text_id) + 1
    if len(starts) < NUM_SAMPLES:
        starts = np.linspace(0, max(0, len(held_out) - 2 * SAMPLE_PROMPT_TOKENS), NUM_SAMPLES).astype(int)
    chosen = starts[np.linspace(0, len(starts) - 1, NUM_SAMPLES).astype(int)]
    special = set(data.tokenizer.special_ids.values())

    def text_at(start: int) -> list[int]:
        ids = held_out[start : start + SAMPLE_PROMPT_TOKENS + 1].tolist()
        first = next((i for i, token in enumerate(ids) if token not in special), len(ids))
        text = list(itertools.takewhile(lambda token: token not in special, ids[first:]))
        return trim_partial_characters(cut_at_word(text, data.tokenizer), data.tokenizer) or [ids[-1]]

    return [text_at(start) for start in chosen]


def cut_at_word(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return at most SAMPLE_PROMPT_TOKENS of the ids, and end before a space if there is one in their second half."""
    if len(ids) <= SAMPLE_PROMPT_TOKENS:
        return ids
    lengths = range(SAMPLE_PROMPT_TOKENS, SAMPLE_PROMPT_TOKENS // 2, -1)
    at_words = (length for length in lengths if tokenizer.decode([ids[length]])[:1].isspace())
    return ids[: next(at_words, SAMPLE_PROMPT_TOKENS)]


def trim_partial_characters(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Remove ids at both ends that hold a part of a character, or only combining marks."""
    mark, first, last = re.compile(f"[\ufffd{joining_character_class()}]"), 0, len(ids)
    while first < last and mark.match(tokenizer.decode(ids[first:last])):
        first += 1
    while first < last and tokenizer.decode(ids[first:last]).endswith("\ufffd"):
        last -= 1
    return ids[first:last]
