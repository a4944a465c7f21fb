"""`tools/serve.py` or `tools/web_demo.py` as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
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
    key: str = ""

    @property
    def printed(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    @property
    def port(self) -> int:
        """Waits until it listens."""
        while not (found := re.search(r"(?s)Listening  http://[\d.]+:(\d+)/.*\n", self.printed)):
            assert self.process.returncode is None, self.printed
            time.sleep(0.05)
        return int(found[1])

    def client(self, **options: Any) -> Any:
        import openai

        options = {"api_key": self.key or "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **options)


def print_to_files() -> None:
    """Redirect stdout and stderr to files in the process's folder."""
    for number, name in ((1, "out"), (2, "err")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)


@contextlib.contextmanager
def started(folder: Path, *words: str, key: str = "", tool: str = "serve") -> Iterator[Server]:
    """A tool in `folder`, on a free port, until Ctrl-C."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("out", "err"):
        (folder / name).touch()
    environment = {"SERVE_API_KEY": key}
    process = Forked(
        [*words, "--port", "0"], folder, environment, script=ROOT / "tools" / f"{tool}.py", first=print_to_files
    )
    server = Server(process, folder, key)
    try:
        yield server
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == (0 if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else 130), server.printed
        assert "Traceback" not in server.printed, server.printed
    finally:
        process.kill()
        process.wait(20)
