"""What generate.py does after it has read its flags: completions, a comparison, a prompt loop, scores."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.chat import AnyTemplate, Message
from common.checkpoint import Checkpoint, newest_run, open_checkpoint
from common.errors import ConfigError, DataError
from common.files import read_text
from common.output import cell, printable, table_row
from generation.completion import ROWS_AT_ONCE, generate, prompt_ids
from generation.loading import load_checkpoint
from generation.scoring import Score, json_row, score_file, table_head, table_line, table_rows
from generation.settings import Request, Sampling
from generation.terminal import interact, stream_one
from model import TransformerLanguageModel
from tokenization.corpus import find_sources, read_pieces
from tokenization.encoding import encode_documents
from tokenizer import Tokenizer
from tokenizer_base import TokenizerError, UnknownCharacterError


def run(arguments: Request, sampling: Sampling) -> None:
    if arguments.score:
        return score(arguments)
    if arguments.compare:
        return compare(arguments, sampling)
    checkpoint = open_checkpoint(arguments.checkpoint or newest_run())
    model, tokenizer = load_checkpoint(checkpoint, arguments.device)
    template = None if arguments.raw else checkpoint.chat_template()
    if arguments.interactive:
        print(f"{checkpoint.path}: {model.num_parameters():,} parameters.")
        interact(model, tokenizer, sampling, template)
        return
    prompts = [prompt for prompt in read_prompts(arguments) for _ in range(arguments.num_samples)]
    after_prompt = "" if template is None else "\n"
    stream = arguments.stream or (len(prompts) == 1 and not arguments.json and not arguments.no_stream)
    if arguments.json:
        for row in rows_as_dicts(model, tokenizer, checkpoint, prompts, sampling, template):
            print(json.dumps(row), flush=True)
    elif stream:
        for i, prompt in enumerate(prompts):
            separate(i)
            seeded = dataclasses.replace(sampling, seed=sampling.seed + i)
            print(printable(prompt), end=after_prompt, flush=True)
            stream_one(model, tokenizer, as_trained(prompt, template, tokenizer), seeded)
    else:
        for i, row in enumerate(rows_as_dicts(model, tokenizer, checkpoint, prompts, sampling, template)):
            separate(i)
            print(printable(row["prompt"] + after_prompt + row["completion"]), flush=True)


def score(arguments: Request) -> None:
    """Print how well the model predicts each file: a table, or one JSON object per file. Always in fp32."""
    named = [  # a file has the name that was typed; the files of a folder or pattern have their whole path
        (name if Path(name).is_file() else str(source.path), source)
        for name in arguments.score
        for source in find_sources([name])
    ]
    checkpoint = open_checkpoint(arguments.checkpoint or newest_run())
    model, tokenizer = load_checkpoint(checkpoint, arguments.device, torch.float32)
    context = model.config.max_seq_len
    stride = max(1, context // 2) if arguments.stride is None else arguments.stride
    if stride > context:
        raise ConfigError(f"--stride is {stride}; use at most {context}, the context of {checkpoint.path}.")
    if not arguments.json:
        print(f"{checkpoint.path}: fp32, windows of {context} tokens, stride {stride}\n")
    total = Score()
    for i, (name, source) in enumerate(named):
        size = None if source.is_compressed else source.size  # unpacked, it is not known yet
        with tqdm(total=size, desc=source.name, unit="B", unit_scale=True, leave=False, disable=None, delay=1) as bar:
            documents = encode_documents(tokenizer, read_pieces([source], on_read=bar.update))
            try:
                scored = score_file(model, tokenizer, name, documents, stride)
            except UnknownCharacterError as error:
                raise TokenizerError(
                    f"{name}: {error.finding}. The model has no probability for it; remove it."
                ) from None
        total.add(scored.total)
        if arguments.json:
            row = json_row(scored.total) | {"stride": stride, "checkpoint": str(checkpoint.path)}
            print(json.dumps({"file": name} | row), flush=True)
        else:
            print(*([] if i else table_head()), *table_rows(name, scored), sep="\n", flush=True)
    if len(named) > 1 and not arguments.json:
        print(table_line("total", total))


def read_prompts(arguments: Request) -> list[str]:
    """All prompts; without any, one empty prompt."""
    prompts = list(arguments.prompt or [])
    if arguments.prompts_file:
        lines = read_text(arguments.prompts_file, DataError, "--prompts_file").split("\n")
        prompts += [line.rstrip("\r") for line in lines if line.strip()]
        if not prompts:
            raise DataError(f"{arguments.prompts_file} holds no prompts.")
    return prompts or [""]


def as_trained(prompt: str, template: AnyTemplate | None, tokenizer: Tokenizer) -> str | list[int]:
    """The prompt for a model of plain text; for a chat model the ids of the prompt as a question."""
    if template is None:
        return prompt
    if not prompt.strip():
        raise ConfigError("A chat model needs a --prompt to answer. To generate text without a prompt, add --raw.")
    return template.prompt_ids(tokenizer, [Message("user", prompt)])


def rows_as_dicts(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    prompts: list[str],
    sampling: Sampling,
    template: AnyTemplate | None,
) -> Iterator[dict[str, Any]]:
    """Complete all prompts, batch by batch. `tokens_per_second` is that of the whole batch."""
    # Encode all of them first: one may have a character that the model does not know.
    ids = {each: prompt_ids(tokenizer, as_trained(each, template, tokenizer)) for each in dict.fromkeys(prompts)}
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = prompts[first : first + ROWS_AT_ONCE]
        started = time.perf_counter()
        seeded = dataclasses.replace(sampling, seed=sampling.seed + first)
        completions = generate(model, tokenizer, [ids[prompt] for prompt in batch], seeded)
        seconds = time.perf_counter() - started
        speed = sum(completion.tokens for completion in completions) / seconds
        for i, (prompt, completion) in enumerate(zip(batch, completions, strict=True)):
            yield {
                "prompt": prompt,
                "completion": completion.text if template is None else completion.text.strip(),
                "tokens": completion.tokens,
                "tokens_per_second": round(speed, 1),
                "checkpoint": str(checkpoint.path),
                "seed": seeded.seed + i,
            }


def compare(arguments: Request, sampling: Sampling) -> None:
    """Print one table per prompt: the completion of each checkpoint."""
    prompts = read_prompts(arguments)
    repeated = [prompt for prompt in prompts for _ in range(arguments.num_samples)]
    checkpoints = [open_checkpoint(path) for path in arguments.compare]  # check all before using the first
    answers: list[list[dict[str, Any]]] = []
    for checkpoint in checkpoints:
        model, tokenizer = load_checkpoint(checkpoint, arguments.device)
        template = None if arguments.raw else checkpoint.chat_template()
        answers.append(list(rows_as_dicts(model, tokenizer, checkpoint, repeated, sampling, template)))
    if arguments.json:
        for rows in answers:
            print(*map(json.dumps, rows), sep="\n")
        return
    for i, prompt in enumerate(prompts):
        separate(i)
        print(table_row(["checkpoint", cell(prompt) or "(no prompt)"]))
        print(table_row(["---", "---"]))
        for checkpoint, rows in zip(checkpoints, answers, strict=True):
            for row in rows[i * arguments.num_samples : (i + 1) * arguments.num_samples]:
                print(table_row([str(checkpoint.path), cell(row["completion"])]))


def separate(index: int) -> None:
    if index:
        print("---")
