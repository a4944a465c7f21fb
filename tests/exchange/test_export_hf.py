"""An exported folder is opened by transformers with nothing else known, and computes what the checkpoint computes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.checkpoint import open_checkpoint
from exchange.hf_model import ConversionError, from_hf, to_hf
from generation.completion import generate
from generation.sampling import Sampling
from model import ACTIVATIONS
from model_config import GATED, ModelConfig
from tests.helpers import full_disk, without_packages
from tests.models import CHARACTERS, MODERN, bpe, random_model, write_model
from tokenizer import CharacterTokenizer
from tokenizer_bpe import PROBE_TEXT, BPETokenizer
from tools.export_hf import main

needs_transformers = pytest.mark.extras("transformers")
FORMS = {
    "gpt2": {},
    "no biases, tied": {"bias": False, "tie_embeddings": True},
    "tanh, narrow": {"activation": "gelu_tanh", "ff_dim": 40, "dropout": 0.1},
    "modern": MODERN,
    "modern, tied": {**MODERN, "embed_norm": False, "tie_embeddings": True},
}
REFUSED = {
    "activation 'gelu'": {**MODERN, "activation": "gelu"},
    "norm 'rmsnorm'": {"norm": "rmsnorm"},
    "embed_norm True": {"embed_norm": True},
    "qk_norm True": {"qk_norm": True},
    "bias True": {**MODERN, "bias": True},
    "norm 'layernorm'": {"position": "rope", "qk_norm": True, "embed_norm": True, "bias": False},
}


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.quick
@needs_transformers
@pytest.mark.parametrize("tokenizer", [bpe(), CHARACTERS], ids=["bpe", "characters"])
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_transformers_opens_it_and_computes_the_same(
    options: dict, tokenizer: BPETokenizer | CharacterTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_model(tmp_path / "best", tokenizer, **options)
    out = tmp_path / "exported"
    assert main([str(tmp_path / "best"), str(out)]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"logits differ by (\S+) at most", said)[1]) <= 1e-4

    theirs = AutoModelForCausalLM.from_pretrained(out)
    their_tokenizer = AutoTokenizer.from_pretrained(out)
    text = "the cat sat on a mat.\nit" if tokenizer.kind == "character" else "the cat sat\r\n\0on 'it' — 猫 😀"
    ids = tokenizer.encode(text)
    assert their_tokenizer(text)["input_ids"] == ids.tolist()
    assert their_tokenizer.decode(ids) == text
    tokens = torch.from_numpy(np.resize(ids, (2, 24)).astype(np.int64))
    with torch.inference_mode():
        logits = model(tokens)
        assert logits.abs().max() > 1  # there is something to compare
        torch.testing.assert_close(theirs(tokens).logits[..., : tokenizer.vocab_size], logits, atol=1e-4, rtol=0)
    assert theirs.num_parameters() >= model.num_parameters()  # zeros for biases
    assert not (theirs.generation_config.eos_token_id is None) ^ (tokenizer.kind == "character")


@needs_transformers
def test_it_generates_the_same_text(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_model(tmp_path / "best", CHARACTERS, **FORMS["modern"])
    assert main([str(tmp_path / "best"), str(tmp_path / "out")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    made = theirs.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=15, do_sample=False)
    ours = generate(model, CHARACTERS, ["the cat"], Sampling(max_new_tokens=15, temperature=0.0))[0].text
    assert tokenizer.decode(made[0]) == "the cat" + ours


@needs_transformers
@pytest.mark.parametrize("tokenizer", [bpe(), CHARACTERS], ids=["bpe", "characters"])
def test_the_blogs_checkpoints(tokenizer: BPETokenizer | CharacterTokenizer, tmp_path: Path) -> None:
    model = random_model(tokenizer.vocab_size)
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    for layer in range(2):
        state[f"_orig_mod.blocks.{layer}.attention.causal_mask"] = torch.ones(24, 24).tril()
    folder = tmp_path / "blog"
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    keys = ("vocab_size", "embed_dim", "num_heads", "num_layers", "ff_dim", "max_seq_len", "dropout")
    config = {"model_type": "gpt2", "architecture": "decoder-only", **{key: getattr(model.config, key) for key in keys}}
    (folder / "config.json").write_text(json.dumps(config))
    name = "bpe_tokenizer.json" if tokenizer.kind == "bpe" else "tokenizer.json"
    tokenizer.save(folder / name)
    assert main([str(folder), str(tmp_path / "out")]) == 0


@needs_transformers
def test_the_card_tells_of_the_run_and_of_nobodys_folders(
    tmp_path: Path, train: Callable, capsys: pytest.CaptureFixture
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "a big", "answer": "red dog"}\n')
    run = tmp_path / "run"
    assert train(run, eval_prompts=prompts).code == 0
    capsys.readouterr()
    for number, checkpoint in enumerate((run, run / "best")):
        out = tmp_path / f"out{number}"
        assert main([str(checkpoint), str(out)]) == 0, capsys.readouterr().err
        card = (out / "README.md").read_text(encoding="utf-8")
        assert str(tmp_path) not in card
        for words in (
            "pipeline_tag: text-generation",
            "MIT licence",
            "| parameters | ",
        ):
            assert words in card
        state = open_checkpoint(checkpoint).training_state()
        assert f"| lowest validation loss | {state['best_val_loss']:.4f} |" in card
        assert f"| trained on | {state['tokens']:,} tokens in {state['step']:,} steps |" in card
        code = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)[1]
        exec(compile(code.replace(f'"out{number}"', repr(str(out))), "card", "exec"), {})  # noqa: S102


@pytest.mark.parametrize("named", REFUSED)
def test_options_that_no_class_supports_are_refused_by_name(named: str) -> None:
    config = random_model(40, **REFUSED[named]).config
    with pytest.raises(ConversionError, match=f"does not support {named} "):
        to_hf(config, {})


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig:
    head_dim, heads = 2 * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    options = {
        "vocab_size": draw(st.integers(1, 9)),
        "embed_dim": head_dim * heads,
        "num_heads": heads,
        "num_layers": draw(st.integers(1, 3)),
        "ff_dim": draw(st.integers(1, 9)),
        "max_seq_len": draw(st.integers(1, 9)),
        "tie_embeddings": draw(st.booleans()),
        "activation": draw(st.sampled_from([name for name in ACTIVATIONS if name not in GATED])),
    }
    return ModelConfig(**options, bias=draw(st.booleans()))


@given(shapes())
@settings(max_examples=60)
def test_a_round_trip_changes_no_bit(config: ModelConfig) -> None:
    state = random_model(**config.to_dict()).state_dict()
    if config.tie_embeddings:
        del state["head.weight"]
    hf_config, tensors = to_hf(config, state)
    back, state_back = from_hf(json.loads(json.dumps(hf_config)), tensors)
    gpt2 = config.position == "learned"
    assert back == (dataclasses.replace(config, bias=True, qkv_bias=True) if gpt2 else config)
    added = {name for name in state_back if name not in state}
    assert state.keys() <= state_back.keys() and all(torch.equal(state[name], state_back[name]) for name in state)
    assert not added or not config.bias
    assert all(name.endswith("bias") and not state_back[name].any() for name in added)


@needs_transformers
@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("option", 4, "cannot be exported: .*qk_norm True"),
        ("not empty", 2, "already exists"),
        ("altered", 4, "was altered"),
        ("full disk", 4, r"could not be written \(No space left"),
        ("other logits", 4, "computes other logits"),
        ("other ids", 3, "reads the tokenizer differently"),
        ("no transformers", 2, r"pip install -r requirements-extras\.txt"),
    ],
)
def test_an_error_is_one_sentence_and_leaves_no_files(
    damage: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, out = tmp_path / "best", tmp_path / "place" / "out"
    write_model(folder, **({"qk_norm": True} if damage == "option" else FORMS["modern"]))
    out.parent.mkdir()
    arguments = [str(folder), str(out)]
    if damage == "not empty":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    elif damage == "altered":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("24", "25"))
    elif damage == "other logits":
        monkeypatch.setattr("exchange.hf_llama.rms_norm", lambda x, *how: 2 * x)  # of the embeddings
    elif damage == "other ids":
        other = BPETokenizer.train([PROBE_TEXT], vocab_size=290)
        monkeypatch.setattr("exchange.hf_folder.hf_tokenizer_json", lambda _: other.to_json().encode())
    before = left_behind(out.parent)
    disk = full_disk() if damage == "full disk" else contextlib.nullcontext()
    packages = without_packages("transformers") if damage == "no transformers" else contextlib.nullcontext()
    with disk, packages:
        assert main(arguments) == code
    err = capsys.readouterr().err
    assert re.search(words, err) and err.startswith("error: ") and "Traceback" not in err, err
    assert left_behind(out.parent) == before


# llama.cpp, and the hub


@pytest.mark.extras("gguf")
def test_a_file_for_llama_cpp_is_written_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_model(tmp_path / "best")
    file = tmp_path / "x.gguf"
    command = [str(tmp_path / "best"), str(tmp_path / "out"), "--gguf", str(file)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert file.read_bytes()[:4] == b"GGUF" and "llama-completion -m" in said and "--ollama" in said
    assert "tanh approximation of GELU" in said
    assert main([command[0], str(tmp_path / "again"), *command[2:]]) == 2 and not (tmp_path / "again").exists()


@pytest.mark.extras("gguf")
def test_types_and_ollama(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_model(tmp_path / "best")
    command = [str(tmp_path / "best"), str(tmp_path / "out"), "--gguf", str(tmp_path / "x.gguf"), "--ollama"]
    assert main([*command, "--gguf_type", "f32"]) == 0
    said = capsys.readouterr().out
    assert "x.gguf (f32, " in said and "ollama create x -f " in said
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./x.gguf\nPARAMETER num_ctx ")
    (tmp_path / "x.gguf").unlink()
    assert main([command[0], str(tmp_path / "again"), *command[2:]]) == 2
    assert "Modelfile, which --ollama would write, already exists" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Modelfile", "best", "out"]
    assert main([*command[:2], "--ollama"]) == 2 and "need --gguf FILE" in capsys.readouterr().err
    assert main([*command, "--gguf_type", "q4"]) == 2


def test_a_modern_model_for_llama_cpp_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_model(tmp_path / "best", **MODERN, rope_scaling=(8.0, 1.0, 4.0, 16.0))
    assert main([str(tmp_path / "best"), str(tmp_path / "out"), "--gguf", str(tmp_path / "x.gguf")]) == 2
    assert "llama.cpp cannot run this model" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]
