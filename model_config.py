"""The shape of a model, in plain values that JSON keeps unchanged. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WrapValidator, model_validator
from pydantic.dataclasses import dataclass

GATED = ("swiglu",)  # activations whose input is twice as wide as their output
EPSILONS = {"layernorm": 1e-5, "rmsnorm": 1e-6}
MAX_SIZE = 2**31  # token ids are int32
MAX_NUMBER = 1e9  # a larger number must be a mistake
Size = Annotated[int, Field(ge=1, lt=MAX_SIZE)]
Positive = Annotated[float, Field(gt=0, lt=MAX_NUMBER)]
FilledIn = WrapValidator(lambda value, check: None if value is None else check(value))  # None before `fill_in`


def setting(default: Any, description: str | None = None, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class ModelConfig:
    """The shape of a model. Fields with a description are flags of the trainer.

    Raises pydantic's ValidationError, a ValueError, for values that are out of range or contradict each other.
    """

    vocab_size: Size
    embed_dim: Size = setting(768, "width of the residual stream")
    num_heads: Size = setting(12, "attention heads; must divide embed_dim")
    num_layers: Size = setting(12, "transformer blocks")
    ff_dim: Annotated[Size, FilledIn] = setting(None, "hidden width of the feed-forward [4 * embed_dim; swiglu 8/3]")
    max_seq_len: Size = setting(512, "context length in tokens")
    dropout: float = setting(0.0, "dropout probability", ge=0, lt=1)
    bias: bool = setting(True, "biases in linear layers and norms")
    tie_embeddings: bool = setting(False, "share the token embedding with the head")
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = setting("gelu", "feed-forward activation")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "normalisation")
    position: Literal["learned", "rope"] = setting("learned", "position information")
    qk_norm: bool = setting(False, "normalise queries and keys")
    embed_norm: bool = setting(False, "normalise the embeddings before the first block")
    zero_init: bool = setting(False, "start projections into the residual stream, and the head, at zero")
    num_kv_heads: Annotated[Size, FilledIn] = setting(None)  # heads of keys and values; default num_heads
    head_dim: Annotated[Size, FilledIn] = setting(None)  # default embed_dim / num_heads
    norm_gain: bool = False  # learned gain of RMSNorm, including queries and keys; LayerNorm always has one
    norm_eps: Annotated[float, Field(ge=0, lt=1), FilledIn] = setting(None)  # default: see EPSILONS
    rope_base: float = setting(10_000.0, ge=1, lt=MAX_NUMBER)
    rope_scaling: tuple[Positive, ...] = setting((), strict=False)  # Llama 3's: factor, low, high, original length
    qkv_bias: Annotated[bool, FilledIn] = setting(None)  # biases of queries, keys and values; default `bias`

    @model_validator(mode="after")
    def checked(self) -> ModelConfig:
        if problems := self.contradictions():
            raise ValueError("\n".join(problems))
        self.fill_in()
        return self

    def fill_in(self) -> None:
        """Fill in the fields whose defaults depend on others."""
        defaults: dict[str, Any] = {
            "ff_dim": default_ff_dim(self.embed_dim, self.activation),
            "num_kv_heads": self.num_heads,
            "head_dim": max(1, self.embed_dim // self.num_heads),
            "norm_eps": EPSILONS[self.norm],
            "qkv_bias": self.bias,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def contradictions(self) -> list[str]:
        """List contradictions between values. Fields whose defaults depend on others may be None."""
        problems = self.head_contradictions()
        if self.zero_init and self.tie_embeddings:
            problems.append(
                "zero_init would set the token embedding to zero, because tie_embeddings shares it with the head"
            )
        if len(self.rope_scaling) not in (0, 4):
            problems.append(f"rope_scaling is {self.rope_scaling!r:.100}; four numbers above 0 are needed, or none")
        elif self.rope_scaling and self.position != "rope":
            problems.append("rope_scaling applies only with position 'rope'")
        elif self.rope_scaling and not self.rope_scaling[1] < self.rope_scaling[2]:
            problems.append(f"rope_scaling is {self.rope_scaling}; the second number must be below the third")
        if self.norm_gain and self.norm != "rmsnorm":
            problems.append("norm_gain applies only with norm 'rmsnorm'; LayerNorm always has a gain")
        return problems

    def head_contradictions(self) -> list[str]:
        """List contradictions between the width and the heads."""
        problems = []
        heads, head_dim = self.num_heads, self.head_dim or self.embed_dim // self.num_heads
        if not self.head_dim and self.embed_dim % heads:
            small = [n for n in range(1, math.isqrt(self.embed_dim) + 1) if self.embed_dim % n == 0]
            fitting = {*small, *(self.embed_dim // n for n in small)}
            nearest = sorted(sorted(fitting, key=lambda n: (abs(n - heads), n))[:3])
            problems.append(
                f"num_heads is {heads}, which does not divide embed_dim {self.embed_dim}; "
                f"the nearest that do: {', '.join(map(str, nearest))}"
            )
        if heads % (self.num_kv_heads or heads):
            problems.append(f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads {heads}")
        if self.position == "rope" and head_dim % 2:
            problems.append(f"head_dim is {head_dim}; position 'rope' needs an even number")
        return problems

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value matrices."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_ff_dim(embed_dim: int, activation: str) -> int:
    """Return 4 * embed_dim or, for gated activations, 8/3 * embed_dim rounded to a multiple of 64: with three matrices
    instead of two, this gives about as many parameters (Shazeer 2020, section 3.1)."""
    return max(64, 64 * round(embed_dim * 8 / 3 / 64)) if activation in GATED else 4 * embed_dim
