"""Llama's form under the names of Hugging Face `transformers`, with its two variants: Qwen2 has biases on queries, keys
and values, Qwen3 has norms of queries and keys. Most programs that run language models know these three.

Three things differ from ours: queries, keys and values, and gate and up, are tensors of their own there; norms always
have a gain (ones where ours have none); and there is no norm of the embeddings, so that it goes into their table.

Shapes in comments: C = embed_dim, F = ff_dim, H = heads, K = heads of keys and values, D = head_dim, V = vocab_size.
"""

from __future__ import annotations

from typing import Any

import torch

from exchange.hf_common import ConversionError, Shapes, Tensors, checked_config, others_than, require_options, with_head
from model import rms_norm
from model_config import ModelConfig

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Where a config.json lacks a key, as the classes have it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "qwen2": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
    "qwen3": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768, "head_dim": 128},
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # as in rope_scaling
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
# Our parameter -> theirs, of which it is made by putting one above the other.
STACKED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out_proj": ("self_attn.o_proj",),
    "feed_forward.fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.fc2": ("mlp.down_proj",),
}


def kind_of(config: ModelConfig) -> str:
    """The `model_type` of a model of Llama's form."""
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias and not config.bias else "llama"


def llama_obstacles(config: ModelConfig) -> list[str]:
    """Options that the class cannot have."""
    kind = kind_of(config)
    needed: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "logit_softcap": 0.0}
    if kind != "llama":
        needed |= {"bias": False, "qkv_bias": kind == "qwen2"}
    wrong = others_than(needed, config)
    if config.qkv_bias != config.bias and kind == "llama":
        wrong.append(f"bias {config.bias!r} beside qkv_bias {config.qkv_bias!r}")
    if config.embed_norm and config.tie_embeddings:
        wrong.append("embed_norm with tie_embeddings (the norm goes into the table, which the head would share)")
    return wrong


def rows_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The rows of each of their tensors, for ours in STACKED."""
    return {
        "attention.qkv": config.qkv_rows,
        "attention.out_proj": (config.embed_dim,),
        "feed_forward.fc1": (config.ff_dim, config.ff_dim),
        "feed_forward.fc2": (config.embed_dim,),
    }


def columns_of(config: ModelConfig) -> dict[str, int]:
    heads = config.num_heads * config.head_dim
    C, F = config.embed_dim, config.ff_dim
    return {"attention.qkv": C, "attention.out_proj": heads, "feed_forward.fc1": C, "feed_forward.fc2": F}


def has_bias(config: ModelConfig, ours: str) -> bool:
    return config.qkv_bias if ours == "attention.qkv" else config.bias


def llama_config(config: ModelConfig) -> dict[str, Any]:
    kind = kind_of(config)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **dict(zip(LLAMA3, config.rope_scaling, strict=True))}
        rope[LLAMA3[-1]] = int(rope[LLAMA3[-1]])
    special = {"llama": {"attention_bias": config.bias, "mlp_bias": config.bias}, "qwen3": {"attention_bias": False}}
    return {
        "architectures": [CLASSES[kind]],
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
        "rope_theta": config.rope_base,  # where programs older than transformers 5 look for it
        **({"rope_scaling": {key: rope[key] for key in ("rope_type", *LLAMA3)}} if config.rope_scaling else {}),
        **special.get(kind, {}),
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def config_of_llama(kind: str, hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    known = DEFAULTS[kind] | {key: value for key, value in hf_config.items() if value is not None}
    require_options(known, {"hidden_act": "silu", "use_sliding_window": False, "partial_rotary_factor": 1.0})
    if any(layer != "full_attention" for layer in known.get("layer_types", ())):
        raise ConversionError("layer_types names another kind than full_attention, the only one that can be expressed")
    bias = False
    if kind == "llama":
        bias = known.get("attention_bias", False)
        require_options(known, {"mlp_bias": bias})
    elif kind == "qwen3":
        require_options(known, {"attention_bias": False})
    heads, width = known.get("num_attention_heads", 32), known.get("hidden_size", 4096)
    base, scaling = rope_of(known)
    return checked_config(
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


def rope_of(hf_config: dict[str, Any]) -> tuple[float, tuple[float, ...]]:
    """Base and scaling of the rotation. transformers 5 keeps both in `rope_parameters`; files from before it have
    `rope_theta` and `rope_scaling`, whose `rope_type` was once `type`."""
    rope = hf_config.get("rope_parameters", hf_config.get("rope_scaling", {}))
    if not isinstance(rope, dict):
        raise ConversionError(f"rope_parameters is {rope!r:.100}; an object {{...}} is needed")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConversionError(f"the rope scaling is {kind!r:.100}; what can be expressed is default and llama3")
    base = rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0))
    if kind == "default":
        return base, ()
    if missing := [key for key in LLAMA3 if key not in rope]:
        raise ConversionError(f"the rope scaling llama3 lacks {', '.join(missing)}")
    return base, tuple(rope[key] for key in LLAMA3)


def llama_shapes(config: ModelConfig) -> Shapes:
    C = config.embed_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, C), "model.norm.weight": (C,)}
    rows, columns = rows_of(config), columns_of(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (C,) for name in NORMS.values()}
        if config.qk_norm:
            shapes |= {f"{prefix}.{name}.weight": (config.head_dim,) for name in QK_NORMS.values()}
        for ours, names in STACKED.items():
            for name, count in zip(names, rows[ours], strict=True):
                shapes[f"{prefix}.{name}.weight"] = (count, columns[ours])
                if has_bias(config, ours):
                    shapes[f"{prefix}.{name}.bias"] = (count,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def llama_tensors(config: ModelConfig, state: Tensors) -> Tensors:
    def gain(ours: str, width: int) -> torch.Tensor:
        return state[f"{ours}.weight"] if config.norm_gain else torch.ones(width)

    embedding = state["token_embedding.weight"]  # (V, C)
    if config.embed_norm:  # each row is normalised wherever it is looked up, so it can be once and for all
        embedding = rms_norm(embedding, config.norm_eps, state.get("embed_norm.weight"))
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": gain("ln_f", config.embed_dim)}
    rows = rows_of(config)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        tensors |= {f"{theirs}.{name}.weight": gain(f"{ours}.{norm}", config.embed_dim) for norm, name in NORMS.items()}
        if config.qk_norm:
            tensors |= {
                f"{theirs}.{name}.weight": gain(f"{ours}.{norm}", config.head_dim) for norm, name in QK_NORMS.items()
            }
        for module, names in STACKED.items():
            for part in ("weight", "bias") if has_bias(config, module) else ("weight",):
                split = state[f"{ours}.{module}.{part}"].split(rows[module])
                tensors |= {
                    f"{theirs}.{name}.{part}": each.contiguous() for name, each in zip(names, split, strict=True)
                }
    return tensors if config.tie_embeddings else tensors | {"lm_head.weight": state["head.weight"]}


def state_of_llama(config: ModelConfig, tensors: Tensors) -> Tensors:
    state = {
        "token_embedding.weight": tensors["model.embed_tokens.weight"],
        "ln_f.weight": tensors["model.norm.weight"],
    }
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        norms = NORMS | (QK_NORMS if config.qk_norm else {})
        state |= {f"{ours}.{norm}.weight": tensors[f"{theirs}.{name}.weight"] for norm, name in norms.items()}
        for module, names in STACKED.items():
            for part in ("weight", "bias") if has_bias(config, module) else ("weight",):
                state[f"{ours}.{module}.{part}"] = torch.cat([tensors[f"{theirs}.{name}.{part}"] for name in names])
    return with_head(config, state, tensors)
