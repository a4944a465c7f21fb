"""What the conversions of all forms share. See hf_model.py."""

from __future__ import annotations

from typing import Any

import torch

from common.validation import build
from model import listed
from model_config import ModelConfig

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}  # ours -> theirs
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}


class ConversionError(ValueError):
    """A model that the other side cannot express, or tensors that do not belong to the model."""


def checked_config(**values: Any) -> ModelConfig:
    """The shape of somebody else's model. Raises ValueError listing what is out of range."""
    return build(ModelConfig, values)


def require_options(hf_config: dict[str, Any], needed: dict[str, Any]) -> None:
    """Raises ConversionError for keys of a foreign config with a value that our model cannot express. An absent key has
    the needed value, which is the default there."""
    wrong = [
        f"{key} is {hf_config[key]!r:.100} (only {value!r} can be expressed)"
        for key, value in needed.items()
        if hf_config.get(key, value) != value
    ]
    if wrong:
        raise ConversionError(listed(wrong))


def our_activation(name: Any) -> str:
    if not isinstance(name, str) or name not in OUR_ACTIVATIONS:
        raise ConversionError(f"the activation is {name!r:.100}; what can be expressed is {', '.join(OUR_ACTIVATIONS)}")
    return OUR_ACTIVATIONS[name]


def with_head(config: ModelConfig, state: Tensors, tensors: Tensors) -> Tensors:
    return state if config.tie_embeddings else state | {"head.weight": tensors["lm_head.weight"]}


def others_than(needed: dict[str, Any], config: ModelConfig) -> list[str]:
    """Options of a model that have another value than a class needs."""
    return [
        f"{key} {getattr(config, key)!r} (it needs {value!r})"
        for key, value in needed.items()
        if getattr(config, key) != value
    ]


def of_one_kind_of_head(config: ModelConfig) -> dict[str, Any]:
    """What classes need whose queries, keys and values are alike."""
    return {
        "num_kv_heads": config.num_heads,
        "head_dim": config.embed_dim // config.num_heads,
        "qkv_bias": config.bias,
        "rope_scaling": (),
    }
