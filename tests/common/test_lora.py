"""Adapters change what a model says by what they are, and its own weights not at all."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import open_checkpoint, stored_weights
from common.errors import CheckpointError
from common.files import sha256_file
from common.lora import TARGETS, AdaptedLinear, LoRA, adapters_of, add_adapters, find_base, load_adapters, merge
from common.validation import build
from model import TransformerLanguageModel
from tests.hostile.readers import seal
from tests.models import MODERN, bpe, random_model, write_adapters, write_model

ALL = tuple(TARGETS)
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


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_at_first_the_adapted_model_is_its_base(options: dict) -> None:
    model, base = adapted(trained=False, **options), random_model(300, **options)
    with torch.inference_mode():
        assert torch.equal(model(TOKENS), base(TOKENS))
    ours, theirs = model.state_dict(), base.state_dict()
    assert [name for name in ours if "lora" not in name] == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    a = [tensor for name, tensor in adapters_of(model).items() if name.endswith("lora_A")]
    bound = max(tensor.size(1) ** -0.5 for tensor in a)  # kaiming_uniform with a = sqrt(5)
    assert all(0.9 * tensor.size(1) ** -0.5 < tensor.abs().max() <= bound for tensor in a)


@pytest.mark.parametrize("targets", [ALL, *((target,) for target in ALL)])
def test_gradients_are_for_adapters_alone(targets: tuple[str, ...]) -> None:
    model = adapted(targets)
    model(TOKENS, TOKENS).backward()
    modules = [module for target in targets for module in TARGETS[target]]
    parts = [f"blocks.{i}.{module}" for i in range(2) for module in modules]
    parts += ["token_embedding", "head"] if "embeddings" in targets else []
    names = {f"{part}.lora_{kind}" for part in parts for kind in "AB"}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == names == set(adapters_of(model))
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)
    assert model.num_parameters(trained_only=True) == sum(p.numel() for p in adapters_of(model).values())


@pytest.mark.parametrize("targets", [ALL, *((target,) for target in ALL)])
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_merged_it_is_an_ordinary_model_that_says_the_same(options: dict, targets: tuple[str, ...]) -> None:
    model, merged = adapted(targets, **options), random_model(300, **options)
    with torch.inference_mode():
        before = merged(TOKENS)
        merged.load_weights(merge(stored_weights(merged), adapters_of(model), lora(targets=targets), merged.config))
        torch.testing.assert_close(merged(TOKENS), model(TOKENS), atol=1e-4, rtol=0)
        assert (merged(TOKENS) - before).abs().max() > 0.1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_checkpointing_changes_nothing(dropout: float) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = adapted(dropout=dropout).train()
        model.activation_checkpointing = checkpointing
        torch.manual_seed(1)
        model(TOKENS, TOKENS).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_under_autocast_the_adapters_gradients_are_fp32_and_near_those_without() -> None:
    model = adapted()
    model(TOKENS, TOKENS).backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, TOKENS).backward()
    near = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(exact, near, strict=True):
        assert other.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.99


def test_a_cache_holds_what_the_adapters_say() -> None:
    """For answers to prompts in the middle of a training."""
    from generation.completion import generate
    from generation.sampling import Sampling

    model, merged = adapted(), random_model(300)
    merged.load_weights(merge(stored_weights(merged), adapters_of(model), lora(), model.config))
    texts = [generate(each, bpe(), ["the cat"], Sampling(10, 0.0))[0].text for each in (model, merged)]
    assert texts[0] == texts[1]


def test_what_is_frozen_costs_no_gradient_of_its_own() -> None:
    """Of 6 operations per number 4 are left: the product forward, and that for what lies before."""
    base, model = random_model(300), adapted()
    embeddings = base.token_embedding.weight.numel() + base.positional_embedding.weight.numel()
    attention = 12 * 2 * 24 * 32
    assert base.flops_per_token() == 6 * (base.num_parameters() - embeddings) + attention
    looked_up = sum(p.numel() for p in model.token_embedding.parameters() if p.requires_grad)
    adapters = model.num_parameters(trained_only=True) - looked_up
    assert model.flops_per_token() == 4 * (base.num_parameters() - embeddings) + 6 * adapters + attention


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
            merge(stored_weights(random_model(300)), bad, lora(), model.config)
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
def test_a_description_that_is_none_is_refused(change: dict) -> None:
    assert build(LoRA, lora().to_dict()) == lora()
    with pytest.raises(ValueError, match=next(iter(change))):
        build(LoRA, lora().to_dict() | change)


def test_a_description_is_whole() -> None:
    for values, said in (
        (None, "an object"),
        ([], "an object"),
        ("lora", "an object"),
        ({"rank": 4}, "base is missing"),
    ):
        with pytest.raises(ValueError, match=said):
            build(LoRA, values)


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


def test_a_base_that_is_gone_or_another_is_one_sentence_that_names_both(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base")
    checkpoint = open_checkpoint(tmp_path / "lora")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="Put them back") as gone:
        checkpoint.weights()
    with torch.random.fork_rng():
        write_model(tmp_path / "base", std=0.1)
    with pytest.raises(CheckpointError, match="an adapter for another base") as other:
        checkpoint.weights(shapes_only=True)
    for raised in (gone, other):
        assert str(tmp_path / "lora") in str(raised.value) and str(tmp_path / "base") in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("base", ["\0", "a" * 5_000, "\ud800", "/dev", "model.safetensors/.."], ids=ascii)
def test_a_base_that_no_folder_can_be_is_told_too(base: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Put them back"):
        find_base(lora(base=base), tmp_path / "lora")


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


def test_a_manifest_without_the_adapters_is_damaged(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base")
    os.remove(tmp_path / "lora" / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors is missing"):
        open_checkpoint(tmp_path / "lora")


def test_adapters_without_a_word_of_what_for_are_refused(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", tmp_path / "base")
    file = tmp_path / "lora" / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "lora"}))
    seal(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"has no .lora., which describes adapter\.safetensors"):
        open_checkpoint(tmp_path / "lora").trusted_config()


def test_layers_of_the_base_are_not_drawn_anew() -> None:
    """Nor does what is drawn for the adapters depend on them: the same seed, the same adapters."""
    drawn = []
    for _ in range(2):
        base = random_model(300)
        torch.manual_seed(3)
        add_adapters(base, lora())
        drawn.append(adapters_of(base))
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    layer = base.blocks[0].attention.qkv
    assert isinstance(layer, AdaptedLinear) and layer.weight.device.type == "cpu"
