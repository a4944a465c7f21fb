"""Make a checkpoint of a Hugging Face folder with a GPT-2 or NanoChat model, to generate with or to train further.

    python tools/import_hf.py openai-community/gpt2 runs/gpt2_pretrained

What the folder computes by `transformers` and what the checkpoint computes here are compared before it gets its name.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import CheckpointError, DataError, script
from common.flags import Parser, add_debug

if TYPE_CHECKING:
    from exchange.hf_folder import Difference
    from exchange.hf_form import Tensors
    from model import ModelConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What is asked for of a repository on the hub; what else may lie there (other frameworks' weights) is left there.
HUB_FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
]  # fmt: skip
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from common.checkpoint import open_checkpoint
    from exchange.hf_folder import require_new, require_transformers

    out = Path(arguments.out)
    require_transformers()
    require_new(out)
    folder = Path(arguments.folder)
    if not folder.exists() and HUB_NAME.fullmatch(arguments.folder):
        folder = download(arguments.folder)
    difference, padding = import_folder(folder, out)
    print(
        f"{arguments.folder} is now {out}. Its logits differ from those of transformers by {difference}, "
        "its token ids not at all."
    )
    if padding:
        print(f"The vocabulary was padded: {padding:,} rows that no text needs are left out.")
    if (folder / "chat_template.jinja").exists() and open_checkpoint(out).chat_template() is None:
        print("Its chat template is left out: it is not the one that tools/export_hf.py writes.")
    print(f'\nGenerate: python generate.py --checkpoint {out} --prompt "..."')
    print(
        f"Train it further: python tokenize_local_bpe.py --input my_text.txt --tokenizer_file {out}/tokenizer.json, "
        f"then python train_colab_mmap.py --init_from {out}"
    )
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/import_hf.py",
        usage="%(prog)s FOLDER OUT",
        description="Make a checkpoint of a Hugging Face folder with a GPT-2 or NanoChat model.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder, or a name on the hub: openai-community/gpt2")
    parser.add_argument("out", metavar="OUT", help="checkpoint folder to write; empty, or not there yet")
    add_debug(parser)
    return parser.parse_args(argv)


def download(name: str) -> Path:
    """The folder of a model on the hub, in huggingface_hub's own cache. Raises CheckpointError in one sentence."""
    from huggingface_hub import snapshot_download

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


def import_folder(folder: Path, out: Path) -> tuple[Difference, int]:
    """Write a checkpoint folder `out` from a Hugging Face folder. Returns the largest difference of the logits, and how
    many rows of a padded vocabulary were left out.

    It holds weights, a tokenizer, a config and their hashes, and no state of a training: a new one starts from it.
    Raises CheckpointError for a folder that is no model or one that we cannot express, DataError or TokenizerError for
    its tokenizer, ConfigError if something lies at `out`.
    """
    from common.checkpoint import WEIGHTS_FILES, stored_config, stored_weights, write_files
    from common.files import json_bytes, read_json
    from common.tensors import safetensors_pieces
    from exchange.hf_folder import (
        build_theirs,
        largest_difference,
        load_their_tokenizer,
        new_folder,
        require_fitting,
        require_new,
    )
    from exchange.hf_form import FormError, from_hf, their_names
    from exchange.hf_tokenizer import chat_template_of, import_tokenizer, require_same_ids
    from model import TransformerLanguageModel

    require_new(out)
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}. Name one with a model of Hugging Face's form.")
    if not (folder / "config.json").exists():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise CheckpointError(f"{folder} is not a Hugging Face model: it has no config.json. There: {there}.")
    hf_config = read_json(folder / "config.json", CheckpointError)
    try:
        tensors = read_tensors(folder)
        config, state = from_hf(hf_config, tensors)
    except FormError as problem:
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
    except Exception as problem:  # its configs are checked by several libraries, with errors of their own
        raise CheckpointError(f"transformers cannot build the model of {folder}: {str(problem).strip():.500}") from None
    try:
        their_tokenizer = load_their_tokenizer(folder, theirs.config)
    except Exception as problem:  # `tokenizers` raises a bare one
        raise DataError(f"transformers cannot open the tokenizer of {folder}: {str(problem).strip():.500}") from None
    require_same_ids(tokenizer, their_tokenizer, split_special_tokens=True)
    difference = largest_difference(model, theirs, tokenizer)
    pieces = safetensors_pieces(stored_weights(model))
    with new_folder(out) as temporary:
        config_file = json_bytes(stored_config(model, tokenizer.kind, chat_template_of(folder, tokenizer)))
        contents = (pieces, config_file, tokenizer_file)
        write_files(temporary, dict(zip(WEIGHTS_FILES, contents, strict=True)))
    return difference, padding


def without_padding(config: ModelConfig, state: Tensors, vocab_size: int) -> tuple[ModelConfig, Tensors]:
    """The model without the ids from `vocab_size` on, which its tokenizer lacks (50,304 for 50,257, say): made
    for the speed of a matrix product, and training takes the size of a model from the tokenizer of its data."""
    padded = {"token_embedding.weight", "head.weight"}
    state = {name: tensor[:vocab_size] if name in padded else tensor for name, tensor in state.items()}
    return dataclasses.replace(config, vocab_size=vocab_size), state


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a folder, from one file or the several that its index names. Raises CheckpointError."""
    import safetensors
    from safetensors.torch import load_file

    from common.tensors import load_tensors, require_own_bytes

    for name in WEIGHTS:
        files = [folder / name] if (folder / name).exists() else parts(folder, f"{name}.index.json")
        tensors: Tensors = {}
        for path in files:
            try:
                if name == WEIGHTS[0]:
                    tensors |= load_file(path, device="cpu")
                else:
                    tensors |= require_own_bytes(load_tensors(path))
            except (ValueError, safetensors.SafetensorError, FileNotFoundError) as problem:
                raise CheckpointError(f"{path} cannot be read: {problem}.") from None
        if files:
            return tensors
    raise CheckpointError(f"{folder} has no weights: neither {' nor '.join(WEIGHTS)}.")


def parts(folder: Path, index: str) -> list[Path]:
    """The files that an index names; none without an index. Raises CheckpointError for a name that leads elsewhere."""
    from common.files import read_json

    if not (folder / index).exists():
        return []
    listed = read_json(folder / index, CheckpointError).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{folder / index} does not name files beside it.")
    return [folder / name for name in sorted(set(names))]


if __name__ == "__main__":
    sys.exit(main())
