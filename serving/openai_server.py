"""`tools/serve.py`: OpenAI's API over a socket, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import shlex
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

import uvicorn

from common.checkpoint import newest_run
from common.machine import device_name
from serving.generation_queue import GenerationQueue
from serving.openai_app import make_app
from serving.served import Served, load_served
from serving.server import KEY_VARIABLE, own_address

SHUTDOWN_SECONDS = 10  # at most, if something hangs


def serve(arguments: argparse.Namespace, listener: socket.socket, key: str | None) -> None:
    """Serve a checkpoint until SIGTERM; Ctrl-C raises KeyboardInterrupt. `arguments` are those of tools/serve.py.

    Raises what `load_served` raises.
    """
    served = load_served(arguments.checkpoint or newest_run(), arguments.device, arguments.max_tokens)
    queue = GenerationQueue(served, arguments.queue, arguments.timeout)
    print(introduction(served, listener, key), flush=True)
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None) if on_main_thread else None
    try:
        asyncio.run(answer_until_signal(queue, listener, key, arguments.cors))
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def introduction(served: Served, listener: socket.socket, key: str | None) -> str:
    """The model, its address, and examples to paste."""
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
    who = "this machine only" if ip.is_loopback else "whoever has the key; the connection is not encrypted"
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


async def answer_until_signal(
    queue: GenerationQueue, listener: socket.socket, key: str | None, origins: Sequence[str] = ()
) -> None:
    """Answer until a signal comes; then refuse new requests and end the running text. uvicorn raises the signal again
    when it is done."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it logs every client that disconnects
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
        while not server.should_exit:  # uvicorn checks as often
            await asyncio.sleep(0.1)
        queue.stop()

    ending = asyncio.create_task(end_with_server())
    try:
        await server.serve(sockets=[listener])
    finally:
        ending.cancel()
        queue.stop()
        queue.thread.shutdown()
