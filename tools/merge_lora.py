"""Make an ordinary checkpoint of LoRA adapters and their base, which does not need that base any more.

    python tools/merge_lora.py runs/lora pretrained/merged

Generating, scoring and exporting merge by themselves; this is for training further, and for giving away one folder.
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
    from common.checkpoint import Checkpoint
    from exchange.hf_folder import Difference
    from model import TransformerLanguageModel


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    out = Path(arguments.out)
    difference = merge_checkpoint(arguments.checkpoint, out)
    print(
        f"{arguments.checkpoint} and its base are now {out}. Its logits differ from those of the adapted model by "
        f"{difference}."
    )
    print(f'\nGenerate: python generate.py --checkpoint {out} --prompt "..."')
    print(f"Train it further: python train_colab_mmap.py --init_from {out}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/merge_lora.py",
        usage="%(prog)s CHECKPOINT OUT",
        description="Make an ordinary checkpoint of LoRA adapters and their base.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", metavar="OUT", help="checkpoint folder to write; empty, or not there yet")
    add_debug(parser)
    return parser.parse_args(argv)


def merge_checkpoint(path: str | Path, out: Path) -> Difference:
    """Write the checkpoint folder `out`: weights, tokenizer, config and their hashes, no state of a training. Returns
    the largest difference of the logits.

    Raises CheckpointError for a checkpoint without adapters and for a base that is not there, ConfigError if something
    lies at `out`.
    """
    from common.checkpoint import WEIGHTS_FILES, open_checkpoint, stored_config, stored_weights, write_files
    from common.files import json_bytes
    from common.tensors import safetensors_pieces
    from exchange.hf_folder import largest_difference, load_in_fp32, new_folder, require_new

    require_new(out)
    checkpoint = open_checkpoint(path)
    adapted = load_adapted(checkpoint)
    merged, tokenizer = load_in_fp32(checkpoint)
    difference = largest_difference(merged, adapted, tokenizer, "the adapted model")
    config = stored_config(merged, tokenizer.kind, checkpoint.chat_template())
    contents = (
        safetensors_pieces(stored_weights(merged)),
        json_bytes(config),
        checkpoint.tokenizer_path().read_bytes(),
    )
    with new_folder(out) as folder:
        write_files(folder, dict(zip(WEIGHTS_FILES, contents, strict=True)))
    return difference


def load_adapted(checkpoint: Checkpoint) -> TransformerLanguageModel:
    """The base with its adapters beside it, as they were trained, in fp32. Raises CheckpointError if it has none."""
    from common.checkpoint import Checkpoint
    from common.lora import add_adapters, find_base
    from model import TransformerLanguageModel

    lora = checkpoint.lora()
    if lora is None:
        raise CheckpointError(f"{checkpoint.path} holds no adapters; there is nothing to merge.")
    model = TransformerLanguageModel(checkpoint.trusted_config())
    Checkpoint(find_base(lora, checkpoint.path)).load_weights(model)
    add_adapters(model, lora)
    checkpoint.load_weights(model)
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
