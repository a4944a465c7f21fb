"""The page of runs that `tools/watch.py` shows, and the server that keeps it up to date."""

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
from serving.server import OWN_HOSTS, host_name
from training.telling.run_reader import RunReader

TEMPLATE = Path(__file__).with_name("watch.html")
POLL_SECONDS = 2.0  # between two looks of the page


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
