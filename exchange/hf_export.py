"""A checkpoint as a folder that Hugging Face transformers opens, checked by transformers itself."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint import open_checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import json_bytes
from exchange.comparison import Difference, largest_difference, least_likely
from exchange.folders import load_in_fp32, require_new
from exchange.hf_adapter import export_adapters
from exchange.hf_card import model_card
from exchange.hf_common import ConversionError
from exchange.hf_folder import load_theirs, require_transformers, written_folder
from exchange.hf_model import hf_kind, to_hf, with_rows
from exchange.hf_tokenizer import hf_generation_config, hf_special_ids, hf_vocab_size


def export(path: str | Path, out: Path, base: Path | None = None) -> Difference:
    """Write the checkpoint or run folder at `path` as the folder `out`; adapters, for the exported model in the folder
    `base`. Returns the largest difference of the logits.

    Raises CheckpointError for a checkpoint that is damaged or that no class of transformers can express, TokenizerError
    for the tokenizer of another model, ConfigError if something is at `out`, transformers is missing, or the checkpoint
    does not fit `base`.
    """
    require_transformers()
    require_new(out)
    checkpoint = open_checkpoint(path)
    try:
        hf_kind(checkpoint.model_config())  # before the weights are read
    except ConversionError as problem:
        raise CheckpointError(f"{checkpoint.path} cannot be exported: {problem}.") from None
    if (lora := checkpoint.lora()) is not None:
        return export_adapters(checkpoint, lora, out, base)
    if base is not None:
        raise ConfigError(f"--base is for adapters, and {checkpoint.path} holds a whole model; leave it out.")
    model, tokenizer = load_in_fp32(checkpoint)
    shape, state = model.config, model.state_dict()
    if (vocab_size := hf_vocab_size(tokenizer)) > shape.vocab_size:
        shape, state = with_rows(shape, state, vocab_size, twin=least_likely(model, tokenizer))
    config, tensors = to_hf(shape, state)
    template = checkpoint.chat_template()
    described = {
        "config.json": json_bytes(config | hf_special_ids(tokenizer, template)),
        "generation_config.json": json_bytes(hf_generation_config(tokenizer, shape, template)),
        "README.md": model_card(checkpoint, model, tokenizer, out.name).encode(),
    }
    weights = "model.safetensors", tensors
    with written_folder(out, weights, described, tokenizer, shape.max_seq_len, template) as folder:
        return largest_difference(model, load_theirs(folder), tokenizer)
