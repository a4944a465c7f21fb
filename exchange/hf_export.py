"""Export a checkpoint as a Hugging Face folder, and check it with transformers."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint import open_checkpoint
from common.errors import CheckpointError
from common.files import json_bytes
from exchange.folders import load_in_fp32, require_new
from exchange.hf_card import build_model_card
from exchange.hf_common import ConversionError
from exchange.hf_folder import load_hf_model, new_hf_folder, require_transformers
from exchange.hf_model import choose_hf_model_type, extend_vocabulary, to_hf
from exchange.hf_tokenizer import build_generation_config, hf_special_ids, hf_vocab_size
from exchange.logits import LogitDifference, find_least_likely_id, require_same_logits


def export(path: str | Path, out: Path) -> LogitDifference:
    """Write a checkpoint, with adapters merged into their base, as the Hugging Face folder `out`.

    Returns the logits' largest difference. Raises CheckpointError if the checkpoint is damaged or no class of
    transformers can express it, TokenizerError if transformers reads other ids, ConfigError if `out` exists or
    transformers is missing.
    """
    require_transformers()
    require_new(out)
    checkpoint = open_checkpoint(path)
    try:
        choose_hf_model_type(checkpoint.model_config())  # checked before the weights are read
    except ConversionError as problem:
        raise CheckpointError(f"{checkpoint.path} cannot be exported: {problem}.") from None
    model, tokenizer = load_in_fp32(checkpoint)
    shape, state = model.config, model.state_dict()
    if (vocab_size := hf_vocab_size(tokenizer)) > shape.vocab_size:
        shape, state = extend_vocabulary(shape, state, vocab_size, source_id=find_least_likely_id(model, tokenizer))
    config, tensors = to_hf(shape, state)
    template = checkpoint.chat_template()
    described = {
        "config.json": json_bytes(config | hf_special_ids(tokenizer, template)),
        "generation_config.json": json_bytes(build_generation_config(tokenizer, shape, template)),
        "README.md": build_model_card(checkpoint, model, tokenizer, out.name).encode(),
    }
    with new_hf_folder(out, tensors, described, tokenizer, shape.max_seq_len, template) as folder:
        return require_same_logits(model, load_hf_model(folder), tokenizer)
