"""Try trained models on a page: checkpoints side by side on one prompt, and conversations.

python tools/web_demo.py
python tools/web_demo.py runs/gpt2_small runs/lora --port 8080
python tools/web_demo.py --share
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

from common.errors import require_packages
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

    from serving.demo import make_page

    page = make_page([Path(place) for place in options.places], options.device)
    page.launch(
        server_name=options.host,
        server_port=port,
        share=options.share,
        auth=(USER, key) if key else None,
        # System fonts, so that none is downloaded.
        theme=gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        max_file_size="0b",  # there is nothing to upload
        enable_monitoring=False,
        footer_links=[],
        quiet=True,
        ssr_mode=False,
        prevent_thread_lock=True,
    )
    who = f"user {USER}, password {key}" if key else "this machine only"
    print(
        f"Listening  {page.share_url or f'http://{options.host}:{port}/'}, for {who}; press Ctrl-C to stop", flush=True
    )
    threading.Event().wait()  # until a signal ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
