"""Convert the GPT-2 form to and from `GPT2LMHeadModel` of Hugging Face transformers.

Its linear layers are stored transposed, and biases that our model lacks are exported as zeros.

Shapes in comments: C = embed_dim, F = ff_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from exchange.hf_common import (
    ACTIVATIONS,
    Table,
    TensorEntry,
    build_config,
    linear_entries,
    list_mismatches,
    multi_head_options,
    read_activation,
    require_options,
)
from model_config import ModelConfig

GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask in files of older versions


def list_gpt2_obstacles(config: ModelConfig) -> list[str]:
    """Return the options that GPT2LMHeadModel lacks."""
    needed = {"norm": "layernorm", "qk_norm": False, "embed_norm": False}
    wrong = list_mismatches(needed | multi_head_options(config), config)
    return wrong if config.activation in ACTIVATIONS else [*wrong, f"activation {config.activation!r}"]


def to_gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_ctx": config.max_seq_len,  # obsolete, but some converters still need it
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ff_dim,
        "activation_function": ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def from_gpt2_config(hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    require_options(
        hf_config,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )
    return build_config(  # defaults of GPT2Config
        vocab_size=hf_config.get("vocab_size", 50257),
        embed_dim=hf_config.get("n_embd", 768),
        num_heads=hf_config.get("n_head", 12),
        num_layers=hf_config.get("n_layer", 12),
        ff_dim=hf_config.get("n_inner"),  # None means 4 * n_embd in both
        max_seq_len=hf_config.get("n_positions", 1024),
        dropout=hf_config.get("resid_pdrop", 0.1),
        tie_embeddings=tied,
        activation=read_activation(hf_config.get("activation_function", "gelu_new")),
        norm_eps=hf_config.get("layer_norm_epsilon", 1e-5),
    )


def gpt2_table(config: ModelConfig) -> Table:
    """Return the tensor table.

    OpenAI wrote linear layers as convolutions of width 1 with an (in, out) weight; ours is (out, in). GPT-2 cannot turn
    biases off; zeros change no bit.
    """
    C, F = config.embed_dim, config.ff_dim

    def layer(ours: str, theirs: str, rows: int, transposed: bool) -> Table:
        weight, bias = linear_entries(ours, [f"transformer.{theirs}"], has_bias=True)
        return [weight._replace(transposed=transposed), bias._replace(default=torch.zeros(rows))]

    return [
        TensorEntry("token_embedding.weight", ("transformer.wte.weight",)),
        TensorEntry("positional_embedding.weight", ("transformer.wpe.weight",)),
        *layer("ln_f", "ln_f", C, transposed=False),
        *layer("blocks.{}.norm1", "h.{}.ln_1", C, transposed=False),
        *layer("blocks.{}.attention.qkv", "h.{}.attn.c_attn", 3 * C, transposed=True),
        *layer("blocks.{}.attention.out_proj", "h.{}.attn.c_proj", C, transposed=True),
        *layer("blocks.{}.norm2", "h.{}.ln_2", C, transposed=False),
        *layer("blocks.{}.feed_forward.fc1", "h.{}.mlp.c_fc", F, transposed=True),
        *layer("blocks.{}.feed_forward.fc2", "h.{}.mlp.c_proj", C, transposed=True),
    ]
