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
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, UserError, script
from common.flags import Parser
from tools.serving import add_flags, check_flags, listen

PACKAGES = ("gradio",)
USER = "guest"
HEIGHT = 900  # pixels, in a notebook


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if in_notebook():
        import gradio

        gradio.close_all(verbose=False)  # the page that this cell opened before
    with listen(arguments.host, arguments.port) as listener:
        address, port = listener.getsockname()[:2]  # free a moment ago, as it is when the page takes it
    from tools.demo_library import Library
    from tools.demo_model import no_checkpoints

    library = Library([Path(place) for place in arguments.places], arguments.device, arguments.max_tokens)
    found = library.find()
    if not found:
        raise no_checkpoints(library.places)
    with contextlib.suppress(UserError):  # what is wrong with it is said on the page
        library.open(str(found[0].path))  # with which the page begins
    from tools.demo_page import make_page

    is_local = ipaddress.ip_address(address).is_loopback and not arguments.share
    password = "" if is_local else secrets.token_urlsafe(12)
    page = make_page(library, arguments.queue, arguments.timeout)
    launch(page, address, port, password, arguments.share)
    print(introduction(page, len(found), password), flush=True)
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

    from tools.demo_page import style, theme
    from tools.openai_app import OWN_HOSTS

    # As in openai_app.make_app; Colab calls this machine by names of its own.
    hosts = [] if password or gradio.utils.colab_check() else [Middleware(TrustedHostMiddleware, [*OWN_HOSTS, address])]
    page.launch(
        server_name=f"[{address}]" if ":" in address else address,
        server_port=port,
        share=share,
        auth=(USER, password) if password else None,
        app_kwargs={"middleware": hosts},
        allowed_paths=[],
        max_file_size=1,  # byte: there is nothing to upload
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


def introduction(page: Any, count: int, password: str) -> str:
    who = f"user {USER}, password {password}" if password else "this machine alone"
    ending = "" if in_notebook() else "; Ctrl-C ends it"
    url = page.share_url or page.local_url
    return f"Models     {count} checkpoint{'s' * (count > 1)}\nListening  {url}, for {who}{ending}"


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
