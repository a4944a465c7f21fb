"""Serve a trained model to programs that speak OpenAI's API: completions and chat, streamed or not.

    python tools/serve.py
    python tools/serve.py runs/gpt2_small --port 8080
    SERVE_API_KEY=SECRET python tools/serve.py --host 0.0.0.0

It answers GET /v1/models, POST /v1/completions, POST /v1/chat/completions and GET /health. One text is made at a time;
other requests wait.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, script
from common.flags import Parser
from serving.server import add_flags, check_flags, listen, load_served, own_address

if TYPE_CHECKING:
    from serving.generation_queue import GenerationQueue
    from serving.openai_form import Served

PACKAGES = ("starlette", "uvicorn")
# The environment's, not a flag: every user of a machine may read the command lines of its processes.
KEY_VARIABLE = "SERVE_API_KEY"
SHUTDOWN_SECONDS = 10  # at most, where something hangs


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    key = os.environ.get(KEY_VARIABLE) or None
    with listen_for(arguments, key) as listener:  # what is wrong is said before the model is read
        from common.checkpoint import newest_run
        from serving.generation_queue import GenerationQueue

        served = load_served(arguments.checkpoint or newest_run(), arguments.device, arguments.max_tokens)
        queue = GenerationQueue(served, arguments.queue, arguments.timeout)
        print(introduction(served, listener, key), flush=True)
        on_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, lambda signum, frame: None) if on_main_thread else None
        try:
            asyncio.run(serve(queue, listener, key, arguments.cors))
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/serve.py",
        usage="%(prog)s [CHECKPOINT] [--FLAG VALUE ...]",
        description="Serve a trained model to programs that speak OpenAI's API. With the environment variable "
        f"{KEY_VARIABLE}, requests need that key; it is needed to let other machines in.",
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
    check_flags(arguments, least_queue=0, packages=PACKAGES)
    arguments.cors = [checked_origin(origin) for origin in arguments.cors]
    return arguments


def checked_origin(origin: str) -> str:
    """As browsers write it. Raises ConfigError for what is none."""
    if origin == "*":
        return origin
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/\s?#]+)/?", origin.lower())
    if not found:
        raise ConfigError(
            f"--cors is {origin}; the beginning of a page's address is needed, http://localhost:3000 say, or *."
        )
    scheme, host = found.groups()
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ''))}"


def listen_for(arguments: argparse.Namespace, key: str | None) -> socket.socket:
    """Raises ConfigError as `listen` does, and for a key that no header can hold."""
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{KEY_VARIABLE} has spaces or characters outside ASCII; choose another key.")
    remedy = (
        f"set the environment variable {KEY_VARIABLE} to a secret of your own and start again, or leave --host out."
    )
    return listen(arguments.host, arguments.port, remedy if key is None else None)


def introduction(served: Served, listener: socket.socket, key: str | None) -> str:
    """What is served where, and examples to paste."""
    from common.machine import device_name

    address, port = listener.getsockname()[:2]
    ip = ipaddress.ip_address(address)
    named = str(ip) if not ip.is_unspecified else "127.0.0.1" if ip.version == 4 else "::1"
    url = f"http://{named if ip.version == 4 else f'[{named}]'}:{port}/v1"
    question: dict[str, Any] = {"model": served.name}
    if served.chat:
        question["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
        path, call, text = "chat/completions", "chat.completions", "message.content"
    else:
        question["prompt"] = "Once upon a time"
        path, call, text = "completions", "completions", "text"
    given = ", ".join(f"{name}={json.dumps(value)}" for name, value in question.items())
    secret = f'os.environ["{KEY_VARIABLE}"]' if key else '"none"'
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if key else ""
    who = "this machine alone" if ip.is_loopback else "whoever has the key, which travels unencrypted"
    lines = [
        f"Model      {served.name}: {served.model.num_parameters():,} parameters, {device_name(served.model.device)}",
        f"Listening  {url}, for {who}; Ctrl-C ends it",
        *([f"Network    http://{own_address()}:{port}/v1, from other machines"] if ip.is_unspecified else []),
        *([] if served.chat else ["Chat       no: it was not trained on conversations"]),
        "",
        "In Python (pip install openai):",
        "",
        *(["    import os"] if key else []),
        "    from openai import OpenAI",
        "",
        f'    client = OpenAI(base_url="{url}", api_key={secret})',
        f"    print(client.{call}.create({given}).choices[0].{text})",
        "",
        "In a shell:",
        "",
        f'    curl {url}/{path} -H "Content-Type: application/json"{header} -d {shlex.quote(json.dumps(question))}',
        "",
    ]
    return "\n".join(lines)


async def serve(queue: GenerationQueue, listener: socket.socket, key: str | None, origins: Sequence[str] = ()) -> None:
    """Answers until a signal: then nothing new, and what is under way ends where it is. uvicorn sends that signal again
    when it is done."""
    import uvicorn

    from serving.openai_app import make_app

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it tells of each client that is gone
    config = uvicorn.Config(
        make_app(queue.served, queue, key, listener.getsockname()[0], origins),
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = uvicorn.Server(config)

    async def end_with_server() -> None:
        while not server.should_exit:  # uvicorn itself looks as often
            await asyncio.sleep(0.1)
        queue.stop()

    ending = asyncio.create_task(end_with_server())
    try:
        await server.serve(sockets=[listener])
    finally:
        ending.cancel()
        queue.stop()
        queue.thread.shutdown()


if __name__ == "__main__":
    sys.exit(main())
