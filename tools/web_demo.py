"""A page to try trained models on: text as it is made, checkpoints side by side, what each token was chosen from.

    python tools/web_demo.py
    python tools/web_demo.py runs/gpt2_small runs/lora --port 8080
    python tools/web_demo.py --share

In a notebook it stands below the cell: %run tools/web_demo.py
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, UserError, script
from common.flags import Parser
from serving.server import OWN_HOSTS, add_flags, check_flags, listen, own_address

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PACKAGES = ("gradio",)
USER = "guest"
HEIGHT = 900  # pixels, in a notebook
LARGEST_BODY = 1_000_000  # bytes; many times what the page sends


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if in_notebook():
        import gradio

        gradio.close_all(verbose=False)  # the page that this cell opened before
    with listen(arguments.host, arguments.port) as listener:
        address, port = listener.getsockname()[:2]  # free a moment ago, as it is when the page takes it
    from serving.demo_library import Library
    from serving.demo_model import no_checkpoints

    library = Library([Path(place) for place in arguments.places], arguments.device, arguments.max_tokens)
    found = library.find()
    if not found:
        raise no_checkpoints(library.places)
    with contextlib.suppress(UserError):  # what is wrong with it is said on the page
        library.open(str(found[0].path))  # with which the page begins
    from serving.demo_page import make_page

    is_local = ipaddress.ip_address(address).is_loopback and not arguments.share
    password = "" if is_local else secrets.token_hex(8)  # a double click takes it whole
    page = make_page(library, arguments.queue, arguments.timeout)
    launch(page, address, port, password, arguments.share)
    print(introduction(page, len(found), password, address), flush=True)
    if not in_notebook():
        try:
            wait_for_a_signal()
        finally:
            page.close(verbose=False)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tools/web_demo.py",
        usage="%(prog)s [PATH ...] [--FLAG VALUE ...]",
        description="A page to try trained models on. Only this machine is let in; others, with --host or --share, "
        "need a password that is made anew and printed.",
    )
    parser.add_argument(
        "places", nargs="*", metavar="PATH", default=["runs"], help="checkpoints, run folders, folders of runs [runs]"
    )
    add_flags(parser, port=7860, queue=16, max_tokens=1000, timeout=120)
    parser.add_argument("--share", action="store_true", help="an address on the internet, through Gradio's servers")
    arguments = parser.parse_args(argv)
    check_flags(arguments, least_queue=1, packages=PACKAGES)
    return arguments


def launch(page: Any, address: str, port: int, password: str, share: bool) -> None:
    import gradio
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from serving.demo_page import style, theme

    # As in openai_app.make_app; Colab calls this machine by names of its own.
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
        raise ConfigError(
            "--share found no way out: is this machine on the internet? Leave it out to stay on this one."
        )


class Limits:
    """Refuses what the page never sends: files, which would stay on the disk, and large bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.exceptions import HTTPException
        from starlette.responses import PlainTextResponse

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
    who = f"user {USER}, password {password}" if password else "this machine alone"
    ending = "" if in_notebook() else "; Ctrl-C ends it"
    url = page.share_url or page.local_url
    lines = [f"Models     {count} checkpoint{'s' * (count > 1)}", f"Listening  {url}, for {who}{ending}"]
    if ipaddress.ip_address(address).is_unspecified:
        port = page.local_url.rstrip("/").rpartition(":")[2]
        lines.append(f"Network    http://{own_address()}:{port}/, unencrypted: who listens there reads along")
    return "\n".join(lines)


def in_notebook() -> bool:
    """Whether this is a notebook's own process: its cell ends while the page stays."""
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


if __name__ == "__main__":
    sys.exit(main())
