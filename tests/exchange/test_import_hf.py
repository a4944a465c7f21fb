"""Folders of transformers become checkpoints that compute the same, generate, train on and can be exported again."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
import tokenize_local_bpe
import tools.export_hf
from common.checkpoint import open_checkpoint
from common.tensors import read_weights
from exchange.hf_model import ConversionError, from_hf
from tests.exchange.test_export_hf import left_behind
from tests.helpers import flags_of_a_tiny_run, generated_text
from tests.models import CHARACTERS, bpe
from tokenizer import load_tokenizer
from tokenizer_bpe import PROBE_TEXT, BPETokenizer
from tools.import_hf import main

pytestmark = pytest.mark.extras("transformers")


def their_model(std: float = 0.2, **options: Any) -> Any:
    """A random GPT-2 as transformers makes it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
    shape |= {"bos_token_id": 299, "eos_token_id": 299}  # the 50256 of GPT-2 would be warned of, outside these 300
    model: Any = GPT2LMHeadModel(GPT2Config(**{**shape, **options}))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if ".ln_" in name and name.endswith("weight") else 0.0, std=std)
    return model.eval()


def write_theirs(folder: Path, model: Any = None, **how: Any) -> Path:
    """A folder as `save_pretrained` writes it, with a tokenizer.json and nothing that says of which class it is."""
    (model or their_model()).save_pretrained(folder, **how)
    bpe().save(folder / "tokenizer.json")
    return folder


def printed_difference(capsys: pytest.CaptureFixture) -> float:
    return float(re.search(r"differ from those of transformers by (\S+) at most", capsys.readouterr().out)[1])


SIZES = {"gpt2": (12, 12), "gpt2-medium": (24, 16), "gpt2-large": (36, 20), "gpt2-xl": (48, 25)}


