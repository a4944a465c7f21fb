"""Generate text with a trained model.

    python generate.py --prompt "What is the capital of France?"
    python generate.py --checkpoint runs/gpt2_small --prompt "Once upon a time" --num_samples 3 --temperature 1.0
    python generate.py --interactive
    python generate.py --prompt "The moon" --compare runs/a/checkpoints/step_00001000 runs/a/checkpoints/step_00002000
    python generate.py --score my_text.txt

Importable: `load_model`, `generate_text`.
"""

from __future__ import annotations

from common.script import check_flags, end, script
from generation.request import Request, Sampling, parse_arguments

if __name__ == "__main__":
    check_flags(parse_arguments)  # before importing torch, which takes seconds: --help should not wait

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from common.chat import Message, Template
from common.checkpoint import Checkpoint, find_newest_run, open_checkpoint
from common.errors import ConfigError, DataError
from common.files import read_text
from common.output import cell, printable, table_row
from generation.completion import ROWS_AT_ONCE, encode_prompt, ends_with_space, generate
from generation.loading import generate_text, load_checkpoint, load_model
from generation.passages import find_training_tokens, score_next_sentences
from generation.scoring import Score, describe_score, render_header, render_score, score_documents, score_to_json
from generation.terminal import interact, print_stream
from generation.trace import TracedText, describe_share
from model import TransformerLanguageModel
from tokenization.corpus import Source, find_sources
from tokenization.documents import read_pieces
from tokenization.encoding import encode_documents, sample_evenly
from tokenization.extract import make_readable
from tokenization.settings import Settings
from tokenizer import Tokenizer
from tokenizer_bpe import TokenizerError, UnknownCharacterError

__all__ = ("generate_text", "load_model", "main")

NEXT_SENTENCE_BYTES = 2e6  # text sampled for next sentences


@script
def main(argv: Sequence[str] | None = None) -> int:
    request, sampling = parse_arguments(argv)
    if request.score:
        score_files(request)
    elif request.compare:
        compare_checkpoints(request, sampling)
    elif request.interactive:
        prompt_in_a_loop(request, sampling)
    else:
        complete_prompts(request, sampling)
    return 0


