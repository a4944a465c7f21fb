"""`tools/export_hf.py --gguf`: a GGUF file for llama.cpp and Ollama, proven, and the commands that run it."""

from __future__ import annotations

import json
import multiprocessing
import re
import shlex
from multiprocessing.connection import Connection
from pathlib import Path

from common.chat import CHATML_TOKENS, AnyTemplate, ChatML
from common.checkpoint import open_checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write
from common.formatting import si
from exchange.extras import INSTALL
from exchange.folders import load_in_fp32
from exchange.gguf_file import require_gguf, write_gguf
from exchange.gguf_proof import Agreement, RoundedAgreement, tanh_difference, verify_gguf
from exchange.hf_tokenizer import hf_special_tokens
from generation.settings import Sampling
from model_config import ModelConfig
from tokenizer import load_tokenizer
from tokenizer_base import END_OF_TEXT

PROOF_SECONDS = 600
TEXT = "Once upon a time there was a king who asked: What is the capital of France?\n\nNobody knew, but 3 of 4.\n"


def require_file(path: str | Path, file: Path, ollama: bool = False) -> None:
    """Raises ConfigError if the model of a checkpoint or run folder cannot be written for llama.cpp, or if `file`, or
    with `ollama` the Modelfile beside it, exists."""
    for there, flag in ((file, "--gguf"), (modelfile_path(file), "--ollama")):
        if there.exists() and (ollama or there is file):
            raise ConfigError(f"{there}, which {flag} would write, is already there. Name a file that is not.")
    checkpoint = open_checkpoint(path)
    require_gguf(checkpoint.model_config(), load_tokenizer(checkpoint.tokenizer_path()))


def export_file(path: str | Path, file: Path, gguf_type: str = "f16", ollama: bool = False) -> None:
    """Write the file with weights of `gguf_type` (GGUF_TYPES), prove it if llama.cpp is installed, and print what to
    type; with `ollama`, write a Modelfile beside it. A file that is not this model is deleted. Raises what `write_gguf`
    and `prove` raise."""
    checkpoint = open_checkpoint(path)
    model, tokenizer = load_in_fp32(checkpoint)
    template = checkpoint.chat_template()
    jinja = template.jinja(hf_special_tokens(tokenizer), marks_answers=False) if template else None
    write_gguf(file, model, tokenizer, file.stem, gguf_type, jinja)
    try:
        agreement = prove(path, file, gguf_type)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    print(
        f"\n{file} ({gguf_type}, {si(file.stat().st_size)}B) is for llama.cpp and Ollama. "
        + (f"{agreement}." if agreement else f"Not proven: {INSTALL}")
    )
    if difference := tanh_difference(model, tokenizer, [TEXT]):
        print(
            f"llama.cpp's GPT-2 approximates GELU by tanh, this model has the exact GELU: logits differ by up to "
            f"{difference:.1e} because of that."
        )
    print_commands("With llama.cpp", llama_command(file, model.config, template))
    if ollama:
        with atomic_write(modelfile_path(file)) as written:
            written.write(modelfile(file, model.config, template).encode())
        print_commands(f"With Ollama, which reads {modelfile_path(file)}", ollama_commands(file))
    else:
        print("\n--ollama would write a Modelfile for Ollama beside it.")


def print_commands(title: str, lines: str) -> None:
    print(f"\n{title}:\n" + "".join(f"\n  {line}" for line in lines.splitlines()))


def modelfile_path(file: Path) -> Path:
    return file.with_name("Modelfile")


def prove(path: str | Path, file: Path, gguf_type: str) -> Agreement | RoundedAgreement | None:
    """What `verify_gguf` returns, run in another process: llama.cpp sometimes hangs when it ends, and may crash on a
    file that it does not understand.

    Raises CheckpointError if it answers differently, does not answer in time, or crashes.
    """
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_proof, args=(sender, str(path), str(file), gguf_type), daemon=True)
    process.start()
    sender.close()
    try:
        if not answer.poll(PROOF_SECONDS):
            raise CheckpointError(f"llama.cpp did not answer within {PROOF_SECONDS} s; {file} is not proven.")
        result: Agreement | RoundedAgreement | CheckpointError | None = answer.recv()
    except EOFError:
        raise CheckpointError(f"llama.cpp crashed on {file}.") from None
    finally:
        process.kill()
        process.join()
    if isinstance(result, CheckpointError):
        raise result
    return result


def send_proof(sender: Connection, path: str, file: str, gguf_type: str) -> None:
    try:
        sender.send(verify_gguf(file, *load_in_fp32(open_checkpoint(path)), [TEXT], gguf_type))
    except CheckpointError as problem:
        sender.send(problem)


def tokens_to_generate(config: ModelConfig) -> int:
    """generate.py's default, but at most half of the context."""
    return min(Sampling().max_new_tokens, config.max_seq_len // 2)


def llama_command(path: str | Path, config: ModelConfig, template: AnyTemplate | None = None) -> str:
    """llama.cpp's command that continues a prompt, or with a `template` that chats."""
    command, tokens = shlex.quote(str(path)), tokens_to_generate(config)
    if template:
        return f"llama-cli -m {command} --jinja -n {tokens}"
    return f"llama-completion -m {command} -no-cnv -n {tokens} -p 'Once upon a time'"


def modelfile(path: str | Path, config: ModelConfig, template: AnyTemplate | None = None) -> str:
    """Ollama's Modelfile, to lie beside the file: with generate.py's defaults, and our context, for Ollama's is longer
    than most of ours."""
    sampling = Sampling()
    parameters: dict[str, object] = {
        "num_ctx": config.max_seq_len,
        "num_predict": tokens_to_generate(config),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repeat_penalty": sampling.repetition_penalty,
    }
    stops: tuple[str, ...] = ()
    form, system = "{{ .Prompt }}", ""
    if isinstance(template, ChatML):
        stops = CHATML_TOKENS
        form = (
            "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
        )
        system = template.default_system
    elif template:
        stops = (END_OF_TEXT,)
        form = (
            f"{END_OF_TEXT}{{{{ range .Messages }}}}"
            f'{{{{ if eq .Role "assistant" }}}}{template.assistant} {{{{ .Content }}}}{END_OF_TEXT}'
            f'{{{{ else if eq .Role "system" }}}}{template.system} {{{{ .Content }}}}\n'
            f"{{{{ else }}}}{template.user} {{{{ .Content }}}}\n{{{{ end }}}}{{{{ end }}}}{template.assistant}"
        )
    lines = [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    lines += [f"PARAMETER stop {json.dumps(word)}" for word in stops]
    lines += [f'SYSTEM """{system}"""'] if system else []
    return "\n".join([f"FROM ./{Path(path).name}", *lines, f'TEMPLATE """{form}"""', ""])


def ollama_commands(path: str | Path) -> str:
    """Commands to type in the folder of the file and the Modelfile."""
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(path).stem.lower()).strip("-._") or "model"
    return f'ollama create {name} -f Modelfile\nollama run {name} "Once upon a time"'
