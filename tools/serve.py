"""Serve a trained model to programs that speak OpenAI's API: completions and chat, streamed or not.

    python tools/serve.py
    python tools/serve.py runs/gpt2_small --port 8080
    SERVE_API_KEY=SECRET python tools/serve.py --host 0.0.0.0

It answers GET /v1/models, POST /v1/completions, POST /v1/chat/completions and GET /health. It generates one text at a
time; other requests wait.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.flags import Parser
from common.script import script
from serving.server import KEY_VARIABLE, add_flags, check_flags, checked_origin, listen_with_key


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    key = os.environ.get(KEY_VARIABLE) or None
    with listen_with_key(arguments.host, arguments.port, key) as listener:  # fail before the model is loaded
        from serving.openai_server import serve  # here, because --help must not import torch

        serve(arguments, listener, key)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/serve.py",
        usage="%(prog)s [CHECKPOINT] [--FLAG VALUE ...]",
        description="Serve a trained model to programs that speak OpenAI's API. If the environment variable "
        f"{KEY_VARIABLE} is set, requests need that key; without one, no other machine is let in.",
    )
    parser.add_argument(
        "checkpoint", nargs="?", metavar="CHECKPOINT", help="checkpoint or run folder [the newest run in runs/]"
    )
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages from there may ask it, http://localhost:3000 say; *: all pages; repeatable [none]",
    )
    add_flags(parser, port=8000, queue=32, max_tokens=4096, timeout=300)
    arguments = parser.parse_args(argv)
    check_flags(arguments, least_queue=0, packages=("starlette", "uvicorn"))
    arguments.cors = [checked_origin(origin) for origin in arguments.cors]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
