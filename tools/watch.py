"""Watch runs: losses, learning rate, speed, memory and samples, on a page that follows them while they train.

    python tools/watch.py
    python tools/watch.py runs/gpt2_small runs/gpt2_small_modern
    python tools/watch.py runs
    python tools/watch.py runs/gpt2_small --html gpt2_small.html

The page is for this machine alone. With --html it is one file that needs no server and no network.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, script
from common.files import atomic_write
from common.flags import Parser, add_debug, suggest
from common.formatting import byte_size
from tools.run_reader import RunReader
from tools.serving import OWN_HOSTS, host_name
from training.records import METRICS

TEMPLATE = Path(__file__).with_name("watch.html")
POLL_SECONDS = 2.0  # between two looks of the page


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    readers = [RunReader(folder, name) for folder, name in named(arguments.runs).items()]
    if arguments.html:
        content = page([reader.read() for reader in readers])
        with atomic_write(arguments.html) as file:
            file.write(content)
        print(f"Wrote {arguments.html}: {', '.join(reader.name for reader in readers)}, {byte_size(len(content))}")
        return 0
    with listen(arguments.port, readers) as server:
        print(f"Watching   {', '.join(str(reader.folder) for reader in readers)}")
        print(f"Page       http://127.0.0.1:{server.server_port}/ for this machine alone; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """`runs` are folders that hold runs. Raises ConfigError for what is none."""
    parser = Parser(
        prog="tools/watch.py",
        usage="%(prog)s [RUN ...] [--FLAG VALUE ...]",
        description="Watch runs on a page that follows them: losses, learning rate, speed, memory, samples. Several "
        "runs lie over each other, by step, tokens or time.",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folder, or one of runs [the newest in runs/]"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page into one file and end")
    parser.add_argument("--port", type=int, default=8001, metavar="N", help="0: any that is free [8001]")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port is {arguments.port}; 0 to 65535 is allowed.")
    if arguments.html and arguments.html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html is {arguments.html}; the name of an .html file is needed, which is written anew.")
    if arguments.html and not arguments.html.parent.is_dir():
        raise ConfigError(f"There is no folder {arguments.html.parent} to write {arguments.html.name} into (--html).")
    given = arguments.runs or [newest_run(Path("runs"))]
    arguments.runs = [run for folder in given for run in runs_in(folder)]
    return arguments


def newest_run(runs: Path) -> Path:
    """The run that reported last."""
    metrics = list(runs.glob(f"*/{METRICS}"))
    if not metrics:
        raise ConfigError(f"There is no run in {runs.absolute()} that has reported; name one: tools/watch.py RUN")
    return max(metrics, key=lambda path: path.stat().st_mtime_ns).parent


def runs_in(folder: Path) -> list[Path]:
    """The run that a folder is, or the runs in it that have reported, by name. Raises ConfigError if there is none."""
    if not folder.is_dir():
        there = [path.name for path in folder.absolute().parent.glob("*/") if (path / "config.json").exists()]
        near = suggest(folder.name, there, prefix=f"{folder.parent}/")
        raise ConfigError(f"There is no run folder {folder}.{near}")
    if any((folder / name).exists() for name in (METRICS, "config.json")):
        return [folder]
    if inside := sorted(path.parent for path in folder.glob(f"*/{METRICS}")):
        return inside
    raise ConfigError(f"{folder} holds no run: there is no {METRICS} and no config.json in it.")


def named(folders: Sequence[Path]) -> dict[Path, str]:
    """Each folder once, and a name for it: its own, or its whole path if another folder has that name too."""
    whole: dict[Path, Path] = {}
    for folder in folders:
        whole.setdefault(folder.resolve(), folder)
    names = [path.name for path in whole]
    return {folder: path.name if names.count(path.name) == 1 else str(folder) for path, folder in whole.items()}


def page(runs: list[dict[str, Any]], poll_seconds: float | None = None) -> bytes:
    """The page of runs as they are; one that looks for news asks the server it came from."""
    template = TEMPLATE.read_text(encoding="utf-8")
    (code,) = re.findall("<script>(.*?)</script>", template, flags=re.DOTALL)
    # By its hash alone: whatever text gets into the page, no other code of it is run.
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    # In HTML nothing but a < can end what is inside a script element.
    data = json.dumps({"runs": runs, "read_at": time.time(), "poll_seconds": poll_seconds}).replace("<", "\\u003c")
    return template.replace("{{code_hash}}", allowed, 1).replace("{{data}}", data, 1).encode()


class Server(ThreadingHTTPServer):
    """Answers the page and its data, as the runs are at that moment."""

    def __init__(self, port: int, readers: list[RunReader]):
        self.readers = readers
        self.reading = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    def read(self) -> list[dict[str, Any]]:
        with self.reading:
            return [reader.read() for reader in self.readers]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a page that was closed
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds, of a browser that says no more

    def do_GET(self) -> None:
        server = cast(Server, self.server)
        # A page from elsewhere could have its own name lead here, and read what it is told (DNS rebinding).
        if host_name(self.headers.get("Host", "")) not in OWN_HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "Ask for 127.0.0.1")
        elif self.path == "/":
            self.answer(page(server.read(), POLL_SECONDS), "text/html; charset=utf-8")
        elif self.path == "/runs.json":
            self.answer(json.dumps(server.read()).encode(), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def answer(self, content: bytes, kind: str) -> None:
        """Nothing but the status, if the browser has this already."""
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        is_known = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        if not is_known:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not is_known:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def listen(port: int, readers: list[RunReader]) -> Server:
    """Raises ConfigError for a port that cannot be had."""
    try:
        return Server(port, readers)
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"Port {port} cannot be listened on ({reason}); choose another with --port.") from None


if __name__ == "__main__":
    sys.exit(main())
