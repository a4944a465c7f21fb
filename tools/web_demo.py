"""Try trained models on a page: text as it is generated, checkpoints side by side, alternatives to each token.

    python tools/web_demo.py
    python tools/web_demo.py runs/gpt2_small runs/lora --port 8080
    python tools/web_demo.py --share

In a notebook the page appears below the cell: %run tools/web_demo.py
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.errors import ConfigError, require_packages
from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option
from serving.server import choose_key, find_port

USER = "guest"  # name for the password


@dataclass(frozen=True, config=STRICT)
class Options:
    """Try trained models on a page. By default only this machine can open it. With --host or --share, others need a
    password, which is printed; set it with the environment variable SERVE_API_KEY."""

    places: tuple[str, ...] = option(("runs",), "", "checkpoints, run folders, folders of runs", word="PATH")
    host: NonEmptyText = option("127.0.0.1", "address", "address to listen on; 0.0.0.0: all")
    port: int = option(8000, "address", "port; 0: any free one", ge=0, le=65535)
    share: bool = option(False, "address", "also get an address on the internet, through Gradio's servers")
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "address", "where to compute")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/web_demo.py").settings(argv, Options)
    require_packages("gradio")
    port, key = find_port(options.host, options.port), choose_key(options.host, options.share)
    print(f"Loading    {', '.join(options.places)} ...", flush=True)
    import gradio  # imported here, because --help should not wait for it and torch

    from serving.demo_page import launch, make_page
    from serving.models import Library

    library = Library([Path(place) for place in options.places], options.device)
    library.require_any()
    gradio.close_all(verbose=False)  # a page that this notebook cell opened before
    page = make_page(library)
    launch(page, options.host, port, (USER, key) if key else None, options.share)
    if options.share and not page.share_url:
        raise ConfigError("--share got no address. Check the internet connection, or leave --share out.")
    who = f"user {USER}, password {key}" if key else "this machine only"
    print(f"Listening  {page.share_url or page.local_url}, for {who}; press Ctrl-C to stop", flush=True)
    shell = sys.modules.get("IPython")
    if not shell or not shell.get_ipython():  # a notebook keeps the page open after the cell
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
