"""The activations of the feed-forward. A new one is an entry here; torch is not needed to read their names."""

from __future__ import annotations

from typing import Any


def relu_squared(F: Any, x: Any) -> Any:
    """ReLU squared (So et al. 2021, "Primer"). A product, not `square`: CUDA's autocast computes powers in fp32, which
    takes twice the memory."""
    x = F.relu(x)
    return x * x


def swiglu(F: Any, x: Any) -> Any:
    """(..., 2F) -> (..., F): the second half, gated by the first (Shazeer 2020, "GLU variants improve Transformer")."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


# Name -> its function of x. F is torch.nn.functional, which model.py hands in.
ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda F, x: F.gelu(x),  # Hendrycks & Gimpel 2016
    "gelu_tanh": lambda F, x: F.gelu(x, approximate="tanh"),  # its approximation by tanh, section 2; GPT-2's own
    "relu2": relu_squared,
    "swiglu": swiglu,
}
GATED = ("swiglu",)  # what enters them is twice as wide as what leaves
