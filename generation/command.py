"""The actions of generate.py: complete prompts, compare checkpoints, prompt in a loop, score files."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from common.chat import Message, Template
from common.checkpoint import find_newest_run, open_checkpoint
from common.errors import ConfigError, DataError
from common.files import read_text
from common.output import cell, printable, table_row
from generation.completion import ROWS_AT_ONCE, encode_prompt, ends_with_space, generate
from generation.loading import load_checkpoint
from generation.passages import score_next_sentences
from generation.scoring import Score, describe_score, render_header, render_score, score_documents, score_to_json
from generation.settings import Request, Sampling
from generation.terminal import interact, print_stream
from generation.trace import TracedText, describe_share
from model import TransformerLanguageModel
from tokenization.corpus import find_sources
from tokenization.documents import read_pieces
from tokenization.encoding import encode_documents, sample_evenly
from tokenization.extract import make_readable
from tokenization.settings import Settings
from tokenizer import Tokenizer
from tokenizer_bpe import TokenizerError, UnknownCharacterError

NEXT_SENTENCE_BYTES = 2e6  # text sampled for next sentences


class OpenModel(NamedTuple):
    """An opened checkpoint."""

    path: Path
    model: TransformerLanguageModel
    tokenizer: Tokenizer
    template: Template | None  # None: continue prompts as text

    def encode(self, prompts: Iterable[str]) -> dict[str, list[int]]:
        """Return {prompt: ids}, with the chat template if there is one. Raises TokenizerError for unknown
        characters."""
        if self.template is None:
            return {prompt: encode_prompt(self.tokenizer, prompt) for prompt in prompts}
        return {prompt: self.template.prompt_ids(self.tokenizer, [Message("user", prompt)]) for prompt in prompts}


def run(request: Request, sampling: Sampling) -> None:
    if request.score:
        return print_scores(request)
    if request.compare:
        return print_comparison(request, sampling)
    checkpoint = open_checkpoint(request.checkpoint or find_newest_run())
    template = None if request.raw else checkpoint.chat_template()
    training_text = TracedText.of(checkpoint) if request.trace else None
    opened = OpenModel(checkpoint.path, *load_checkpoint(checkpoint, request.device), template)
    model_line = f"{checkpoint.path}: {opened.model.num_parameters():,} parameters."
    if request.interactive:
        print(model_line)
        return interact(opened.model, opened.tokenizer, sampling, template)
    asked = read_prompts(request, must_ask=template is not None)
    if template is None and opened.tokenizer.kind == "bpe" and any(map(ends_with_space, asked)):
        print("Note: the final space of a prompt is left out, because words begin with their space.", file=sys.stderr)
        asked = [prompt[:-1] if ends_with_space(prompt) else prompt for prompt in asked]
    prompts = repeat_prompts(asked, request)
    encoded = opened.encode(prompts)
    print(model_line, file=sys.stderr)
    after_prompt = "" if template is None else "\n"
    if request.stream or (len(prompts) == 1 and not request.json and not request.no_stream):
        for i, prompt in enumerate(prompts):
            print_separator(i)
            print(printable(prompt), end=after_prompt, flush=True)
            seeded = dataclasses.replace(sampling, seed=sampling.seed + i)
            written = print_stream(
                opened.model, opened.tokenizer, encoded[prompt], seeded, is_answer=template is not None
            )
            if training_text is not None:
                print_copied(training_text, written.text)
        return
    for i, row in enumerate(complete_in_batches(opened, encoded, prompts, sampling)):
        if request.json:
            if training_text is not None:
                row["copied"] = [span._asdict() for span in training_text.find_spans(row["completion"])]
            print(json.dumps(row), flush=True)
            continue
        print_separator(i)
        print(printable(row["prompt"] + after_prompt + row["completion"]), flush=True)
        if training_text is not None:
            print_copied(training_text, row["completion"])


def print_copied(training_text: TracedText, text: str) -> None:
    """Print the spans of a generated text that occur in the training text."""
    spans = training_text.find_spans(text)
    print(f"\nCopied     {describe_share(spans, [text])}", flush=True)
    for span in spans:
        print(f'  {span.place}: "{printable(" ".join(span.text.split()))}"', flush=True)


def print_scores(request: Request) -> None:
    """Print how well the model predicts each file, as a table or one JSON object per file. Computes in fp32."""
    sources, skipped = make_readable(find_sources(request.score), Settings(input=tuple(request.score)))
    for name, reason in skipped:
        print(f"Left out: {name}: {reason}.", file=sys.stderr)
    typed = {Path(name).resolve(): name for name in request.score}
    named = [(typed.get(source.path, source.name if source.note else str(source.path)), source) for source in sources]
    checkpoint = open_checkpoint(request.checkpoint or find_newest_run())
    model, tokenizer = load_checkpoint(checkpoint, request.device, torch.float32)
    context = model.config.max_seq_len
    stride = max(1, context // 2) if request.stride is None else request.stride
    if stride > context:
        raise ConfigError(f"--stride {stride} is above {context}, the context of {checkpoint.path}. Use a smaller one.")
    if not request.json:
        print(f"{checkpoint.path}: fp32, windows of {context} tokens, stride {stride}\n")
    total, header = Score(), render_header()
    for name, source in named:
        size = source.text_bytes
        with tqdm(total=size, desc=source.name, unit="B", unit_scale=True, leave=False, disable=None, delay=1) as bar:
            documents = encode_documents(tokenizer, read_pieces([source], on_read=bar.update))
            try:
                scored = list(score_documents(model, tokenizer, documents, stride))
            except UnknownCharacterError as error:
                raise TokenizerError(f"{name} cannot be scored: {error.finding}. Remove these characters.") from None
        of_file = Score()
        for document in scored:
            of_file.add(document)
        total.add(of_file)
        if not of_file.tokens:
            nothing = f"{name} has no text to score: no document has two tokens"
            if len(named) == 1:
                raise DataError(f"{nothing}.")
            print(f"{nothing}. It is left out.", file=sys.stderr)
        elif request.json:
            row = score_to_json(of_file) | {"stride": stride, "checkpoint": str(checkpoint.path)}
            print(json.dumps({"file": name} | row), flush=True)
        else:
            several = f", {len(scored):,} documents" if len(scored) > 1 else ""
            print(*header, render_score(name + several, of_file), sep="\n", flush=True)
            header = []
    if not request.json:
        if len(named) > 1:
            print(render_score("total", total))
        print(f"\n{describe_score(total)}")
        pieces = (piece.text for _, source in named for piece in read_pieces([source]))
        guessed = score_next_sentences(
            model, tokenizer, sample_evenly(pieces, NEXT_SENTENCE_BYTES / max(1, total.bytes))
        )
        if guessed.total:
            print(f"Next sentences: {guessed}")


def read_prompts(request: Request, must_ask: bool) -> list[str]:
    """Return all prompts, or one empty prompt if there are none. `must_ask`: leave out empty ones, for a chat model."""
    prompts = list(request.prompt)
    if request.prompts_file:
        lines = read_text(request.prompts_file, DataError, "--prompts_file").split("\n")
        prompts += [line.rstrip("\r") for line in lines if line.strip()]
        if not prompts:
            raise DataError(f"{request.prompts_file} has no prompts.")
    if must_ask:
        prompts = [prompt for prompt in prompts if prompt.strip()]
        if not prompts:
            raise ConfigError("A chat model needs a --prompt to answer. To generate text without one, add --raw.")
    return prompts or [""]


def repeat_prompts(prompts: list[str], request: Request) -> list[str]:
    return [prompt for prompt in prompts for _ in range(request.num_samples)]


def complete_in_batches(
    opened: OpenModel, encoded: Mapping[str, list[int]], prompts: list[str], sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """Yield a row for each prompt, completed in batches. `tokens_per_second` is for the whole batch."""
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = prompts[first : first + ROWS_AT_ONCE]
        started = time.perf_counter()
        seeded = dataclasses.replace(sampling, seed=sampling.seed + first)
        completions = generate(opened.model, opened.tokenizer, [encoded[prompt] for prompt in batch], seeded)
        seconds = time.perf_counter() - started
        speed = sum(completion.tokens for completion in completions) / seconds
        for i, (prompt, completion) in enumerate(zip(batch, completions, strict=True)):
            yield {
                "prompt": prompt,
                "completion": completion.text.strip() if opened.template else completion.text,
                "tokens": completion.tokens,
                "tokens_per_second": round(speed, 1),
                "checkpoint": str(opened.path),
                "seed": seeded.seed + i,
            }


def print_comparison(request: Request, sampling: Sampling) -> None:
    """Print a table per prompt with the completions of each checkpoint."""
    answers: list[list[dict[str, Any]]] = []
    checkpoints = [open_checkpoint(path) for path in request.compare]  # checks all before using the first
    templates = [None if request.raw else checkpoint.chat_template() for checkpoint in checkpoints]
    prompts = read_prompts(request, must_ask=any(templates))
    for checkpoint, template in zip(checkpoints, templates, strict=True):
        opened = OpenModel(checkpoint.path, *load_checkpoint(checkpoint, request.device), template)
        answers.append(
            list(complete_in_batches(opened, opened.encode(prompts), repeat_prompts(prompts, request), sampling))
        )
    if request.json:
        for each in answers:
            print(*map(json.dumps, each), sep="\n")
        return
    for i, prompt in enumerate(prompts):
        print_separator(i)
        print(table_row(["checkpoint", cell(prompt) or "(no prompt)"]))
        print(table_row(["---", "---"]))
        for each in answers:
            for row in each[i * request.num_samples : (i + 1) * request.num_samples]:
                print(table_row([row["checkpoint"], cell(row["completion"])]))


def print_separator(index: int) -> None:
    if index:
        print("---")