@pytest.mark.parametrize("size", SIZES)
def test_gpt2_in_the_proportions_of_each_size(size: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Tied, tanh, 4 times as wide inside: layers and heads are those of the size, a head is two numbers wide."""
    layers, heads = SIZES[size]
    theirs = their_model(n_layer=layers, n_head=heads, n_embd=2 * heads)
    assert main([str(write_theirs(tmp_path / "theirs", theirs)), str(tmp_path / "ours")]) == 0
    assert printed_difference(capsys) <= 1e-4
    checkpoint = open_checkpoint(tmp_path / "ours")
    config = checkpoint.model_config()
    assert (config.tie_embeddings, config.activation, config.bias, config.ff_dim) == (
        True,
        "gelu_tanh",
        True,
        8 * heads,
    )
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == (tmp_path / "theirs" / "tokenizer.json").read_bytes()
    model, _ = generate.load_checkpoint(checkpoint, "cpu")
    tokens = torch.randint(300, (2, 24))
    with torch.inference_mode():
        torch.testing.assert_close(model.float()(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    assert model.num_parameters() == theirs.num_parameters()


def test_every_way_in_which_the_same_weights_lie_in_files(tmp_path: Path) -> None:
    """Test files with and without prefix, head and old buffers; sharded; of PyTorch; in half precision."""
    from safetensors.torch import load_file, save_file

    theirs = their_model()
    folders = [
        write_theirs(tmp_path / "plain", theirs),
        write_theirs(tmp_path / "parts", theirs, max_shard_size="20KB"),
    ]
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    assert "lm_head.weight" not in weights
    openai = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    openai |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24).tril() for layer in range(2)}
    openai |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    with_head = weights | {"lm_head.weight": weights["transformer.wte.weight"]}
    for name, tensors in (("openai", openai), ("pickled", with_head), ("half", weights)):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "plain", folder)
        (folder / "model.safetensors").unlink()
        if name == "openai":
            save_file(tensors, folder / "model.safetensors")
        else:
            dtype = torch.float16 if name == "half" else torch.float32
            torch.save({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / "pytorch_model.bin")
        folders.append(folder)
    imported = []
    for folder in folders:
        out = tmp_path / f"{folder.name}_ours"
        assert main([str(folder), str(out)]) == 0
        imported.append(read_weights(out))
    first, *others = imported
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.allclose(first[name], other[name], atol=1e-3) for name in first)
    assert all(torch.equal(first[name], imported[2][name]) for name in first)


def test_the_two_files_of_gpt2s_vocabulary(tmp_path: Path) -> None:
    """As OpenAI ordered them: the tokens first, the end of the text last."""
    backend = bpe().backend
    backend.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    names = [name for name in sorted(vocab, key=vocab.__getitem__) if not name.startswith("<|")]
    vocab = {name: i for i, name in enumerate([*names, "<|endoftext|>"])}
    folder = write_theirs(tmp_path / "theirs", their_model(vocab_size=len(vocab)))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    shutil.copy(tmp_path / "merges.txt", folder)
    assert main([str(folder), str(tmp_path / "ours")]) == 0
    tokenizer = load_tokenizer(tmp_path / "ours" / "tokenizer.json")
    assert tokenizer.vocab_size == len(vocab) and tokenizer.end_of_text_id == len(vocab) - 1
    assert tokenizer.decode(tokenizer.encode(PROBE_TEXT)) == PROBE_TEXT
    (folder / "merges.txt").write_text("#version: 0.2\nq zzz\n")
    assert main([str(folder), str(tmp_path / "again")]) == 3


@pytest.mark.parametrize("padding", [0, 20])
def test_import_generate_train_on_and_export(padding: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The whole way; the shape of the model comes from the weights that the training starts from, and a vocabulary that
    was padded has the size of its tokenizer's."""
    theirs, ours, more, run = (tmp_path / name for name in ("theirs", "ours", "more", "run"))
    model = their_model(vocab_size=bpe().vocab_size + padding)
    assert main([str(write_theirs(theirs, model)), str(ours)]) == 0
    assert (f"{padding} rows of padding" in capsys.readouterr().out) == bool(padding)
    prompt = ["--prompt", "the cat", "--max_new_tokens", "5", "--device", "cpu"]
    assert generate.main(["--checkpoint", str(ours), *prompt]) == 0
    assert generate.main(["--compare", str(ours), str(ours), *prompt]) == 0
    (tmp_path / "text.txt").write_text(generated_text(20_000))
    tokenize = ["--input", str(tmp_path / "text.txt"), "--tokenizer_file", str(ours / "tokenizer.json")]
    assert tokenize_local_bpe.main([*tokenize, "--output_dir", str(more)]) == 0
    import train_colab_mmap

    shape = dict.fromkeys(("num_layers", "embed_dim", "num_heads"))
    flags = flags_of_a_tiny_run(more, run, init_from=ours, max_steps=3, max_seq_len=24, dropout=0.0, **shape)
    assert train_colab_mmap.main(flags) == 0, capsys.readouterr()
    capsys.readouterr()
    assert train_colab_mmap.main([*flags, "--output_dir", str(tmp_path / "resumed"), "--resume_from", str(ours)]) != 0
    capsys.readouterr()
    assert tools.export_hf.main([str(run), str(tmp_path / "exported")]) == 0, capsys.readouterr()
    assert main([str(tmp_path / "exported"), str(tmp_path / "back")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert "| started from | the weights of another model |" in card
    trained, back = read_weights(open_checkpoint(run).path), read_weights(tmp_path / "back")
    assert all(torch.equal(trained[name], back[name]) for name in back) and trained.keys() == back.keys()
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (ours / "tokenizer.json").read_bytes()


def test_an_export_of_characters_comes_back_as_characters(tmp_path: Path) -> None:
    from tests.models import write_model

    write_model(tmp_path / "best", CHARACTERS)
    assert tools.export_hf.main([str(tmp_path / "best"), str(tmp_path / "theirs")]) == 0
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert (tmp_path / "ours" / "tokenizer.json").read_text(encoding="utf-8") == CHARACTERS.to_json()


def change(**keys: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return spoil


def weights(act: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        act(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


WEIGHT = "transformer.h.1.attn.c_attn.weight"
BAD = {
    "nothing": (lambda folder: shutil.rmtree(folder), 4, "No such folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), 4, r"no config\.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), 4, "has no weights"),
    "cut short": (lambda folder: (folder / "model.safetensors").write_bytes(b"12345"), 4, "cannot be read"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), 4, "not valid JSON"),
    "no architecture": (change(model_type=None), 4, "model_type is missing"),
    "another architecture": (change(model_type="bloom"), 4, "model_type is 'bloom'; supported are"),
    "no model": (change(model_type=["gpt2"]), 4, r"model_type is \['gpt2'\]"),
    "an option": (change(scale_attn_by_inverse_layer_idx=True), 4, "scale_attn_by_inverse_layer_idx is True"),
    "an epsilon": (change(layer_norm_epsilon=-1.0), 4, "norm_eps is -1.0"),
    "an activation": (change(activation_function="no_such"), 4, "the activation is 'no_such'"),
    "a billion layers": (change(n_layer=10**9), 4, r"transformer\.h\.2\.\* is missing"),
    "a billion wide": (change(n_embd=4 * 10**8), 4, r"not \(300, 400000000\)"),
    "no number": (change(n_head="four"), 4, 'num_heads is "four"'),
    "a weight missing": (weights(lambda w: w.pop(WEIGHT)), 4, f"{re.escape(WEIGHT)} is missing"),
    "a weight too many": (weights(lambda w: w.update(extra=torch.ones(2))), 4, "extra is unknown"),
    "another shape": (weights(lambda w: w.update({WEIGHT: torch.ones(96, 32)})), 4, r"is \(96, 32\), not \(32, 96\)"),
    "whole numbers": (weights(lambda w: w.update({WEIGHT: torch.ones(32, 96).int()})), 4, r"is torch\.int32"),
    "not finite": (weights(lambda w: w[WEIGHT].fill_(float("inf"))), 4, "not finite"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), 3, "has no tokenizer"),
    "another tokenizer": (
        lambda folder: BPETokenizer.train([PROBE_TEXT], vocab_size=350).save(folder / "tokenizer.json"),
        3,
        "312 ids, the model 300",
    ),
    "no BPE": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}'),
        3,
        "only byte-level BPE is supported",
    ),
    "labels": (change(num_labels=10**12), 0, ""),  # nothing that is used of it: no memory is taken for them
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_sentence_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    spoil, code, words = BAD[case]
    folder = write_theirs(tmp_path / "theirs")
    (tmp_path / "place").mkdir()
    spoil(folder)
    assert main([str(folder), str(tmp_path / "place" / "ours")]) == code
    err = capsys.readouterr().err
    assert re.search(words, err) and "Traceback" not in err, err
    assert left_behind(tmp_path / "place") == ([] if code else ["ours"])


def test_any_value_of_any_key_is_expressed_or_named() -> None:
    theirs = their_model()
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    whole = json.loads(theirs.config.to_json_string(use_diff=False))
    assert from_hf(whole, tensors)
    strange = [None, True, False, -1, 0, 3, 10**30, 0.5, 1e300, float("nan"), "", "gelu", [], [1], {}, {"a": 1}]
    refused = 0
    for key in whole:
        for value in strange:
            try:
                from_hf(whole | {key: value}, tensors)
            except ConversionError:
                refused += 1
        absent = {name: value for name, value in whole.items() if name != key}
        with contextlib.suppress(ConversionError):
            from_hf(absent, tensors)
    assert refused > 100


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", 3])
def test_an_index_leads_nowhere_else(name: object, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_theirs(tmp_path / "theirs")
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    assert main([str(folder), str(tmp_path / "ours")]) == 4
    assert "names files outside its folder" in capsys.readouterr().err


def test_code_in_a_pickle_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    folder = write_theirs(tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Evil()}, folder / "pytorch_model.bin")
    assert main([str(folder), str(tmp_path / "ours")]) == 4
    assert not (tmp_path / "ran").exists() and "cannot be read" in capsys.readouterr().err


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    import huggingface_hub

    folder = write_theirs(tmp_path / "theirs")
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert main(["openai-community/gpt2", "ours"]) == 0 and asked == ["openai-community/gpt2"]

    def no_network(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    capsys.readouterr()
    assert main(["openai-community/gpt2", "again"]) == 4
    err = capsys.readouterr().err
    assert err.startswith("error: No such folder: openai-community/gpt2.")
    assert err.endswith("Name or service not known\n")
    assert not (tmp_path / "again").exists()
