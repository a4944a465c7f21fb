"""GPT-2's form under the names of Hugging Face `transformers`, GPT2LMHeadModel. Its linear layers are stored transposed
there, and biases that we leave out are zeros.

Shapes in comments: C = embed_dim, F = ff_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from exchange.hf_common import (
    ACTIVATIONS,
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

GPT2_ENDS = {"token_embedding": "wte", "positional_embedding": "wpe", "ln_f": "ln_f"}
GPT2_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.fc1": "mlp.c_fc",
    "feed_forward.fc2": "mlp.c_proj",
}
KINDS = ("weight", "bias")
GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, in files of older versions


def gpt2_obstacles(config: ModelConfig) -> list[str]:
    """Options that the class cannot have."""
    needed = {"norm": "layernorm", "qk_norm": False, "embed_norm": False, "logit_softcap": 0.0}
    wrong = others_than(needed | of_one_kind_of_head(config), config)
    return wrong if config.activation in ACTIVATIONS else [*wrong, f"activation {config.activation!r}"]


def gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_ctx": config.max_seq_len,  # of older versions; some converters still ask for it
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


def config_of_gpt2(hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    require_options(
        hf_config,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )
    return checked_config(  # absent keys as GPT2Config has them
        vocab_size=hf_config.get("vocab_size", 50257),
        embed_dim=hf_config.get("n_embd", 768),
        num_heads=hf_config.get("n_head", 12),
        num_layers=hf_config.get("n_layer", 12),
        ff_dim=hf_config.get("n_inner"),  # None is 4 * n_embd here and there
        max_seq_len=hf_config.get("n_positions", 1024),
        dropout=hf_config.get("resid_pdrop", 0.1),
        tie_embeddings=tied,
        activation=our_activation(hf_config.get("activation_function", "gelu_new")),
        norm_eps=hf_config.get("layer_norm_epsilon", 1e-5),
    )


def gpt2_modules(config: ModelConfig) -> dict[str, str]:
    """Our module -> theirs, the head aside."""
    modules = {ours: f"transformer.{theirs}" for ours, theirs in GPT2_ENDS.items()}
    for layer in range(config.num_layers):
        modules |= {f"blocks.{layer}.{ours}": f"transformer.h.{layer}.{name}" for ours, name in GPT2_BLOCK.items()}
    return modules


def gpt2_shapes(config: ModelConfig) -> Shapes:
    C, F = config.embed_dim, config.ff_dim
    weights = {
        "wte": (config.vocab_size, C), "wpe": (config.max_seq_len, C), "ln_f": (C,), "ln_1": (C,), "ln_2": (C,),
        "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, F), "mlp.c_proj": (F, C),
    }  # fmt: skip
    shapes: Shapes = {}
    for module in gpt2_modules(config).values():
        shape = next(shape for name, shape in weights.items() if module.endswith(f".{name}"))
        shapes[f"{module}.weight"] = shape
        if not module.endswith(("wte", "wpe")):
            shapes[f"{module}.bias"] = shape[-1:]
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def is_conv1d(name: str) -> bool:
    """OpenAI wrote its linear layers as convolutions of width 1, whose weight is (in, out); ours is (out, in)."""
    return ".c_" in name and name.endswith(".weight")


def gpt2_tensors(config: ModelConfig, state: Tensors) -> Tensors:
    tensors: Tensors = {}
    names = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in gpt2_modules(config).items() for kind in KINDS}
    names["head.weight"] = "lm_head.weight"
    theirs_to_ours = {theirs: ours for ours, theirs in names.items()}
    for name, shape in gpt2_shapes(config).items():
        tensor = state.get(theirs_to_ours[name])
        if tensor is None:  # biases cannot be turned off there; adding zeros changes no bit
            assert name.endswith(".bias") and not config.bias, name
            tensor = torch.zeros(shape)
        tensors[name] = tensor.T.contiguous() if is_conv1d(name) else tensor
    return tensors


def state_of_gpt2(config: ModelConfig, tensors: Tensors) -> Tensors:
    state: Tensors = {}
    for ours, theirs in gpt2_modules(config).items():
        for kind in KINDS:
            if (tensor := tensors.get(f"{theirs}.{kind}")) is not None:
                state[f"{ours}.{kind}"] = tensor.T.contiguous() if is_conv1d(f"{theirs}.{kind}") else tensor
    return with_head(config, state, tensors)
