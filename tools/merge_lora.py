"""Make an ordinary checkpoint of LoRA adapters and their base. It no longer needs that base.

    python tools/merge_lora.py runs/lora pretrained/merged

Generating, scoring and exporting merge adapters automatically. Use this to train further, or to share one folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.flags import Parser, add_debug
from common.script import script


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="tools/merge_lora.py",
        usage="%(prog)s CHECKPOINT OUT",
        description="Make an ordinary checkpoint of LoRA adapters and their base.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", metavar="OUT", help="checkpoint folder to write; empty, or not there yet")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    from exchange.folders import merge_checkpoint  # here, because --help must not import torch

    out = Path(arguments.out)
    difference = merge_checkpoint(arguments.checkpoint, out)
    print(
        f"{arguments.checkpoint} and its base are now {out}. Its logits differ from those of the adapted model by "
        f"{difference}."
    )
    print(f'\nGenerate: python generate.py --checkpoint {out} --prompt "..."')
    print(f"Train it further: python train_colab_mmap.py --init_from {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
