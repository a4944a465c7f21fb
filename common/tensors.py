"""Read tensors from files without running code."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.overrides import TorchFunctionMode

from common.errors import is_out_of_memory
from model import TransformerLanguageModel
from model_config import ModelConfig


def load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Read named tensors written by torch.save, without running code. Raises ValueError for anything else.

    PyTorch's message is not shown, because it advises to switch off the protection.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its type depends on where the file is broken
        is_disk_error = isinstance(error, OSError) and error.errno != errno.EINVAL  # EINVAL: a seek before the start
        if is_disk_error or is_out_of_memory(error):
            raise
        raise ValueError(f"{path.name} is incomplete or holds something other than tensors") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise ValueError(f"{path.name} holds something other than named tensors")
    return state


def weights_file(folder: Path) -> Path:
    """Return the path of model.safetensors or, if it does not exist, of the blog's pytorch_model.bin."""
    path = folder / "model.safetensors"
    return path if os.path.exists(path) else folder / "pytorch_model.bin"  # also False for an impossible name


def read_weights(folder: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """Read weights by name. `shapes_only`: return tensors on the meta device, from the file's header if the format has
    one.

    Raises ValueError or SafetensorError for an invalid file.
    """
    path = weights_file(folder)
    if path.suffix == ".bin":
        return load_pickled(path)
    return read_safetensors(path, shapes_only)


def read_safetensors(path: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    if not shapes_only:
        return safetensors.torch.load_file(path, device="cpu")
    with safetensors.safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


class Uninitialized(TorchFunctionMode):
    """A context in which models are built without initial weights, because others will be loaded. The random numbers of
    GPT-2 small take a second; on the meta device they also import torch's compiler, another second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def meta_model(config: ModelConfig) -> TransformerLanguageModel:
    """Build a model on the meta device: shapes without memory."""
    with Uninitialized(), torch.device("meta"):
        return TransformerLanguageModel(config)


def require_shape(config: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if the weights, which may be on the meta device, do not fit a model of this shape.

    Call this before building a model from an untrusted config, whose shape may be larger than any memory.
    """
    names = [name.removeprefix("_orig_mod.") for name in state]
    layers = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    if layers < config.num_layers:  # even on the meta device each layer takes memory
        raise ValueError(f"num_layers is {config.num_layers:,}, and blocks.{layers}.* is missing")
    try:
        model = meta_model(config)
    except RuntimeError:  # the size overflows 64 bits
        raise ValueError("no model can have this shape") from None
    model.fit_weights(state)
