"""Folders that are whole or absent, and the checkpoint folders read from and written to them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.chat import Template
from common.checkpoint import WEIGHTS_FILES, Checkpoint, open_checkpoint, stored_config, stored_weights, write_files
from common.errors import CheckpointError, ConfigError, DataError
from common.files import json_bytes, sync_directory
from common.lora import add_adapters, find_base
from common.tensors import to_device
from exchange.comparison import Difference, largest_difference
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer, load_tokenizer


def require_new(out: Path) -> None:
    """Raises ConfigError if `out` is a file or a folder with content."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is already there. Name a folder that is empty or not there yet.")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into. It gets the name `out` when the body ends; if the body raises, it is
    deleted.

    Raises ConfigError if something is at `out`, CheckpointError if it cannot be written (a full disk).
    """
    require_new(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_directory(temporary)
        if out.exists():
            out.rmdir()  # it is empty; Windows does not replace a folder
        os.replace(temporary, out)
    except OSError as problem:
        raise CheckpointError(
            f"{out} could not be written: {problem.strerror or problem}. Nothing is left of it; fix that, or name a "
            "folder elsewhere."
        ) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(out.parent)


def write_weights_checkpoint(
    out: Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    tokenizer_file: bytes,
    template: Template | None,
) -> None:
    """Write the checkpoint folder `out`: weights, config, tokenizer and their hashes, but no training state.

    Raises what `new_folder` raises.
    """
    weights = to_device(stored_weights(model), copy=False)
    config = json_bytes(stored_config(model, tokenizer.kind, template))
    with new_folder(out) as folder:
        write_files(
            folder,
            dict(zip(WEIGHTS_FILES, (weights, config, tokenizer_file), strict=True)),
        )


def load_in_fp32(checkpoint: Checkpoint) -> tuple[TransformerLanguageModel, Tokenizer]:
    """The model in fp32 on the CPU, whatever device generation would choose. Raises CheckpointError or DataError."""
    config = checkpoint.trusted_config()
    path = checkpoint.tokenizer_path()
    tokenizer = load_tokenizer(path)
    require_fitting(tokenizer, config, path)
    model = TransformerLanguageModel(config)
    checkpoint.load_weights(model)
    return model.eval(), tokenizer


def require_fitting(tokenizer: Tokenizer, config: ModelConfig, source: Path) -> None:
    """Raises DataError if the tokenizer has ids that the model lacks."""
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"The tokenizer of {source} has {tokenizer.vocab_size:,} ids and the model {config.vocab_size:,}: it is "
            "the tokenizer of another model."
        )


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
