"""Make a checkpoint of a Hugging Face folder, to generate with or to train further: GPT-2, Llama, Qwen2 or Qwen3.

    python tools/import_hf.py openai-community/gpt2 runs/gpt2_pretrained
    python tools/import_hf.py HuggingFaceTB/SmolLM2-135M runs/smollm2

The checkpoint appears only after it computes the same as transformers does with the folder.
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
    """Make a checkpoint of a Hugging Face folder: GPT-2, SmolLM2, Llama, Qwen2, Qwen3."""

    folder: NonEmptyText = option(..., "", "folder, or a name on the hub: openai-community/gpt2", word="FOLDER")
    out: NonEmptyText = option(..., "", "checkpoint folder to write; empty, or not there yet", word="OUT")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/import_hf.py").settings(argv, Options)
    from exchange.hf_import import import_model  # here, because --help must not import torch

    out = Path(options.out)
    imported = import_model(options.folder, out)
    print(
        f"{options.folder} is now {out}. Its logits differ from those of transformers by {imported.difference}, "
        "its token ids not at all."
    )
    if imported.padding:
        print(f"The vocabulary was padded: {imported.padding:,} rows that no text needs are left out.")
    if not imported.ends:
        print("Its tokenizer has no token that is known here to end a text: generation goes on to the length you give.")
    if imported.template:
        print("It answers questions: generation uses its chat template.")
    elif imported.has_template:
        print("Its chat template is left out: it is neither ours nor ChatML. Generation continues prompts as text.")
    print(f'\nGenerate: python generate.py --checkpoint {out} --prompt "..."')
    print(
        f"Train it further: python tokenize_local_bpe.py --input my_text.txt --tokenizer_file {out}/tokenizer.json, "
        f"then python train_colab_mmap.py --init_from {out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
