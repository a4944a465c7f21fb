"""Models of the same shape from nanoGPT and Hugging Face transformers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from model_config import ModelConfig


def gpt2_config(config: ModelConfig, **more: Any) -> Any:
    """A `transformers.GPT2Config` of the same shape."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_seq_len,
        n_embd=config.embed_dim,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        bos_token_id=0,
        **more,
    )


def nanogpt_model(checkout: str | Path, config: ModelConfig) -> Any:
    """A GPT of the same shape from a checkout of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout) / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    shape = module.GPTConfig(
        block_size=config.max_seq_len,
        vocab_size=config.vocab_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_embd=config.embed_dim,
        dropout=0.0,
        bias=config.bias,
    )
    return module.GPT(shape)
