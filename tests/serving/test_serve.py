"""`tools/serve.py`: our model behind llama.cpp's server, asked by OpenAI's client as a program would."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import generate
from common.chat import ChatTemplate, Message
from common.checkpoint import Checkpoint
from exchange.gguf_export import find_or_write_gguf
from generation.completion import generate as complete
from generation.sampling import Sampling
from tests.helpers import without_packages
from tests.models import CHARACTERS, MODERN, write_model
from tests.serving.servers import Server, started
from tools import serve

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.extras("gguf", "xllamacpp", "openai")
KEY = "secretSECRETsecret"
QUESTION = [{"role": "user", "content": "What is it?"}]
GREEDY = {"temperature": 0, "max_tokens": 30}
ENDLESS = 100_000  # tokens; a model of characters never ends by itself


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on conversations, and a model of characters that knows of none."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "runs" / "talker" / "checkpoints" / "step_00000007", chat=ChatTemplate(), max_seq_len=128)
    write_model(folder / "letters", CHARACTERS, max_seq_len=2048)
    return folder


@pytest.fixture(scope="module")
def talker(models: Path) -> Iterator[Server]:
    with started(models / "talks", str(models / "runs" / "talker")) as server:
        yield server


@pytest.fixture(scope="module")
def letters(models: Path) -> Iterator[Server]:
    """Serve to other machines, with a key."""
    with started(models / "spells", str(models / "letters"), "--host", "0.0.0.0", key=KEY) as server:
        yield server


def expected(folder: Path, prompt: str, tokens: int) -> str:
    """Return the greedy text of generate.py."""
    model, tokenizer = generate.load_model(folder, "cpu")
    return generate.generate_text(model, tokenizer, prompt, tokens, temperature=0).removeprefix(prompt)


def test_a_completion_is_that_of_generate_whole_and_as_a_stream(letters: Server, models: Path) -> None:
    ask = letters.client().completions.create
    text = expected(models / "letters", "the cat", 30)
    assert ask(model="letters", prompt="the cat", **GREEDY).choices[0].text == text
    parts = list(ask(model="letters", prompt="the cat", stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts if part.choices) == text and len(parts) > 20
    assert len(ask(model="letters", prompt="the cat").choices[0].text) == 200, "generate.py's length"
    stop = text[12:15]
    assert ask(model="letters", prompt="the cat", stop=stop, **GREEDY).choices[0].text == text[: text.index(stop)]


def test_a_chat_is_that_of_generate_whole_and_as_a_stream(talker: Server, models: Path) -> None:
    ask = talker.client().chat.completions.create
    model, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    ids = ChatTemplate().prompt_ids(tokenizer, [Message("user", "What is it?")])
    (answer,) = complete(model, tokenizer, [ids], Sampling(30, temperature=0))
    assert ask(model="talker", messages=QUESTION, **GREEDY).choices[0].message.content.strip() == answer.text.strip()
    parts = ask(model="talker", messages=QUESTION, stream=True, **GREEDY)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed.strip() == answer.text.strip()
    with pytest.raises(openai.APIError):  # two questions in a row, which the template refuses
        ask(model="talker", messages=QUESTION * 2, **GREEDY)


def test_a_model_of_text_continues_the_last_message(letters: Server, models: Path) -> None:
    assert letters.port and "Chat       no" in letters.printed
    asked = [{"role": "user", "content": "the cat"}]
    said = letters.client().chat.completions.create(model="letters", messages=asked, **GREEDY)
    assert said.choices[0].message.content == expected(models / "letters", "the cat", 30)


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(talker: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as refused:
        talker.client().completions.create(model="talker", prompt="the cat " * 200, **GREEDY)
    assert refused.value.type == "exceed_context_size_error" and refused.value.body["n_ctx"] == 128


def test_the_address_is_a_chat_page(talker: Server) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{talker.port}/", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as page:
        assert b"<html" in gzip.decompress(page.read())


def test_two_clients_at_once_and_one_that_does_not_read(letters: Server, models: Path) -> None:
    body = json.dumps({"prompt": "the dog", "max_tokens": ENDLESS, "stream": True})
    with socket.create_connection(("127.0.0.1", letters.port)) as silent:
        silent.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        ask = letters.client().completions.create
        prompts = ["the cat", "a mat"]
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda prompt: ask(model="letters", prompt=prompt, **GREEDY).choices[0].text, prompts)
            assert list(answers) == [expected(models / "letters", prompt, 30) for prompt in prompts]


def test_requests_that_are_never_completed_hold_up_nobody(letters: Server, models: Path) -> None:
    with contextlib.ExitStack() as stack:
        for half in (b"POST /v1/completions HTTP/1.1\r\nHost: 127", b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
            for _ in range(40):
                stack.enter_context(socket.create_connection(("127.0.0.1", letters.port))).sendall(half)
        client = letters.client().with_options(timeout=15, max_retries=0)
        answer = client.completions.create(model="letters", prompt="the cat", **GREEDY)
    assert answer.choices[0].text == expected(models / "letters", "the cat", 30)


def test_suggested_commands_work(talker: Server) -> None:
    assert talker.port and "\nModel      talker, from " in talker.printed
    (command,) = re.findall(r"^Try +(curl .*)", talker.printed, flags=re.MULTILINE)
    if shutil.which("curl"):
        answer = subprocess.run(["sh", "-c", f"{command} -s"], capture_output=True, check=True).stdout
        assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"


def test_a_key_is_needed_where_there_is_one_and_no_page_from_elsewhere_reads(letters: Server, talker: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        letters.client(api_key="wrong").completions.create(model="letters", prompt="a", **GREEDY)
    models = talker.client().with_options(default_headers={"Origin": "http://evil.example"}).models
    assert "Access-Control-Allow-Origin" not in models.with_raw_response.list().headers


def test_the_file_is_written_once_and_again_when_the_weights_are_newer(tmp_path: Path) -> None:
    write_model(tmp_path, CHARACTERS)
    file = find_or_write_gguf(Checkpoint(tmp_path), "letters")
    before = file.read_bytes(), file.stat().st_mtime_ns
    assert find_or_write_gguf(Checkpoint(tmp_path), "letters").stat().st_mtime_ns == before[1]
    write_model(tmp_path, CHARACTERS, std=0.3)
    os.utime(tmp_path / "model.safetensors", ns=(before[1] + 10**9,) * 2)
    assert find_or_write_gguf(Checkpoint(tmp_path), "letters").read_bytes() != before[0]


def test_a_checkpoint_in_a_read_only_folder_is_written_elsewhere_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "shared", CHARACTERS)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    opened = open

    def read_only(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "w" in mode and str(path).startswith(str(tmp_path / "shared")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, *more, **options)

    monkeypatch.setattr("builtins.open", read_only)
    file = find_or_write_gguf(Checkpoint(tmp_path / "shared"), "letters")
    assert file.is_relative_to(tmp_path / "home") and not (tmp_path / "shared" / "model.gguf").exists()
    written = file.stat().st_mtime_ns
    assert find_or_write_gguf(Checkpoint(tmp_path / "shared"), "letters").stat().st_mtime_ns == written


def test_mistakes_are_reported(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "foreign", **MODERN, rope_scaling=(8.0, 1.0, 4.0, 16.0))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, code, said in (
            (["--port", port], 2, f"--port {port} cannot be used (Address already in use)"),
            (["--host", "no.such.host.invalid"], 2, "--host no.such.host.invalid"),
            (["--prot", "1"], 2, "Did you mean --port?"),
            (["--port", "0"], 4, "No trained model"),
            (["foreign", "--port", "0"], 2, "`transformers serve"),
        ):
            assert serve.main(words) == code
            assert said in capsys.readouterr().err
    monkeypatch.setenv("SERVE_API_KEY", "two words")
    assert serve.main(["--port", "0"]) == 2 and "SERVE_API_KEY" in capsys.readouterr().err
    with without_packages("xllamacpp"):
        assert serve.main([]) == 2
    assert "pip install" in capsys.readouterr().err
