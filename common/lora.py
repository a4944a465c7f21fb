"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"): freeze the weights of a trained model,
the base, and train two thin matrices beside each adapted one.

y = W x + alpha / rank * B A x, with A (rank, in) and B (out, rank). B starts at zero, so the model starts as its base.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass

from common.errors import CheckpointError
from common.files import sha256_file
from common.tensors import Uninitialized, weights_file
from common.validation import STRICT, NonEmptyText
from model import Head, Linear, TransformerLanguageModel, list_first, require_shapes
from model_config import ModelConfig

# Target -> its modules in a block. "embeddings" are outside the blocks: the token embedding and the head.
TARGET_MODULES = {
    "attention": ("attention.qkv", "attention.out_proj"),
    "feed_forward": ("feed_forward.fc1", "feed_forward.fc2"),
    "embeddings": (),
}
EMBEDDING, HEAD = "token_embedding", "head"
MAX_RANK = 65_536  # also the maximum of alpha; a larger value is a mistake


@dataclass(frozen=True, config=STRICT)
class LoRA:
    """The settings of adapters, and their base."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    alpha: Annotated[float, Field(gt=0, le=MAX_RANK)]
    targets: Annotated[tuple[Literal["attention", "feed_forward", "embeddings"], ...], Field(min_length=1)]
    base: NonEmptyText  # checkpoint folder, absolute or relative to the working directory of the training
    base_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # SHA-256 of the base's weights file

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def block_modules(self) -> tuple[str, ...]:
        """Adapted modules inside a block."""
        return tuple(
            module for target, modules in TARGET_MODULES.items() if target in self.targets for module in modules
        )

    @property
    def end_modules(self) -> tuple[str, ...]:
        """Adapted modules outside the blocks. A tied head shares the adapters of the embedding."""
        return (EMBEDDING, HEAD) if "embeddings" in self.targets else ()

    def modules(self, config: ModelConfig) -> list[str]:
        """Return the names of all adapted modules of a model."""
        layers = range(config.num_layers)
        return [*self.end_modules, *(f"blocks.{layer}.{module}" for layer in layers for module in self.block_modules)]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}


class AdaptedLinear(Linear):
    """A linear layer with adapters. Weight and bias are the frozen ones of the base, under the same names."""

    def __init__(self, base: Linear, lora: LoRA):
        with Uninitialized():
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora, self.scale = lora, lora.scale
        self.lora_A, self.lora_B = new_adapters(base.weight, lora)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = F.linear(x, self.lora_A) * self.scale  # (..., rank); scaled here, where it costs least
        return super().forward(x) + F.linear(thin, self.lora_B)


class AdaptedHead(AdaptedLinear, Head):
    """A head with adapters; it uses the forward of Head."""


class AdaptedEmbedding(nn.Embedding):
    """An embedding with adapters: row t is W[t] + alpha / rank * B[t] A. W is the frozen weight of the base."""

    def __init__(self, base: nn.Embedding, lora: LoRA):
        with Uninitialized():
            super().__init__(base.num_embeddings, base.embedding_dim, device="meta")
        self.weight = base.weight
        self.lora, self.scale = lora, lora.scale
        self.lora_A, self.lora_B = new_adapters(base.weight, lora)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        thin = F.embedding(tokens, self.lora_B) * self.scale  # (..., rank)
        return super().forward(tokens) + F.linear(thin, self.lora_A.T)


def new_adapters(weight: torch.Tensor, lora: LoRA) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (rank, in) and B (out, rank) for a weight (out, in), drawn on the CPU so that a seed is the same on
    every device."""
    a, b = torch.empty(lora.rank, weight.size(1)), torch.zeros(weight.size(0), lora.rank)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # the reference implementation's
    return nn.Parameter(a.to(weight.device)), nn.Parameter(b.to(weight.device))


