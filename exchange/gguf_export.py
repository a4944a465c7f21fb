"""`tools/export_hf.py --gguf`: a GGUF file for llama.cpp and Ollama, and the commands that run it."""

from __future__ import annotations

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
from exchange.hf_tokenizer import chat_jinja, tokens_to_generate
from generation.settings import Sampling
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer, load_tokenizer


def require_file(path: str | Path, file: Path, ollama: bool = False) -> None:
    """Raises ConfigError if the model of a checkpoint or run folder cannot be written for llama.cpp, or if `file`, or
    with `ollama` the Modelfile beside it, exists."""
    for there, flag in ((file, "--gguf"), (modelfile_path(file), "--ollama")):
        if there.exists() and (ollama or there is file):
            raise ConfigError(f"{there}, which {flag} would write, is already there. Name a file that is not.")
    checkpoint = open_checkpoint(path)
    require_gguf(checkpoint.model_config(), load_tokenizer(checkpoint.tokenizer_path()))


def gguf_beside(checkpoint: Checkpoint, name: str) -> Path:
    """Return model.gguf in the checkpoint's folder, in f16; write it if it is not there or older than the weights.
    Raises what `write_gguf` raises."""
    file = checkpoint.path / "model.gguf"
    weights = max(path.stat().st_mtime_ns for path in checkpoint.path.iterdir() if path != file)
    if not file.exists() or file.stat().st_mtime_ns < weights:
        write_file(checkpoint, file, name, "f16")
    return file


def export_file(path: str | Path, file: Path, gguf_type: str = "f16", ollama: bool = False) -> None:
    """Write the file with weights of `gguf_type`, and print what to type; with `ollama`, write a Modelfile
    beside it. Raises what `write_gguf` raises."""
    checkpoint = open_checkpoint(path)
    model, tokenizer = write_file(checkpoint, file, file.stem, gguf_type)
    template = checkpoint.chat_template()
    print(f"\n{file} ({gguf_type}, {si(file.stat().st_size)}B) is for llama.cpp and Ollama.")
    if model.config.activation == "gelu":
        print("llama.cpp's GPT-2 approximates GELU by tanh, this model has the exact GELU: logits differ a little.")
    print_commands("With llama.cpp", llama_command(file, model.config, template))
    if ollama:
        with atomic_write(modelfile_path(file)) as written:
            written.write(modelfile(file, model.config, tokenizer, template).encode())
        print_commands("With Ollama", ollama_commands(file, template))
    else:
        print("\n--ollama would write a Modelfile for Ollama beside it.")


def write_file(
    checkpoint: Checkpoint, file: Path, name: str, gguf_type: str
) -> tuple[TransformerLanguageModel, Tokenizer]:
    """Write the model and the chat template, if it has one. Returns what was written."""
    model, tokenizer = load_in_fp32(checkpoint)
    template = checkpoint.chat_template()
    jinja = chat_jinja(template, tokenizer, marks_answers=False) if template else None
    write_gguf(file, model, tokenizer, name, gguf_type, jinja)
    return model, tokenizer


def print_commands(title: str, lines: str) -> None:
    print(f"\n{title}:\n" + "".join(f"\n  {line}" for line in lines.splitlines()))


def modelfile_path(file: Path) -> Path:
    return file.with_name("Modelfile")


def llama_command(path: str | Path, config: ModelConfig, template: Template | None = None) -> str:
    """llama.cpp's command that continues a prompt, or with a `template` that chats."""
    command, tokens = shlex.quote(str(path)), tokens_to_generate(config)
    if template:
        return f"llama-cli -m {command} --jinja -n {tokens}"
    return f"llama-completion -m {command} -no-cnv -n {tokens} -p 'Once upon a time'"


def modelfile(path: Path, config: ModelConfig, tokenizer: Tokenizer, template: Template | None = None) -> str:
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
        system = template.chatml
    elif template:
        end = tokenizer.decode([require_end_of_text_id(tokenizer)])
        stops = (end,)
        start = end if tokenizer.bos_id is None else ""  # llama.cpp adds a beginning of the tokenizer's own
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


def ollama_commands(file: Path, template: Template | None) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower()).strip("-._") or "model"
    prompt = "What is the capital of France?" if template else "Once upon a time"
    return f'ollama create {name} -f {shlex.quote(str(modelfile_path(file)))}\nollama run {name} "{prompt}"'
