"""Merge LoRA adapters and their base into an ordinary checkpoint, which no longer needs the base.

    python tools/merge_lora.py runs/lora pretrained/merged

Generation, scoring and export merge adapters automatically. Use this to train further, or to share one folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option


@dataclass(frozen=True, config=STRICT)
class Options:
    """Merge LoRA adapters and their base into an ordinary checkpoint."""

    checkpoint: NonEmptyText = option(..., "", "checkpoint folder, or run folder for its newest", word="CHECKPOINT")
    out: NonEmptyText = option(..., "", "checkpoint folder to write; new or empty", word="OUT")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/merge_lora.py").settings(argv, Options)
    from exchange.folders import merge_checkpoint  # imported here, because --help should not wait for torch

    out = Path(options.out)
    difference = merge_checkpoint(options.checkpoint, out)
    print(
        f"Merged {options.checkpoint} and its base into {out}. Its logits differ from those of the adapted model by "
        f"{difference}."
    )
    print(f'\nTo generate: python generate.py --checkpoint {out} --prompt "..."')
    print(f"To train it further: python train_colab_mmap.py --init_from {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
