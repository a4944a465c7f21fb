"""Weights as the page of `tools/export_page.py` holds them: matrices in f16, or in int8 with a scale for each 64
weights of a row; vectors in fp32."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.errors import ConfigError

BLOCK = 64  # weights that share a scale; page_model.js has the same number
LARGEST = 127  # of an int8, on both sides of zero


class Packed(NamedTuple):
    data: bytes
    weights: torch.Tensor  # what the page computes with, in fp32


def packed_size(shape: torch.Size, kind: str) -> int:
    """Bytes of a tensor of this shape."""
    if len(shape) == 1:
        return 4 * shape[0]
    rows, columns = shape
    if kind == "f16":
        return 2 * rows * columns
    blocks = rows * math.ceil(columns / BLOCK)
    return blocks * (2 + BLOCK)


def pack(name: str, weights: torch.Tensor, kind: str) -> Packed:
    """A vector or a matrix (rows, columns) in fp32, rounded to `kind`, "int8" or "f16", row after row, little-endian.

    int8: first all scales, in f16, then the weights, each row filled up with zeros to a multiple of BLOCK. Raises
    ConfigError for weights that are too large for f16.
    """
    if weights.dim() == 1:
        return Packed(weights.numpy().astype("<f4").tobytes(), weights)
    if kind == "f16":
        half = weights.half()
        require_finite(name, half)
        return Packed(half.numpy().astype("<f2").tobytes(), half.float())
    rows, columns = weights.shape
    blocks = F.pad(weights, (0, -columns % BLOCK)).view(rows, -1, BLOCK)  # (rows, blocks, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST).half()
    require_finite(name, scales)
    steps = scales.float()
    whole = (blocks / steps.where(steps > 0, 1)).round().clamp(-LARGEST, LARGEST)
    rounded = (whole * steps).view(rows, -1)[:, :columns]
    return Packed(scales.numpy().astype("<f2").tobytes() + whole.numpy().astype("i1").tobytes(), rounded)


def require_finite(name: str, numbers: torch.Tensor) -> None:
    if not numbers.isfinite().all():
        raise ConfigError(f"{name} has weights that are too large for 16 bits, so this model cannot be put on a page.")
