"""Write a trained model as a folder that Hugging Face `transformers` opens, and as a file for llama.cpp and Ollama.

    python tools/export_hf.py runs/gpt2_small exported/gpt2_small
    python tools/export_hf.py runs/gpt2_small exported/gpt2_small --gguf exported/gpt2_small.gguf --ollama
    python tools/export_hf.py runs/lora exported/lora --base exported/gpt2_small

transformers loads the folder before it gets its name. If the logits or the token ids differ, there is no folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError
from common.flags import Parser, add_debug
from common.script import script
from exchange.extras import GGUF_TYPES


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from exchange import gguf_export  # here, because --help must not import torch
    from exchange.hf_export import export

    checkpoint, out, base = arguments.checkpoint, Path(arguments.out), arguments.base
    if arguments.gguf:  # fail before anything is written
        gguf_export.require_file(checkpoint, Path(arguments.gguf), arguments.ollama)
    difference = export(checkpoint, out, Path(base) if base else None)
    reader = "peft" if base else "transformers"
    print(
        f"{checkpoint} is now {out}. Read back by {reader}, its logits differ by {difference}, its token ids not at "
        "all."
    )
    model = f'AutoModelForCausalLM.from_pretrained("{base or out}")'
    model = f'PeftModel.from_pretrained({model}, "{out}")' if base else model
    print(f'\nUse it: {model}, AutoTokenizer.from_pretrained("{out}")')
    if arguments.gguf:
        gguf_export.export_file(checkpoint, Path(arguments.gguf), arguments.gguf_type or "f16", arguments.ollama)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/export_hf.py",
        usage="%(prog)s CHECKPOINT OUT",
        description="Write a trained model as a folder that Hugging Face transformers opens.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", metavar="OUT", help="folder to write; empty, or not there yet")
    parser.add_argument("--base", metavar="FOLDER", help="for LoRA adapters: the folder their base was exported to")
    parser.add_argument("--gguf", metavar="FILE", help="write a file for llama.cpp and Ollama too")
    types = "; ".join(f"{name}: {about}" for name, about in GGUF_TYPES.items())
    parser.add_argument("--gguf_type", choices=GGUF_TYPES, help=f"with --gguf: of its weights [f16]. {types}")
    parser.add_argument("--ollama", action="store_true", help="with --gguf: write a Modelfile for Ollama beside it")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    if (arguments.gguf_type or arguments.ollama) and not arguments.gguf:
        raise ConfigError("--gguf_type and --ollama are for --gguf FILE.")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
