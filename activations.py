"""The activations of the feed-forward. A new one is an entry here; torch is not needed to read their names."""

from __future__ import annotations

from typing import Any

# Name -> its function of x. F is torch.nn.functional, which model.py hands in.
ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda F, x: F.gelu(x),  # Hendrycks & Gimpel 2016
    "gelu_tanh": lambda F, x: F.gelu(x, approximate="tanh"),  # its approximation by tanh, section 2; GPT-2's own
    "relu2": lambda F, x: F.relu(x).square(),  # So et al. 2021, "Primer"
}
