"""Adapters and their base become one checkpoint, as good as any, or nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import exchange.folders
import generate
from common.checkpoint import open_checkpoint
from tests.exchange.test_export_hf import left_behind
from tests.hostile.readers import seal
from tests.models import CHARACTERS, MODERN, bpe, write_adapters, write_model
from tools.merge_lora import main

FORMS = {"gpt2": {}, "tied, no biases": {"tie_embeddings": True, "bias": False}, "modern": MODERN}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_the_merged_checkpoint_says_what_the_adapted_model_says(
    options: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = write_adapters(tmp_path / "lora", tmp_path / "base", **options)
    assert main([str(tmp_path / "lora"), str(tmp_path / "merged")]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"differ from those of the adapted model by (\S+) at most", said)[1]) <= 1e-4
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(tmp_path / "lora")
    assert left_behind(tmp_path / "merged") == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    checkpoint = open_checkpoint(tmp_path / "merged")
    assert checkpoint.lora() is None and checkpoint.model_config() == model.config
    described = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert described["tokenizer_type"] == "bpe" and "chat_template" not in described
    merged, _ = generate.load_checkpoint(checkpoint, "cpu", torch.float32)
    assert described["total_parameters"] == merged.num_parameters()
    tokens = torch.arange(48).view(2, 24)
    with torch.inference_mode():
        torch.testing.assert_close(merged(tokens), model(tokens), atol=1e-4, rtol=0)


def test_a_run_is_merged_and_trained_further(train: Callable, tmp_path: Path) -> None:
    assert train(tmp_path / "base", max_steps=6).code == 0
    assert train(tmp_path / "lora", max_steps=6, init_from=tmp_path / "base", lora_rank=4).code == 0
    assert main([str(tmp_path / "lora"), str(tmp_path / "merged")]) == 0
    result = train(tmp_path / "second", max_steps=6, init_from=tmp_path / "merged", lora_rank=4)
    assert result.code == 0 and "those of " + str(tmp_path / "merged") in result.out


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("no adapters", 4, "has no adapters"),
        ("another base", 4, "holds adapters for other weights"),
        ("another rank", 4, r"adapters do not fit the base: .*\(4, 32\), not \(5, 32\)"),
        ("another tokenizer", 3, "they do not belong together"),
        ("other logits", 4, "the adapted model computes other logits"),
    ],
)
def test_an_error_is_one_sentence_and_leaves_no_files(
    damage: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, out = tmp_path / "lora", tmp_path / "place" / "out"
    write_adapters(folder, tmp_path / "base")
    out.parent.mkdir()
    arguments = [str(folder), str(out)]
    config = json.loads((folder / "config.json").read_text())
    if damage == "no adapters":
        arguments[0] = str(tmp_path / "base")
    elif damage == "another base":
        write_model(tmp_path / "base", std=0.1)
    elif damage == "another rank":
        (folder / "config.json").write_text(json.dumps(config | {"lora": config["lora"] | {"rank": 5}}))
        seal(folder)
    elif damage == "another tokenizer":
        write_adapters(folder, tmp_path / "base", CHARACTERS)
        (folder / "tokenizer.json").write_bytes(bpe().to_json().encode())
        seal(folder)
    elif damage == "other logits":
        original = exchange.folders.load_adapted

        def with_another_scale(checkpoint: object) -> object:
            model = original(checkpoint)
            for block in model.blocks:
                block.attention.qkv.scale = 3.9
            return model

        monkeypatch.setattr(exchange.folders, "load_adapted", with_another_scale)
    before = left_behind(out.parent)
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert re.search(words, err) and err.startswith("error: ") and "Traceback" not in err, err
    assert left_behind(out.parent) == before
