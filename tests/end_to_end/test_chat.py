"""Talking to a model of conversations: its template, its memory, and how to do without."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import generate
from common.chat import ChatTemplate, Message
from common.checkpoint import open_checkpoint
from generation.completion import generate as complete
from generation.sampling import Sampling
from tests.helpers import run_script
from tests.models import bpe, random_model, save_checkpoint, write_model
from training.config import Config
from training.optimizer import build_optimizer

FLAGS = ("--device", "cpu", "--max_new_tokens", "6", "--temperature", "0")
GREEDY = Sampling(max_new_tokens=6, temperature=0)


def write_speaker(folder: Path, chat: ChatTemplate | None) -> Path:
    """A random model that says nothing but letters, so that all it says can be printed."""
    tokenizer = bpe()
    model = random_model(tokenizer.vocab_size, max_seq_len=64)
    with torch.no_grad():
        for i in range(tokenizer.vocab_size):
            if i in tokenizer.unused_ids or not tokenizer.decode([i]).strip(" ").isalpha():
                model.head.weight[i] = 0
    optimizer = build_optimizer(model, Config())
    save_checkpoint(folder, model, optimizer, tokenizer.to_json().encode(), tokenizer.kind, {"step": 0}, chat)
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("models") / "chat", ChatTemplate())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("models") / "plain", None)


def answer(checkpoint: Path, *turns: Message, room: int | None = None) -> str:
    """Return the model's answer after these turns."""
    model, tokenizer = generate.load_checkpoint(open_checkpoint(checkpoint), "cpu")
    return complete(model, tokenizer, [ChatTemplate().prompt_ids(tokenizer, turns, room)], GREEDY)[0].text.strip()


def ask(*words: Any) -> SimpleNamespace:
    result = run_script(generate.main, *words, *FLAGS)
    assert result.code == 0, result.err
    return result


def test_a_prompt_is_a_question(chat: Path) -> None:
    expected = answer(chat, Message("user", "the cat"))
    assert ask("--checkpoint", chat, "--prompt", "the cat").out == f"the cat\n{expected}\n"
    assert ask("--checkpoint", chat, "--prompt", "the cat", "--no_stream").out == f"the cat\n{expected}\n"
    row = json.loads(ask("--checkpoint", chat, "--prompt", "the cat", "--json").out)
    assert (row["prompt"], row["completion"]) == ("the cat", expected)


def test_raw_continues_text(chat: Path, plain: Path) -> None:
    raw = ask("--checkpoint", chat, "--prompt", "the cat", "--raw").out
    assert raw == ask("--checkpoint", plain, "--prompt", "the cat").out and raw.startswith("the cat")
    assert raw != ask("--checkpoint", chat, "--prompt", "the cat").out
    assert ask("--checkpoint", chat, "--raw").out  # from nothing


def converse(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, *lines: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Return the answer to each line."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, "/quit"]) + "\n"))
    out = ask("--checkpoint", checkpoint, "--interactive", *flags).out
    return [said.strip() for said in out.split("> ")[1:-1]]


def test_a_conversation_is_remembered_and_can_be_forgotten(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = converse(monkeypatch, chat, "the cat", "a dog", "/reset", "a dog")
    cat, dog = Message("user", "the cat"), Message("user", "a dog")
    first = answer(chat, cat)
    assert said[:2] == [first, answer(chat, cat, Message("assistant", first), dog)]
    assert said[2:4] == ["New conversation.", answer(chat, dog)] and said[1] != said[3]


def test_the_oldest_turns_go_first(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"the cat sat on a mat {word}" for word in ("one", "two", "three", "four")]
    said = converse(monkeypatch, chat, *lines)
    assert sum("the oldest turns are forgotten" in text for text in said) == 1, "told once"
    answers = [text.rpartition(")")[2].strip() if "forgotten" in text else text for text in said]
    turns: list[Message] = []
    for line, found in zip(lines, answers, strict=True):
        turns.append(Message("user", line))
        assert found == answer(chat, *turns, room=64 - 6)
        turns.append(Message("assistant", found))
    assert len(ChatTemplate().prompt_ids(bpe(), turns[:-1])) > 64


def test_an_invalid_template_is_reported(tmp_path: Path) -> None:
    write_model(tmp_path / "model", chat=ChatTemplate())
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": {"user": 1}}))
    (tmp_path / "model" / "manifest.json").unlink()
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "x")
    torch.save(safetensors.torch.load_file(tmp_path / "model" / "x"), tmp_path / "model" / "pytorch_model.bin")
    result = run_script(generate.main, "--checkpoint", tmp_path / "model", "--prompt", "x", *FLAGS)
    assert result.code == 4 and "user is 1; a text is needed" in result.err
