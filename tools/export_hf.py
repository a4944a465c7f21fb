"""Write a trained model as a folder that Hugging Face `transformers` opens, and as a file for llama.cpp and Ollama.

    python tools/export_hf.py runs/gpt2_small exported/gpt2_small
    python tools/export_hf.py runs/gpt2_small exported/gpt2_small --gguf exported/gpt2_small.gguf
    python tools/export_hf.py runs/gpt2_small exported/gpt2_small --push my_name/my_model
    python tools/export_hf.py runs/lora exported/lora --base exported/gpt2_small

The folder is loaded by transformers and compared with the model before it gets its name: the same logits, the same
token ids, or there is no folder.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import CheckpointError, ConfigError, script
from common.flags import Parser, add_debug

if TYPE_CHECKING:
    from exchange.gguf_form import Agreement
    from exchange.hf_folder import Difference
    from model import TransformerLanguageModel
    from tokenizer import Tokenizer

PROOF_SECONDS = 600
GGUF_TEXT = "Once upon a time there was a king who asked: What is the capital of France?\n\nNobody knew, but 3 of 4.\n"


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    out = Path(arguments.out)
    if arguments.push:
        from exchange.push_hub import require_push

        require_push(arguments.push)
    if arguments.gguf:  # what cannot be written is said before anything is
        require_gguf_of(arguments.checkpoint, Path(arguments.gguf))
    difference = export(arguments.checkpoint, out, None if arguments.base is None else Path(arguments.base))
    reader = "transformers" if arguments.base is None else "peft"
    print(
        f"{arguments.checkpoint} is now {out}. Read back by {reader}, its logits differ by {difference}, its token ids "
        "not at all."
    )
    model = f'AutoModelForCausalLM.from_pretrained("{arguments.base or out}")'
    model = f'PeftModel.from_pretrained({model}, "{out}")' if arguments.base else model
    print(f'\nUse it: {model}, AutoTokenizer.from_pretrained("{out}")')
    if arguments.gguf:
        export_gguf(arguments.checkpoint, Path(arguments.gguf))
    if arguments.push:
        from exchange.push_hub import push

        print(f"\n{push(out, arguments.push, public=arguments.public)}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/export_hf.py",
        usage="%(prog)s CHECKPOINT OUT",
        description="Write a trained model as a folder that Hugging Face transformers opens.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", metavar="OUT", help="folder to write; empty, or not there yet")
    parser.add_argument("--base", metavar="FOLDER", help="of LoRA adapters: the folder their base was exported to")
    parser.add_argument("--gguf", metavar="FILE", help="write a file for llama.cpp and Ollama too (GPT-2's form alone)")
    parser.add_argument("--push", metavar="USER/NAME", help="upload the folder to the Hugging Face Hub, for you alone")
    parser.add_argument("--public", action="store_true", help="with --push: for everybody")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    if arguments.public and not arguments.push:
        raise ConfigError("--public is for --push USER/NAME.")
    return arguments


def loaded(path: str | Path) -> tuple[TransformerLanguageModel, Tokenizer]:
    from common.checkpoint import open_checkpoint
    from exchange.hf_folder import load_in_fp32

    return load_in_fp32(open_checkpoint(path))


def require_gguf_of(path: str | Path, file: Path) -> None:
    """Raises ConfigError if the model cannot be written for llama.cpp, or something lies at `file`."""
    from common.checkpoint import open_checkpoint
    from exchange.gguf_form import require_gguf
    from tokenizer import load_tokenizer

    if file.exists():
        raise ConfigError(f"--gguf {file} is already there. Name a file that is not.")
    checkpoint = open_checkpoint(path)
    require_gguf(checkpoint.model_config(), load_tokenizer(checkpoint.tokenizer_path()))


def export_gguf(path: str | Path, file: Path) -> None:
    """Write the file, prove it with llama.cpp where that is installed, and say what to type. One that is not the model
    is deleted. Raises what `write_gguf` and `prove` raise."""
    from common.checkpoint import open_checkpoint
    from exchange.gguf_form import INSTALL, llama_command, modelfile, ollama_commands, tanh_difference, write_gguf
    from exchange.hf_folder import load_in_fp32
    from exchange.hf_tokenizer import hf_special_tokens

    checkpoint = open_checkpoint(path)
    model, tokenizer = load_in_fp32(checkpoint)
    template = checkpoint.chat_template()
    jinja = template.jinja(hf_special_tokens(tokenizer), marks_answers=False) if template else None
    write_gguf(file, model, tokenizer, file.stem, chat_template=jinja)
    try:
        agreement = prove(path, file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    print(f"\n{file} is for llama.cpp and Ollama. " + (f"{agreement}." if agreement else f"Not proven: {INSTALL}"))
    if difference := tanh_difference(model, tokenizer, [GGUF_TEXT]):
        print(
            f"llama.cpp's GPT-2 approximates GELU by tanh, this model has it exact: logits differ by up to "
            f"{difference:.1e} for that."
        )
    for title, lines in (
        ("With llama.cpp", llama_command(file, model.config, template=template)),
        ("With Ollama, a file named Modelfile beside it", modelfile(file, model.config, template)),
        ("and in that folder", ollama_commands(file)),
    ):
        print(f"\n{title}:\n" + "".join(f"\n  {line}" for line in lines.splitlines()))


def prove(path: str | Path, file: Path) -> Agreement | None:
    """What `verify_gguf` returns, in a process of its own: llama.cpp has been seen to hang at its end, and a file that
    it does not understand may crash it.

    Raises CheckpointError if it says something else, does not answer in time, or is gone.
    """
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_proof, args=(sender, str(path), str(file)), daemon=True)
    process.start()
    sender.close()
    try:
        if not answer.poll(PROOF_SECONDS):
            raise CheckpointError(f"llama.cpp did not answer within {PROOF_SECONDS} s; {file} is not proven.")
        result: Agreement | CheckpointError | None = answer.recv()
    except EOFError:
        raise CheckpointError(f"llama.cpp crashed on {file}.") from None
    finally:
        process.kill()
        process.join()
    if isinstance(result, CheckpointError):
        raise result
    return result


def send_proof(sender: Connection, path: str, file: str) -> None:
    from exchange.gguf_form import verify_gguf

    try:
        sender.send(verify_gguf(file, *loaded(path), [GGUF_TEXT]))
    except CheckpointError as problem:
        sender.send(problem)


def export(path: str | Path, out: Path, base: Path | None = None) -> Difference:
    """Write the checkpoint or run folder at `path` as the folder `out`, adapters for the exported model in the folder
    `base`. Returns the largest difference of the logits.

    Raises CheckpointError for a checkpoint that cannot be trusted or that no class there can express, TokenizerError
    for a tokenizer that is not the model's, ConfigError if something lies at `out`, transformers is missing, or `base`
    is not for such a checkpoint.
    """
    from common.checkpoint import open_checkpoint
    from common.files import json_bytes
    from common.tensors import safetensors_pieces, write_verified
    from exchange.hf_card import model_card
    from exchange.hf_folder import (
        largest_difference,
        least_likely,
        load_in_fp32,
        load_theirs,
        new_folder,
        require_new,
        require_same_tokens,
        require_transformers,
    )
    from exchange.hf_form import FormError, hf_kind, to_hf, with_rows
    from exchange.hf_tokenizer import (
        hf_generation_config,
        hf_special_ids,
        hf_special_tokens,
        hf_tokenizer_config,
        hf_tokenizer_json,
        hf_vocab_size,
    )

    require_transformers()
    require_new(out)
    checkpoint = open_checkpoint(path)
    try:
        hf_kind(checkpoint.model_config())  # before the weights are read
    except FormError as problem:
        raise CheckpointError(f"{checkpoint.path} cannot be exported: {problem}.") from None
    if (lora := checkpoint.lora()) is not None:
        from exchange.hf_adapter import export_adapters

        return export_adapters(checkpoint, lora, out, base)
    if base is not None:
        raise ConfigError(f"--base is for adapters, and {checkpoint.path} holds a whole model; leave it out.")
    model, tokenizer = load_in_fp32(checkpoint)
    shape, state = model.config, model.state_dict()
    if (vocab_size := hf_vocab_size(tokenizer)) > shape.vocab_size:
        shape, state = with_rows(shape, state, vocab_size, twin=least_likely(model, tokenizer))
    config, tensors = to_hf(shape, state)
    template = checkpoint.chat_template()
    contents = {
        "config.json": json_bytes(config | hf_special_ids(tokenizer)),
        "generation_config.json": json_bytes(hf_generation_config(tokenizer, shape)),
        "tokenizer.json": hf_tokenizer_json(tokenizer),
        "tokenizer_config.json": json_bytes(hf_tokenizer_config(tokenizer, model.config.max_seq_len, template)),
        "README.md": model_card(checkpoint, model.config, model.num_parameters(), tokenizer, out.name).encode(),
    }
    if template:
        contents["chat_template.jinja"] = template.jinja(hf_special_tokens(tokenizer)).encode()
    with new_folder(out) as folder:
        write_verified(folder / "model.safetensors", safetensors_pieces(tensors, metadata={"format": "pt"}))
        for name, content in contents.items():
            write_verified(folder / name, content)
        require_same_tokens(folder, tokenizer, template)
        return largest_difference(model, load_theirs(folder), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