def add_adapters(model: TransformerLanguageModel, lora: LoRA) -> None:
    """Freeze `model` and add adapters. Weights keep their names, so that they can still be loaded."""
    model.requires_grad_(False)
    for name in lora.modules(model.config):
        adapted = ADAPTED_CLASSES[type(model.get_submodule(name))]
        model.set_submodule(name, adapted(model.get_submodule(name), lora))
    if HEAD in lora.end_modules and model.config.tie_embeddings:
        model.head.lora_A, model.head.lora_B = model.token_embedding.lora_A, model.token_embedding.lora_B


ADAPTED_CLASSES: dict[type[nn.Module], Callable[[Any, LoRA], nn.Module]] = {
    Linear: AdaptedLinear,
    Head: AdaptedHead,
    nn.Embedding: AdaptedEmbedding,
}


def lora_of(model: nn.Module) -> LoRA | None:
    """Return the model's LoRA settings; None if it has no adapters."""
    adapted = (module for module in model.modules() if isinstance(module, AdaptedLinear | AdaptedEmbedding))
    return next((module.lora for module in adapted), None)


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters by name (`blocks.N.attention.qkv.lora_A`). Shared ones appear once, under their first
    name."""
    return {name: p.detach() for name, p in model.named_parameters() if name.endswith((".lora_A", ".lora_B"))}


def load_adapters(model: nn.Module, adapters: dict[str, torch.Tensor]) -> None:
    """Load adapters into a model that has some. Raises ValueError if they do not fit or are not finite."""
    own = adapters_of(model)
    require_shapes(adapters, {name: tensor.shape for name, tensor in own.items()}, "the adapters do not fit the base")
    broken = [name for name, tensor in adapters.items() if not tensor.float().sum().isfinite()]
    if broken:
        raise ValueError(f"the adapters are not finite: {list_first(broken)}")
    model.load_state_dict(adapters, strict=False)


def merge(
    weights: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], lora: LoRA, config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return the base's weights with the adapters added, W + alpha / rank * B A, under the same names.

    Both may be on the meta device. Raises ValueError if the adapters belong to another model.
    """
    adapted, modules = {}, set(lora.modules(config))
    for name, weight in weights.items():
        module = name.removeprefix("_orig_mod.").removesuffix(".weight")
        if module in modules and weight.dim() == 2:
            holder = EMBEDDING if module == HEAD and config.tie_embeddings else module
            adapted[name] = f"{holder}.lora_A", f"{holder}.lora_B"
    shapes: dict[str, Sequence[int]] = {}
    for name, (a, b) in adapted.items():
        out, into = weights[name].shape
        shapes |= {a: (lora.rank, into), b: (out, lora.rank)}
    require_shapes(adapters, shapes, "the adapters do not fit the base")
    merged = {
        name: torch.addmm(weights[name].float(), adapters[b].float(), adapters[a].float(), alpha=lora.scale)
        for name, (a, b) in adapted.items()
    }
    return weights | merged


def find_base(lora: LoRA, checkpoint: Path) -> Path:
    """Return the folder of an adapter checkpoint's base. Its path is looked up in the current folder and in all parents
    of the checkpoint, so that a project folder can be moved.

    Raises CheckpointError if there is no base, or if its weights are not the ones the adapters were trained on.
    """
    places = [Path(lora.base), *(parent / lora.base for parent in checkpoint.absolute().parents)]
    found = [place for place in places if os.path.isfile(weights_file(place))]
    for place in found:
        file = weights_file(place)
        if cached_sha256(file, file.stat().st_size, file.stat().st_mtime_ns) == lora.base_sha256:
            return place
    if not found:
        raise CheckpointError(
            f"{checkpoint} holds adapters for the weights in {lora.base}, which do not exist. Restore them, or run the "
            "command in the folder that this path is relative to."
        )
    raise CheckpointError(
        f"{checkpoint} holds adapters for other weights than those in {found[0]}: it was trained on weights with the "
        f"SHA-256 {lora.base_sha256[:16]}... Restore them."
    )


@functools.cache
def cached_sha256(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file, computed once for each size and time of change. Half a gigabyte takes a second."""
    return sha256_file(file)
