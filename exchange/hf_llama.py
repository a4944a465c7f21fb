"""Convert to and from Llama and its variants in Hugging Face transformers: Qwen2 (qkv biases) and Qwen3 (qk norms).

Most programs that run language models know these three. They differ from our model in three ways: q, k and v, and gate
and up, are separate tensors; norms always have a gain (ones where ours have none); and there is no embedding norm, so
ours is folded into the embedding table.

Shapes in comments: C = embed_dim, F = ff_dim, D = head_dim, V = vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exchange.hf_common import (
    ConversionError,
    Table,
    TensorEntry,
    Tensors,
    build_config,
    linear_entries,
    list_mismatches,
    require_options,
)
from model import rms_norm
from model_config import ModelConfig

MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Defaults of the classes for keys that a config.json lacks.
CONFIG_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "qwen2": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
    "qwen3": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768, "head_dim": 128},
}
# The keys of Hugging Face's rope_scaling, in the order of our rope_scaling.
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def llama_model_type(config: ModelConfig) -> str:
    """Return the `model_type` of a modern model."""
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias and not config.bias else "llama"


def list_llama_obstacles(config: ModelConfig) -> list[str]:
    """Return the options that the class lacks."""
    kind = llama_model_type(config)
    needed: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu"}
    if kind != "llama":
        needed |= {"bias": False, "qkv_bias": kind == "qwen2"}
    wrong = list_mismatches(needed, config)
    if config.qkv_bias != config.bias and kind == "llama":
        wrong.append(f"bias {config.bias!r} beside qkv_bias {config.qkv_bias!r}")
    if config.embed_norm and config.tie_embeddings:
        wrong.append("embed_norm with tie_embeddings (the norm is folded into the table, which the head would share)")
    return wrong


def to_llama_config(config: ModelConfig) -> dict[str, Any]:
    kind = llama_model_type(config)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **dict(zip(LLAMA3_KEYS, config.rope_scaling, strict=True))}
        rope[LLAMA3_KEYS[-1]] = int(rope[LLAMA3_KEYS[-1]])
    special = {"llama": {"attention_bias": config.bias, "mlp_bias": config.bias}, "qwen3": {"attention_bias": False}}
    return {
        "architectures": [MODEL_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.ff_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": "silu",
        "attention_dropout": config.dropout,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_base,  # read by programs older than transformers 5
        **({"rope_scaling": {key: rope[key] for key in ("rope_type", *LLAMA3_KEYS)}} if config.rope_scaling else {}),
        **special.get(kind, {}),
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def from_llama_config(kind: str, hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    known = CONFIG_DEFAULTS[kind] | {key: value for key, value in hf_config.items() if value is not None}
    require_options(known, {"hidden_act": "silu", "use_sliding_window": False, "partial_rotary_factor": 1.0})
    if any(layer != "full_attention" for layer in known.get("layer_types", ())):
        raise ConversionError("layer_types has another kind of attention than full_attention, the only one supported")
    bias = False
    if kind == "llama":
        bias = known.get("attention_bias", False)
        require_options(known, {"mlp_bias": bias})
    elif kind == "qwen3":
        require_options(known, {"attention_bias": False})
    heads, width = known.get("num_attention_heads", 32), known.get("hidden_size", 4096)
    base, scaling = _read_rope(known)
    return build_config(
        vocab_size=known["vocab_size"],
        embed_dim=width,
        num_heads=heads,
        num_layers=known.get("num_hidden_layers", 32),
        ff_dim=known["intermediate_size"],
        max_seq_len=known["max_position_embeddings"],
        dropout=known.get("attention_dropout", 0.0),
        bias=bias,
        tie_embeddings=tied,
        activation="swiglu",
        norm="rmsnorm",
        position="rope",
        qk_norm=kind == "qwen3",
        num_kv_heads=known.get("num_key_value_heads", heads if kind == "llama" else 32),
        head_dim=known.get("head_dim"),
        norm_gain=True,
        norm_eps=known.get("rms_norm_eps", 1e-6),
        rope_base=base,
        rope_scaling=scaling,
        qkv_bias=True if kind == "qwen2" else bias,
    )


def _read_rope(hf_config: dict[str, Any]) -> tuple[float, tuple[float, ...]]:
    """Return the base and the scaling of RoPE.

    transformers 5 keeps both in `rope_parameters`; older files have `rope_theta` and `rope_scaling`, where `rope_type`
    was once `type`.
    """
    rope = hf_config.get("rope_parameters", hf_config.get("rope_scaling", {}))
    if not isinstance(rope, dict):
        raise ConversionError(f"rope_parameters is {rope!r:.100}; an object {{...}} is needed")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConversionError(f"the rope scaling is {kind!r:.100}; supported are default and llama3")
    base = rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0))
    if kind == "default":
        return base, ()
    if missing := [key for key in LLAMA3_KEYS if key not in rope]:
        raise ConversionError(f"the rope scaling llama3 lacks {', '.join(missing)}")
    return base, tuple(rope[key] for key in LLAMA3_KEYS)


def llama_table(config: ModelConfig) -> Table:
    C, F, D = config.embed_dim, config.ff_dim, config.head_dim
    layer, theirs = "blocks.{}", "model.layers.{}"

    def norm(ours: str, name: str, width: int) -> TensorEntry:
        return TensorEntry(f"{ours}.weight", (f"{name}.weight",), default=torch.ones(width))

    def stacked(ours: str, names: Sequence[str], has_bias: bool, rows: tuple[int, ...]) -> Table:
        return linear_entries(f"{layer}.{ours}", [f"{theirs}.{name}" for name in names], has_bias, rows)

    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    qk_norms = [norm(f"{layer}.attention.{part}_norm", f"{theirs}.self_attn.{part}_norm", D) for part in "qk"]
    return [
        TensorEntry("token_embedding.weight", ("model.embed_tokens.weight",)),
        norm("ln_f", "model.norm", C),
        norm(f"{layer}.norm1", f"{theirs}.input_layernorm", C),
        norm(f"{layer}.norm2", f"{theirs}.post_attention_layernorm", C),
        *(qk_norms if config.qk_norm else []),
        *stacked("attention.qkv", qkv, config.qkv_bias, config.qkv_rows),
        *stacked("attention.out_proj", ["self_attn.o_proj"], config.bias, (C,)),
        *stacked("feed_forward.fc1", ["mlp.gate_proj", "mlp.up_proj"], config.bias, (F, F)),
        *stacked("feed_forward.fc2", ["mlp.down_proj"], config.bias, (C,)),
    ]


def fold_embed_norm(config: ModelConfig, state: Tensors) -> Tensors:
    """Fold the embedding norm into the embedding table.

    A row gets the same norm wherever it is looked up, so it can be applied once.
    """
    if not config.embed_norm:
        return state
    table = rms_norm(state["token_embedding.weight"], config.norm_eps, state.get("embed_norm.weight"))  # (V, C)
    return state | {"token_embedding.weight": table}
