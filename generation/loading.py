"""Load a model and its tokenizer from a checkpoint, and generate text in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.checkpoint import Checkpoint, find_newest_run, open_checkpoint
from common.errors import CheckpointError
from common.machine import has_fast_bf16, pick_device
from common.tensors import Uninitialized
from common.validation import build
from generation.completion import generate
from generation.request import Sampling
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer, load_tokenizer

CPU_BF16_MIN_WIDTH = 384  # see `generation_dtype`


def load_model(path: str | Path | None = None, device: str = "auto") -> tuple[TransformerLanguageModel, Tokenizer]:
    """Load a model and its tokenizer from a checkpoint folder, or from the newest checkpoint of a run folder (default:
    the newest run).

    `device` is "auto", "cpu", "cuda" or "mps". Weights have the `generation_dtype`.
    Raises CheckpointError for a missing or damaged checkpoint, ConfigError for a missing device.
    """
    return load_checkpoint(open_checkpoint(find_newest_run() if path is None else path), device)


def load_checkpoint(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype | None = None
) -> tuple[TransformerLanguageModel, Tokenizer]:
    """Load the model and tokenizer of an open checkpoint. `dtype`: of the weights (default: `generation_dtype`)."""
    target = pick_device(device)
    config = checkpoint.trusted_config()
    tokenizer_path = checkpoint.tokenizer_path()
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer_path} belongs to another model: it has {tokenizer.vocab_size:,} ids, and the model only "
            f"{config.vocab_size:,}. Copy the right one there."
        )
    with Uninitialized():
        model = TransformerLanguageModel(config)
    checkpoint.load_weights(model)
    convert(model, target, dtype or generation_dtype(config, target))
    return model.eval(), tokenizer


def convert(model: TransformerLanguageModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move the weights to a device and convert them. With fp16 the residual stream and its norms stay in fp32, because
    its range is too narrow for a sum over all layers."""
    is_half = dtype == torch.float16
    model.to(device, torch.float32 if is_half else dtype)
    for name, module in model.named_modules():
        if is_half and name.endswith(("attention", "feed_forward", "embedding", "head")):
            module.half()


def generation_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return bf16 if the hardware has units for it, else fp16 on a GPU and fp32 elsewhere. Each token reads all weights
    once, so half the bytes take half the time.

    Narrow models on a CPU use fp32, because bf16 has more overhead per operation (measured on a CPU with AMX, batch 1:
    256 wide 1.1 times slower, 384 wide 1.4 times faster, 768 wide 1.4 times faster).
    """
    wide_enough = device.type == "cuda" or config.embed_dim >= CPU_BF16_MIN_WIDTH
    if wide_enough and has_fast_bf16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def generate_text(
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    **sampling: Any,
) -> str:
    """Return the prompt and its continuation, up to the end-of-text token. `sampling`: top_k, top_p,
    repetition_penalty, stop (a tuple of strings), seed. Raises ValueError for an invalid value."""
    settings = build(Sampling, {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling})
    return prompt + generate(model, tokenizer, [prompt], settings)[0].text
