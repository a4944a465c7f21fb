"""`tools/web_demo.py`: the demo's page over HTTP, until a signal; in a notebook, below the cell."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import gradio
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ConfigError, UserError
from serving.demo_library import Library
from serving.demo_model import no_checkpoints
from serving.demo_page import make_page, style, theme
from serving.server import OWN_HOSTS, listen, own_address

USER = "guest"
HEIGHT = 900  # pixels, in a notebook
LARGEST_BODY = 1_000_000  # bytes; many times what the page sends


def serve_demo(arguments: argparse.Namespace) -> None:
    """Show the page; outside a notebook, wait until SIGTERM or Ctrl-C. `arguments` are those of tools/web_demo.py.

    Raises ConfigError for an address that cannot be used, CheckpointError if there is no checkpoint.
    """
    if in_notebook():
        gradio.close_all(verbose=False)  # the page that this cell opened before
    with listen(arguments.host, arguments.port) as listener:
        address, port = listener.getsockname()[:2]  # free again when the page takes it
    library = Library([Path(place) for place in arguments.places], arguments.device, arguments.max_tokens)
    found = library.find()
    if not found:
        raise no_checkpoints(library.places)
    with contextlib.suppress(UserError):  # the page reports what is wrong with it
        library.open(str(found[0].path))  # the first choice on the page
    is_local = ipaddress.ip_address(address).is_loopback and not arguments.share
    password = "" if is_local else secrets.token_hex(8)  # a double click selects all of it
    page = make_page(library, arguments.queue, arguments.timeout)
    launch(page, address, port, password, arguments.share)
    print(introduction(page, len(found), password, address), flush=True)
    if not in_notebook():
        try:
            wait_for_a_signal()
        finally:
            page.close(verbose=False)


def launch(page: Any, address: str, port: int, password: str, share: bool) -> None:
    """Start the page's server in the background. Raises ConfigError if `share` fails."""
    # Without a password, only requests to this machine's own names are answered, as in openai_app.make_app. Colab uses
    # other names for this machine.
    hosts = [] if password or gradio.utils.colab_check() else [Middleware(TrustedHostMiddleware, [*OWN_HOSTS, address])]
    page.launch(
        server_name=f"[{address}]" if ":" in address else address,
        server_port=port,
        share=share,
        auth=(USER, password) if password else None,
        app_kwargs={"middleware": [*hosts, Middleware(Limits)]},
        allowed_paths=[],
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
        height=HEIGHT,
        theme=theme(),
        css=style(),
    )
    if share and not page.share_url:
        page.close(verbose=False)
        raise ConfigError("--share got no address: is this machine on the internet? Without --share it stays local.")


class Limits:
    """Refuses what the page never sends: uploads, which would stay on the disk, and large bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload"):
            return await PlainTextResponse("There is nothing to upload.", 404)(scope, receive, send)
        size = 0

        async def receive_within_limit() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST_BODY:
                raise HTTPException(413, f"The request is larger than {LARGEST_BODY:,} bytes.")
            return message

        await self.app(scope, receive_within_limit if scope["type"] == "http" else receive, send)


def introduction(page: Any, count: int, password: str, address: str) -> str:
    """The number of models, the address, and the password if there is one."""
    who = f"user {USER}, password {password}" if password else "this machine only"
    ending = "" if in_notebook() else "; Ctrl-C ends it"
    url = page.share_url or page.local_url
    lines = [f"Models     {count} checkpoint{'s' * (count > 1)}", f"Listening  {url}, for {who}{ending}"]
    if ipaddress.ip_address(address).is_unspecified:
        port = page.local_url.rstrip("/").rpartition(":")[2]
        lines.append(f"Network    http://{own_address()}:{port}/, unencrypted: others in that network can read it")
    return "\n".join(lines)


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
