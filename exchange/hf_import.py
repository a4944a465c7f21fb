"""Import a Hugging Face folder as a checkpoint, and compare its logits with transformers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import safetensors
from safetensors.torch import load_file

from common.chat import Template
from common.errors import CheckpointError, DataError
from common.files import read_json, require_regular
from common.tensors import load_pickled
from exchange.folders import require_matching_tokenizer, require_new, write_weights_checkpoint
from exchange.hf_common import ConversionError, Tensors
from exchange.hf_folder import build_hf_model, load_hf_tokenizer, require_transformers
from exchange.hf_model import complete_names, from_hf
from exchange.hf_tokenizer import import_tokenizer, recognize_chat_template, require_same_ids
from exchange.logits import LogitDifference, require_same_logits
from model import TransformerLanguageModel
from model_config import ModelConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Files to download from the hub; other frameworks' weights are skipped.
HUB_FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
]  # fmt: skip
HF_WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")


class ImportResult(NamedTuple):
    """The result of an import."""

    difference: LogitDifference
    padding_rows: int  # rows of a padded vocabulary that were removed
    end_tokens: list[str]  # tokens that stop generation
    template: Template | None  # the chat template, if it is one that we support
    has_template: bool  # the folder has a chat template


def import_model(name: str, out: Path) -> ImportResult:
    """Import the Hugging Face folder `name`, or the model of that name on the hub, as the checkpoint folder `out`.

    The checkpoint has no training state; new runs can start from it. Raises CheckpointError if the folder is no model
    or one that we cannot express, DataError or TokenizerError for its tokenizer, ConfigError if `out` exists or
    transformers is missing.
    """
    require_transformers()
    require_new(out)
    folder = Path(name)
    if not folder.exists() and HUB_NAME.fullmatch(name):
        folder = _download_model(name)
    if not folder.is_dir():
        raise CheckpointError(f"No such folder: {folder}. Name a Hugging Face model folder.")
    if not (folder / "config.json").exists():
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise CheckpointError(f"{folder} is not a Hugging Face model: it has no config.json. It contains {names}.")
    hf_config = read_json(folder / "config.json", CheckpointError)
    try:
        tensors = _read_tensors(folder)
        config, state = from_hf(hf_config, tensors)
    except ConversionError as problem:
        raise CheckpointError(f"{folder} cannot be imported: {problem}.") from None
    tokenizer, tokenizer_file = import_tokenizer(folder)
    require_matching_tokenizer(tokenizer, config, folder)
    padding = config.vocab_size - tokenizer.vocab_size
    config, state = _remove_padding(config, state, tokenizer.vocab_size)
    model = TransformerLanguageModel(config).eval()
    try:
        model.load_weights(state)
    except ValueError as problem:
        raise CheckpointError(f"The weights of {folder} cannot be loaded: {problem}.") from None
    del state
    try:
        hf_model = build_hf_model(hf_config, complete_names(hf_config["model_type"], tensors), config.tie_embeddings)
    except Exception as problem:  # several libraries check the config, each with its own errors
        raise CheckpointError(f"transformers cannot build the model of {folder}: {str(problem).strip():.500}") from None
    try:
        their_tokenizer = load_hf_tokenizer(folder, hf_model.config)
    except Exception as problem:  # `tokenizers` raises a plain Exception
        raise DataError(f"transformers cannot open the tokenizer of {folder}: {str(problem).strip():.500}") from None
    require_same_ids(tokenizer, their_tokenizer, split_special_tokens=True)
    difference = require_same_logits(model, hf_model, tokenizer)
    template = recognize_chat_template(folder, tokenizer, their_tokenizer)
    write_weights_checkpoint(out, model, tokenizer, tokenizer_file, template)
    ends = [tokenizer.decode([i]) for i in sorted(tokenizer.end_ids)]
    return ImportResult(difference, padding, ends, template, their_tokenizer.chat_template is not None)


def _download_model(name: str) -> Path:
    """Download a model from the hub to huggingface_hub's cache and return its folder. Raises CheckpointError."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        if not any((folder / file).exists() for file in (HF_WEIGHTS_FILES[0], f"{HF_WEIGHTS_FILES[0]}.index.json")):
            folder = Path(snapshot_download(name, allow_patterns=[*HUB_FILES, "pytorch_model*"]))
        return folder
    except Exception as problem:  # the HTTP client depends on the version of huggingface_hub
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise CheckpointError(
            f"No such folder: {name}. Downloading it from the hub failed, too: {reason:.300}"
        ) from None


def _remove_padding(config: ModelConfig, state: Tensors, vocab_size: int) -> tuple[ModelConfig, Tensors]:
    """Remove the ids from `vocab_size` on, which the tokenizer lacks.

    Others pad a vocabulary (50,257 to 50,304, say) for faster matrix products; here it has the tokenizer's size.
    """
    padded = {"token_embedding.weight", "head.weight"}
    state = {name: tensor[:vocab_size] if name in padded else tensor for name, tensor in state.items()}
    return dataclasses.replace(config, vocab_size=vocab_size), state


def _read_tensors(folder: Path) -> Tensors:
    """Read all tensors of a folder, from one file or from the shards in its index. Raises CheckpointError."""
    for name in HF_WEIGHTS_FILES:
        files = [folder / name] if (folder / name).exists() else _list_shards(folder, f"{name}.index.json")
        tensors: Tensors = {}
        for path in files:
            try:
                require_regular(path, CheckpointError)
                tensors |= load_file(path, device="cpu") if name == HF_WEIGHTS_FILES[0] else load_pickled(path)
            except (ValueError, safetensors.SafetensorError, FileNotFoundError) as problem:
                raise CheckpointError(f"{path} cannot be read: {problem}.") from None
        if files:
            return tensors
    raise CheckpointError(f"{folder} has no weights: neither {' nor '.join(HF_WEIGHTS_FILES)}.")


def _list_shards(folder: Path, index: str) -> list[Path]:
    """Return the files in an index, or [] without one. Raises CheckpointError for a name outside the folder."""
    if not (folder / index).exists():
        return []
    listed = read_json(folder / index, CheckpointError).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{folder / index} names files outside its folder, or none.")
    return [folder / name for name in sorted(set(names))]
