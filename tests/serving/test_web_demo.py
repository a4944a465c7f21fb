"""The page of `tools/web_demo.py` in a real browser."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import generate
from common.chat import ChatTemplate, Message
from generation.completion import generate as complete
from generation.sampling import Sampling
from tests.helpers import without_packages
from tests.models import CHARACTERS, write_model
from tests.serving.servers import Server, started
from tools import web_demo

pytestmark = pytest.mark.extras("gradio")
STEPS = [f"letters/checkpoints/step_0000000{step}" for step in (9, 8)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model and, written last, a model of characters at two steps."""
    folder = tmp_path_factory.mktemp("demo") / "runs"
    write_model(folder / "talker" / "best", chat=ChatTemplate(), max_seq_len=128)
    for step in reversed(STEPS):
        write_model(folder / step, CHARACTERS, std=int(step[-1]) / 40)
    return folder


@pytest.fixture(scope="module")
def demo(runs: Path) -> Iterator[Server]:
    with started(runs.parent / "server", str(runs), tool="web_demo") as demo:
        yield demo


class Visitor:
    """Somebody with the page before them."""

    def __init__(self, browser: Any, demo: Server, **screen: Any) -> None:
        self.page = browser.new_page(**screen)
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2].partition(":")[0]))
        self.page.goto(f"http://127.0.0.1:{demo.port}/")
        self.page.get_by_role("button", name="Generate").wait_for()

    def set(self, label: str, value: object) -> None:
        if not self.page.get_by_label(label).locator("visible=true").count():
            self.page.get_by_role("button", name="Settings").click()
        self.fill(self.page.get_by_label(label).locator("visible=true").first, str(value))

    def fill(self, field: Any, text: str) -> None:
        """Fill a field and see that it keeps the text: soon after it has appeared, it takes its first one once more."""
        field.fill(text)
        for _ in range(5):
            self.page.wait_for_timeout(100)
            if field.input_value() != text:
                field.fill(text)

    def choose(self, *paths: str) -> None:
        box = self.page.get_by_role("combobox", name="Checkpoints")
        for path in paths:
            box.click()
            box.fill(path)
            self.page.get_by_role("option", name=path).click()
        box.press("Escape")

    def generate(self, prompt: str) -> None:
        self.page.get_by_label("Prompt").fill(prompt)
        self.page.get_by_role("button", name="Generate").click()

    def see(self, text: str) -> None:
        """Wait for a text. Each token is an element of its own, so white space does not count."""
        squeezed = "".join(text.split())
        self.page.wait_for_function(
            "text => document.body.textContent.replace(/\\s/g, '').includes(text)", arg=squeezed
        )


@pytest.fixture
def visitor(demo: Server, browser: Any) -> Iterator[Visitor]:
    visitor = Visitor(browser, demo, viewport={"width": 1280, "height": 900})
    yield visitor
    visitor.page.close()
    assert visitor.complaints == [] and visitor.hosts == {"127.0.0.1"}, "nothing is fetched from elsewhere"


def test_checkpoints_are_compared_side_by_side(visitor: Visitor, runs: Path) -> None:
    visitor.choose(STEPS[1])
    visitor.set("Length", 30)
    visitor.set("Seed", 5)
    visitor.generate("the cat\nand")
    for step in STEPS:
        text = generate.generate_text(*generate.load_model(runs / step, "cpu"), "the cat\nand", 30, seed=5)
        visitor.see(text)
        visitor.see(f"{step}: 30 tokens")
    left, right = (visitor.page.get_by_text(f"{step}: 30 tokens").bounding_box() for step in STEPS)
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    visitor.see("below 1%")


def test_it_works_on_a_phone(demo: Server, browser: Any) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    visitor = Visitor(browser, demo, **phone)
    visitor.generate("the cat")
    visitor.see("200 tokens")
    assert visitor.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"


def test_stop_makes_room_for_the_next_text(visitor: Visitor) -> None:
    visitor.set("Length", 1000)
    visitor.generate("the")
    visitor.see("tokens/s")
    visitor.page.get_by_role("button", name="Stop").locator("visible=true").click()
    visitor.set("Length", 4)
    visitor.generate("the")
    visitor.see("4 tokens, ")


def test_a_character_that_the_model_does_not_know_is_said_beside_its_name(visitor: Visitor) -> None:
    visitor.generate("ÄÖ")
    visitor.see("2 characters are not in the vocabulary")


def test_a_seed_is_another_each_time_or_the_one_that_was_typed(visitor: Visitor) -> None:
    seeds = set()
    for length in (4, 5):
        visitor.set("Length", length)
        visitor.generate("the")
        visitor.see(f"{length} tokens, ")
        seeds |= set(re.findall(r"seed (\d+)", visitor.page.evaluate("document.body.innerText")))
    assert len(seeds) == 2
    visitor.set("Seed", "seven")
    visitor.generate("the")
    visitor.see("The seed is a whole number")


def test_a_conversation_is_that_of_generate(visitor: Visitor, runs: Path) -> None:
    model, tokenizer = generate.load_model(runs / "talker/best", "cpu")
    ids = ChatTemplate().prompt_ids(tokenizer, [Message("user", "What is it?")])
    texts = (complete(model, tokenizer, [ids], Sampling(9, seed=seed))[0].text.strip() for seed in range(100))
    seed, text = next((seed, text) for seed, text in enumerate(texts) if text.isascii() and len(text) > 3)
    visitor.set("Length", 9)
    visitor.set("Seed", seed)
    visitor.page.get_by_role("tab", name="Conversation").click()
    box = visitor.page.get_by_role("textbox").locator("visible=true").last
    visitor.fill(box, "What is it?")
    box.press("Enter")
    visitor.see(text)
    box.fill("And that?")
    box.press("Enter")
    visitor.page.get_by_test_id("user").nth(1).wait_for()


def test_other_machines_need_a_password(runs: Path, tmp_path: Path) -> None:
    with started(tmp_path / "server", str(runs), "--host", "0.0.0.0", tool="web_demo") as demo:
        connection = http.client.HTTPConnection("127.0.0.1", demo.port, timeout=30)
        connection.request("GET", "/config")
        assert connection.getresponse().status == 401
        assert re.search(r"for user guest, password [0-9a-f]{16}", demo.printed)


def test_mistakes_in_a_command_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words, code, message in (
            (["--port", str(taken.getsockname()[1])], 2, "cannot be used (Address already in use)"),
            (["--port", "0"], 4, "No trained model in runs/. Train one first"),
        ):
            assert web_demo.main(words) == code
            assert message in capsys.readouterr().err
    with without_packages("gradio"):
        assert web_demo.main([]) == 2
    assert "This needs gradio: pip install -r" in capsys.readouterr().err
