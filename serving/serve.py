"""What `tools/serve.py` and `tools/web_demo.py` do: the same server, with examples for programs or without."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.middleware import Middleware

from common.machine import device_name
from serving.app import Guard, Turns, make_app
from serving.models import Library, Served
from serving.server import KEY_VARIABLE, Settings, key_for, listen, own_address

SHUTDOWN_SECONDS = 3  # at most, for answers that are on their way
USER = "guest"  # of the page, where there is a key


def serve(settings: Settings, for_programs: bool) -> None:
    """Serve until SIGTERM; Ctrl-C raises KeyboardInterrupt. In a notebook, show the page below the cell and return.

    Raises ConfigError for an address that cannot be used, CheckpointError if there is no checkpoint.
    """
    with listen(settings.host, settings.port) as listener:  # fail before a model is loaded
        address, port = listener.getsockname()[:2]
        ip = ipaddress.ip_address(address)
        key = key_for(settings.share or not ip.is_loopback)
        library = Library([Path(place) for place in settings.places], settings.device, settings.max_tokens)
        served = library.first()
        name = "127.0.0.1" if address == "0.0.0.0" else "::1" if ip.is_unspecified else address
        url = f"http://{f'[{name}]' if ':' in name else name}:{port}"
        lines = introduction(served, url, key, own_address() if ip.is_unspecified else "")
        if settings.share or in_notebook():
            show_page(library, settings, listener, key)
        else:
            server = make_server(settings, library, served, address, key)
            before = signal.signal(signal.SIGTERM, server.handle_exit)
            print(*lines, *(examples(served, url, key) if for_programs else []), sep="\n", flush=True)
            try:
                server.run(sockets=[listener])
            finally:
                signal.signal(signal.SIGTERM, before)


def introduction(served: Served, url: str, key: str, network: str) -> list[str]:
    """The model, its address, and the key where there is one. `network`: this machine's name for others."""
    who = "whoever has the key; the connection is not encrypted" if key else "this machine only"
    is_new = key and not os.environ.get(KEY_VARIABLE)
    return [
        f"Model      {served.name}: {served.model.num_parameters():,} parameters, {device_name(served.model.device)}",
        f"Listening  {url}/, for {who}; Ctrl-C ends it",
        *([f"Network    http://{network}:{url.rpartition(':')[2]}/, from other machines"] if network else []),
        *([f"Key        {key}, new each time; set {KEY_VARIABLE} to choose it"] if is_new else []),
        *([f"Page       user {USER}; the key is the password"] if key else []),
    ]


def show_page(library: Library, settings: Settings, listener: socket.socket, key: str) -> None:
    """The page alone, from Gradio's own server: it knows how to share it, and how to show it in a notebook."""
    import gradio

    from serving.demo_page import launch, make_page

    gradio.close_all(verbose=False)  # the page that this cell opened before
    page = make_page(library, settings.queue, settings.timeout)
    # Colab has other names for this machine, which only its user can reach.
    guard = Middleware(Guard, key=key, address=None if gradio.utils.colab_check() else listener.getsockname()[0])
    launch(page, listener, guard, (USER, key) if key else None, settings.share)
    who = f"user {USER}, password {key}" if key else "this machine only"
    print(f"Listening  {page.share_url or page.local_url}, for {who}", flush=True)
    if not in_notebook():
        try:
            wait_for_a_signal()
        finally:
            page.close(verbose=False)


def in_notebook() -> bool:
    """Whether this is the process of a notebook, where the cell ends and the page stays."""
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def wait_for_a_signal() -> None:
    """Returns at SIGTERM; Ctrl-C is a KeyboardInterrupt."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda signum, frame: ended.set())
    try:
        ended.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def make_server(settings: Settings, library: Library, served: Served, address: str, key: str) -> uvicorn.Server:
    """A signal makes it refuse new requests and end the running text; uvicorn raises the signal again in the end."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it logs every client that disconnects
    turns = Turns(served, settings.queue, settings.timeout)
    app = make_app(turns, settings, key, address)
    if importlib.util.find_spec("gradio") is not None:
        from serving.demo_page import make_page, mount

        mount(app, make_page(library, settings.queue, settings.timeout), (USER, key) if key else None)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            turns.is_ending = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # of connections that are cut off now
            super().handle_exit(sig, frame)

    return Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )


def examples(served: Served, url: str, key: str) -> list[str]:
    """To paste: in Python, and in a shell."""
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
    return [
        *([] if served.chat else ["Chat       no: it was not trained on conversations"]),
        "",
        "In Python (pip install openai):",
        "",
        *(["    import os"] if key else []),
        "    from openai import OpenAI",
        "",
        f'    client = OpenAI(base_url="{url}/v1", api_key={secret})',
        f"    print(client.{call}.create({given}).choices[0].{text})",
        "",
        "In a shell:",
        "",
        f'    curl {url}/v1/{path} -H "Content-Type: application/json"{header} -d {shlex.quote(json.dumps(question))}',
        "",
    ]
