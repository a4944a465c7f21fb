"""Serve a trained model to programs that speak OpenAI's API, by llama.cpp's server.

    python tools/serve.py
    python tools/serve.py runs/gpt2_small --port 8080
    SERVE_API_KEY=SECRET python tools/serve.py --host 0.0.0.0

It first writes the model for llama.cpp, as model.gguf in the checkpoint's folder.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.errors import ConfigError, require_packages
from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option
from serving.server import free_port, key_for


@dataclass(frozen=True, config=STRICT)
class Options:
    """Serve a trained model to programs that speak OpenAI's API. Requests need the key in the environment variable
    SERVE_API_KEY if there is one, and a new one where other machines are let in."""

    run: NonEmptyText | None = option(None, "", "checkpoint or run folder [the newest run in runs/]", word="RUN")
    host: NonEmptyText = option("127.0.0.1", "address", "address to listen on; 0.0.0.0: all of them")
    port: int = option(8000, "address", "0: any free one", ge=0, le=65535)


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/serve.py").settings(argv, Options)
    require_packages("gguf", "xllamacpp")
    port, key = free_port(options.host, options.port), key_for(options.host)
    from common.checkpoint import newest_run, open_checkpoint  # here, because --help must not import torch
    from exchange.gguf_export import gguf_beside
    from serving.llama import start
    from serving.models import run_folder

    checkpoint = open_checkpoint(options.run or newest_run())
    name = run_folder(checkpoint.path).name or "model"
    try:
        file = gguf_beside(checkpoint, name)
    except ConfigError as problem:
        raise ConfigError(
            f"{problem} `transformers serve FOLDER` serves what tools/export_hf.py writes of it into FOLDER."
        ) from None
    server = start(checkpoint, file, name, options.host, port, key)
    url, header = f"{server.listening_address}/v1", f' -H "Authorization: Bearer {key}"' if key else ""
    if checkpoint.chat_template():
        chat, path, body = "yes", "chat/completions", '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    else:
        chat, path, body = "no: it continues the last message as text", "completions", '{"prompt": "Once upon a time"}'
    print(f"Model      {name}, from {checkpoint.path}", f"Chat       {chat}", sep="\n")
    print(
        f"Listening  {url}, for {'whoever sends the key, unencrypted' if key else 'this machine only'}; Ctrl-C ends it"
    )
    print(f"Ask it     curl {url}/{path}{header} -d '{body}'", flush=True)
    threading.Event().wait()  # until a signal ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
