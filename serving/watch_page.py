"""The page of `tools/watch.py`, and the server that updates it. Does not import torch."""

from __future__ import annotations

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

from common.errors import ConfigError
from common.files import atomic_write
from common.output import byte_size
from common.validation import suggest
from serving.run_reader import RunReader
from serving.server import is_local
from training.records import CONFIG, METRICS, find_records

TEMPLATE = Path(__file__).with_name("watch.html")
POLL_SECONDS = 2.0


def find_last_reported(runs: Path) -> Path:
    """Return the run that reported last. Raises ConfigError if there is none."""
    metrics = list(runs.glob(f"*/{METRICS}"))
    if not metrics:
        raise ConfigError(f"No run in {runs.absolute()} has reported yet. Name one: tools/watch.py RUN")
    return max(metrics, key=lambda path: path.stat().st_mtime_ns).parent


def find_runs(folder: Path) -> list[Path]:
    """Return the run `folder`, or the runs in it that have reported, by name. Raises ConfigError if there is none."""
    if not folder.is_dir():
        there = [path.name for path in folder.absolute().parent.glob("*/") if (path / "config.json").exists()]
        near = suggest(folder.name, there, prefix=f"{folder.parent}/")
        raise ConfigError(f"No run folder {folder}.{near}")
    if any((find_records(folder) / name).exists() for name in (METRICS, CONFIG)):
        return [folder]
    if inside := sorted(path for path in folder.iterdir() if (find_records(path) / METRICS).exists()):
        return inside
    raise ConfigError(f"{folder} is not a run: it has neither {METRICS} nor {CONFIG}.")


def name_runs(folders: Sequence[Path]) -> dict[Path, str]:
    """Return {folder: name} without duplicates, with the whole path if several folders have that name."""
    whole: dict[Path, Path] = {}
    for folder in folders:
        whole.setdefault(folder.resolve(), folder)
    names = [path.name for path in whole]
    return {folder: path.name if names.count(path.name) == 1 else str(folder) for path, folder in whole.items()}


def html_file(name: str | None) -> Path | None:
    """Return the path of --html. Raises ConfigError if it cannot be written."""
    html = Path(name) if name else None
    if html and html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html is {html}, but it should end in .html. An existing file is replaced.")
    if html and not html.parent.is_dir():
        raise ConfigError(f"The folder of --html {html} does not exist. Create it first.")
    return html


def write_page(html: Path, readers: Sequence[RunReader], comparison: dict[str, Any] | None = None) -> None:
    """Write the page of runs to one file, and print so."""
    content = page([reader.read() for reader in readers], comparison=comparison)
    with atomic_write(html) as file:
        file.write(content)
    print(f"Wrote {html}: {', '.join(reader.name for reader in readers)}, {byte_size(len(content))}")


def page(
    runs: list[dict[str, Any]], poll_seconds: float | None = None, comparison: dict[str, Any] | None = None
) -> bytes:
    """Return the page of runs. With `poll_seconds` it asks its server for updates. `comparison`: sentences and tables
    of tools/compare.py."""
    template = TEMPLATE.read_text(encoding="utf-8")
    (code,) = re.findall("<script>(.*?)</script>", template, flags=re.DOTALL)
    # The script is allowed by its hash, so no other code runs, whatever text is in the page.
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    # Only a < can end the content of a script element.
    content = {"runs": runs, "read_at": time.time(), "poll_seconds": poll_seconds, "comparison": comparison}
    data = json.dumps(content).replace("<", "\\u003c")
    return template.replace("{{code_hash}}", allowed, 1).replace("{{data}}", data, 1).encode()


class Server(ThreadingHTTPServer):
    """Serves the page with the current state of the runs."""

    def __init__(self, port: int, readers: list[RunReader]):
        self.readers = readers
        self.reading = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    def read(self) -> list[dict[str, Any]]:
        with self.reading:
            return [reader.read() for reader in self.readers]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the page was closed
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without data from the browser

    def do_GET(self) -> None:
        server = cast(Server, self.server)
        if not is_local(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "Ask for 127.0.0.1")
        elif self.path == "/":
            self.answer(page(server.read(), POLL_SECONDS), "text/html; charset=utf-8")
        elif self.path == "/runs.json":
            self.answer(json.dumps(server.read()).encode(), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def answer(self, content: bytes, kind: str) -> None:
        """Send the content, or only the status if the browser already has it."""
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
    """Start the server. Raises ConfigError if the port cannot be used."""
    try:
        return Server(port, readers)
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"Port {port} cannot be used ({reason}). Choose another with --port.") from None
