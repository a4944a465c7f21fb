"""Tensors in files."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from common.files import sha256_file
from common.tensors import to_cpu, write_file


def test_a_file_of_tensors_is_the_librarys_with_its_hash(tmp_path: Path) -> None:
    tensors = {"weights": torch.randn(3, 4), "empty": torch.zeros(0, 4)}
    assert write_file(tmp_path / "a.safetensors", tensors) == sha256_file(tmp_path / "a.safetensors")
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_copy_on_the_host_does_not_change_with_the_original() -> None:
    tensors = {"step": torch.tensor(1.0)}
    copied, shared = to_cpu(tensors, copy=True), to_cpu(tensors, copy=False)
    tensors["step"] += 1
    assert (copied["step"].item(), shared["step"].item()) == (1.0, 2.0)
