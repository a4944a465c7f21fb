"""`tools/web_demo.py` as a process that may not call anybody, and its page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Python reads this first in every process: it writes down whom the process calls or looks up beside this machine,
# and an address that is nobody's, to which nothing is sent.
LISTENING_IN = """
import os, sys

def hear(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in (None, "", "127.0.0.1", "0.0.0.0", "::1", "localhost", b"127.0.0.1", "192.0.2.1"):
        with open(os.environ["CALLS"], "a") as file:
            print(event, host, file=file)

sys.addaudithook(hear)
"""


@dataclass
class Demo:
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def printed(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    @property
    def port(self) -> int:
        """Waits until it listens."""
        while not (found := re.search(r"Listening  http://[\w.\[\]:]+:(\d+)/, for .*\n", self.printed)):
            assert self.process.poll() is None, self.printed
            time.sleep(0.05)
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """(status, headers, text)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read().decode(errors="replace")


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[Demo]:
    """Start the demo in `folder` on a free port. It calls nobody, prints no traceback of ours and ends at a signal."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hear").mkdir()
    (folder / "hear" / "sitecustomize.py").write_text(LISTENING_IN)
    environment = os.environ | {"PYTHONPATH": str(folder / "hear"), "CALLS": str(folder / "calls")}
    command = [sys.executable, str(ROOT / "tools" / "web_demo.py"), *words, "--port", "0", "--device", "cpu"]
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=folder)
    demo = Demo(process, folder)
    try:
        yield demo
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130, demo.printed
        assert "Traceback" not in demo.printed, demo.printed
        assert not (folder / "calls").exists(), (folder / "calls").read_text()
    finally:
        process.kill()
        process.wait()


class Visitor:
    """Somebody with the page before them; what the browser complains of is an error in the end."""

    def __init__(self, context: Any, demo: Demo) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)  # the first one takes a third of that where both cores are busy
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))
        # It asks at once which checkpoints there are, and chooses one if it finds none chosen in that moment.
        with self.page.expect_response("**/run/predict") as answer:
            self.page.goto(demo.url)
        answer.value.finished()
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.button("Generate").wait_for()

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.page.close()
        if kind is None:
            assert self.complaints == []

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True).locator("visible=true")

    def choose(self, *names: str) -> None:
        """These checkpoints and no others."""
        box = self.page.get_by_label("Checkpoints")
        while (taken := self.page.get_by_role("button", name="Remove")).locator("visible=true").count():
            taken.first.click()
        for name in names:
            box.click()
            box.fill(name)
            self.page.get_by_role("option", name=name).click()
        box.press("Escape")

    def fill(self, **values: str) -> None:
        """Boxes by the beginning of their labels."""
        for name, value in values.items():
            self.page.get_by_label(name).locator("visible=true").first.fill(value)

    def cards(self) -> Any:
        return self.page.locator(".tokens .card:visible")

    def finished(self, note: str = "seed") -> list[str]:
        """The texts of all cards, once none is written any more."""
        self.page.wait_for_function(
            """note => {
                const cards = [...document.querySelectorAll(".tokens .card")].filter((card) => card.offsetParent);
                const ends = (card) => !card.classList.contains("running") && card.innerText.includes(note);
                return cards.length && cards.every(ends);
            }""",
            arg=note,
        )
        return self.texts()

    def texts(self) -> list[str]:
        read = (
            "cards => cards.map(card => [...card.querySelectorAll('.model')].map(turn => turn.textContent).join('|'))"
        )
        texts: list[str] = self.cards().evaluate_all(read)
        return texts

    def count(self) -> int:
        return int(self.page.locator(".turn .token").count())

    def wait_for_tokens(self, least: int) -> None:
        self.page.wait_for_function("n => document.querySelectorAll('.turn .token').length >= n", arg=least)
