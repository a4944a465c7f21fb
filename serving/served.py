"""The model that a server answers with, under its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from common.chat import AnyTemplate
from common.checkpoint import open_checkpoint
from common.files import CHECKPOINT_NAME
from generate import load_checkpoint
from model import TransformerLanguageModel
from tokenizer import Tokenizer


class Served(NamedTuple):
    name: str
    model: TransformerLanguageModel
    tokenizer: Tokenizer
    chat: AnyTemplate | None
    created: int  # seconds since 1970
    max_tokens: int  # that a request may ask for

    def card(self) -> dict[str, Any]:
        """OpenAI's description of a model."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "local"}


def load_served(path: str | Path, device: str, max_tokens: int) -> Served:
    """The model of a checkpoint or run folder. Raises what `open_checkpoint` and `load_checkpoint` raise."""
    checkpoint = open_checkpoint(path)
    chat = checkpoint.chat_template()
    model, tokenizer = load_checkpoint(checkpoint, device)
    created = int((checkpoint.path / "config.json").stat().st_mtime)
    return Served(run_folder(checkpoint.path).name or "model", model, tokenizer, chat, created, max_tokens)


def run_folder(checkpoint: Path) -> Path:
    """The run folder that the checkpoint belongs to, or else the checkpoint folder itself."""
    path = checkpoint.resolve()
    if CHECKPOINT_NAME.fullmatch(path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path
