"""Shared by all conversions: a table of tensor names, used in both directions. See hf_model.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from common.validation import build
from model import list_first
from model_config import ModelConfig

Tensors = dict[str, torch.Tensor]

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}  # ours -> theirs
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}


class ConversionError(ValueError):
    """A model that the other format cannot express, or tensors that do not fit the model."""


class TensorEntry(NamedTuple):
    """One of our tensors and the Hugging Face tensors that hold it. "{}" in a name is the layer number."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()  # rows of each of `theirs`, if ours is their concatenation
    transposed: bool = False
    default: torch.Tensor | None = None  # the value to export if our model lacks this tensor

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = tensor.split(self.rows) if self.rows else (tensor,)
        return [part.T.contiguous() if self.transposed else part.contiguous() for part in parts]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [part.T.contiguous() if self.transposed else part for part in parts]
        return torch.cat(parts) if self.rows else parts[0]


Table = list[TensorEntry]


def linear_entries(ours: str, theirs: Sequence[str], has_bias: bool, rows: tuple[int, ...] = (), **more: Any) -> Table:
    """Return the entries of a linear layer or a norm: a weight and, with `has_bias`, a bias."""
    return [
        TensorEntry(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), rows, **more)
        for part in ("weight", "bias")[: 1 + has_bias]
    ]


def _expand_layers(table: Table, config: ModelConfig) -> Iterator[TensorEntry]:
    """Yield each entry, per-layer entries once per layer."""
    for entry in table:
        for layer in range(config.num_layers if "{}" in entry.ours else 1):
            yield entry._replace(
                ours=entry.ours.format(layer), theirs=tuple(name.format(layer) for name in entry.theirs)
            )


def to_hf_tensors(table: Table, config: ModelConfig, state: Tensors) -> Tensors:
    tensors: Tensors = {}
    for entry in _expand_layers(table, config):
        if (tensor := state.get(entry.ours)) is None:
            assert entry.default is not None, entry.ours
            tensor = entry.default.clone()  # safetensors refuses shared memory
        tensors |= zip(entry.theirs, entry.split(tensor), strict=True)
    return tensors


def from_hf_tensors(table: Table, config: ModelConfig, tensors: Tensors) -> Tensors:
    return {entry.ours: entry.join([tensors[name] for name in entry.theirs]) for entry in _expand_layers(table, config)}


def build_config(**values: Any) -> ModelConfig:
    """Build the config of an imported model. Raises ValueError listing the values out of range."""
    return build(ModelConfig, values)


def require_options(hf_config: dict[str, Any], needed: dict[str, Any]) -> None:
    """Raise ConversionError if a Hugging Face config has other values than `needed`, which are its defaults."""
    wrong = [
        f"{key} is {hf_config[key]!r:.100} (only {value!r} is supported)"
        for key, value in needed.items()
        if hf_config.get(key, value) != value
    ]
    if wrong:
        raise ConversionError(list_first(wrong))


def read_activation(name: Any) -> str:
    if not isinstance(name, str) or name not in OUR_ACTIVATIONS:
        raise ConversionError(f"the activation is {name!r:.100}; supported are {', '.join(OUR_ACTIVATIONS)}")
    return OUR_ACTIVATIONS[name]


def list_mismatches(needed: dict[str, Any], config: ModelConfig) -> list[str]:
    """Return a phrase for each option of a model that differs from `needed`."""
    return [
        f"{key} {getattr(config, key)!r} (needs {value!r})"
        for key, value in needed.items()
        if getattr(config, key) != value
    ]


def multi_head_options(config: ModelConfig) -> dict[str, Any]:
    """Return the options of plain multi-head attention: queries, keys and values of the same shape."""
    return {
        "num_kv_heads": config.num_heads,
        "head_dim": config.embed_dim // config.num_heads,
        "qkv_bias": config.bias,
        "rope_scaling": (),
    }
