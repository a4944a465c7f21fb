"""Make a checkpoint of a Hugging Face folder with a GPT-2 or NanoChat model, to generate with or to train further.

    python tools/import_hf.py openai-community/gpt2 runs/gpt2_pretrained

The checkpoint appears only after it computes the same as transformers does with the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import script
from common.flags import Parser, add_debug


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="tools/import_hf.py",
        usage="%(prog)s FOLDER OUT",
        description="Make a checkpoint of a Hugging Face folder with a GPT-2 or NanoChat model.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder, or a name on the hub: openai-community/gpt2")
    parser.add_argument("out", metavar="OUT", help="checkpoint folder to write; empty, or not there yet")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    from exchange.hf_import import import_model  # here, because --help must not import torch

    out = Path(arguments.out)
    imported = import_model(arguments.folder, out)
    print(
        f"{arguments.folder} is now {out}. Its logits differ from those of transformers by {imported.difference}, "
        "its token ids not at all."
    )
    if imported.padding:
        print(f"The vocabulary was padded: {imported.padding:,} rows that no text needs are left out.")
    if imported.lost_template:
        print("Its chat template is left out: it is not the one that tools/export_hf.py writes.")
    print(f'\nGenerate: python generate.py --checkpoint {out} --prompt "..."')
    print(
        f"Train it further: python tokenize_local_bpe.py --input my_text.txt --tokenizer_file {out}/tokenizer.json, "
        f"then python train_colab_mmap.py --init_from {out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
