"""The page that is sent: what it refuses, what its bytes are, and what it says in a browser, token for token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from common.chat import ChatTemplate, Message
from exchange.page_weights import pack
from generation.decoding import generate
from generation.settings import Sampling
from model import TransformerLanguageModel
from tests.helpers import run_script
from tests.models import CHARACTERS, MODERN, bpe, random_model, write_adapters, write_model
from tokenizer import Tokenizer
from tokenizer_bpe import PROBE
from tools import export_page

ATTACK = "</script><script>document.title='hit'</script>{{weights}}<img src=x onerror=\"document.title='hit'\">"
LLAMA = {**MODERN, "norm_gain": True, "embed_norm": False, "activation": "swiglu", "num_kv_heads": 2, "qkv_bias": True}
FORMS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "tanh": {"activation": "gelu_tanh", "tie_embeddings": True, "bias": False, "qk_norm": True},
    "modern": {**MODERN, "activation": "relu2", "logit_softcap": 5.0},
    "llama": {**LLAMA, "head_dim": 10, "rope_base": 500.0, "rope_scaling": (4.0, 1.0, 4.0, 16.0)},
    "layernorm with rope": {"position": "rope", "embed_norm": True, "embed_dim": 72, "norm_eps": 0.01, "ff_dim": 40},
}


def written(folder: Path, *words: str) -> Path:
    """The page of the checkpoint `folder`."""
    page = folder.with_suffix(".html")
    done = run_script(export_page.main, folder, page, *words)
    assert done.code == 0, done.err
    return page


def rounded(model: TransformerLanguageModel, kind: str) -> TransformerLanguageModel:
    """The model with the weights that its page has."""
    other = TransformerLanguageModel(model.config).eval()
    other.load_weights({name: pack(name, weights, kind).weights for name, weights in model.state_dict().items()})
    return other


# What is written


def test_it_says_how_large_it_is_how_exact_and_how_to_open_it(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    done = run_script(export_page.main, tmp_path / "mine", tmp_path / "new" / "page.html")
    size = (tmp_path / "new" / "page.html").stat().st_size / 1e6
    assert done.code == 0 and f"page.html, {size:.1f} MB. Rounded to int8, the likeliest token stays" in done.out
    assert (tmp_path / "new" / "page.html").as_uri() in done.out


@pytest.mark.parametrize("kind, least", [("int8", 0.9), ("f16", 0.99)])
def test_the_proof_is_that_of_the_rounded_weights(tmp_path: Path, kind: str, least: float) -> None:
    write_model(tmp_path / "mine")
    done = run_script(export_page.main, tmp_path / "mine", tmp_path / "page.html", "--type", kind)
    share, cost = re.findall(r"same at ([\d.]+)% of 192 places .* costs ([+-][\d.]+) bits", done.out)[0]
    assert least <= float(share) / 100 <= 1 and abs(float(cost)) < 0.1


def test_f16_takes_two_bytes_a_weight_and_int8_one(tmp_path: Path) -> None:
    model = write_model(tmp_path / "mine", embed_dim=128, ff_dim=2048)
    small = written(tmp_path / "mine").stat().st_size
    (tmp_path / "mine.html").unlink()
    large = written(tmp_path / "mine", "--type", "f16").stat().st_size
    matrices = sum(weights.numel() for weights in model.parameters() if weights.dim() == 2)
    assert large - small == pytest.approx(4 / 3 * matrices * (2 - (1 + 2 / 64)), rel=0.001)


def test_rounding_is_to_the_nearest_step_of_its_block() -> None:
    weights = torch.randn(3, 130)
    weights[1] = 0
    weights[2, :64] = 1e-9
    near = pack("w", weights, "int8")
    assert len(near.data) == 3 * 3 * (2 + 64)
    for block in range(0, 130, 64):
        part, found = weights[0, block : block + 64], near.weights[0, block : block + 64]
        assert (part - found).abs().max() <= part.abs().max() / 127 * 0.6
    assert not near.weights[1:2].any() and near.weights.isfinite().all()
    assert torch.equal(pack("w", weights, "f16").weights, weights.half().float())


def test_what_is_in_the_file_cannot_become_code(tmp_path: Path) -> None:
    write_model(tmp_path / "mine", chat=ChatTemplate("a", ATTACK[:90], "c"))
    name = ATTACK.replace("/", "_")
    assert run_script(export_page.main, tmp_path / "mine", tmp_path / name).code == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script") == 4 and text.count("<img") == 0
    described = json.loads(re.findall('id="model">(.*?)</script>', text, re.DOTALL)[0])
    assert described["name"] == name.rpartition(".")[0] if "." in name else name
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


# What is refused


def refused(folder: Path, *words: str) -> str:
    """The sentence; nothing is written."""
    before = sorted(folder.parent.iterdir())
    done = run_script(export_page.main, folder, folder.with_suffix(".html"), *words)
    assert done.code == 2 and sorted(folder.parent.iterdir()) == before
    return str(done.err)


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    (tmp_path / "mine.html").write_text("a letter")
    assert "mine.html is already there. Name a file that is not." in refused(tmp_path / "mine")
    assert (tmp_path / "mine.html").read_text() == "a letter"


def test_too_large_a_page_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "mine", max_seq_len=100, embed_dim=128)
    monkeypatch.setattr("exchange.page.load_in_fp32", None)
    monkeypatch.setattr("exchange.page.LARGEST_PAGE", 1_000_000)
    message = refused(tmp_path / "mine", "--type", "f16")
    assert re.search(r"The page would have 1 MB; .*--type int8 makes about half", message)
    monkeypatch.setattr("exchange.page.LARGEST_PAGE", 200_000_000)
    monkeypatch.setattr("exchange.page.LARGEST_MEMORY", 1_000_000)
    assert "for its context of 100 tokens" in refused(tmp_path / "mine")


def test_weights_beyond_16_bits_are_refused(tmp_path: Path) -> None:
    model = random_model(bpe().vocab_size)
    with torch.no_grad():
        model.blocks[1].feed_forward.fc2.weight[0, 0] = 1e5
    write_model(tmp_path / "mine", model=model)
    assert "blocks.1.feed_forward.fc2.weight has weights that are too large" in refused(
        tmp_path / "mine", "--type", "f16"
    )


def test_a_tokenizer_with_another_pattern_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    path = tmp_path / "mine" / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}|\s+"}, "behavior": "Isolated", "invert": False}
    byte_level = {**content["pre_tokenizer"], "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    path.write_text(json.dumps(content))
    (tmp_path / "mine" / "manifest.json").unlink()
    (tmp_path / "mine" / "model.safetensors").rename(tmp_path / "weights")
    (tmp_path / "mine" / "model.safetensors").hardlink_to(tmp_path / "weights")
    write_manifest(tmp_path / "mine")
    assert "its normalizer or pre-tokenizer is not GPT-2's" in refused(tmp_path / "mine")


# In a browser

pytest_in_browser = pytest.mark.extras("playwright")
