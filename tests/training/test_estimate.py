"""The types and the memory of a step under CUDA's autocast, followed tensor by tensor without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import TransformerLanguageModel
from tests.helpers import CPU
from tests.training.followed import HALF, Followed
from training.config import Config
from training.memory import bytes_per_token

MODERN = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "embed_norm": True, "bias": False}
MODERN |= {"activation": "swiglu"}
FORMS: dict[str, dict[str, Any]] = {"gpt-2": {}, "gpt-2, tanh": {"activation": "gelu_tanh"}, "modern": MODERN}
FORMS["qwen3"] = MODERN | {"norm_gain": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 80}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention"}
PRODUCTS |= {"_scaled_dot_product_flash_attention_backward"}

every_form = pytest.mark.parametrize("form", FORMS)
either_half = pytest.mark.parametrize("precision", HALF)


def config_of(form: str, layers: int = 2) -> Config:
    # 384 tokens: no activation has the shape of a weight.
    shape = {"embed_dim": 256, "num_heads": 2, "max_seq_len": 128, "batch_size": 3}
    values = {**shape, **FORMS[form]}
    return Config(num_layers=layers, **values)


@every_form
@either_half
def test_what_a_layer_keeps_on_a_gpu_is_what_is_counted(form: str, precision: str) -> None:
    kept, counted = [], []
    hardware = dataclasses.replace(CPU, device=torch.device("cuda"), precision=precision)
    for layers in (6, 2):
        config = config_of(form, layers)
        followed = Followed(config.shape(1000), config.batch_size, precision)
        kept.append(followed.kept_of_a_token())
        counted.append(bytes_per_token(config, followed.model, hardware))
    assert (counted[0] - counted[1]) / 4 == pytest.approx((kept[0] - kept[1]) / 4, rel=0.02)


class Products(TorchDispatchMode):
    """Notes the types of all matrix products and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            factors = {each.dtype for each in args if isinstance(each, torch.Tensor) and each.dim() > 1}
            self.types.setdefault(name, set()).update(each for each in factors if each.is_floating_point)
        return func(*args, **(kwargs or {}))


@every_form
@either_half
def test_no_product_of_a_step_in_half_precision_is_in_fp32(form: str, precision: str) -> None:
    """So a training needs no TF32."""
    followed = Followed(config_of(form).shape(1000), 3, precision)
    with Products() as products:
        followed.loss().backward()
    assert {"mm", "_scaled_dot_product_flash_attention_backward"} <= products.types.keys()
    for name, types in products.types.items():
        half = {each for each in types if each != torch.float32} if "backward" in name else types
        assert half == {HALF[precision]}, name


def test_a_product_in_fp32_would_be_noticed() -> None:
    with Products() as products:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert products.types == {"mm": {torch.float32}}


def test_the_head_and_the_loss_are_counted_too() -> None:
    """Eager: its softmax in fp32; the gradients of both come in the backward pass."""
    config, hardware = config_of("gpt-2"), dataclasses.replace(CPU, device=torch.device("cuda"), precision="bf16")
    kept, counted = [], []
    for vocabulary in (2048, 1024):  # the head pads other sizes
        followed = Followed(config.shape(vocabulary), config.batch_size, "bf16")
        kept.append(followed.kept_of_a_token())
        with torch.device("meta"):
            model = TransformerLanguageModel(config.shape(vocabulary))
        counted.append(bytes_per_token(config, model, hardware))
    of_backward = 2 * 4 * 1024
    assert counted[0] - counted[1] == pytest.approx(kept[0] - kept[1] + of_backward, rel=0.02)
