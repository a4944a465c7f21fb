"""Tensors in files: read without running code or trusting sizes; written without a second copy, then read back."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import safetensors.torch
import torch
from torch.overrides import TorchFunctionMode

from common.errors import is_out_of_memory
from common.files import sha256_file
from model import TransformerLanguageModel
from model_config import ModelConfig

# What a pickle of tensors may name. PyTorch allows more, and some of that allocates as much memory as the file says.
STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
ZIP_MAGIC = b"PK\x03\x04"  # PyTorch needs it at the start; Python's zipfile also finds an archive after other bytes
PICKLED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in STORAGES),
}


def load_tensors(path: Path) -> dict[str, Any]:
    """Read a dict that torch.save wrote, without running code in it or allocating more memory than its size. Raises
    ValueError for anything else.

    PyTorch's own message is not shown, because it advises to switch the protection off.
    """
    try:
        require_plain_tensors(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, depending on where the file is broken
        is_of_disk = isinstance(error, OSError) and error.errno != errno.EINVAL  # EINVAL: a seek before the start
        if is_of_disk or is_out_of_memory(error):
            raise
        raise ValueError(f"{path.name} is incomplete or holds something other than tensors") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} holds something other than named tensors")
    return state


def require_own_bytes(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Raises ValueError unless every value is a tensor whose numbers are all in the file. A tensor that repeats one
    number could claim any shape."""
    held: dict[int, int] = {}  # bytes of each storage
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            raise ValueError(f"{name!r:.100} is not a named tensor")
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    if sum(tensor.nbytes for tensor in state.values()) > 2 * sum(held.values()):  # a tied head is there twice
        raise ValueError("tensors repeat the numbers in the file")
    return state


def require_plain_tensors(path: Path) -> None:
    """Raises ValueError unless a file is a zip archive (torch.save's format since 1.6) that unpacks to no more than its
    own size, with a pickle that names only tensors."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        file.seek(0)
        if file.read(4) != ZIP_MAGIC or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("it is not a zip archive, or unpacks to more than its size")
        for pickled in (archive.read(member) for member in members if member.filename.lower().endswith(".pkl")):
            if not {str(named) for code, named, _ in pickletools.genops(pickled) if code.name == "GLOBAL"} <= PICKLED:
                raise ValueError("it holds something other than tensors")


def weights_file(folder: Path) -> Path:
    """model.safetensors, or the blog's pytorch_model.bin if there is none. The second need not exist either."""
    ours = folder / "model.safetensors"
    return ours if os.path.exists(ours) else folder / "pytorch_model.bin"  # False for an impossible name, too


def read_weights(folder: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """Weights by name. With `shapes_only`, on the meta device if the format allows it, from the file's header alone.

    Raises ValueError or SafetensorError for a file that holds something else.
    """
    path = weights_file(folder)
    if path.suffix == ".bin":
        return require_own_bytes(load_tensors(path))
    return read_safetensors(path, shapes_only)


def read_safetensors(path: Path, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    if not shapes_only:
        return safetensors.torch.load_file(path, device="cpu")
    with safetensors.safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


class Uninitialized(TorchFunctionMode):
    """Inside, a model is built without initialising its weights, because others will be loaded. The random numbers of
    GPT-2 small take a second; on the meta device they also import torch's compiler, another second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def require_weights(config: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if the weights, which may be on the meta device, do not fit a model of this shape.

    Call it before a model is built from a foreign config, whose shape may be larger than any memory.
    """
    names = [name.removeprefix("_orig_mod.") for name in state]
    layers = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    if layers < config.num_layers:  # each layer takes memory even on the meta device
        raise ValueError(f"num_layers is {config.num_layers:,}, and blocks.{layers}.* is missing")
    try:
        with Uninitialized(), torch.device("meta"):
            model = TransformerLanguageModel(config)
    except RuntimeError:  # more bytes than 64 bits can count
        raise ValueError("no model can have this shape") from None
    model.fit_weights(state)


def on_host(state: Any, copy: bool) -> Any:
    """The same structure of dicts and lists with its tensors on the CPU, with `copy` always as copies."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=copy).contiguous()
    if isinstance(state, dict):
        return {key: on_host(value, copy) for key, value in state.items()}
    return [on_host(value, copy) for value in state] if isinstance(state, list) else state


def safetensors_pieces(
    weights: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of fp32 tensors on the CPU, in pieces. The library's own function copies them all
    first, and blocks other threads meanwhile.

    The format is the library's: size of the header, header in JSON padded to 8 bytes, numbers sorted by name.
    """
    names = sorted(weights)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + weights[name].nbytes
        header[name] = {"dtype": "F32", "shape": list(weights[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        tensor = weights[name]
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu", name
        yield tensor.numpy().reshape(-1).view("uint8").data


Content = bytes | Iterable[bytes | memoryview] | dict[str, Any]  # what `write_verified` writes


class HashingWriter:
    """A binary file that hashes what is written, so that what is on disk can be checked."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_verified(path: Path, content: Content) -> str:
    """Write bytes, pieces of bytes, or a dict of tensors with torch.save; flush to disk and read back.

    Returns the file's SHA-256. Raises OSError if the bytes read back differ.
    """
    with open(path, "wb") as file:
        writer = HashingWriter(file)
        if isinstance(content, dict):
            torch.save(content, cast(BinaryIO, writer))  # it only calls `write` and `flush`
        else:
            for piece in [content] if isinstance(content, bytes) else content:
                writer.write(piece)
        file.flush()
        os.fsync(file.fileno())
    sha256 = writer.sha256.hexdigest()
    if sha256_file(path) != sha256:
        raise OSError(f"{path.name} reads back differently than written; the disk may be failing")
    return sha256
