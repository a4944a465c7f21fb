"""LoRA adapters and their base as one ordinary checkpoint, which does not need that base any more."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import CheckpointError
from common.lora import add_adapters, find_base
from exchange.comparison import Difference, largest_difference
from exchange.folders import load_in_fp32, require_new, write_weights_checkpoint
from model import TransformerLanguageModel


def merge_checkpoint(path: str | Path, out: Path) -> Difference:
    """Write the checkpoint folder `out`, without a training state. Returns the largest difference of the logits.

    Raises CheckpointError for a checkpoint without adapters or a missing base, ConfigError if something is at `out`.
    """
    require_new(out)
    checkpoint = open_checkpoint(path)
    adapted = load_adapted(checkpoint)
    merged, tokenizer = load_in_fp32(checkpoint)
    difference = largest_difference(merged, adapted, tokenizer, "the adapted model")
    tokenizer_file = checkpoint.tokenizer_path().read_bytes()
    write_weights_checkpoint(out, merged, tokenizer, tokenizer_file, checkpoint.chat_template())
    return difference


def load_adapted(checkpoint: Checkpoint) -> TransformerLanguageModel:
    """The base with its adapters as separate modules, as in training, in fp32. Raises CheckpointError if there are
    none."""
    lora = checkpoint.lora()
    if lora is None:
        raise CheckpointError(f"{checkpoint.path} holds no adapters; there is nothing to merge.")
    model = TransformerLanguageModel(checkpoint.trusted_config())
    Checkpoint(find_base(lora, checkpoint.path)).load_weights(model)
    add_adapters(model, lora)
    checkpoint.load_weights(model)
    return model.eval()
