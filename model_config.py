"""The shape of a model, in plain values that JSON keeps unchanged. Reading one takes no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "swiglu")  # their functions: the table of that name in model.py
GATED = ("swiglu",)  # what enters them is twice as wide as what leaves
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")
EPSILONS = {"layernorm": 1e-5, "rmsnorm": 1e-6}
SIZE_LIMIT = 2**31  # of any one size: token ids are int32
LARGEST = 1e9  # of any other number; larger ones, and softcaps below 1e-6, can only be mistakes
SIZES = ("vocab_size", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "num_layers", "ff_dim", "max_seq_len")
SWITCHES = ("bias", "qkv_bias", "tie_embeddings", "qk_norm", "norm_gain", "embed_norm", "zero_init")


@dataclass(frozen=True)
class ModelConfig:
    """Raises ValueError listing every value that is out of range."""

    vocab_size: int
    embed_dim: int = 768
    num_heads: int = 12
    num_layers: int = 12
    ff_dim: int = None  # type: ignore[assignment]  # None: `default_ff_dim`
    max_seq_len: int = 512
    dropout: float = 0.0
    bias: bool = True
    tie_embeddings: bool = False
    activation: str = "gelu"
    norm: str = "layernorm"
    position: str = "learned"
    qk_norm: bool = False
    logit_softcap: float = 0.0  # 0: off
    embed_norm: bool = False  # normalise what enters the first block
    zero_init: bool = False  # projections into the residual stream, and the head, start at zero
    num_kv_heads: int = None  # type: ignore[assignment]  # heads of keys and values; None: num_heads
    head_dim: int = None  # type: ignore[assignment]  # None: embed_dim / num_heads
    norm_gain: bool = False  # RMSNorm has a learned gain, that of queries and keys too; LayerNorm always has one
    norm_eps: float = None  # type: ignore[assignment]  # None: that of EPSILONS
    rope_base: float = 10_000.0
    rope_scaling: tuple[float, ...] = ()  # Llama 3's: factor, low and high frequency factor, length before
    qkv_bias: bool = None  # type: ignore[assignment]  # biases of queries, keys and values; None: as `bias`

    def __post_init__(self) -> None:
        divides_heads = self.head_dim is None
        self.fill_in()
        problems = [
            f"{name} is {getattr(self, name)!r:.100}; a whole number of at least 1 and below {SIZE_LIMIT:,} is needed"
            for name in SIZES
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) < SIZE_LIMIT
        ]
        problems += [
            f"{name} is {getattr(self, name)!r:.100}; allowed: {', '.join(allowed)}"
            for name, allowed in (("activation", ACTIVATIONS), ("norm", NORMS), ("position", POSITIONS))
            if getattr(self, name) not in allowed
        ]
        problems += [
            f"{name} is {getattr(self, name)!r:.100}; true or false is needed"
            for name in SWITCHES
            if type(getattr(self, name)) is not bool
        ]
        limits = {"dropout": (0, 1), "rope_base": (1, LARGEST), "norm_eps": (0, 1)}
        problems += [
            f"{name} is {getattr(self, name)!r:.100}; allowed: {low} up to, not including, {high:,g}"
            for name, (low, high) in limits.items()
            if not is_number(getattr(self, name)) or not low <= getattr(self, name) < high
        ]
        softcap = self.logit_softcap
        if not is_number(softcap) or not (softcap == 0 or 1e-6 <= softcap <= 1e6):
            problems.append(f"logit_softcap is {softcap!r:.100}; allowed: 0 (off), or 0.000001 to 1,000,000")
        scaling = self.rope_scaling
        numbers = [each for each in scaling if is_number(each) and 0 < each < LARGEST] if type(scaling) is tuple else []
        if scaling != () and len(numbers) != 4:
            problems.append(f"rope_scaling is {scaling!r:.100}; four numbers above 0 are needed, or none")
        if problems:
            raise ValueError("; ".join(problems))
        if problems := self.contradictions(divides_heads):
            raise ValueError("; ".join(problems))

    def fill_in(self) -> None:
        """Give values to the fields that follow others, where these can be used."""
        defaults: dict[str, Any] = {
            "num_kv_heads": self.num_heads,
            "norm_eps": EPSILONS.get(self.norm) if isinstance(self.norm, str) else None,
            "qkv_bias": self.bias,
        }
        if type(self.embed_dim) is int:
            defaults["ff_dim"] = default_ff_dim(self.embed_dim, self.activation)
            if type(self.num_heads) is int and self.num_heads > 0:
                defaults["head_dim"] = max(1, self.embed_dim // self.num_heads)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if isinstance(self.rope_scaling, list):  # as JSON has it
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))

    def contradictions(self, divides_heads: bool) -> list[str]:
        """What is wrong with values that are each in range. `divides_heads`: the heads divide embed_dim among them."""
        problems = []
        heads, head_dim = self.num_heads, self.head_dim
        if divides_heads and self.embed_dim % heads:
            small = [n for n in range(1, math.isqrt(self.embed_dim) + 1) if self.embed_dim % n == 0]
            fitting = {*small, *(self.embed_dim // n for n in small)}
            nearest = sorted(sorted(fitting, key=lambda n: (abs(n - heads), n))[:3])
            problems.append(
                f"num_heads is {heads}, which does not divide embed_dim {self.embed_dim}; "
                f"near it these do: {', '.join(map(str, nearest))}"
            )
        if heads % self.num_kv_heads:
            problems.append(f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads {heads}")
        if self.zero_init and self.tie_embeddings:
            problems.append("zero_init starts the head at zero, which tie_embeddings shares with the token embedding")
        if self.position == "rope" and head_dim % 2:
            problems.append(f"head_dim is {head_dim}; position 'rope' needs an even number")
        if self.rope_scaling and self.position != "rope":
            problems.append("rope_scaling is for position 'rope'")
        if self.rope_scaling and not self.rope_scaling[1] < self.rope_scaling[2]:
            problems.append(f"rope_scaling is {self.rope_scaling}; the second number must be below the third")
        if self.norm_gain and self.norm != "rmsnorm":
            problems.append("norm_gain is for norm 'rmsnorm'; LayerNorm always has a gain")
        return problems

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the matrices of queries, keys and values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> tuple[ModelConfig, list[str]]:
        """Build from a config.json. Returns the config and the names of keys this version does not know.

        Missing keys take their defaults, which are the GPT-2 form. Raises ValueError without a vocab_size.
        """
        if "vocab_size" not in values:
            raise ValueError("vocab_size is missing")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known}), sorted(set(values) - known)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def default_ff_dim(embed_dim: int, activation: str) -> int:
    """Four times the width. Gated feed-forwards have three matrices instead of two: 8/3 of the width, to a multiple of
    64, gives about as many parameters (Shazeer 2020, section 3.1)."""
    return max(64, 64 * round(embed_dim * 8 / 3 / 64)) if activation in GATED else 4 * embed_dim
