"""`tools/serve.py` as a process, and requests to it that no client would send."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import Forked
from tests.helpers import ROOT


@dataclass
class Server:
    process: Forked
    folder: Path  # of what it prints
    key: str

    @property
    def printed(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    @property
    def port(self) -> int:
        """Waits until it listens."""
        while not (found := re.search(r"Listening  http://[\d.]+:(\d+)/, .*\n(?s:.*)curl .*\n", self.printed)):
            assert self.process.returncode is None, self.printed
            time.sleep(0.05)
        return int(found[1])

    def client(self, **options: Any) -> Any:
        import openai

        options = {"api_key": self.key or "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **options)

    def ask(self, body: Any, path: str = "completions", method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
        """(status, headers, answer) of a request that no client would send."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        bearer = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with contextlib.closing(connection):
            connection.request(method, f"/v1/{path}", body, {"Content-Type": "application/json"} | bearer | headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, answer.headers, json.loads(text) if text.startswith("{") else text

    def send(self, body: dict[str, Any], length: int | None = None) -> socket.socket:
        """A request whose answer nobody waits for; one of a larger `length` never comes to its end."""
        content = json.dumps(body)
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length or len(content)}\r\n\r\n{content}".encode()
        )
        return connection


def print_to_files() -> None:
    """In the process's folder."""
    for number, name in ((1, "out"), (2, "err")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)


@contextlib.contextmanager
def started(folder: Path, *words: str, key: str = "", end: int = signal.SIGTERM) -> Iterator[Server]:
    """`tools/serve.py` in `folder`, on a free port, until the signal `end`; what it prints holds no traceback
    and no key."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("out", "err"):
        (folder / name).touch()
    flags = [*words, "--port", "0", "--device", "cpu"]
    process = Forked(flags, folder, {"SERVE_API_KEY": key}, script=ROOT / "tools" / "serve.py", first=print_to_files)
    server = Server(process, folder, key)
    try:
        yield server
        process.send_signal(end)
        ends_well = end == signal.SIGTERM or signal.getsignal(end) == signal.SIG_IGN  # as in a shell's background
        assert process.wait(10) == (0 if ends_well else 130), server.printed
        assert "Traceback" not in server.printed and (not key or key not in server.printed), server.printed
    finally:
        process.kill()
        process.wait(10)
