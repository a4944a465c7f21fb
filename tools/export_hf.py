"""Write a trained model as a folder that Hugging Face `transformers` opens, and as a file for llama.cpp and Ollama.

    python tools/export_hf.py runs/gpt2_small exported/gpt2_small
    python tools/export_hf.py runs/gpt2_small exported/gpt2_small --gguf exported/gpt2_small.gguf --ollama

The folder is loaded by transformers first. If logits or token ids differ, it is not written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.errors import ConfigError
from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option


@dataclass(frozen=True, config=STRICT)
class Options:
    """Write a trained model as a folder that Hugging Face transformers opens."""

    checkpoint: NonEmptyText = option(..., "", "checkpoint folder, or run folder for its newest", word="CHECKPOINT")
    out: NonEmptyText = option(..., "", "folder to write; new or empty", word="OUT")
    gguf: NonEmptyText | None = option(None, "also", "also write a file for llama.cpp and Ollama", metavar="FILE")
    gguf_type: Literal["f16", "f32", "q8_0"] | None = option(
        None, "also", "type of its weights: half precision [f16], as trained, or 8 bits"
    )
    ollama: bool = option(False, "also", "with --gguf: write a Modelfile for Ollama beside it")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/export_hf.py").settings(argv, Options)
    if (options.gguf_type or options.ollama) and not options.gguf:
        raise ConfigError("--gguf_type and --ollama need --gguf FILE.")
    print(f"Exporting  {options.checkpoint} to {options.out} ...", flush=True)
    from exchange import gguf_export  # imported here, because --help should not wait for torch
    from exchange.hf_export import export

    checkpoint, out = options.checkpoint, Path(options.out)
    if options.gguf:  # fail before anything is written
        gguf_export.require_gguf_export(checkpoint, Path(options.gguf), options.ollama)
    difference = export(checkpoint, out)
    print(
        f"Exported {checkpoint} to {out}. Loaded by transformers, its logits differ by {difference}, and its token ids "
        "are the same."
    )
    print(f'\nTo use it: AutoModelForCausalLM.from_pretrained("{out}"), AutoTokenizer.from_pretrained("{out}")')
    if options.gguf:
        gguf_export.export_gguf(checkpoint, Path(options.gguf), options.gguf_type or "f16", options.ollama)
    return 0


if __name__ == "__main__":
    sys.exit(main())
