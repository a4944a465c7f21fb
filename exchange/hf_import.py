"""A Hugging Face folder as a checkpoint, compared with what transformers computes."""

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
from exchange.comparison import Difference, largest_difference
from exchange.folders import require_fitting, require_new, write_weights_checkpoint
from exchange.hf_common import ConversionError, Tensors
from exchange.hf_folder import build_theirs, load_their_tokenizer, require_transformers
from exchange.hf_model import from_hf, their_names
from exchange.hf_tokenizer import chat_template_of, import_tokenizer, require_same_ids
from model import TransformerLanguageModel
from model_config import ModelConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The files to download from a repository on the hub. Others, like other frameworks' weights, are not needed.
HUB_FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
]  # fmt: skip
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class Imported(NamedTuple):
    """What an import did."""

    difference: Difference  # of the logits
    padding: int  # rows of a padded vocabulary that it left out
    ends: list[str]  # names of the tokens at which generation stops
    template: Template | None  # the chat template that it kept
    has_template: bool  # whether the folder has one


def import_model(name: str, out: Path) -> Imported:
    """Write the checkpoint folder `out` from the Hugging Face folder `name`, or from the model of that name on the hub.

    The checkpoint has no training state: a new training can start from it. Raises CheckpointError for a folder that is
    not a model or that we cannot express, DataError or TokenizerError for its tokenizer, ConfigError if something is
    at `out` or transformers is missing.
    """
    require_transformers()
    require_new(out)
    folder = Path(name)
    if not folder.exists() and HUB_NAME.fullmatch(name):
        folder = download(name)
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}. Name a Hugging Face model folder.")
    if not (folder / "config.json").exists():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise CheckpointError(f"{folder} is not a Hugging Face model: it has no config.json. There: {there}.")
    hf_config = read_json(folder / "config.json", CheckpointError)
    try:
        tensors = read_tensors(folder)
        config, state = from_hf(hf_config, tensors)
    except ConversionError as problem:
        raise CheckpointError(f"{folder} cannot be imported: {problem}.") from None
    tokenizer, tokenizer_file = import_tokenizer(folder)
    require_fitting(tokenizer, config, folder)
    padding = config.vocab_size - tokenizer.vocab_size
    config, state = without_padding(config, state, tokenizer.vocab_size)
    model = TransformerLanguageModel(config).eval()
    try:
        model.load_weights(state)
    except ValueError as problem:
        raise CheckpointError(f"The weights of {folder} cannot be loaded: {problem}.") from None
    del state
    try:
        theirs = build_theirs(hf_config, their_names(hf_config["model_type"], tensors), config.tie_embeddings)
    except Exception as problem:  # several libraries check its config, each with its own errors
        raise CheckpointError(f"transformers cannot build the model of {folder}: {str(problem).strip():.500}") from None
    try:
        their_tokenizer = load_their_tokenizer(folder, theirs.config)
    except Exception as problem:  # `tokenizers` raises a bare one
        raise DataError(f"transformers cannot open the tokenizer of {folder}: {str(problem).strip():.500}") from None
    require_same_ids(tokenizer, their_tokenizer, split_special_tokens=True)
    difference = largest_difference(model, theirs, tokenizer)
    template = chat_template_of(folder, tokenizer, their_tokenizer)
    write_weights_checkpoint(out, model, tokenizer, tokenizer_file, template)
    ends = [tokenizer.decode([i]) for i in sorted(tokenizer.end_ids)]
    return Imported(difference, padding, ends, template, their_tokenizer.chat_template is not None)


def download(name: str) -> Path:
    """The folder of a model on the hub, in huggingface_hub's own cache. Raises CheckpointError in one sentence."""
    from huggingface_hub import snapshot_download  # of requirements-extras.txt

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        if not any((folder / file).exists() for file in (WEIGHTS[0], f"{WEIGHTS[0]}.index.json")):
            folder = Path(snapshot_download(name, allow_patterns=[*HUB_FILES, "pytorch_model*"]))
        return folder
    except Exception as problem:  # of whichever HTTP client this version of huggingface_hub uses
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise CheckpointError(
            f"There is no folder {name}, and it could not be downloaded from the hub: {reason:.300}"
        ) from None


def without_padding(config: ModelConfig, state: Tensors, vocab_size: int) -> tuple[ModelConfig, Tensors]:
    """The model without the ids from `vocab_size` on, which its tokenizer lacks. Others pad a vocabulary (50,257 to
    50,304, say) for faster matrix products; here a training takes the size from the tokenizer of its data."""
    padded = {"token_embedding.weight", "head.weight"}
    state = {name: tensor[:vocab_size] if name in padded else tensor for name, tensor in state.items()}
    return dataclasses.replace(config, vocab_size=vocab_size), state


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a folder, from one file or from the files that its index names. Raises CheckpointError."""
    for name in WEIGHTS:
        files = [folder / name] if (folder / name).exists() else parts(folder, f"{name}.index.json")
        tensors: Tensors = {}
        for path in files:
            try:
                require_regular(path, CheckpointError)
                tensors |= load_file(path, device="cpu") if name == WEIGHTS[0] else load_pickled(path)
            except (ValueError, safetensors.SafetensorError, FileNotFoundError) as problem:
                raise CheckpointError(f"{path} cannot be read: {problem}.") from None
        if files:
            return tensors
    raise CheckpointError(f"{folder} has no weights: neither {' nor '.join(WEIGHTS)}.")


def parts(folder: Path, index: str) -> list[Path]:
    """The files that an index names; none without an index. Raises CheckpointError for a name outside the folder."""
    if not (folder / index).exists():
        return []
    listed = read_json(folder / index, CheckpointError).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{folder / index} does not name files beside it.")
    return [folder / name for name in sorted(set(names))]
