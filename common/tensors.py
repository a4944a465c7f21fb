"""Files of torch.save, read as what they should be, tensors: no code of theirs is run, no size of theirs believed."""

from __future__ import annotations

import errno
import json
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import is_out_of_memory

# What a pickle of tensors may name. PyTorch allows more, some of which takes any memory that it is told to.
STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
ZIP_MAGIC = b"PK\x03\x04"  # by which PyTorch knows an archive; Python's zipfile finds one behind other bytes too
PICKLED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in STORAGES),
}


def load_tensors(path: Path) -> dict[str, Any]:
    """Read what torch.save wrote, without running code it may hold, nor taking memory for more than it holds. Raises
    ValueError for anything but a dict.

    PyTorch's own message is not passed on: it advises to load the file with the protection off.
    """
    try:
        require_plain_tensors(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by where the file is broken
        is_of_disk = isinstance(error, OSError) and error.errno != errno.EINVAL  # which is a place before the file
        if is_of_disk or is_out_of_memory(error):
            raise
        raise ValueError(f"{path.name} is cut short or holds something other than tensors") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} holds something other than named tensors")
    return state


def require_own_bytes(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Raises ValueError unless every value is a tensor whose numbers are in the file: one of them, repeated, can have
    any shape."""
    held: dict[int, int] = {}  # bytes of each storage
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            raise ValueError(f"{name!r:.100} is no named tensor")
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    if sum(tensor.nbytes for tensor in state.values()) > 2 * sum(held.values()):  # a tied head is there twice
        raise ValueError("they repeat the numbers in the file")
    return state


def require_plain_tensors(path: Path) -> None:
    """Raises ValueError unless a file is a zip archive, as torch.save has written since 1.6, that unpacks to no more
    than its own size, with a pickle that names nothing but tensors."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        file.seek(0)
        if file.read(4) != ZIP_MAGIC or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("PyTorch would read it in another way, or unpack it to more than its size")
        for pickled in (archive.read(member) for member in members if member.filename.lower().endswith(".pkl")):
            if not {str(named) for code, named, _ in pickletools.genops(pickled) if code.name == "GLOBAL"} <= PICKLED:
                raise ValueError("it holds something other than tensors")


def safetensors_pieces(weights: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of fp32 tensors on the CPU, in pieces: the library's own function makes a second
    copy of all of them first, and holds other threads up meanwhile.

    The form is the library's: the header's size, the header in JSON padded to 8 bytes, the numbers by name.
    """
    names = sorted(weights)
    header: dict[str, Any] = {}
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
