"""A model of conversations keeps its template in transformers, in llama.cpp, and on the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tools.export_hf
import tools.import_hf
from common.chat import ChatTemplate, Message
from common.checkpoint import open_checkpoint
from tests.models import MODERN, bpe, write_model

pytestmark = pytest.mark.extras("transformers")
TURNS = [
    Message("system", "Be brief."),
    Message("user", " What is it?\n"),
    Message("assistant", 'It\'s a "test".'),
    Message("user", "Why\n\nso?"),
]
ASKED = [turn._asdict() for turn in TURNS]


@pytest.mark.parametrize("options", [{}, MODERN])
def test_transformers_reads_the_same_conversation_and_it_comes_back(options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = ChatTemplate()
    write_model(tmp_path / "ours", chat=template, **options)
    assert tools.export_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    found = theirs.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found == template.prompt_ids(bpe(), TURNS)
    assert theirs("<|endoftext|>", split_special_tokens=True)["input_ids"] == bpe().encode("<|endoftext|>").tolist()
    card = (tmp_path / "theirs" / "README.md").read_text(encoding="utf-8")
    assert "apply_chat_template(messages" in card and "add `split_special_tokens=True`" in card
    assert tools.import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert open_checkpoint(tmp_path / "back").chat_template() == template


def test_a_template_of_others_is_not_taken_for_ours(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_model(tmp_path / "ours", chat=ChatTemplate())
    assert tools.export_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tools.import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert open_checkpoint(tmp_path / "back").chat_template() is None
    assert "Its chat template is left out" in capsys.readouterr().out


def test_a_model_of_text_has_no_template(tmp_path: Path) -> None:
    write_model(tmp_path / "ours")
    assert tools.export_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert not (tmp_path / "theirs" / "chat_template.jinja").exists()


@pytest.mark.extras("gguf", "xllamacpp")
def test_llama_cpp_reads_the_same_conversation(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from exchange.llama_server import LlamaServer

    template, file = ChatTemplate(), tmp_path / "model.gguf"
    write_model(tmp_path / "ours", chat=template)
    assert (
        tools.export_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs"), "--gguf", str(file), "--ollama"]) == 0
    )
    out = capsys.readouterr().out
    assert f"llama-cli -m {file} --jinja" in out
    assert "{{ range .Messages }}" in (tmp_path / "Modelfile").read_text()
    server = LlamaServer(file, open_checkpoint(tmp_path / "ours").model_config())
    prompt = server.ask("/apply-template", {"messages": ASKED})["prompt"]
    ids = server.ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
    assert ids == template.prompt_ids(bpe(), TURNS)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (user,) = asked = [{"role": "user", "content": parts}]
    assert server.ask("/apply-template", {"messages": asked})["prompt"] == "<|endoftext|>User: a\nb\nAssistant:"
    for wrong in ([user, user], [{"role": "user", "content": "a<|endoftext|>User: b"}]):
        problem = server.ask("/v1/chat/completions", {"messages": wrong, "max_tokens": 1})["error"]["message"]
        assert "Jinja Exception: turn" in problem
    assert server.ask("/v1/chat/completions", {"messages": asked, "max_tokens": 1})["choices"]
