"""Tensors in files."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from common.tensors import on_host, safetensors_pieces
from model import TransformerLanguageModel
from model_config import ModelConfig


def test_the_pieces_are_the_file_that_the_library_writes() -> None:
    shape = {"embed_dim": 16, "num_heads": 2, "num_layers": 11, "max_seq_len": 8}
    weights = TransformerLanguageModel(ModelConfig(13, **shape)).state_dict()
    weights["empty"] = torch.zeros(0, 4)
    assert b"".join(bytes(piece) for piece in safetensors_pieces(weights)) == safetensors.torch.save(weights)


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.float64), torch.zeros(2, 3).T])
def test_what_would_be_written_wrongly_is_not_written(tensor: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="weights"):
        list(safetensors_pieces({"weights": tensor}))


def test_a_copy_on_the_host_does_not_change_with_the_original() -> None:
    state = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    copied, shared = on_host(state, copy=True), on_host(state, copy=False)
    state["state"][0]["step"] += 1
    assert copied == {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    assert shared["state"][0]["step"] == 2.0
