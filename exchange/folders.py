"""Write folders all or nothing; read and write checkpoints in fp32."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.chat import Template
from common.checkpoint import Checkpoint, build_stored_config, build_weights_files, write_files
from common.errors import CheckpointError, ConfigError, DataError
from common.files import json_bytes, rename, sync_directory
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer, load_tokenizer


def require_new(out: Path) -> None:
    """Raise ConfigError if `out` is a file or a folder with content."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists. Name a new or an empty folder.")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`. It is renamed to `out` when the body ends, and deleted if the body raises.

    Raises ConfigError if `out` exists, CheckpointError if it cannot be written (a full disk).
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
        rename(temporary, out)
    except OSError as problem:
        raise CheckpointError(
            f"{out} could not be written ({problem.strerror or problem}), and the incomplete folder was deleted. Free "
            "disk space, check the permissions, or name another folder."
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
    """Write a checkpoint folder with weights, config, tokenizer and their hashes, but no training state.

    Raises what `new_folder` raises.
    """
    config = json_bytes(build_stored_config(model, tokenizer.kind, template))
    with new_folder(out) as folder:
        write_files(folder, build_weights_files(model) | {"config.json": config, "tokenizer.json": tokenizer_file})


def load_in_fp32(checkpoint: Checkpoint) -> tuple[TransformerLanguageModel, Tokenizer]:
    """Load the model in fp32 on the CPU, and its tokenizer. Raises CheckpointError or DataError."""
    config = checkpoint.trusted_config()
    path = checkpoint.tokenizer_path()
    tokenizer = load_tokenizer(path)
    require_matching_tokenizer(tokenizer, config, path)
    model = TransformerLanguageModel(config)
    checkpoint.load_weights(model)
    return model.eval(), tokenizer


def require_matching_tokenizer(tokenizer: Tokenizer, config: ModelConfig, source: Path) -> None:
    """Raise DataError if the tokenizer has ids that the model lacks."""
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"The tokenizer of {source} has {tokenizer.vocab_size:,} ids, the model {config.vocab_size:,}: they do not "
            "belong together."
        )
