"""Adapters change what a model says by what they are, and its own weights not at all."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import open_checkpoint, select_stored_weights
from common.errors import CheckpointError
from common.files import sha256_file
from common.lora import TARGET_MODULES, LoRA, adapters_of, add_adapters, load_adapters, merge
from common.validation import build
from model import TransformerLanguageModel
from tests.hostile.readers import seal
from tests.models import MODERN, bpe, random_model, write_adapters, write_model

ALL = tuple(TARGET_MODULES)
FORMS = {"gpt2": {}, "tied": {"tie_embeddings": True}, "modern": MODERN}
TOKENS = torch.arange(48).view(2, 24) * 5


def lora(rank: int = 4, targets: tuple[str, ...] = ALL, **changes: Any) -> LoRA:
    return dataclasses.replace(LoRA(rank, 16.0, targets, "base", "0" * 64), **changes)


def adapted(targets: tuple[str, ...] = ALL, trained: bool = True, **options: Any) -> TransformerLanguageModel:
    """A model with adapters, as they are at the start or with random numbers in both."""
    model = random_model(300, **options)
    add_adapters(model, lora(targets=targets))
    if trained:
        with torch.no_grad():
            for adapter in adapters_of(model).values():
                adapter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("targets", [ALL, *((target,) for target in ALL)])
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_merged_it_is_an_ordinary_model_that_says_the_same(options: dict, targets: tuple[str, ...]) -> None:
    model, merged = adapted(targets, **options), random_model(300, **options)
    with torch.inference_mode():
        before = merged(TOKENS)
        merged.load_weights(
            merge(select_stored_weights(merged), adapters_of(model), lora(targets=targets), merged.config)
        )
        torch.testing.assert_close(merged(TOKENS), model(TOKENS), atol=1e-4, rtol=0)
        assert (merged(TOKENS) - before).abs().max() > 0.1


def test_a_cache_holds_what_the_adapters_say() -> None:
    """As needed for answers to prompts during training."""
    from generation.completion import generate
    from generation.sampling import Sampling

    model, merged = adapted(), random_model(300)
    merged.load_weights(merge(select_stored_weights(merged), adapters_of(model), lora(), model.config))
    texts = [generate(each, bpe(), ["the cat"], Sampling(10, 0.0))[0].text for each in (model, merged)]
    assert texts[0] == texts[1]


def test_adapters_of_another_model_are_refused_by_name() -> None:
    model = adapted()
    good = {name: tensor.clone() for name, tensor in adapters_of(model).items()}
    name = "blocks.1.attention.qkv.lora_A"
    for bad, said in (
        ({key: tensor for key, tensor in good.items() if key != name}, f"{name} is missing"),
        (good | {"blocks.2.attention.qkv.lora_A": good[name]}, "blocks.2.attention.qkv.lora_A is unknown"),
        (good | {"head.weight": good[name]}, "head.weight is unknown"),
        (good | {name: good[name][:2]}, r"\(2, 32\), not \(4, 32\)"),
        (good | {name: good[name].long()}, "torch.int64"),
    ):
        with pytest.raises(ValueError, match=said):
            load_adapters(model, bad)
        with pytest.raises(ValueError, match=said):
            merge(select_stored_weights(random_model(300)), bad, lora(), model.config)
    with pytest.raises(ValueError, match="not finite"):
        load_adapters(model, good | {name: torch.full_like(good[name], torch.nan)})
    load_adapters(model, good)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0}, {"rank": 4.0}, {"rank": "4"}, {"rank": 10**9}, {"alpha": 0}, {"alpha": "16"}, {"alpha": None},
        {"targets": []}, {"targets": ["head"]}, {"targets": [["attention"]]}, {"base": ""},
        {"base": 3}, {"base_sha256": "abc"}, {"base_sha256": None}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_description_is_refused(change: dict) -> None:
    assert build(LoRA, lora().to_dict()) == lora()
    with pytest.raises(ValueError, match=next(iter(change))):
        build(LoRA, lora().to_dict() | change)


# The base of a checkpoint


def test_a_checkpoint_of_adapters_opens_as_the_merged_model(tmp_path: Path) -> None:
    model = write_adapters(tmp_path / "lora", tmp_path / "base")
    checkpoint = open_checkpoint(tmp_path / "lora")
    assert not (tmp_path / "lora" / "model.safetensors").exists()
    assert (tmp_path / "lora" / "adapter.safetensors").stat().st_size < (
        (tmp_path / "base" / "model.safetensors").stat().st_size / 2
    )
    assert checkpoint.model_config().to_dict() == model.config.to_dict()
    merged = TransformerLanguageModel(checkpoint.trusted_config()).eval()
    checkpoint.load_weights(merged)
    with torch.inference_mode():
        torch.testing.assert_close(merged(TOKENS), model(TOKENS), atol=1e-4, rtol=0)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for adapter in adapters_of(again).values():
            adapter.zero_()
    checkpoint.load_weights(again)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))


def test_the_base_is_found_from_the_current_folder_and_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    write_adapters(Path("runs/lora/best"), Path("pretrained/base"))
    assert open_checkpoint("runs/lora/best").weights()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").rename(tmp_path / "moved")
    assert open_checkpoint("moved/runs/lora/best").weights()
    monkeypatch.chdir(tmp_path / "moved" / "runs")
    assert open_checkpoint("lora/best").weights()


def test_another_base_of_the_same_name_does_not_hide_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    write_adapters(Path("runs/lora/best"), Path("runs/base"))
    monkeypatch.chdir(tmp_path / "other")
    with torch.random.fork_rng():
        write_model(Path("runs/base"), std=0.1)
    assert open_checkpoint(tmp_path / "one" / "runs" / "lora" / "best").weights()


def test_a_missing_or_another_base_is_an_error_that_names_both(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base")
    checkpoint = open_checkpoint(tmp_path / "lora")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="Restore them") as gone:
        checkpoint.weights()
    with torch.random.fork_rng():
        write_model(tmp_path / "base", std=0.1)
    with pytest.raises(CheckpointError, match="holds adapters for other weights") as other:
        checkpoint.weights(shapes_only=True)
    for raised in (gone, other):
        assert str(tmp_path / "lora") in str(raised.value) and str(tmp_path / "base") in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_base_of_the_blog(tmp_path: Path) -> None:
    """Weights by torch.save, with torch.compile's prefix."""
    base = random_model(300)
    (tmp_path / "base").mkdir()
    file = tmp_path / "base" / "pytorch_model.bin"
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in base.state_dict().items()}, file)
    described = lora(base=str(tmp_path / "base"), base_sha256=sha256_file(file))
    model = write_adapters(tmp_path / "lora", lora=described)
    merged = TransformerLanguageModel(base.config).eval()
    open_checkpoint(tmp_path / "lora").load_weights(merged)
    with torch.inference_mode():
        torch.testing.assert_close(merged(TOKENS), model(TOKENS), atol=1e-4, rtol=0)


def test_adapters_without_a_description_are_refused(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base")
    file = tmp_path / "lora" / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "lora"}))
    seal(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"has no .lora., which describes adapter\.safetensors"):
        open_checkpoint(tmp_path / "lora").trusted_config()
