"""nanochat's form under the names of Hugging Face `transformers`, NanoChatForCausalLM, which rotates the other way.

Shapes in comments: C = embed_dim, F = ff_dim, H = heads, D = C / H, V = vocab_size.
"""

from __future__ import annotations

from typing import Any

import torch

from exchange.hf_common import (
    ACTIVATIONS,
    ConversionError,
    Shapes,
    Tensors,
    checked_config,
    of_one_kind_of_head,
    others_than,
    our_activation,
    require_options,
    with_head,
)
from model_config import ModelConfig

DEFAULT_SOFTCAP = 15.0  # where its config.json has no such key
ROPE_BASE = 10_000.0
NANOCHAT_BLOCK = {
    "attention.out_proj": "self_attn.o_proj",
    "feed_forward.fc1": "mlp.fc1",
    "feed_forward.fc2": "mlp.fc2",
}


def nanochat_obstacles(config: ModelConfig) -> list[str]:
    """Options that the class cannot have. Its norm of the embedding and of q and k is always there."""
    needed = {"norm": "rmsnorm", "norm_gain": False, "qk_norm": True, "embed_norm": True, "bias": False}
    return others_than(needed | of_one_kind_of_head(config), config)


def nanochat_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.ff_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": ACTIVATIONS[config.activation],
        "attention_dropout": config.dropout,
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "final_logit_softcapping": config.logit_softcap or None,  # absent, it would be 15
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def config_of_nanochat(hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    heads = hf_config.get("num_attention_heads", 6)
    rope = hf_config.get("rope_parameters") or {"rope_theta": hf_config.get("rope_theta", ROPE_BASE)}
    if not isinstance(rope, dict):
        raise ConversionError(f"rope_parameters is {rope!r:.100}; an object {{...}} is needed")
    require_options({"rope_type": "default", **rope}, {"rope_type": "default"})
    needed = {"rope_scaling": None, "attention_bias": False}
    require_options({key: value for key, value in hf_config.items() if value is not None}, needed)
    if hf_config.get("num_key_value_heads") not in (None, heads):
        raise ConversionError(
            f"num_key_value_heads is {hf_config['num_key_value_heads']!r:.100} beside {heads!r:.100} heads; here every "
            "head has keys and values of its own"
        )
    config = checked_config(  # absent keys as NanoChatConfig has them
        vocab_size=hf_config.get("vocab_size", 50304),
        embed_dim=hf_config.get("hidden_size", 768),
        num_heads=heads,
        num_layers=hf_config.get("num_hidden_layers", 12),
        ff_dim=hf_config.get("intermediate_size", 8192),
        max_seq_len=hf_config.get("max_position_embeddings", 2048),
        dropout=hf_config.get("attention_dropout", 0.0),
        bias=False,
        tie_embeddings=tied,
        activation=our_activation(hf_config.get("hidden_act", "relu2")),
        norm="rmsnorm",
        position="rope",
        qk_norm=True,
        embed_norm=True,
        norm_eps=hf_config.get("rms_norm_eps", 1e-6),
        rope_base=rope.get("rope_theta", ROPE_BASE),
        logit_softcap=hf_config.get("final_logit_softcapping", DEFAULT_SOFTCAP) or 0.0,
    )
    if hf_config.get("head_dim") not in (None, config.head_dim):
        raise ConversionError(f"head_dim is {hf_config['head_dim']!r:.100}; only hidden_size / heads can be expressed")
    return config


def nanochat_shapes(config: ModelConfig) -> Shapes:
    C, F = config.embed_dim, config.ff_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, C)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{kind}_proj.weight": (C, C) for kind in "qkvo"}
        shapes |= {f"{prefix}.mlp.fc1.weight": (F, C), f"{prefix}.mlp.fc2.weight": (C, F)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def swap_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of q's or k's projection, (C, C) or (C, rank), with the two halves of every head swapped.

    RoPE rotates the pairs (x[i], x[i + D/2]). NanoChat rotates them by the negative angle; with the members of each
    pair swapped, that is our rotation. The swap is the same in q and k, so their products do not change, and a norm
    over the head ignores the order. The function is its own inverse.
    """
    return weight.view(heads, 2, -1, weight.size(1)).flip(1).reshape(weight.shape)  # (H, 2, D/2, C)


def nanochat_tensors(config: ModelConfig, state: Tensors) -> Tensors:
    tensors = {"model.embed_tokens.weight": state["token_embedding.weight"]}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = (part.contiguous() for part in state[f"{ours}.attention.qkv.weight"].split(config.embed_dim))
        tensors[f"{theirs}.self_attn.q_proj.weight"] = swap_halves(q, config.num_heads)
        tensors[f"{theirs}.self_attn.k_proj.weight"] = swap_halves(k, config.num_heads)
        tensors[f"{theirs}.self_attn.v_proj.weight"] = v
        tensors |= {f"{theirs}.{n}.weight": state[f"{ours}.{o}.weight"] for o, n in NANOCHAT_BLOCK.items()}
    return tensors if config.tie_embeddings else tensors | {"lm_head.weight": state["head.weight"]}


def state_of_nanochat(config: ModelConfig, tensors: Tensors) -> Tensors:
    state = {"token_embedding.weight": tensors["model.embed_tokens.weight"]}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = (tensors[f"{theirs}.self_attn.{kind}_proj.weight"] for kind in "qkv")
        qkv = [swap_halves(q, config.num_heads), swap_halves(k, config.num_heads), v]
        state[f"{ours}.attention.qkv.weight"] = torch.cat(qkv)  # (3C, C)
        state |= {f"{ours}.{o}.weight": tensors[f"{theirs}.{n}.weight"] for o, n in NANOCHAT_BLOCK.items()}
    return with_head(config, state, tensors)
