"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") by Hugging Face `peft`: the weights of a
trained model, the base, are frozen, and two thin matrices beside each adapted one are trained. A checkpoint holds them
in peft's own files, which name the base and the hash of its weights.
"""

from __future__ import annotations

import functools
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn as nn
from pydantic import Field
from pydantic.dataclasses import dataclass

from common.errors import CheckpointError, require_packages
from common.files import read_json, sha256_file
from common.tensors import read_safetensors, weights_file
from common.validation import STRICT, NonEmptyText, build, fields_of
from model import TransformerLanguageModel, list_first, require_shapes

ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # in peft's files, before the name of a module
TARGETS = {
    "attention": ("qkv", "out_proj"),
    "feed_forward": ("fc1", "fc2"),
    "embeddings": ("token_embedding", "head"),
}
Module = Literal["qkv", "out_proj", "fc1", "fc2", "token_embedding", "head"]
MAX_RANK = 65_536  # also the maximum of alpha; a larger value is a mistake


@dataclass(frozen=True, config=STRICT)
class LoRA:
    """The settings of adapters and their base, with peft's names."""

    r: Annotated[int, Field(ge=1, le=MAX_RANK)]
    lora_alpha: Annotated[float, Field(gt=0, le=MAX_RANK)]
    target_modules: Annotated[tuple[Module, ...], Field(min_length=1)]
    base_model_name_or_path: NonEmptyText  # checkpoint folder, absolute or relative to where the training ran
    revision: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # SHA-256 of the base's weights file


def add_adapters(model: TransformerLanguageModel, lora: LoRA) -> Any:
    """Freeze `model` and add adapters in place; they change nothing until they are trained or loaded. Return peft's
    wrapper, which can merge them. Raises ConfigError if peft is missing."""
    require_packages("peft")
    from peft import LoraConfig, LoraModel

    return LoraModel(model, LoraConfig(**asdict(lora) | {"target_modules": list(lora.target_modules)}), "default")


def lora_of(model: nn.Module) -> LoRA | None:
    """Return the settings of the model's adapters; None if it has none."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return None
    values = {key: getattr(config, key) for key in fields_of(LoRA)}
    return LoRA(**values | {"target_modules": tuple(sorted(config.target_modules))})


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters with peft's names: `base_model.model.blocks.N.attention.qkv.lora_A.weight`."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {PREFIX + name.replace(".default", ""): tensor for name, tensor in trained.items()}


def load_adapters(model: nn.Module, adapters: dict[str, torch.Tensor]) -> None:
    """Load adapters into a model that has some. Raises ValueError if they do not fit or are not finite."""
    trained = adapters_of(model)
    shapes = {name: tensor.shape for name, tensor in trained.items()}
    require_shapes(adapters, shapes, "the adapters do not fit the base")
    broken = [name for name, tensor in adapters.items() if not tensor.float().sum().isfinite()]
    if broken:
        raise ValueError(f"the adapters are not finite: {list_first(broken)}")
    for name, tensor in trained.items():
        tensor.copy_(adapters[name])


def merge_adapters(model: TransformerLanguageModel, folder: Path, lora: LoRA) -> None:
    """Add the adapters in `folder` to the weights of `model`, their base."""
    adapters = read_safetensors(folder / ADAPTERS)
    if not all(lora.r in tensor.shape for tensor in adapters.values()):  # checked before memory is taken
        raise ValueError(f"the adapters do not have rank {lora.r}, as {ADAPTER_CONFIG} says")
    wrapped = add_adapters(model, lora)
    load_adapters(model, adapters)
    wrapped.merge_and_unload()
    model.requires_grad_(True)


def read_lora(folder: Path) -> LoRA | None:
    """Read the settings of a checkpoint's adapters; None if it has none. Raises CheckpointError if they are invalid."""
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return None
    values = read_json(path, CheckpointError)
    try:
        return build(LoRA, {key: values[key] for key in fields_of(LoRA) if key in values})
    except ValueError as problem:
        raise CheckpointError(f"{path} is not valid: {problem}.") from None


def find_base(lora: LoRA, checkpoint: Path) -> Path:
    """Return the folder of an adapter checkpoint's base. Its path is looked up in the current folder and in all parents
    of the checkpoint, so that a project folder can be moved.

    Raises CheckpointError if there is no base, or if its weights are not the ones the adapters were trained on.
    """
    base = lora.base_model_name_or_path
    places = [Path(base), *(parent / base for parent in checkpoint.absolute().parents)]
    found = [place for place in places if os.path.isfile(stored_weights(place))]
    for place in found:
        file = stored_weights(place)
        if _cached_sha256(file, file.stat().st_size, file.stat().st_mtime_ns) == lora.revision:
            return place
    if not found:
        raise CheckpointError(
            f"{checkpoint} holds adapters for the weights in {base}, which do not exist. Restore them, or run the "
            "command in the folder that this path is relative to."
        )
    raise CheckpointError(
        f"{checkpoint} holds adapters for other weights than those in {found[0]}: it was trained on weights with the "
        f"SHA-256 {lora.revision[:16]}... Restore them."
    )


def stored_weights(folder: Path) -> Path:
    """Return the path of a checkpoint's adapters, or of its weights if it has none."""
    adapters = folder / ADAPTERS
    return adapters if os.path.exists(adapters) else weights_file(folder)


@functools.cache
def _cached_sha256(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file, computed once for each size and time of change. Half a gigabyte takes a second."""
    return sha256_file(file)
