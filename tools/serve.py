"""Serve a trained model by llama.cpp's server: a chat page and OpenAI's API.

    python tools/serve.py
    python tools/serve.py runs/gpt2_small --port 8080
    SERVE_API_KEY=SECRET python tools/serve.py --host 0.0.0.0

First writes the model for llama.cpp, as model.gguf in the checkpoint's folder.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.errors import CheckpointError, ConfigError, require_packages
from common.files import CHECKPOINT_NAME
from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option
from generation.request import Sampling
from serving.server import choose_key, find_port

PARALLEL_REQUESTS = 4  # each has the whole context
REQUEST_TIMEOUT_SECONDS = 5  # a client that never completes its request holds a thread until then
# The chat template of a model that was not trained on conversations; llama.cpp's default is ChatML.
CONTINUE_TEMPLATE = "{{ messages[-1].content }}"


@dataclass(frozen=True, config=STRICT)
class Options:
    """Serve a trained model by llama.cpp: a chat page and OpenAI's API. Requests need the key in the environment
    variable SERVE_API_KEY, if set; if other machines have access, a random one is used by default."""

    run: NonEmptyText | None = option(None, "", "checkpoint or run folder [the newest run in runs/]", word="RUN")
    host: NonEmptyText = option("127.0.0.1", "address", "address to listen on; 0.0.0.0: all")
    port: int = option(8000, "address", "port; 0: any free one", ge=0, le=65535)


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/serve.py").settings(argv, Options)
    require_packages("gguf", "xllamacpp")
    port, key = find_port(options.host, options.port), choose_key(options.host)
    print(f"Loading    {options.run or 'the newest run'} ...", flush=True)
    from common.checkpoint import find_newest_run, open_checkpoint  # imported here, as --help should not wait for torch
    from exchange.gguf_export import find_or_write_gguf
    from exchange.hf_card import example_prompt
    from tokenizer import load_tokenizer

    checkpoint = open_checkpoint(options.run or find_newest_run())
    name, is_chat = _name_model(checkpoint.path), checkpoint.chat_template() is not None
    try:
        file = find_or_write_gguf(checkpoint, name)
    except ConfigError as problem:
        raise ConfigError(
            f"{problem} Export it to a FOLDER with tools/export_hf.py instead, and use `transformers serve FOLDER`."
        ) from None
    server = start(file, name, checkpoint.model_config().max_seq_len, is_chat, options.host, port, key)
    url, header = server.listening_address, f' -H "Authorization: Bearer {key}"' if key else ""
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    if not is_chat:
        path, prompt = "completions", example_prompt(checkpoint, load_tokenizer(checkpoint.tokenizer_path()))
        body = json.dumps({"prompt": prompt}, ensure_ascii=False).replace("'", "\\u0027")
    print(f"Model      {name}, from {checkpoint.path}")
    print(f"Chat       {'yes' if is_chat else 'no; it continues the last message as text'}")
    audience = "clients with the key, unencrypted" if key else "this machine only"
    print(f"Listening  {url}/ (a chat page) and {url}/v1, for {audience}; press Ctrl-C to stop")
    print(f"Try        curl {url}/v1/{path}{header} -d '{body}'", flush=True)
    threading.Event().wait()  # until a signal ends the process
    return 0


def start(file: Path, name: str, context: int, is_chat: bool, host: str, port: int, key: str) -> Any:
    """Start an `xllamacpp.Server` with the defaults of generate.py; its `listening_address` is a URL. Raises
    CheckpointError if llama.cpp cannot load the file."""
    import xllamacpp

    params, sampling = xllamacpp.CommonParams(), Sampling()
    params.model.path, params.model_alias = str(file), {name}
    params.hostnames, params.port, params.api_keys = [host], port, [key] if key else []
    params.timeout_read = REQUEST_TIMEOUT_SECONDS
    params.cors_origins = "localhost"  # pages from elsewhere cannot read the answers
    params.n_parallel, params.n_ctx = PARALLEL_REQUESTS, PARALLEL_REQUESTS * context
    params.n_predict = sampling.max_new_tokens
    params.sampling.temp, params.sampling.top_p = sampling.temperature, sampling.top_p
    params.sampling.top_k, params.sampling.min_p = sampling.top_k, 0.0
    params.endpoint_slots = params.fit_params = False
    params.verbosity = -1  # silent
    if not is_chat:
        params.chat_template = CONTINUE_TEMPLATE
    try:
        return xllamacpp.Server(params)
    except RuntimeError as problem:
        raise CheckpointError(f"llama.cpp cannot serve {file}: {problem}") from None


def _name_model(checkpoint: Path) -> str:
    """Return the name of a checkpoint's run, or of its folder if it is in no run."""
    parts = [part for part in checkpoint.resolve().parts if not CHECKPOINT_NAME.fullmatch(part)]
    return next(part for part in reversed(parts) if part != "checkpoints")


if __name__ == "__main__":
    sys.exit(main())
