"""The table of file formats beside the Hugging Face folder: flags of tools/export_hf.py.

A new format is a line in FORMATS and a module exchange/NAME_export.py with the two functions of `Format`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

# Flag -> its help. Reading this imports no torch.
FORMATS = {
    "gguf": "write a file for llama.cpp and Ollama too (GPT-2's form only)",
}


class Format(Protocol):
    """What the module of a format offers. `path` is a checkpoint or run folder."""

    def require_file(self, path: str | Path, file: Path) -> None:
        """Raises ConfigError if the model cannot be written in this format, or if `file` exists."""

    def export_file(self, path: str | Path, file: Path) -> None:
        """Write `file`, and print what to do with it."""


def load_format(name: str) -> Format:
    return cast(Format, importlib.import_module(f"exchange.{name}_export"))
