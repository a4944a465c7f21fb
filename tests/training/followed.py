"""A training step on a GPU that is not there: the types that CUDA's autocast chooses, on tensors without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from model import TransformerLanguageModel
from model_config import ModelConfig

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class WithoutGuard(TorchFunctionMode):
    """Slices without Python's indexing, which asks the GPU's driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, (first, *rest) = args
        assert first is Ellipsis, "only the last dimensions"
        (part,) = rest
        begins, ends, _ = part.indices(x.size(-1))
        return x.narrow(-1, begins, ends - begins)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool, **_: Any) -> Any:
    """What scaled_dot_product_attention takes on a GPU. Autocast casts its inputs."""
    q, k, v = (each.to(torch.get_autocast_dtype("cuda")) for each in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


class Followed:
    """The forward pass of a model under CUDA's autocast, as a graph with every cast, to be run on the meta device."""

    def __init__(self, config: ModelConfig, rows: int, precision: str):
        with torch.device("meta"):
            self.model = TransformerLanguageModel(config)
            self.tokens = torch.zeros(rows, config.max_seq_len, dtype=torch.long)
        mode = FakeTensorMode()

        def on_gpu(tensor: torch.Tensor) -> FakeTensor:
            return FakeTensor(mode, tensor.detach(), torch.device("cuda", 0))

        def forward(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
            # torch.autocast turns itself off where it finds no GPU.
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", HALF[precision])
            torch.autocast_increment_nesting()
            try:
                with WithoutGuard():
                    return functional_call(self.model, weights, (tokens, tokens))
            finally:
                torch.clear_autocast_cache()
                torch.autocast_decrement_nesting()
                torch.set_autocast_enabled("cuda", False)

        weights = {name: on_gpu(tensor) for name, tensor in self.tensors().items()}
        tokens = on_gpu(self.tokens)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), mode:
            patch.setattr(F, "scaled_dot_product_attention", lambda *qkv, attn_mask, **how: flash(*qkv, **how))
            self.graph: GraphModule = make_fx(forward)(weights, tokens)
        for node in self.graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("meta")}
        self.graph.recompile()

    def loss(self) -> torch.Tensor:
        return self.graph(self.tensors(), self.tokens)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])

    def kept_of_a_token(self) -> float:
        """Bytes that the forward pass keeps for the backward pass, weights and their casts aside."""
        weights = {parameter.untyped_storage()._cdata for parameter in self.model.parameters()}
        shapes = {tuple(parameter.shape) for parameter in self.model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            is_weight = tuple(tensor.shape) in shapes or tuple(tensor.shape[::-1]) in shapes
            if not is_weight and tensor.untyped_storage()._cdata not in weights:
                kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.loss()
        del loss
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / self.tokens.numel()
