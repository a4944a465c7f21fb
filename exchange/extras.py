"""Packages of requirements-extras.txt: other programs' formats need them, training does not."""

from __future__ import annotations

import importlib.util

from common.errors import ConfigError

INSTALL = "pip install -r requirements-extras.txt"


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def require_package(package: str, purpose: str) -> None:
    """Raises ConfigError if the package is not installed. `purpose` is the subject of the sentence."""
    if not is_installed(package):
        raise ConfigError(f"{purpose} needs the package {package}: {INSTALL}")


# Type -> its help.
GGUF_TYPES = {
    "f16": "half precision",
    "f32": "as trained, for exact comparisons",
    "q8_0": "8 bits, half the size of f16",
}
