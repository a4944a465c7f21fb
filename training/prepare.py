"""Everything that a training needs, checked and built before it starts. Each part prints one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from examples import conversations
from model import TransformerLanguageModel
from tokenization.command import tokenize_with
from tokenization.metadata import metadata_files
from tokenization.settings import DEFAULT_FOLDER, Settings
from tokenization.token_folder import folder_of_text
from training.config import Config
from training.keeping.adapters import adapt
from training.keeping.resume import own_tokenizer, with_given_shape
from training.machine.hardware import detect_hardware
from training.machine.processes import on_rank_0
from training.numbers.data import TokenData
from training.numbers.optimizer import build_optimizer
from training.numbers.prompts import check_prompts, read_prompts
from training.numbers.schedule import repetition
from training.parts import Parts
from training.planning.memory import fit_micro_batch
from training.planning.memory_advice import memory_advice


def prepare(config: Config) -> Parts:
    """Look at the machine, tokenize or read the data, build the model. The run folder is not opened yet."""
    config = on_rank_0(lambda: use_builtin_files(with_given_shape(config)))
    hardware = detect_hardware(config)
    print(hardware.describe())
    config = on_rank_0(lambda: tokenize_input(config))
    prompts = on_rank_0(lambda: read_prompts(config.eval_prompts) if config.eval_prompts else [])
    data = TokenData.open(config, hardware)
    print(data.describe() + repetition(data.windows, config))
    check_prompts(prompts, data)

    with memory_advice(config, data.vocab_size, hardware):
        torch.manual_seed(config.seed)
        model = TransformerLanguageModel(config.shape(data.vocab_size)).to(hardware.device)
        print(
            f"Model      {model.num_parameters():,} parameters: {config.num_layers} layers x {config.embed_dim}, "
            f"{config.num_heads} heads, context {config.max_seq_len}"
        )
        model.activation_checkpointing = config.activation_checkpointing
        adapt(model, config)
        config = on_rank_0(lambda: fit_micro_batch(config, model, hardware, data.gpu_bytes))
        optimizer = build_optimizer(model, config)
    return Parts(config, hardware, data, prompts, model, optimizer, hardware.grad_scaler(), model)


def use_builtin_files(config: Config) -> Config:
    """Replace `builtin:conversations` by the files of the example corpus, written on first use."""
    files: dict[str, Any] = {}
    if config.input == "builtin:conversations":
        text = Path(DEFAULT_FOLDER) / "conversations" / "conversations.txt"
        if not text.exists():
            text.parent.mkdir(parents=True, exist_ok=True)
            conversations.write(text)
        files["input"] = str(text)
    if config.eval_prompts == "builtin:conversations":
        files["eval_prompts"] = str(conversations.HELD_OUT_FILE)
    return dataclasses.replace(config, **files)


def tokenize_input(config: Config) -> Config:
    """Tokenize `input`, if there is one, on first use: into `data_dir`, or else into a folder of this text alone. A run
    that is continued keeps its tokenizer.

    Raises DataError if `data_dir` holds the tokens of another text, which other runs may need.
    """
    if not config.input:
        return config
    folder = config.data_dir or folder_of_text(config.input, config.tokenizer, config.vocab_size)
    names = [path.name.removesuffix("_metadata.json") for path in metadata_files(Path(folder))]
    settings = Settings(
        input=(config.input,),
        output_dir=folder,
        output_name=names[0] if len(names) == 1 and names[0] not in ("tokens", "tokens_bpe") else None,
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        tokenizer_file=own_tokenizer(config),
    )
    tokenize_with(settings, quiet=True, may_replace=not config.data_dir)
    return dataclasses.replace(config, data_dir=folder)