class LoadedModel(NamedTuple):
    """A model, its tokenizer, and the chat template if it answers questions."""

    path: Path
    model: TransformerLanguageModel
    tokenizer: Tokenizer
    template: Template | None  # None: continue prompts as text

    @classmethod
    def of(cls, checkpoint: Checkpoint, request: Request) -> LoadedModel:
        template = None if request.raw else checkpoint.chat_template()
        return cls(checkpoint.path, *load_checkpoint(checkpoint, request.device), template)

    def __str__(self) -> str:
        return f"{self.path}: {self.model.num_parameters():,} parameters."

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, a question if there is a template. Raises TokenizerError for
        unknown characters."""
        if self.template is None:
            return encode_prompt(self.tokenizer, prompt)
        return self.template.prompt_ids(self.tokenizer, [Message("user", prompt)])


def prompt_in_a_loop(request: Request, sampling: Sampling) -> None:
    """--interactive: continue each line that is typed, or hold a conversation."""
    loaded = LoadedModel.of(open_checkpoint(request.checkpoint or find_newest_run()), request)
    print(loaded)
    interact(loaded.model, loaded.tokenizer, sampling, loaded.template)


def complete_prompts(request: Request, sampling: Sampling) -> None:
    """Complete each prompt `num_samples` times: one after the other as the tokens come, or in batches."""
    checkpoint = open_checkpoint(request.checkpoint or find_newest_run())
    training_text = TracedText.of(checkpoint) if request.trace else None
    for note in training_text.notes if training_text else ():
        print(f"Note: {note}.", file=sys.stderr)
    loaded = LoadedModel.of(checkpoint, request)
    prompts = read_prompts(request, must_ask=loaded.template is not None)
    if loaded.template is None and loaded.tokenizer.kind == "bpe" and any(map(ends_with_space, prompts)):
        print("Note: the final space of a prompt is left out, because words begin with their space.", file=sys.stderr)
        prompts = [prompt[:-1] if ends_with_space(prompt) else prompt for prompt in prompts]
    encoded = {prompt: loaded.encode(prompt) for prompt in prompts}
    prompts = [prompt for prompt in prompts for _ in range(request.num_samples)]
    print(loaded, file=sys.stderr)
    if request.stream or (len(prompts) == 1 and not request.json and not request.no_stream):
        stream_completions(loaded, encoded, prompts, sampling, training_text)
        return
    for number, row in enumerate(complete_in_batches(loaded, encoded, prompts, sampling)):
        if request.json:
            if training_text is not None:
                row["copied"] = [span._asdict() for span in training_text.find_spans(row["completion"])]
            print(json.dumps(row), flush=True)
        else:
            print_separator(number)
            after_prompt = "\n" if loaded.template else ""
            print(printable(row["prompt"] + after_prompt + row["completion"]), flush=True)
            print_copied(row["completion"], training_text)


def stream_completions(
    loaded: LoadedModel,
    encoded: Mapping[str, list[int]],
    prompts: Sequence[str],
    sampling: Sampling,
    training_text: TracedText | None,
) -> None:
    """Print each completion as its tokens come."""
    is_answer = loaded.template is not None
    for number, prompt in enumerate(prompts):
        print_separator(number)
        print(printable(prompt), end="\n" if is_answer else "", flush=True)
        seeded = dataclasses.replace(sampling, seed=sampling.seed + number)
        completion = print_stream(loaded.model, loaded.tokenizer, encoded[prompt], seeded, is_answer)
        print_copied(completion.text, training_text)


def complete_in_batches(
    loaded: LoadedModel, encoded: Mapping[str, list[int]], prompts: Sequence[str], sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """Yield a row for each prompt. `tokens_per_second` is for the whole batch."""
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = prompts[first : first + ROWS_AT_ONCE]
        started = time.perf_counter()
        seeded = dataclasses.replace(sampling, seed=sampling.seed + first)
        completions = generate(loaded.model, loaded.tokenizer, [encoded[prompt] for prompt in batch], seeded)
        seconds = time.perf_counter() - started
        speed = sum(completion.tokens for completion in completions) / seconds
        for number, (prompt, completion) in enumerate(zip(batch, completions, strict=True)):
            yield {
                "prompt": prompt,
                "completion": completion.text.strip() if loaded.template else completion.text,
                "tokens": completion.tokens,
                "tokens_per_second": round(speed, 1),
                "checkpoint": str(loaded.path),
                "seed": seeded.seed + number,
            }


def compare_checkpoints(request: Request, sampling: Sampling) -> None:
    """--compare: print a table for each prompt, with the completions of each checkpoint."""
    checkpoints = [open_checkpoint(path) for path in request.compare]  # checks all before loading the first
    has_chat = not request.raw and any(checkpoint.chat_template() for checkpoint in checkpoints)
    prompts = read_prompts(request, must_ask=has_chat)
    repeated = [prompt for prompt in prompts for _ in range(request.num_samples)]
    rows_by_checkpoint: list[list[dict[str, Any]]] = []
    for checkpoint in checkpoints:
        loaded = LoadedModel.of(checkpoint, request)
        encoded = {prompt: loaded.encode(prompt) for prompt in prompts}
        rows_by_checkpoint.append(list(complete_in_batches(loaded, encoded, repeated, sampling)))
    if request.json:
        for rows in rows_by_checkpoint:
            print(*map(json.dumps, rows), sep="\n")
        return
    for number, prompt in enumerate(prompts):
        print_separator(number)
        print(table_row(["checkpoint", cell(prompt) or "(no prompt)"]))
        print(table_row(["---", "---"]))
        for rows in rows_by_checkpoint:
            for row in rows[number * request.num_samples : (number + 1) * request.num_samples]:
                print(table_row([row["checkpoint"], cell(row["completion"])]))


def score_files(request: Request) -> None:
    """--score: print how well the model predicts each file, as a table or one JSON object per file. Computes in
    fp32."""
    if not request.json:
        print(f"Scoring    {', '.join(request.score)} ...", flush=True)
    sources = find_named_sources(request)
    checkpoint = open_checkpoint(request.checkpoint or find_newest_run())
    model, tokenizer = load_checkpoint(checkpoint, request.device, torch.float32)
    context = model.config.max_seq_len
    metadata = find_training_tokens(checkpoint)
    files = metadata.source_files if metadata else ()
    if trained := [name for name, source in sources if {"name": source.name, "size": source.size} in files]:
        print(f"Note: the model was trained on {', '.join(trained)}; it predicts new text worse.", file=sys.stderr)
    stride = max(1, context // 2) if request.stride is None else request.stride
    if stride > context:
        raise ConfigError(f"--stride {stride} is above {context}, the context of {checkpoint.path}. Use a smaller one.")
    if not request.json:
        print(f"{checkpoint.path}: fp32, windows of {context} tokens, stride {stride}\n")
    total = Score()
    header = render_header()
    for name, source in sources:
        documents = score_file(model, tokenizer, name, source, stride)
        score = Score()
        for document in documents:
            score.add(document)
        total.add(score)
        if not score.tokens:
            message = f"{name} has no text to score: no document has two tokens"
            if len(sources) == 1:
                raise DataError(f"{message}.")
            print(f"{message}. It is left out.", file=sys.stderr)
        elif request.json:
            row = {"file": name} | score_to_json(score) | {"stride": stride, "checkpoint": str(checkpoint.path)}
            print(json.dumps(row), flush=True)
        else:
            several = f", {len(documents):,} documents" if len(documents) > 1 else ""
            print(*header, render_score(name + several, score), sep="\n", flush=True)
            header = []
    if request.json:
        return
    if len(sources) > 1:
        print(render_score("total", total))
    print(f"\n{describe_score(total)}")
    pieces = (piece.text for _, source in sources for piece in read_pieces([source]))
    sample = sample_evenly(pieces, NEXT_SENTENCE_BYTES / max(1, total.bytes))
    guessed = score_next_sentences(model, tokenizer, sample)
    if guessed.total:
        print(f"Next sentences: {guessed}")


def find_named_sources(request: Request) -> list[tuple[str, Source]]:
    """Return (name, source) of the files to score. The name is as typed, else the path."""
    sources, skipped = make_readable(find_sources(request.score), Settings(input=tuple(request.score)))
    for name, reason in skipped:
        print(f"Left out: {name}: {reason}.", file=sys.stderr)
    typed = {Path(name).resolve(): name for name in request.score}
    return [(typed.get(source.path, source.name if source.note else str(source.path)), source) for source in sources]


def score_file(
    model: TransformerLanguageModel, tokenizer: Tokenizer, name: str, source: Source, stride: int
) -> list[Score]:
    """Return the score of each document of a file. Raises TokenizerError for unknown characters."""
    size = source.text_bytes
    with tqdm(total=size, desc=source.name, unit="B", unit_scale=True, leave=False, disable=None, delay=1) as bar:
        documents = encode_documents(tokenizer, read_pieces([source], on_read=bar.update))
        try:
            return list(score_documents(model, tokenizer, documents, stride))
        except UnknownCharacterError as error:
            raise TokenizerError(f"{name} cannot be scored: {error.finding}. Remove these characters.") from None


def read_prompts(request: Request, must_ask: bool) -> list[str]:
    """Return all prompts, or one empty prompt if there are none. `must_ask`: leave out empty ones, for a
    chat model."""
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


def print_separator(number: int) -> None:
    if number:
        print("---")


def print_copied(text: str, training_text: TracedText | None) -> None:
    """--trace: print the spans of a generated text that occur in the training text."""
    if training_text is None:
        return
    spans = training_text.find_spans(text)
    print(f"\nCopied     {describe_share(spans, [text])}", flush=True)
    for span in spans:
        place = f"{span.place} (held out, not trained on)" if span.is_held_out else span.place
        print(f'  {place}: "{printable(" ".join(span.text.split()))}"', flush=True)


if __name__ == "__main__":
    end(main)
