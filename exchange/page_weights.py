"""Pack weights for the page of `tools/export_page.py`: matrices in f16, or in int8 with one scale per 64 weights of a
row; vectors in fp32."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.errors import ConfigError

SCALE_BLOCK = 64  # weights per scale; page_model.js has the same number
MAX_INT8 = 127  # symmetric around zero


class PackedWeights(NamedTuple):
    data: bytes
    weights: torch.Tensor  # the rounded weights, in fp32


def packed_size(shape: torch.Size, kind: str) -> int:
    """Return the bytes that a tensor of this shape takes."""
    if len(shape) == 1:
        return 4 * shape[0]
    rows, columns = shape
    if kind == "f16":
        return 2 * rows * columns
    blocks = rows * math.ceil(columns / SCALE_BLOCK)
    return blocks * (2 + SCALE_BLOCK)


def pack(name: str, weights: torch.Tensor, kind: str) -> PackedWeights:
    """Pack a vector or a matrix (rows, columns) in fp32, row by row, little-endian.

    `kind`: "f16", or "int8": first all scales in f16, then the weights, each row padded with zeros to a multiple of
    SCALE_BLOCK. Raises ConfigError if a weight is too large for f16.
    """
    if weights.dim() == 1:
        return PackedWeights(weights.numpy().astype("<f4").tobytes(), weights)
    if kind == "f16":
        half = weights.half()
        require_finite(name, half)
        return PackedWeights(half.numpy().astype("<f2").tobytes(), half.float())
    rows, columns = weights.shape
    blocks = F.pad(weights, (0, -columns % SCALE_BLOCK)).view(rows, -1, SCALE_BLOCK)  # (rows, blocks, SCALE_BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / MAX_INT8).half()
    require_finite(name, scales)
    steps = scales.float()
    whole = (blocks / steps.where(steps > 0, 1)).round().clamp(-MAX_INT8, MAX_INT8)
    rounded = (whole * steps).view(rows, -1)[:, :columns]
    return PackedWeights(scales.numpy().astype("<f2").tobytes() + whole.numpy().astype("i1").tobytes(), rounded)


def require_finite(name: str, numbers: torch.Tensor) -> None:
    if not numbers.isfinite().all():
        raise ConfigError(
            f"{name} has weights that are too large for 16 bits, so this model cannot be exported as a page."
        )
