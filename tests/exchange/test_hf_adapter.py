"""Adapters are opened by peft on the exported base with nothing else known, and it computes what we compute."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import exchange.hf_adapter
from common.chat import ChatTemplate, Message
from common.checkpoint import open_checkpoint
from tests.exchange.test_export_hf import left_behind
from tests.helpers import snapshot, without_packages
from tests.models import CHARACTERS, MODERN, bpe, write_adapters, write_model
from tokenizer import CharacterTokenizer
from tokenizer_bpe import BPETokenizer
from tools.export_hf import main

QWEN3 = {**MODERN, "embed_norm": False}
FORMS = {
    "gpt2": {},
    "no biases, tied": {"bias": False, "tie_embeddings": True},
    "narrow": {"ff_dim": 40, "dropout": 0.1},
    "modern": QWEN3,
}
MODERN_BLOCK = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]
MODERN_MODULES = ["model.embed_tokens", "lm_head", *MODERN_BLOCK]
GPT2_MODULES = ["transformer.wte", "lm_head", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
MODULES = {False: GPT2_MODULES, True: MODERN_MODULES}

needs_peft = pytest.mark.extras("peft", "transformers")


@needs_peft
@pytest.mark.parametrize("tokenizer", [bpe(), CHARACTERS], ids=["bpe", "characters"])
@pytest.mark.parametrize("form", FORMS)
def test_peft_opens_them_and_computes_the_same(
    form: str, tokenizer: BPETokenizer | CharacterTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_adapters(tmp_path / "lora", tmp_path / "base", tokenizer, **FORMS[form])
    base, out = tmp_path / "exported_base", tmp_path / "exported_lora"
    assert main([str(tmp_path / "base"), str(base)]) == 0
    before = snapshot(base)
    capsys.readouterr()
    assert main([str(tmp_path / "lora"), str(out), "--base", str(base)]) == 0
    printed = capsys.readouterr()
    assert float(re.search(r"by peft, its logits differ by (\S+) at most", printed.out)[1]) <= 1e-4
    assert f'"{base}"), "{out}")' in printed.out and "Warning" not in printed.err
    assert snapshot(base) == before
    assert {*left_behind(out)} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md",
    }  # fmt: skip

    described = json.loads((out / "adapter_config.json").read_text())
    assert described["target_modules"] == MODULES["modern" in form]
    assert described["fan_in_fan_out"] == ("modern" not in form)
    assert described["base_model_name_or_path"] == str(base) and (described["r"], described["lora_alpha"]) == (4, 16)
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.from_numpy(np.resize(tokenizer.encode("the cat sat on a mat"), (2, 24)).astype(np.int64))
    with torch.inference_mode():
        size = tokenizer.vocab_size  # theirs have ids for padding and the unknown beside those of characters
        logits, unadapted = model(tokens), plain(tokens).logits[..., :size]
        theirs = PeftModel.from_pretrained(plain, out)
        torch.testing.assert_close(theirs(tokens).logits[..., :size], logits, atol=1e-4, rtol=0)
        assert (unadapted - logits).abs().max() > 0.1
        if not model.config.tie_embeddings:  # where peft adds to the one tensor twice, as the card says
            merged = theirs.merge_and_unload()
            torch.testing.assert_close(merged(tokens).logits[..., :size], logits, atol=1e-4, rtol=0)
        alone = AutoModelForCausalLM.from_pretrained(out)  # which finds the base by the name in the folder
        torch.testing.assert_close(alone(tokens).logits[..., :size], logits, atol=1e-4, rtol=0)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert ("merge_and_unload" in card) == model.config.tie_embeddings
    ids = AutoTokenizer.from_pretrained(out)("the cat sat")["input_ids"]
    assert ids == tokenizer.encode("the cat sat").tolist()


@needs_peft
def test_the_card_says_how_to_use_them_and_names_nobodys_folders(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base")
    assert main([str(tmp_path / "base"), str(tmp_path / "my_base")]) == 0
    assert main([str(tmp_path / "lora"), str(tmp_path / "my_lora"), "--base", str(tmp_path / "my_base")]) == 0
    card = (tmp_path / "my_lora" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: peft\n") and "# my_lora\n" in card and str(tmp_path) not in card
    assert "PeftModel.from_pretrained" in card and '"my_base"' in card and "| rank, alpha | 4, 16 |" in card


@needs_peft
def test_a_chat_template_goes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = ChatTemplate()
    write_adapters(tmp_path / "lora", tmp_path / "base", chat=template)
    assert main([str(tmp_path / "base"), str(tmp_path / "b")]) == 0
    assert main([str(tmp_path / "lora"), str(tmp_path / "l"), "--base", str(tmp_path / "b")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "l")
    asked = [{"role": "user", "content": "the cat?"}]
    found = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found == template.prompt_ids(bpe(), [Message("user", "the cat?")])
    assert "apply_chat_template" in (tmp_path / "l" / "README.md").read_text(encoding="utf-8")


def half_of(read: Callable) -> Callable:
    return lambda path: {name: tensor / 2 for name, tensor in read(path).items()}


@needs_peft
@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("no base", 2, r"--base \(python tools/export_hf\.py .*base FOLDER"),
        ("no model", 2, "cannot be opened by transformers"),
        ("another base", 2, "is not the base of the adapters"),
        ("other logits", 4, "peft computes other logits"),
        ("no peft", 2, r"needs peft: .*requirements-extras\.txt"),
    ],
)
def test_an_error_is_one_sentence_and_leaves_no_files(
    damage: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base", **QWEN3)
    exported, out = tmp_path / "exported", tmp_path / "place" / "out"
    out.parent.mkdir()
    if damage == "another base":
        write_model(tmp_path / "other", **QWEN3, std=0.1)
    assert main([str(tmp_path / ("other" if damage == "another base" else "base")), str(exported)]) == 0
    arguments = [str(tmp_path / "lora"), str(out), "--base", str(exported)]
    if damage == "no base":
        del arguments[2:]
    elif damage == "no model":
        (exported / "config.json").write_text('{"model_type": "nothing"}')
    elif damage == "other logits":
        monkeypatch.setattr("exchange.hf_adapter.read_safetensors", half_of(exchange.hf_adapter.read_safetensors))
    before = left_behind(out.parent)
    capsys.readouterr()
    with without_packages("peft") if damage == "no peft" else contextlib.nullcontext():
        assert main(arguments) == code
    err = capsys.readouterr().err
    assert re.search(words, err) and err.startswith("error: ") and "Traceback" not in err, err
    assert left_behind(out.parent) == before


@needs_peft
def test_a_base_for_a_whole_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_model(tmp_path / "best")
    assert main([str(tmp_path / "best"), str(tmp_path / "out"), "--base", str(tmp_path / "best")]) == 2
    assert "--base is only for adapters" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.extras("peft", "gguf")
def test_llama_cpp_gets_the_merged_model(tmp_path: Path) -> None:
    from gguf import GGUFReader

    write_adapters(tmp_path / "lora", tmp_path / "base")
    assert main([str(tmp_path / "base"), str(tmp_path / "b")]) == 0
    command = [str(tmp_path / "lora"), str(tmp_path / "l"), "--base", str(tmp_path / "b")]
    assert main([*command, "--gguf", str(tmp_path / "x.gguf"), "--gguf_type", "f32"]) == 0
    written = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "x.gguf").tensors}
    merged = open_checkpoint(tmp_path / "lora").weights()["blocks.0.attention.qkv.weight"]
    np.testing.assert_array_equal(written["blk.0.attn_qkv.weight"].reshape(merged.shape), merged.numpy())
