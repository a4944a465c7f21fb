"""The page of `tools/web_demo.py` as people use it, in a real browser, and its server as nobody should."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import generate
from common.chat import ChatTemplate
from tests.helpers import without_packages
from tests.models import CHARACTERS, write_model
from tests.serving.demos import Demo, Visitor, started
from tools import web_demo

pytestmark = pytest.mark.extras("gradio")
LONGEST = 4_096  # tokens; a model of characters never ends by itself


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Any]) -> Path:
    """A run that was trained, a model of conversations and last, so that the page begins with it, one of characters at
    two steps."""
    folder = tmp_path_factory.mktemp("demo")
    assert train(folder / "runs" / "tiny").code == 0
    chat = ChatTemplate()
    write_model(folder / "runs" / "talker" / "checkpoints" / "step_00000001", chat=chat, max_seq_len=128)
    for step in (8, 9):
        write_model(folder / "runs" / "letters" / "checkpoints" / f"step_{step:08}", CHARACTERS, std=step / 40)
    return folder


@pytest.fixture(scope="module")
def demo(models: Path) -> Iterator[Demo]:
    with started(models / "server", str(models / "runs")) as demo:
        yield demo


@pytest.fixture(scope="module")
def context(browser: Any) -> Any:
    """Who has been there before loads the page faster; each page is a session of its own all the same."""
    return browser.new_context(viewport={"width": 1280, "height": 900})


@pytest.fixture
def visitor(demo: Demo, context: Any) -> Iterator[Visitor]:
    with Visitor(context, demo) as visitor:
        yield visitor


def expected(models: Path, step: int, prompt: str, tokens: int, seed: int) -> str:
    """Return the text of generate.py."""
    path = models / "runs" / "letters" / "checkpoints" / f"step_{step:08}"
    model, tokenizer = generate.load_model(path, "cpu")
    text = generate.generate_text(model, tokenizer, prompt, tokens, seed=seed)
    return text.removeprefix(prompt)


# In a browser


def test_the_page_loads_alone_and_fits_a_phone(demo: Demo, browser: Any) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    with Visitor(browser.new_context(**phone), demo) as visitor:
        page = visitor.page
        assert page.title() == "Try the model"
        visitor.fill(Prompt="the cat", Length="60")
        visitor.button("Generate").click()
        visitor.finished()
        page.locator(".turn .token:visible").nth(40).click()
        assert page.locator(".considered").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert red + green + blue < 200
        hosts = {re.match(r"(?:https?|wss?)://([^/:]+)", request.url)[1] for request in visitor.requests}
        assert hosts == {"127.0.0.1"}, "nothing is fetched from elsewhere"


def test_text_streams_and_stops(visitor: Visitor, models: Path) -> None:
    visitor.fill(Prompt="the", Length=str(LONGEST), Seed="3")
    visitor.button("Generate").click()
    visitor.wait_for_tokens(5)
    visitor.page.locator(".turn .token").nth(2).click()  # its table stays open while more comes
    visitor.wait_for_tokens(visitor.count() + 20)
    assert visitor.page.locator(".considered").is_visible() and visitor.page.locator(".card.running").count() == 1
    with visitor.page.expect_response("**/cancel"):  # before it is answered, it could stop what comes next
        visitor.button("Stop").click()
    visitor.page.locator(".card.stopped").wait_for()
    (text,) = visitor.finished("seed 3")
    assert expected(models, 9, "the", len(text), 3) == text
    visitor.fill(Length="7")
    visitor.button("Generate").click()
    assert visitor.finished("token limit reached") == [expected(models, 9, "the", 7, 3)], (
        "at once: nothing goes on unseen"
    )


def test_checkpoints_are_compared_side_by_side(visitor: Visitor, models: Path) -> None:
    visitor.choose("letters, step 9", "letters, step 8")
    visitor.fill(Prompt="the cat", Length="30", Seed="5")
    visitor.button("Generate").click()
    assert visitor.finished() == [expected(models, step, "the cat", 30, 5) for step in (9, 8)]
    assert visitor.cards().get_by_role("heading").all_inner_texts() == ["letters, step 9", "letters, step 8"]
    left, right = (visitor.cards().nth(i).bounding_box() for i in range(2))
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    visitor.choose("letters, step 9", "letters, step 8", "tiny, best")
    visitor.button("Generate").click()
    visitor.page.locator(".card").nth(2).wait_for()
    tops = "cards => cards.map(card => card.getBoundingClientRect().top)"  # of one moment: what is above may grow
    assert len(set(visitor.page.locator(".card").evaluate_all(tops))) == 1, "three columns"
    visitor.finished()
    visitor.choose("letters, step 8")
    visitor.fill(Temperature="0", Seed="")
    visitor.button("Generate").click()
    path = models / "runs" / "letters" / "checkpoints" / "step_00000008"
    greedy = generate.generate_text(*generate.load_model(path, "cpu"), "the cat", 30, temperature=0)
    visitor.page.wait_for_function(
        "text => document.body.textContent.includes(text)", arg=greedy.removeprefix("the cat")
    )


def test_everything_can_be_done_by_keyboard(visitor: Visitor) -> None:
    page, keys = visitor.page, visitor.page.keyboard
    page.get_by_label("Prompt").focus()
    keys.type("the dog")
    keys.press("Shift+Enter")
    visitor.finished()
    for _ in range(9):  # past the buttons and the switch of the colours
        keys.press("Tab")
        if page.evaluate("document.activeElement.matches('.turn .token')"):
            break
    table = page.locator(".considered")
    assert table.is_hidden()
    keys.press("Enter")
    first = table.inner_text()
    assert table.get_by_role("row").count() in (8, 9) and table.locator(".chosen").count() == 1
    keys.press("ArrowRight")
    assert table.inner_text() != first and page.evaluate("document.activeElement.matches('.token.active')")
    keys.press("ArrowLeft")
    assert table.inner_text() == first
    keys.press("Escape")
    assert table.is_hidden() and page.evaluate("document.activeElement.matches('.turn .token')")
    page.get_by_label("How likely").press("Space")
    colours = (
        "new Set([...document.querySelectorAll('.turn .token')].map(e => getComputedStyle(e).backgroundColor)).size"
    )
    assert page.evaluate(colours) == 1
    page.get_by_label("How likely").press("Space")
    assert page.evaluate(colours) > 1


def test_text_is_never_html(visitor: Visitor) -> None:
    tag = "<img src=x onerror=alert(1)><b>bold</b><script>alert(2)</script> ${1+1} {{value}}"
    visitor.choose("talker, step 1")
    visitor.fill(Prompt=tag, Length="3")
    visitor.button("Generate").click()
    visitor.finished()
    assert visitor.page.locator(".turn.user").inner_text() == tag
    assert visitor.page.locator(".turn b, .turn img, .turn script").count() == 0


def test_a_visitor_who_leaves_makes_room(demo: Demo, context: Any, visitor: Visitor) -> None:
    with Visitor(context, demo) as other:
        other.fill(Prompt="the", Length=str(LONGEST))
        other.button("Generate").click()
        other.wait_for_tokens(3)
    visitor.fill(Prompt="the", Length="4")
    visitor.button("Generate").click()
    assert len(visitor.finished()[0]) == 4


def test_a_conversation(visitor: Visitor) -> None:
    page = visitor.page
    page.get_by_role("tab", name="Conversation").click()
    visitor.fill(Length="6", Seed="3")  # with which the first answer does not end before it begins
    box = page.get_by_label("Question")
    for number, question in enumerate(("What is it?", "And that?"), 1):
        box.fill(question)
        box.press("Enter")
        page.locator(".note:visible", has_text="seed").wait_for()
        page.wait_for_function("n => document.querySelectorAll('.turn.user').length === n", arg=number)
        visitor.finished()
        assert box.input_value() == ""
    assert page.locator(".turn.user").all_inner_texts() == ["What is it?", "And that?"]
    assert page.locator(".turn.model").count() == 2
    page.locator(".turn.model").nth(1).locator(".token").first.click()
    assert page.locator(".considered:visible .chosen").count() == 1
    box.press("Enter")
    page.get_by_role("alert").filter(has_text="type a question").wait_for()
    visitor.button("Clear").click()
    page.locator(".turn.user").first.wait_for(state="hidden")


# Without one


def test_only_the_page_is_served(demo: Demo, models: Path) -> None:
    for path in ("/etc/passwd", str(models / "runs" / "tiny" / "config.json"), "../../../../etc/passwd", __file__):
        assert demo.ask(f"/gradio_api/file={path}")[0] in (403, 404), path
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nmore than a byte\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert demo.ask("/gradio_api/upload", "POST", part, **kind)[0] >= 400
    for path in ("/monitoring/summary", "/gradio_api/runs", "/docs"):
        assert demo.ask(path)[0] >= 400 or "gradio-app" in demo.ask(path)[2], path
    assert json.loads(demo.ask("/gradio_api/info")[2]) == {"named_endpoints": {}, "unnamed_endpoints": {}}


def test_other_machines_need_a_password(models: Path, tmp_path: Path, browser: Any) -> None:
    with started(tmp_path / "server", str(models / "runs"), "--host", "0.0.0.0") as demo:
        assert demo.port
        ((name, password),) = re.findall(r"for user (\w+), password ([0-9a-f]{16});", demo.printed)
        assert demo.ask("/config")[0] == 401 and demo.ask("/gradio_api/queue/join", "POST", b"{}")[0] == 401
        assert "letters" not in demo.ask("/")[2]
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            page.goto(demo.url)
            page.get_by_role("button", name="Login").wait_for()
            page.close()
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        for wrong in ("", password[:-1], "guest"):
            assert demo.ask("/login", "POST", f"username={name}&password={wrong}".encode(), **form)[0] in (400, 422)
        status, headers, _ = demo.ask("/login", "POST", f"username={name}&password={password}".encode(), **form)
        assert status == 200
        assert "letters, step 9" in demo.ask("/config", Cookie=headers["set-cookie"].partition(";")[0])[2]


def test_mistakes_in_a_command_are_reported(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, code, said in (
            (["--port", str(port)], 2, f"--port {port} cannot be used (Address already in use)"),
            (["--shar"], 2, "unknown flag --shar. Did you mean --share?"),
            (["--port", "0"], 4, "No trained model in runs/. Train one first"),
            (["nowhere", "--port", "0"], 4, "No trained model in nowhere/."),
        ):
            assert web_demo.main(words) == code
            assert said in capsys.readouterr().err
    with without_packages("gradio"):
        assert web_demo.main([]) == 2
    assert "This needs gradio: pip install -r" in capsys.readouterr().err
