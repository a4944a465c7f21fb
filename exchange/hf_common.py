"""What the conversions of all forms share: a form is a table of entries, read in both directions. See hf_model.py."""

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
    """A model that the other side cannot express, or tensors that do not belong to the model."""


class Entry(NamedTuple):
    """A tensor of ours, and those that hold it there. "{}" in the names stands for each layer's number."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()  # of each of theirs, where ours has them one above the other
    transposed: bool = False
    absent: torch.Tensor | None = None  # what theirs is where a model of ours has no such tensor

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = tensor.split(self.rows) if self.rows else (tensor,)
        return [part.T.contiguous() if self.transposed else part.contiguous() for part in parts]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [part.T.contiguous() if self.transposed else part for part in parts]
        return torch.cat(parts) if self.rows else parts[0]


Table = list[Entry]


def linear(ours: str, theirs: Sequence[str], has_bias: bool, rows: tuple[int, ...] = (), **more: Any) -> Table:
    """A linear layer, or the norm with the same two parameters."""
    return [
        Entry(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), rows, **more)
        for part in ("weight", "bias")[: 1 + has_bias]
    ]


def expanded(table: Table, config: ModelConfig) -> Iterator[Entry]:
    """Each entry, those of a layer for each layer."""
    for entry in table:
        for layer in range(config.num_layers if "{}" in entry.ours else 1):
            yield entry._replace(
                ours=entry.ours.format(layer), theirs=tuple(name.format(layer) for name in entry.theirs)
            )


def to_theirs(table: Table, config: ModelConfig, state: Tensors) -> Tensors:
    tensors: Tensors = {}
    for entry in expanded(table, config):
        if (tensor := state.get(entry.ours)) is None:
            assert entry.absent is not None, entry.ours
            tensor = entry.absent.clone()  # each layer's its own: a file of safetensors holds none twice
        tensors |= zip(entry.theirs, entry.split(tensor), strict=True)
    return tensors


def to_ours(table: Table, config: ModelConfig, tensors: Tensors) -> Tensors:
    return {entry.ours: entry.join([tensors[name] for name in entry.theirs]) for entry in expanded(table, config)}


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
        raise ConversionError(list_first(wrong))


def our_activation(name: Any) -> str:
    if not isinstance(name, str) or name not in OUR_ACTIVATIONS:
        raise ConversionError(f"the activation is {name!r:.100}; what can be expressed is {', '.join(OUR_ACTIVATIONS)}")
    return OUR_ACTIVATIONS[name]


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
