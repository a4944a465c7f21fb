"""Convert a Hugging Face model to a checkpoint, for generation or further training: GPT-2, Llama, Qwen2, Qwen3.

    python tools/import_hf.py openai-community/gpt2 runs/gpt2_pretrained
    python tools/import_hf.py HuggingFaceTB/SmolLM2-135M runs/smollm2

The checkpoint is written only if it computes the same as transformers.
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
    """Convert a Hugging Face model to a checkpoint: GPT-2, SmolLM2, Llama, Qwen2, Qwen3."""

    folder: NonEmptyText = option(..., "", "folder, or a name on the hub: openai-community/gpt2", word="FOLDER")
    out: NonEmptyText = option(..., "", "checkpoint folder to write; new or empty", word="OUT")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/import_hf.py").settings(argv, Options)
    from exchange.hf_import import import_model  # imported here, because --help should not wait for torch

    out = Path(options.out)
    imported = import_model(options.folder, out)
    print(
        f"Imported {options.folder} to {out}. Its logits differ from those of transformers by {imported.difference}, "
        "and its token ids are the same."
    )
    if imported.padding_rows:
        print(f"Left out {imported.padding_rows:,} rows of padding in the vocabulary.")
    if not imported.end_tokens:
        print("Its tokenizer has no known end-of-text token, so generation continues to the length you give.")
    if imported.template:
        print("It is a chat model: generation uses its chat template.")
    elif imported.has_template:
        print("Its chat template is not supported (only ChatML is), so generation continues prompts as text.")
    print(f'\nTo generate: python generate.py --checkpoint {out} --prompt "..."')
    print(
        f"To train it further: python tokenize_local_bpe.py --input my_text.txt --tokenizer_file {out}/tokenizer.json, "
        f"then python train_colab_mmap.py --init_from {out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
