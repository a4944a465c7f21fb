"""GGUF files: llama.cpp itself loads them and says what the model says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.chat import ChatTemplate
from common.errors import CheckpointError, ConfigError
from exchange import gguf_export, gguf_file
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.exchange import gguf_proof
from tests.helpers import generated_text, with_large_weights
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_bpe import PROBE_TEXT, BPETokenizer

pytestmark = pytest.mark.extras
TEXT = generated_text(8_000)
TANH = {"activation": "gelu_tanh"}


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train([TEXT, PROBE_TEXT], 400)


@pytest.fixture(scope="module")
def characters() -> CharacterTokenizer:
    return CharacterTokenizer.train([TEXT, 'é中😀\x00\r\\"'])


def build(tokenizer: Tokenizer, **changes: object) -> TransformerLanguageModel:
    """A small model of random weights, large enough that what it says depends on all of the text."""
    shape = {"vocab_size": tokenizer.vocab_size, "embed_dim": 48, "num_heads": 3, "num_layers": 2, "max_seq_len": 64}
    torch.manual_seed(0)
    return with_large_weights(TransformerLanguageModel(ModelConfig(**{**shape, **changes}))).eval()


@pytest.fixture(scope="module")
def trained(bpe: BPETokenizer) -> TransformerLanguageModel:
    torch.manual_seed(0)
    model = TransformerLanguageModel(ModelConfig(bpe.vocab_size, 64, 2, 2, ff_dim=80, max_seq_len=64))
    ids, optimizer = torch.tensor(bpe.encode(TEXT)), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        starts = torch.randint(len(ids) - 65, (16,))
        rows = torch.stack([ids[start : start + 65] for start in starts]).long()
        loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2.5
    return model.eval()


def test_llama_cpp_runs_a_trained_model(tmp_path: Path, bpe: BPETokenizer, trained: TransformerLanguageModel) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    path = tmp_path / "new folder" / "trained.gguf"
    gguf_file.write_gguf(path, trained, bpe, "trained")
    agreement = gguf_proof.verify_gguf(path, trained, bpe, [TEXT[:2_000], "<|endoftext|>", ""])
    assert agreement.texts == 3 and agreement.compared >= 7
    assert agreement.difference < 1e-2 and agreement.rounding_aside < 1e-4
    assert "same token ids on 3 texts" in str(agreement)
    assert 0 < gguf_proof.tanh_difference(trained, bpe, [TEXT]) < 1e-2
    assert [file.name for file in path.parent.iterdir()] == ["trained.gguf"]


@pytest.mark.parametrize(("gguf_type", "largest_change"), [("f16", 1e-3), ("q8_0", 1e-2)])
def test_rounded_weights(
    tmp_path: Path, bpe: BPETokenizer, trained: TransformerLanguageModel, gguf_type: str, largest_change: float
) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    path = tmp_path / "a.gguf"
    gguf_file.write_gguf(path, trained, bpe, "a", gguf_type)
    agreement = gguf_proof.verify_gguf(path, trained, bpe, [TEXT[:2_000]], gguf_type)
    assert agreement.texts == 2 and agreement.compared > 60
    assert abs(agreement.change) < largest_change and "its perplexity on" in str(agreement)

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, exact in gguf_file.to_gguf_tensors(trained):
        stored = tensors[name]
        matrix = exact.dim() == 2 and name != "position_embd.weight"
        expected = gguf_type if matrix else "f32"
        if expected == "q8_0" and "ffn_down" in name:  # rows of 80: not whole blocks of 32
            expected = "f16"
        assert stored.tensor_type.name.lower() == expected
        read = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
        f16 = 2**-11  # its rounding; q8_0 rounds to steps of 1/127 of the largest, which is stored in f16
        rounding = {"f32": 0, "f16": f16, "q8_0": 0.5 / 127 + f16}[expected]
        assert (read - exact).abs().max() <= 1.001 * rounding * exact.abs().max()

    with torch.no_grad():
        trained.ln_f.weight *= 1.2
    with pytest.raises(CheckpointError, match=r"llama\.cpp's perplexity differs by .*%, and rounding may explain 1%"):
        gguf_proof.verify_gguf(path, trained, bpe, [TEXT[:2_000]], gguf_type)
    with torch.no_grad():
        trained.ln_f.weight /= 1.2


def test_a_character_model_of_eight_bits(tmp_path: Path, characters: CharacterTokenizer) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    torch.manual_seed(0)
    model, path = TransformerLanguageModel(ModelConfig(characters.vocab_size, 64, 2, 2)).eval(), tmp_path / "a.gguf"
    gguf_file.write_gguf(path, model, characters, "a", "q8_0")
    agreement = gguf_proof.verify_gguf(path, model, characters, [TEXT[:300]], "q8_0")
    assert agreement.compared >= 300


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**TANH, "tie_embeddings": True},
        {**TANH, "bias": False, "ff_dim": 50},
        {"max_seq_len": 2, "num_layers": 1, "embed_dim": 15},
        {"vocab_size": 500},
    ],
)
@pytest.mark.parametrize("kind", ["bpe", "character"])
def test_every_shape_of_gpt2s_form(
    tmp_path: Path, bpe: BPETokenizer, characters: CharacterTokenizer, kind: str, changes: dict[str, object]
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    tokenizer = bpe if kind == "bpe" else characters
    model, path = build(tokenizer, **changes), tmp_path / "a.gguf"
    gguf_file.write_gguf(path, model, tokenizer, "a", chat_template="{{ messages[0].content }}")
    agreement = gguf_proof.verify_gguf(path, model, tokenizer, [TEXT[:500]])
    assert agreement.texts == 2


def test_another_model_or_tokenizer_is_noticed(tmp_path: Path, bpe: BPETokenizer) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    model, path = build(bpe), tmp_path / "a.gguf"
    gguf_file.write_gguf(path, model, bpe, "a")
    other = BPETokenizer.train([TEXT[::-1], PROBE_TEXT], 400)
    with pytest.raises(CheckpointError, match=r"gives other ids from token \d+ on, after"):
        gguf_proof.verify_gguf(path, model, other)
    with torch.no_grad():
        model.blocks[1].norm1.bias += 0.1
    with pytest.raises(CheckpointError, match=r"is not this model: llama\.cpp's log-probabilities differ by"):
        gguf_proof.verify_gguf(path, model, bpe)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"llama\.cpp cannot load"):
        gguf_proof.verify_gguf(path, model, bpe)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "rmsnorm"}, r"GPT2LMHeadModel, which does not support norm 'rmsnorm' \(needs 'layernorm'\)\.$"),
        ({"position": "rope"}, "LlamaForCausalLM, which does not support norm 'layernorm'"),
        ({"vocab_size": 300}, r"the tokenizer has \d+ ids and the model a vocab_size of 300"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, bpe: BPETokenizer, changes: dict[str, object], words: str
) -> None:
    model = build(bpe, **{"num_heads": 2, **changes})
    with pytest.raises(ConfigError, match=words):
        gguf_file.write_gguf(tmp_path / "folder" / "a.gguf", model, bpe, "a")
    assert not [*tmp_path.iterdir()]


def test_other_tokenizers_are_refused(tmp_path: Path, bpe: BPETokenizer) -> None:
    pytest.importorskip("gguf")
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    model = build(bpe)

    def refused(change: Callable[[Backend], object], words: str) -> None:
        backend = Backend.from_str(bpe.to_json())
        change(backend)
        with pytest.raises(ConfigError, match=f"its tokenizer {words}"):
            gguf_file.require_gguf(dataclasses.replace(model.config, vocab_size=500), BPETokenizer(backend))

    def add_without_merge(backend: Backend) -> None:
        content = json.loads(backend.to_str())
        vocab = content["model"]["vocab"]
        backend.model = BPE(vocab | {"Whole": len(vocab)}, [tuple(pair) for pair in content["model"]["merges"]])
        backend.model.ignore_merges = True

    prefix, digits = ByteLevel(add_prefix_space=True), Digits(individual_digits=False)
    refused(
        lambda backend: setattr(backend, "pre_tokenizer", prefix),
        'has a pre-tokenizer .* known here: {.*"add_prefix_space": true',
    )
    refused(
        lambda backend: setattr(backend, "pre_tokenizer", Sequence([digits, ByteLevel(False)])),
        'has a pre-tokenizer .*"Digits"',
    )
    refused(
        lambda backend: setattr(backend, "normalizer", Lowercase()),
        'has a normalizer that llama.cpp lacks: {"type": "Lowercase"}',
    )
    refused(lambda backend: backend.add_tokens([AddedToken("<x>", lstrip=True)]), "strips spaces .* token '<x>'")
    refused(add_without_merge, "has tokens that no merge creates, such as 'Whole'")
    with pytest.raises(ConfigError, match="is a folder"):
        gguf_file.write_gguf(tmp_path, model, bpe, "a")
    assert not [*tmp_path.iterdir()]


def test_suggested_commands(bpe: BPETokenizer) -> None:
    config, path = ModelConfig(65, max_seq_len=256), Path("runs/My Model!.gguf")
    command = gguf_export.llama_command(path, config, "Once upon")
    assert command == "llama-completion -m 'runs/My Model!.gguf' -no-cnv -n 128 -p 'Once upon'"
    assert gguf_export.build_modelfile(path, config, bpe).splitlines() == [
        "FROM ./My Model!.gguf",
        "PARAMETER num_ctx 256",
        "PARAMETER num_predict 128",
        "PARAMETER temperature 0.8",
        "PARAMETER top_k 0",
        "PARAMETER top_p 0.9",
        "PARAMETER repeat_penalty 1.0",
        'TEMPLATE """{{ .Prompt }}"""',
    ]
    chats = gguf_export.build_modelfile(path, config, bpe, ChatTemplate())
    assert 'PARAMETER stop "<|endoftext|>"\nTEMPLATE """<|endoftext|>{{ range .Messages }}' in chats
    commands = gguf_export.ollama_commands(path, "Who is it?")
    assert commands.startswith("ollama create my-model -f runs/Modelfile\n")
    assert commands.endswith("\nollama run my-model 'Who is it?'")
