"""Serve a trained model through OpenAI's API, by llama.cpp's server.

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

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.errors import ConfigError, require_packages
from common.files import CHECKPOINT_NAME
from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option
from serving.server import choose_key, find_port


@dataclass(frozen=True, config=STRICT)
class Options:
    """Serve a trained model through OpenAI's API. Requests need the key in the environment variable SERVE_API_KEY, if
    set; if other machines have access, a random one is used by default."""

    run: NonEmptyText | None = option(None, "", "checkpoint or run folder [the newest run in runs/]", word="RUN")
    host: NonEmptyText = option("127.0.0.1", "address", "address to listen on; 0.0.0.0: all")
    port: int = option(8000, "address", "port; 0: any free one", ge=0, le=65535)


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/serve.py").settings(argv, Options)
    require_packages("gguf", "xllamacpp")
    port, key = find_port(options.host, options.port), choose_key(options.host)
    print(f"Loading    {options.run or 'the newest run'} ...", flush=True)
    from common.checkpoint import (  # imported here, because --help should not wait for torch
        find_newest_run,
        open_checkpoint,
    )
    from exchange.gguf_export import find_or_write_gguf
    from exchange.hf_card import example_prompt
    from serving.llama import start
    from tokenizer import load_tokenizer

    checkpoint = open_checkpoint(options.run or find_newest_run())
    name = name_model(checkpoint.path)
    try:
        file = find_or_write_gguf(checkpoint, name)
    except ConfigError as problem:
        raise ConfigError(
            f"{problem} Export it to a FOLDER with tools/export_hf.py instead, and use `transformers serve FOLDER`."
        ) from None
    server = start(checkpoint, file, name, options.host, port, key)
    url, header = f"{server.listening_address}/v1", f' -H "Authorization: Bearer {key}"' if key else ""
    if checkpoint.chat_template():
        chat, path, body = "yes", "chat/completions", '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    else:
        chat, path = "no; it continues the last message as text", "completions"
        prompt = example_prompt(checkpoint, load_tokenizer(checkpoint.tokenizer_path()))
        body = json.dumps({"prompt": prompt}, ensure_ascii=False).replace("'", "\\u0027")
    print(f"Model      {name}, from {checkpoint.path}", f"Chat       {chat}", sep="\n")
    print(
        f"Listening  {url}, for {'clients with the key, unencrypted' if key else 'this machine only'}; press Ctrl-C to "
        "stop"
    )
    print(f"Try        curl {url}/{path}{header} -d '{body}'", flush=True)
    threading.Event().wait()  # until a signal ends the process
    return 0


def name_model(checkpoint: Path) -> str:
    """Return the name of a checkpoint's run, or of its folder if it is in no run."""
    parts = [part for part in checkpoint.resolve().parts if not CHECKPOINT_NAME.fullmatch(part)]
    return next(part for part in reversed(parts) if part != "checkpoints")


if __name__ == "__main__":
    sys.exit(main())
