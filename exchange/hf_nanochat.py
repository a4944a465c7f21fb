"""nanochat's form under the names of Hugging Face `transformers`, NanoChatForCausalLM, which rotates the other way."""

from __future__ import annotations

from typing import Any

from exchange.hf_common import (
    ACTIVATIONS,
    ConversionError,
    Entry,
    Table,
    checked_config,
    linear,
    of_one_kind_of_head,
    others_than,
    our_activation,
    require_options,
)
from model_config import ModelConfig

DEFAULT_SOFTCAP = 15.0  # where its config.json has no such key
ROPE_BASE = 10_000.0


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


def nanochat_table(config: ModelConfig) -> Table:
    heads, layer, theirs = config.num_heads, "blocks.{}", "model.layers.{}"
    qkv = [f"{theirs}.self_attn.{part}_proj" for part in "qkv"]
    return [
        Entry("token_embedding.weight", ("model.embed_tokens.weight",)),
        *linear(f"{layer}.attention.qkv", qkv, False, config.qkv_rows, swapped=(heads, heads)),
        *linear(f"{layer}.attention.out_proj", [f"{theirs}.self_attn.o_proj"], False),
        *linear(f"{layer}.feed_forward.fc1", [f"{theirs}.mlp.fc1"], False),
        *linear(f"{layer}.feed_forward.fc2", [f"{theirs}.mlp.fc2"], False),
    ]
