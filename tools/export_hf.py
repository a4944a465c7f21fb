"""Write a trained model as a folder that Hugging Face `transformers` opens.

    python tools/export_hf.py runs/gpt2_small exported/gpt2_small

The folder is loaded by transformers and compared with the model before it gets its name: the same logits, the same
token ids, or there is no folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import CheckpointError, script
from common.flags import Parser, add_debug

if TYPE_CHECKING:
    from tools.hf_folder import Difference


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    out = Path(arguments.out)
    difference = export(arguments.checkpoint, out)
    print(
        f"{arguments.checkpoint} is now {out}. Read back by transformers, its logits differ by {difference}, "
        "its token ids not at all."
    )
    print(f'\nUse it: AutoModelForCausalLM.from_pretrained("{out}"), AutoTokenizer.from_pretrained("{out}")')
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/export_hf.py",
        usage="%(prog)s CHECKPOINT OUT",
        description="Write a trained model as a folder that Hugging Face transformers opens.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", metavar="OUT", help="folder to write; empty, or not there yet")
    add_debug(parser)
    return parser.parse_args(argv)


def export(path: str | Path, out: Path) -> Difference:
    """Write the checkpoint or run folder at `path` as the folder `out`. Returns the largest difference of the logits.

    Raises CheckpointError for a checkpoint that cannot be trusted or that no class there can express, TokenizerError
    for a tokenizer that is not the model's, ConfigError if something lies at `out` or transformers is missing.
    """
    from common.checkpoint import open_checkpoint, write_verified
    from common.files import json_bytes
    from common.tensors import safetensors_pieces
    from tools.hf_card import model_card
    from tools.hf_folder import (
        largest_difference,
        load_in_fp32,
        load_their_tokenizer,
        load_theirs,
        new_folder,
        require_new,
        require_transformers,
    )
    from tools.hf_form import FormError, hf_kind, to_hf
    from tools.hf_tokenizer import hf_special_ids, hf_tokenizer_config, hf_tokenizer_json, require_same_ids

    require_transformers()
    require_new(out)
    checkpoint = open_checkpoint(path)
    try:
        hf_kind(checkpoint.model_config())  # before the weights are read
    except FormError as problem:
        raise CheckpointError(f"{checkpoint.path} cannot be exported: {problem}.") from None
    model, tokenizer = load_in_fp32(checkpoint)
    config, tensors = to_hf(model.config, model.state_dict())
    special = hf_special_ids(tokenizer)
    contents = {
        "config.json": json_bytes(config | special),
        "generation_config.json": json_bytes(special),
        "tokenizer.json": hf_tokenizer_json(tokenizer),
        "tokenizer_config.json": json_bytes(hf_tokenizer_config(tokenizer, model.config.max_seq_len)),
        "README.md": model_card(checkpoint, model.config, model.num_parameters(), tokenizer, out.name).encode(),
    }
    with new_folder(out) as folder:
        write_verified(folder / "model.safetensors", safetensors_pieces(tensors, metadata={"format": "pt"}))
        for name, content in contents.items():
            write_verified(folder / name, content)
        require_same_ids(tokenizer, load_their_tokenizer(folder))
        return largest_difference(model, load_theirs(folder), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
