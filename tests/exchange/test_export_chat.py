"""A model of conversations keeps its template in transformers, in llama.cpp, and on the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tools.export_hf
import tools.import_hf
from common.chat import CHATML_TOKENS, ChatML, ChatTemplate, Message
from common.checkpoint import open_checkpoint
from common.files import read_json
from tests.models import MODERN, bpe, write_model
from tokenizer_bpe import BPETokenizer

pytestmark = pytest.mark.extras("transformers")
TURNS = [
    Message("system", "Be brief."),
    Message("user", " What is it?\n"),
    Message("assistant", 'It\'s a "test".'),
    Message("user", "Why\n\nso?"),
]
QWEN3 = {**MODERN, "activation": "swiglu"}
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
    assert "apply_chat_template(messages" in card and "`split_special_tokens=True`" in card
    assert tools.import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert open_checkpoint(tmp_path / "back").chat_template() == template


def test_a_template_of_others_is_not_taken_for_ours(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_model(tmp_path / "ours", chat=ChatTemplate())
    assert tools.export_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tools.import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert open_checkpoint(tmp_path / "back").chat_template() is None
    assert "Its chat template is not supported" in capsys.readouterr().out


# As chat models of others have it: the first with a system's turn of its own, the second thinking aloud in old answers.
CHATML = """\
{%- if messages[0].role != 'system' -%}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


@pytest.mark.parametrize(
    ("jinja", "template"),
    [
        (CHATML, ChatML("You are kind.")),
        (CHATML[CHATML.index("{%- for") :], ChatML()),
        (CHATML.replace("message.content +", "message.content + ' ' +"), None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_chatml_of_others_is_kept(
    jinja: str, template: ChatML | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from transformers import AutoTokenizer

    tokenizer = with_chatml_tokens()
    write_model(tmp_path / "ours", tokenizer, **QWEN3)
    assert tools.export_hf.main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    config = tmp_path / "theirs" / "tokenizer_config.json"
    values = read_json(config, ValueError) | {"chat_template": jinja}  # older folders have it there
    del values["split_special_tokens"]  # ours alone have it
    config.write_text(json.dumps(values))
    assert tools.import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert open_checkpoint(tmp_path / "back").chat_template() == template
    said = capsys.readouterr().out
    assert ("generation uses its chat template" if template else "Its chat template is not supported") in said
    if template is None:
        return
    assert tools.export_hf.main([str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again")
    found = theirs.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found == template.prompt_ids(tokenizer, TURNS)
    ends = read_json(tmp_path / "again" / "generation_config.json", ValueError)["eos_token_id"]
    assert ends == sorted(tokenizer.special_ids[name] for name in ("<|endoftext|>", "<|im_end|>"))


@pytest.mark.extras("gguf", "xllamacpp")
def test_llama_cpp_reads_chatml(tmp_path: Path) -> None:
    from tests.exchange.llama_server import LlamaServer

    template, tokenizer, file = ChatML("You are kind."), with_chatml_tokens(), tmp_path / "model.gguf"
    write_model(tmp_path / "ours", tokenizer, chat=template, **QWEN3)
    command = [str(tmp_path / "ours"), str(tmp_path / "theirs"), "--gguf", str(file), "--ollama", "--gguf_type", "f32"]
    assert tools.export_hf.main(command) == 0
    modelfile = (tmp_path / "Modelfile").read_text()
    assert 'PARAMETER stop "<|im_end|>"' in modelfile and 'SYSTEM """You are kind."""' in modelfile
    server = LlamaServer(file, open_checkpoint(tmp_path / "ours").model_config())
    for asked in (TURNS, TURNS[1:]):
        prompt = server.ask("/apply-template", {"messages": [turn._asdict() for turn in asked]})["prompt"]
        ids = server.ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
        assert ids == template.prompt_ids(tokenizer, asked)


def with_chatml_tokens() -> BPETokenizer:
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(bpe().to_json())
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in CHATML_TOKENS])
    return BPETokenizer(backend)


@pytest.mark.extras("gguf", "xllamacpp")
def test_llama_cpp_reads_the_same_conversation(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from tests.exchange.llama_server import LlamaServer

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
