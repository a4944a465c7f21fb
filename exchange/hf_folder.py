"""Write Hugging Face folders, open them with transformers, and compare tokens."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.chat import Template
from common.checkpoint import write_file
from common.errors import ConfigError, require_packages
from common.files import json_bytes
from exchange.folders import new_folder
from exchange.hf_common import Tensors
from exchange.hf_model import CONVERSIONS
from exchange.hf_tokenizer import (
    build_chat_jinja,
    hf_tokenizer_config,
    hf_tokenizer_json,
    require_same_conversation,
    require_same_ids,
)
from tokenizer import Tokenizer


def require_transformers() -> None:
    """Raise ConfigError if transformers is missing or too old. Turns off its progress bars and warnings."""
    require_packages("transformers")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ConfigError(
            f"transformers {transformers.__version__} is too old; 5.0 or later is needed: "
            "pip install -r requirements-extras.txt"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def new_hf_folder(
    out: Path,
    tensors: Tensors,
    described: dict[str, bytes],
    tokenizer: Tokenizer,
    max_seq_len: int,
    template: Template | None,
) -> Iterator[Path]:
    """Write the weights, the `described` files and the tokenizer, and yield the folder.

    It is renamed to `out` when the body, which checks the model, ends. Raises what `new_folder` and
    `require_same_tokens` raise.
    """
    files = described | {
        "tokenizer.json": hf_tokenizer_json(tokenizer),
        "tokenizer_config.json": json_bytes(hf_tokenizer_config(tokenizer, max_seq_len, template)),
    }
    if template:
        files["chat_template.jinja"] = build_chat_jinja(template, tokenizer).encode()
    with new_folder(out) as folder:
        write_file(folder / "model.safetensors", tensors)
        for name, content in files.items():
            write_file(folder / name, content)
        require_same_tokens(folder, tokenizer, template)
        yield folder


def load_hf_model(folder: Path) -> Any:
    """Load a folder with transformers in fp32. Downloads nothing and runs no code from the folder."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    return model.eval()


def load_hf_tokenizer(folder: Path, config: Any = None) -> Any:
    """Load a folder's tokenizer with transformers. Give the `config` (of transformers) if another program wrote it.

    Then tokenizer.json is read directly: AutoTokenizer of transformers 5 replaces SmolLM2's pre-tokenizer by GPT-2's,
    because of the class named in its folder (transformers issue 45920).
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if config is not None and (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    options = {} if config is None else {"config": config}
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


def require_same_tokens(folder: Path, tokenizer: Tokenizer, template: Template | None) -> None:
    """Raise TokenizerError if an exported folder's tokenizer or chat template gives other ids in transformers."""
    hf_tokenizer = load_hf_tokenizer(folder)
    splitting = {"split_special_tokens": True} if template else {}
    require_same_ids(tokenizer, hf_tokenizer, add_special_tokens=True, **splitting)
    if template:
        require_same_conversation(template, tokenizer, hf_tokenizer)


def build_hf_model(hf_config: dict[str, Any], tensors: Tensors, tied: bool) -> Any:
    """Build the transformers model of a Hugging Face config and its tensors, in fp32.

    Only keys that the config's class declares are passed on. Others (labels, a quantization, an adapter) could take any
    amount of memory, and `from_hf` does not read them.
    """
    import transformers

    model_class = getattr(transformers, CONVERSIONS[hf_config["model_type"]].model_class)
    config_class = model_class.config_class
    # Before transformers 5.4, config classes declare their keys in __init__.
    declared = inspect.get_annotations(config_class) or inspect.signature(config_class).parameters
    known = {key: value for key, value in hf_config.items() if key in declared}
    model: Any = model_class(config_class(**{**known, "tie_word_embeddings": tied}))
    missing, unknown = model.load_state_dict(tensors, strict=False, assign=True)  # no second copy in memory
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    return model.float().eval()
