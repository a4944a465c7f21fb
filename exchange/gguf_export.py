"""Export a checkpoint as a GGUF file, and print the commands that run it: `tools/export_hf.py --gguf`."""

from __future__ import annotations

import errno
import json
import re
import shlex
from pathlib import Path

from common.chat import CHATML_TOKENS, ChatML, Template, require_end_of_text_id
from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import ConfigError
from common.files import atomic_write
from common.output import si
from exchange.folders import load_in_fp32
from exchange.gguf_file import require_gguf, write_gguf
from exchange.hf_card import example_prompt
from exchange.hf_tokenizer import build_chat_jinja, default_new_tokens
from generation.request import Sampling
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer, load_tokenizer

CACHE_FOLDER = Path("~/.cache/gpt2_from_scratch")  # for checkpoints in read-only folders


def require_gguf_export(path: str | Path, file: Path, ollama: bool = False) -> None:
    """Check that the model can be exported and that no file is overwritten, before anything is loaded.

    Raises ConfigError if llama.cpp cannot run the model, or if `file`, or with `ollama` the Modelfile beside it,
    exists.
    """
    for output, flag in ((file, "--gguf"), (_modelfile_path(file), "--ollama")):
        if output.exists() and (ollama or output is file):
            raise ConfigError(f"{output}, which {flag} would write, already exists. Name a new file.")
    checkpoint = open_checkpoint(path)
    require_gguf(checkpoint.model_config(), load_tokenizer(checkpoint.tokenizer_path()))


def find_or_write_gguf(checkpoint: Checkpoint, name: str) -> Path:
    """Return model.gguf (f16) in the checkpoint's folder, writing it if it is missing or older than the weights. If the
    folder is read-only, return a file in CACHE_FOLDER.

    Raises what `write_gguf` raises.
    """
    file = checkpoint.path / "model.gguf"
    weights = max(path.stat().st_mtime_ns for path in checkpoint.path.iterdir() if path != file)
    if file.exists() and file.stat().st_mtime_ns >= weights:
        return file
    try:
        _convert_checkpoint(checkpoint, file, name, "f16")
    except OSError as problem:
        if problem.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        file = CACHE_FOLDER.expanduser() / f"{checkpoint.weights_sha256()}.gguf"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            _convert_checkpoint(checkpoint, file, name, "f16")
    return file


def export_gguf(path: str | Path, file: Path, gguf_type: str = "f16", ollama: bool = False) -> None:
    """Write the model as `file`, with `ollama` a Modelfile beside it, and print the commands that run it.

    Raises what `write_gguf` raises.
    """
    checkpoint = open_checkpoint(path)
    model, tokenizer = _convert_checkpoint(checkpoint, file, file.stem, gguf_type)
    template, prompt = checkpoint.chat_template(), example_prompt(checkpoint, tokenizer)
    print(f"\n{file} ({gguf_type}, {si(file.stat().st_size)}B) is for llama.cpp and Ollama.")
    if model.config.activation == "gelu":
        print(
            "llama.cpp's GPT-2 uses the tanh approximation of GELU and this model the exact one: logits differ a "
            "little."
        )
    _print_commands("With llama.cpp", llama_command(file, model.config, prompt, template))
    if ollama:
        with atomic_write(_modelfile_path(file)) as written:
            written.write(build_modelfile(file, model.config, tokenizer, template).encode())
        _print_commands("With Ollama", ollama_commands(file, prompt))
    else:
        print("\nAdd --ollama to write a Modelfile for Ollama, too.")


def _convert_checkpoint(
    checkpoint: Checkpoint, file: Path, name: str, gguf_type: str
) -> tuple[TransformerLanguageModel, Tokenizer]:
    """Load the checkpoint, write it as `file` with its chat template, and return its model and tokenizer."""
    model, tokenizer = load_in_fp32(checkpoint)
    template = checkpoint.chat_template()
    jinja = build_chat_jinja(template, tokenizer, marks_answers=False) if template else None
    write_gguf(file, model, tokenizer, name, gguf_type, jinja)
    return model, tokenizer


def _print_commands(title: str, lines: str) -> None:
    print(f"\n{title}:\n" + "".join(f"\n  {line}" for line in lines.splitlines()))


def _modelfile_path(file: Path) -> Path:
    return file.with_name("Modelfile")


def llama_command(path: str | Path, config: ModelConfig, prompt: str, template: Template | None = None) -> str:
    """Return the llama.cpp command that continues a prompt, or chats if there is a `template`."""
    command, tokens = shlex.quote(str(path)), default_new_tokens(config)
    if template:
        return f"llama-cli -m {command} --jinja -n {tokens}"
    return f"llama-completion -m {command} -no-cnv -n {tokens} -p {shlex.quote(prompt)}"


def build_modelfile(path: Path, config: ModelConfig, tokenizer: Tokenizer, template: Template | None = None) -> str:
    """Return a Modelfile that uses generate.py's defaults and the model's own context.

    Ollama's default context is longer than most of these models have.
    """
    sampling = Sampling()
    parameters: dict[str, object] = {
        "num_ctx": config.max_seq_len,
        "num_predict": default_new_tokens(config),
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
        system = template.chatml
    elif template:
        end = tokenizer.decode([require_end_of_text_id(tokenizer)])
        stops = (end,)
        start = end if tokenizer.bos_id is None else ""  # llama.cpp adds the tokenizer's own beginning-of-text token
        form = (
            f"{start}{{{{ range .Messages }}}}"
            f'{{{{ if eq .Role "assistant" }}}}{template.assistant} {{{{ .Content }}}}{end}'
            f'{{{{ else if eq .Role "system" }}}}{template.system} {{{{ .Content }}}}\n'
            f"{{{{ else }}}}{template.user} {{{{ .Content }}}}\n{{{{ end }}}}{{{{ end }}}}{template.assistant}"
        )
    lines = [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    lines += [f"PARAMETER stop {json.dumps(word)}" for word in stops]
    lines += [f'SYSTEM """{system}"""'] if system else []
    return "\n".join([f"FROM ./{Path(path).name}", *lines, f'TEMPLATE """{form}"""', ""])


def ollama_commands(file: Path, prompt: str) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower()).strip("-._") or "model"
    return f"ollama create {name} -f {shlex.quote(str(_modelfile_path(file)))}\nollama run {name} {shlex.quote(prompt)}"
