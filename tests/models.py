"""Tiny models of every form, in checkpoint folders of ours."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.chat import Template
from common.checkpoint import Checkpoint, Content, build_stored_config, build_weights_files, to_cpu
from common.files import json_bytes
from common.lora import TARGETS, LoRA, adapters_of, add_adapters
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import ALPHABET, generated_text
from tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from tokenizer_bpe import BPETokenizer
from training.config import Config
from training.optimizer import Optimizer, build_optimizer
from training.store import Store

CHARACTERS = CharacterTokenizer.train(ALPHABET + "\0\r'😀")
MODERN = {"norm": "rmsnorm", "position": "rope", "qk_norm": True, "embed_norm": True, "bias": False}
MODERN |= {"activation": "swiglu"}
TINY = {"embed_dim": 32, "num_heads": 4, "num_layers": 2, "max_seq_len": 24}


@functools.cache
def bpe() -> BPETokenizer:
    return BPETokenizer.train([generated_text(2_000)], vocab_size=300)


def random_model(vocab_size: int, std: float = 0.2, **options: Any) -> TransformerLanguageModel:
    """Every weight random, those of norms and biases too, so that each of them counts."""
    model = TransformerLanguageModel(ModelConfig(vocab_size, **{**TINY, **options})).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(mean=1.0 if is_gain else 0.0, std=std)
    return model


def save_checkpoint(
    folder: Path,
    model: TransformerLanguageModel,
    optimizer: Optimizer,
    tokenizer_file: bytes,
    tokenizer_type: str,
    training_state: dict[str, Any],
    chat: Template | None = None,
) -> None:
    contents: dict[str, Content] = {
        **build_weights_files(model),
        "optimizer.safetensors": to_cpu(optimizer.tensors()),
        "tokenizer.json": tokenizer_file,
        "config.json": json_bytes(build_stored_config(model, tokenizer_type, chat)),
        "training_state.json": json_bytes(training_state),
    }
    Store(folder.parent).save(contents, folder)


def write_model(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    chat: Template | None = None,
    model: TransformerLanguageModel | None = None,
    **options: Any,
) -> TransformerLanguageModel:
    """A checkpoint folder of a random model, or of the one that is given."""
    tokenizer = tokenizer or bpe()
    model = model or random_model(tokenizer.vocab_size, **options)
    optimizer = build_optimizer(model, Config())
    save_checkpoint(folder, model, optimizer, tokenizer.to_json().encode(), tokenizer.kind, {"step": 0}, chat)
    return model


def write_adapters(folder: Path, base: Path, targets: tuple[str, ...] = tuple(TARGETS)) -> TransformerLanguageModel:
    """A checkpoint folder of random adapters for the checkpoint `base`; returns the adapted model."""
    checkpoint = Checkpoint(base)
    config = checkpoint.model_config()
    model = TransformerLanguageModel(replace(config, tie_embeddings=False)).eval()
    checkpoint.load_weights(model)
    modules = sorted(module for target in targets for module in TARGETS[target])
    add_adapters(model, LoRA(4, 16.0, tuple(modules), str(base), checkpoint.weights_sha256()))
    torch.manual_seed(2)
    with torch.no_grad():
        for adapter in adapters_of(model).values():
            adapter.normal_(std=0.1)
    return write_model(folder, load_tokenizer(checkpoint.tokenizer_path()), checkpoint.chat_template(), model)
