"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"): a trained model, its base, stays as it
is, and beside its matrices two thin ones each learn what is to change.

y = W x + alpha / rank * B A x, with A (rank, in) and B (out, rank). B starts at zero: at first the model is its base.
"""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from common.errors import CheckpointError
from common.files import sha256_file
from common.tensors import weights_file
from model import Linear, TransformerLanguageModel, listed

# What can be adapted, and the modules of a block that it stands for.
TARGETS = {
    "attention": ("attention.qkv", "attention.out_proj"),
    "feed_forward": ("feed_forward.fc1", "feed_forward.fc2"),
}
LARGEST_RANK = 65_536  # and of alpha; beyond it nothing but mistakes


@dataclass(frozen=True)
class LoRA:
    """What adapters are, and what for. Raises ValueError listing every value that is out of range."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str  # folder of a checkpoint: absolute, or relative to where the training was started
    base_sha256: str  # of the file that holds its weights

    def __post_init__(self) -> None:
        problems = []
        if type(self.rank) is not int or not 1 <= self.rank <= LARGEST_RANK:
            problems.append(f"rank is {self.rank!r:.100}; a whole number from 1 to {LARGEST_RANK:,} is needed")
        if type(self.alpha) not in (int, float) or not 0 < self.alpha <= LARGEST_RANK:
            problems.append(f"alpha is {self.alpha!r:.100}; a number above 0, up to {LARGEST_RANK:,}, is needed")
        if not self.targets or any(target not in TARGETS for target in self.targets):
            problems.append(f"targets is {self.targets!r:.100}; allowed: {', '.join(TARGETS)}")
        if not isinstance(self.base, str) or not self.base:
            problems.append(f"base is {self.base!r:.100}; the folder of a checkpoint is needed")
        if not isinstance(self.base_sha256, str) or not re.fullmatch("[0-9a-f]{64}", self.base_sha256):
            problems.append(f"base_sha256 is {self.base_sha256!r:.100}; 64 hexadecimal digits are needed")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        """Those of a block that are adapted."""
        return tuple(module for target, modules in TARGETS.items() if target in self.targets for module in modules)

    @classmethod
    def from_dict(cls, values: Any) -> LoRA:
        """Build from the `lora` of a config.json. Raises ValueError for anything that is none."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"lora is {values!r:.200}; an object of {', '.join(cls.__dataclass_fields__)} is needed")
        targets = values["targets"]
        is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
        return cls(**{**values, "targets": tuple(targets) if is_list else ()})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}


class AdaptedLinear(Linear):
    """A linear layer whose weight and bias are the base's, under their names, and are not trained."""

    def __init__(self, base: Linear, lora: LoRA):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora, self.scale = lora, lora.scale
        self.lora_A = nn.Parameter(torch.empty(lora.rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, lora.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as the reference does
        self.lora_A, self.lora_B = (nn.Parameter(p.to(base.weight.device)) for p in (self.lora_A, self.lora_B))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = F.linear(x, self.lora_A) * self.scale  # (..., rank), where scaling costs least
        return super().forward(x) + F.linear(thin, self.lora_B)


def add_adapters(model: TransformerLanguageModel, lora: LoRA) -> None:
    """From here on the adapters of `model` are all that trains. Its own weights, in place already or still to be
    loaded, keep their names."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in lora.modules:
            parent, _, child = name.partition(".")
            layer = block.get_submodule(name)
            assert isinstance(layer, Linear) and not isinstance(layer, AdaptedLinear), name
            setattr(block.get_submodule(parent), child, AdaptedLinear(layer, lora))


def lora_of(model: nn.Module) -> LoRA | None:
    """What the model was adapted with; None if all of its weights train."""
    return next((module.lora for module in model.modules() if isinstance(module, AdaptedLinear)), None)


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name: `blocks.N.attention.qkv.lora_A` and so on."""
    return {name: p for name, p in model.state_dict().items() if name.endswith((".lora_A", ".lora_B"))}


def load_adapters(model: nn.Module, adapters: dict[str, torch.Tensor]) -> None:
    """Into a model that has some. Raises ValueError for those of another model, and for numbers that are not finite."""
    own = adapters_of(model)
    require_fitting(adapters, {name: tuple(tensor.shape) for name, tensor in own.items()})
    broken = [name for name, tensor in adapters.items() if not tensor.float().sum().isfinite()]
    if broken:
        raise ValueError(f"the adapters are not finite: {listed(broken)}")
    model.load_state_dict(adapters, strict=False)


def merge(weights: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], lora: LoRA) -> dict[str, torch.Tensor]:
    """The weights of a base, W + alpha / rank * B A where it is adapted, under the names that it has.

    Either may be on the meta device. Raises ValueError for adapters of another model.
    """
    adapted = {}
    for name, weight in weights.items():
        module = name.removeprefix("_orig_mod.").removesuffix(".weight")
        if re.fullmatch(rf"blocks\.\d+\.({'|'.join(map(re.escape, lora.modules))})", module) and weight.dim() == 2:
            adapted[name] = f"{module}.lora_A", f"{module}.lora_B"
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (a, b) in adapted.items():
        out, into = weights[name].shape
        shapes |= {a: (lora.rank, into), b: (out, lora.rank)}
    require_fitting(adapters, shapes)
    merged = {
        name: torch.addmm(weights[name].float(), adapters[b].float(), adapters[a].float(), alpha=lora.scale)
        for name, (a, b) in adapted.items()
    }
    return weights | merged


def require_fitting(adapters: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError naming adapters that are missing, unknown, of another shape or whole numbers."""
    problems = [f"{name} is missing" for name in shapes if name not in adapters]
    problems += [f"{name} is unknown" for name in adapters if name not in shapes]
    problems += [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {shapes[name]}"
        for name, tensor in adapters.items()
        if name in shapes and (tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point())
    ]
    if problems:
        raise ValueError("the adapters do not fit the base: " + listed(problems))


def find_base(lora: LoRA, checkpoint: Path) -> Path:
    """The folder of the base of an adapter checkpoint: where it was, as seen from the current folder, or from one that
    the checkpoint lies in, for a project may have moved.

    Raises CheckpointError if there is none, or one with other weights than those the adapters were trained on.
    """
    places = [Path(lora.base), *(parent / lora.base for parent in checkpoint.absolute().parents)]
    found = [place for place in places if os.path.isfile(weights_file(place))]
    for place in found:
        file = weights_file(place)
        if sha256_once(file, file.stat().st_size, file.stat().st_mtime_ns) == lora.base_sha256:
            return place
    if not found:
        raise CheckpointError(
            f"{checkpoint} is an adapter for the weights of {lora.base}, and there are none: put them back, or "
            "type the command in the folder that its path begins in."
        )
    raise CheckpointError(
        f"{checkpoint} is an adapter for another base than the weights that are now in {found[0]} (their SHA-256 is "
        f"not {lora.base_sha256[:16]}...): put those back that it was trained on."
    )


@functools.cache
def sha256_once(file: Path, size: int, changed: int) -> str:
    """Of a file as it is: a command looks at its base several times, and half a gigabyte takes a second to hash."""
    return sha256_file(file)
