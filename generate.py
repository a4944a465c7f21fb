"""Generate text with a trained model.

    python generate.py --prompt "What is the capital of France?"
    python generate.py --checkpoint runs/gpt2_small --prompt "Once upon a time" --num_samples 3 --temperature 1.0
    python generate.py --interactive
    python generate.py --prompt "The moon" --compare runs/a/checkpoints/step_00001000 runs/a/checkpoints/step_00002000
    python generate.py --score my_text.txt

Importable: `load_model`, `generate_text`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, DataError, script
from common.files import read_text
from common.flags import Parser, add_debug
from generation.settings import FLAGS, Request, Sampling, settings_of

# torch takes seconds to import, and --help should not wait for it: functions import what needs it when they run.
if TYPE_CHECKING:
    import torch

    from common.chat import ChatTemplate
    from common.checkpoint import Checkpoint
    from model import ModelConfig, TransformerLanguageModel
    from tokenizer import Tokenizer

CPU_BF16_MIN_WIDTH = 384  # see generation_dtype


def load_model(path: str | Path | None = None, device: str = "auto") -> tuple[TransformerLanguageModel, Tokenizer]:
    """Load a model and its tokenizer from a checkpoint folder, or a run folder for its newest (None: the newest run).

    `device` is "auto", "cpu", "cuda" or "mps". The weights are bf16 where that is faster (`generation_dtype`), else
    fp32. Raises CheckpointError for a folder that is not a whole checkpoint, ConfigError for a device that is not
    there.
    """
    from common.checkpoint import newest_run, open_checkpoint

    return load_checkpoint(open_checkpoint(newest_run() if path is None else path), device)


def load_checkpoint(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype | None = None
) -> tuple[TransformerLanguageModel, Tokenizer]:
    """`load_model` for a checkpoint that is open; `dtype` (None: `generation_dtype`) is that of the weights."""
    from common.errors import CheckpointError
    from common.machine import pick_device
    from common.tensors import Uninitialized
    from model import TransformerLanguageModel
    from tokenizer import load_tokenizer

    target = pick_device(device)
    config = checkpoint.trusted_config()
    tokenizer_path = checkpoint.tokenizer_path()
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer_path} has {tokenizer.vocab_size:,} ids and the model {config.vocab_size:,}: it is the "
            "tokenizer of another model."
        )
    with Uninitialized():
        model = TransformerLanguageModel(config)
    checkpoint.load_weights(model)
    model.to(target, dtype or generation_dtype(config, target))
    return model.eval(), tokenizer


def generation_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """bf16 where the hardware computes in it, else fp32: a token takes as long as it takes to read all weights once.

    Not for narrow models on a CPU, where the overhead of each operation counts more and bf16's is larger (measured
    on a CPU with AMX, batch 1: 256 wide 1.1 times slower, 384 wide 1.4 times faster, 768 wide 1.4 times faster).
    """
    import torch

    from common.machine import has_fast_bf16

    wide_enough = device.type == "cuda" or config.embed_dim >= CPU_BF16_MIN_WIDTH
    return torch.bfloat16 if wide_enough and has_fast_bf16(device) else torch.float32


def generate_text(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    **sampling: Any,
) -> str:
    """The prompt and its continuation, up to the end-of-text token. `sampling`: top_k, top_p, repetition_penalty,
    stop (a tuple of strings), seed. Raises ValueError for a value out of range."""
    from generation.decoding import generate

    settings = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, **sampling)
    return prompt + generate(model, tokenizer, [prompt], settings)[0].text


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments, sampling = parse_arguments(argv)
    if arguments.score:
        score(arguments)
        return 0
    from common.checkpoint import newest_run, open_checkpoint
    from common.formatting import printable
    from generation.terminal import interact, stream_one

    if arguments.compare:
        compare(arguments, sampling)
        return 0
    checkpoint = open_checkpoint(arguments.checkpoint or newest_run())
    model, tokenizer = load_checkpoint(checkpoint, arguments.device)
    template = None if arguments.raw else checkpoint.chat_template()
    if arguments.interactive:
        print(f"{checkpoint.path}: {model.num_parameters():,} parameters.")
        interact(model, tokenizer, sampling, template)
        return 0
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
    return 0


def parse_arguments(argv: Sequence[str] | None) -> tuple[Request, Sampling]:
    """Raises ConfigError that lists unknown flags, values out of range, and flags that contradict each other."""
    parser = Parser(
        prog="generate.py",
        usage="%(prog)s [--prompt TEXT] [--FLAG VALUE ...]",
        description="Generate text with a trained model. The same command gives the same text; change --seed for "
        "another. With --score: how well the model predicts a text.",
    )
    parser.add_options(FLAGS)
    add_debug(parser)
    problems: list[str] = []
    settings = settings_of(parser.read(argv, problems), problems)
    parser.require_none(problems)
    return settings


def score(arguments: Request) -> None:
    """Print how well the model predicts each file: a table, or an object a file. In fp32, whatever the machine."""
    import torch
    from tqdm import tqdm

    from common.checkpoint import newest_run, open_checkpoint
    from generation.scoring import Score, json_row, score_file, table_head, table_line, table_rows
    from tokenization.corpus import find_sources, read_pieces
    from tokenization.encoding import encode_documents
    from tokenizer_base import TokenizerError, UnknownCharacterError

    # A file by its name as it was given; what a folder or a pattern stands for by its whole path.
    named = [
        (name if Path(name).is_file() else str(source.path), source)
        for name in arguments.score
        for source in find_sources([name])
    ]
    checkpoint = open_checkpoint(arguments.checkpoint or newest_run())
    model, tokenizer = load_checkpoint(checkpoint, arguments.device, torch.float32)
    context = model.config.max_seq_len
    stride = max(1, context // 2) if arguments.stride is None else arguments.stride
    if stride > context:
        raise ConfigError(f"--stride is {stride}; {checkpoint.path} reads {context} tokens, use {context} at most.")
    if not arguments.json:
        print(f"{checkpoint.path}: fp32, windows of {context} tokens, stride {stride}\n")
    total = Score()
    for i, (name, source) in enumerate(named):
        size = None if source.is_compressed else source.size  # unpacked, which nobody knows yet
        with tqdm(total=size, desc=source.name, unit="B", unit_scale=True, leave=False, disable=None, delay=1) as bar:
            documents = encode_documents(tokenizer, read_pieces([source], on_read=bar.update))
            try:
                scored = score_file(model, tokenizer, name, documents, stride)
            except UnknownCharacterError as error:
                raise TokenizerError(
                    f"{name}: {error.finding}. The model cannot give it a probability; take it out of the text."
                ) from None
        total.add(scored.total)
        if arguments.json:
            row = json_row(scored.total) | {"stride": stride, "checkpoint": str(checkpoint.path)}
            print(json.dumps({"file": name} | row), flush=True)
        else:
            print(*([] if i else table_head()), *table_rows(name, scored), sep="\n", flush=True)
    if len(named) > 1 and not arguments.json:
        print(table_line("in all", total))


def read_prompts(arguments: Request) -> list[str]:
    """All prompts; without any, one empty prompt: text from scratch."""
    prompts = list(arguments.prompt or [])
    if arguments.prompts_file:
        lines = read_text(arguments.prompts_file, DataError, "--prompts_file").split("\n")
        prompts += [line.rstrip("\r") for line in lines if line.strip()]
        if not prompts:
            raise DataError(f"{arguments.prompts_file} holds no prompts.")
    return prompts or [""]


def as_trained(prompt: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> str | list[int]:
    """The prompt as it is, or the ids of the question that it is to a model of conversations."""
    from common.chat import Message

    if template is None:
        return prompt
    if not prompt.strip():
        raise ConfigError("This model answers: it needs a --prompt. For text from nothing, add --raw.")
    return template.prompt_ids(tokenizer, [Message("user", prompt)])


def rows_as_dicts(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    prompts: list[str],
    sampling: Sampling,
    template: ChatTemplate | None,
) -> Iterator[dict[str, Any]]:
    """Complete all prompts, batch by batch. `tokens_per_second` is that of the whole batch."""
    from generation.decoding import ROWS_AT_ONCE, generate, prompt_ids

    # All of them before the first is completed, for one may hold a character that the model does not know.
    ids = {each: prompt_ids(tokenizer, as_trained(each, template, tokenizer)) for each in dict.fromkeys(prompts)}
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = prompts[first : first + ROWS_AT_ONCE]
        started = time.perf_counter()
        seeded = dataclasses.replace(sampling, seed=sampling.seed + first)
        completions = generate(model, tokenizer, [ids[prompt] for prompt in batch], seeded)
        seconds = time.perf_counter() - started
        speed = sum(completion.tokens for completion in completions) / seconds
        for prompt, completion in zip(batch, completions, strict=True):
            yield {
                "prompt": prompt,
                "completion": completion.text if template is None else completion.text.strip(),
                "tokens": completion.tokens,
                "tokens_per_second": round(speed, 1),
                "checkpoint": str(checkpoint.path),
                "seed": completion.seed,
            }


def compare(arguments: Request, sampling: Sampling) -> None:
    """One table a prompt: what each checkpoint makes of it."""
    from common.checkpoint import open_checkpoint

    prompts = read_prompts(arguments)
    checkpoints = [open_checkpoint(path) for path in arguments.compare]  # all of them, before the first is used
    answers: list[list[dict[str, Any]]] = []
    for checkpoint in checkpoints:
        model, tokenizer = load_checkpoint(checkpoint, arguments.device)
        repeated = [prompt for prompt in prompts for _ in range(arguments.num_samples)]
        template = None if arguments.raw else checkpoint.chat_template()
        answers.append(list(rows_as_dicts(model, tokenizer, checkpoint, repeated, sampling, template)))
    if arguments.json:
        for row in (row for rows in answers for row in rows):
            print(json.dumps(row))
        return
    from common.formatting import cell, table_row

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


if __name__ == "__main__":
    sys.exit(main())
