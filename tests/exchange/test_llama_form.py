"""Llama's form and its variants, Qwen2 and Qwen3: the same logits in transformers, llama.cpp and here, both ways."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_colab_mmap
from exchange import gguf_file
from exchange.hf_common import ConversionError, Tensors
from exchange.hf_folder import build_hf_model, load_hf_model
from exchange.hf_llama import LLAMA3_KEYS
from exchange.hf_model import CONVERSIONS as FORMS_OF_THEIRS
from exchange.hf_model import choose_hf_model_type, from_hf, to_hf
from generate import load_model
from generation.completion import generate
from generation.sampling import Sampling
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.exchange import gguf_proof
from tests.helpers import generated_text
from tests.models import MODERN, bpe, random_model
from tokenize_local_bpe import tokenize
from tools import export_hf, import_hf

needs_transformers = pytest.mark.extras("transformers")
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "norm_gain": True}
SCALING = (8.0, 1.0, 4.0, 16.0)
# What another program wrote, or our own modern form.
FORMS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_kv_heads": 2, "norm_eps": 1e-5},
    "llama, scaled, tied": {**LLAMA, "rope_base": 5e5, "rope_scaling": SCALING, "tie_embeddings": True},
    "llama, biases": {**LLAMA, "bias": True, "num_kv_heads": 1},
    "qwen2": {**LLAMA, "qkv_bias": True, "num_kv_heads": 2},
    "qwen3": {**LLAMA, "qk_norm": True, "num_kv_heads": 2, "head_dim": 12, "rope_base": 1e6, "tie_embeddings": True},
    "qwen3, ours": {**MODERN, "activation": "swiglu"},
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    bias = draw(st.booleans())
    qk_norm = draw(st.booleans()) and not bias
    return ModelConfig(
        vocab_size=draw(st.integers(1, 9)),
        embed_dim=draw(st.integers(1, 9)),
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 3)),
        ff_dim=draw(st.integers(1, 9)),
        max_seq_len=draw(st.integers(1, 9)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope_base=draw(st.sampled_from([1e4, 1e6])),
        rope_scaling=draw(st.sampled_from([(), SCALING])),
        tie_embeddings=draw(st.booleans()),
        qk_norm=qk_norm,
        qkv_bias=bias or (draw(st.booleans()) and not qk_norm),
        **{**LLAMA, "bias": bias},
    )


@given(configs())
@settings(max_examples=60)
def test_a_round_trip_changes_no_bit(config: ModelConfig) -> None:
    state = random_model(**config.to_dict()).state_dict()
    if config.tie_embeddings:
        del state["head.weight"]
    hf_config, tensors = to_hf(config, state)
    back, state_back = from_hf(json.loads(json.dumps(hf_config)), tensors)
    assert back == config and state_back.keys() == state.keys()
    assert all(torch.equal(state[name], state_back[name]) for name in state)


def converted(name: str) -> tuple[TransformerLanguageModel, dict[str, Any], Tensors]:
    model = random_model(bpe().vocab_size, **FORMS[name])
    return model, *to_hf(model.config, model.state_dict())


@needs_transformers
@pytest.mark.parametrize("name", FORMS)
def test_transformers_computes_the_same_logits(name: str) -> None:
    model, hf_config, tensors = converted(name)
    theirs = build_hf_model(hf_config, tensors, model.config.tie_embeddings)
    assert hf_config["model_type"] == name.partition(",")[0]
    tokens = torch.randint(model.config.vocab_size, (2, 24))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    assert sum(tensor.numel() for tensor in tensors.values()) == theirs.num_parameters()


@needs_transformers
def test_rope_parameters_are_read_as_older_files_have_them() -> None:
    _, hf_config, tensors = converted("llama, scaled, tied")
    now, _ = from_hf(hf_config, tensors)
    del hf_config["rope_parameters"]
    assert from_hf(hf_config, tensors)[0] == now
    hf_config["rope_scaling"]["type"] = hf_config["rope_scaling"].pop("rope_type")
    assert from_hf(hf_config, tensors)[0] == now


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"attention_bias": True}, "mlp_bias is False"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads is 3"),
        ("llama", {"head_dim": 5}, "head_dim is 5"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "the rope scaling is 'yarn'; .* default and llama3"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, f"lacks {', '.join(LLAMA3_KEYS)}"),
        ("llama", {"intermediate_size": 60}, "the weights do not match the config"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3", {"head_dim": 8}, "the weights do not match the config"),
    ],
)
def test_unsupported_options_are_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    _, hf_config, tensors = converted(name)
    with pytest.raises(ConversionError, match=words):
        from_hf(hf_config | changes, tensors)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embed_norm": True, "tie_embeddings": True}, "embed_norm with tie_embeddings"),
        ({"qk_norm": True, "qkv_bias": True}, "qkv_bias True"),
        ({"norm": "layernorm", "norm_gain": False}, "norm 'layernorm'"),
    ],
)
def test_combinations_that_no_class_has_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    config = random_model(40, **{**LLAMA, **changes}).config
    with pytest.raises(ConversionError, match=f"does not support .*{words}"):
        choose_hf_model_type(config)


@pytest.mark.extras("xllamacpp")
@pytest.mark.parametrize("name", FORMS)
def test_llama_cpp_gives_the_same_next_tokens(name: str, tmp_path: Path) -> None:
    model = random_model(bpe().vocab_size, **{**FORMS[name], "embed_dim": 64, "max_seq_len": 96})
    gguf_file.write_gguf(tmp_path / "a.gguf", model, bpe(), "a")
    agreement = gguf_proof.verify_gguf(tmp_path / "a.gguf", model, bpe())
    assert agreement and agreement.difference < 1e-3


def test_qwens_architectures_have_no_scaled_rotation_in_llama_cpp() -> None:
    config = ModelConfig(300, 64, 4, 2, qk_norm=True, rope_scaling=SCALING, **LLAMA)
    assert gguf_file.find_gguf_obstacle(config, bpe()) == "its qwen3 architecture has no rope_scaling"


def test_groups_of_queries_share_keys_and_values() -> None:
    """Grouped attention equals ordinary attention with repeated keys and values."""
    grouped = random_model(40, **FORMS["llama"])
    config = grouped.config
    whole = TransformerLanguageModel(dataclasses.replace(config, num_kv_heads=config.num_heads)).eval()
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        q, *kv = state[name].split(config.qkv_rows)
        repeated = [each.view(2, config.head_dim, -1).repeat_interleave(2, dim=0).flatten(0, 1) for each in kv]
        state[name] = torch.cat([q, *repeated])
    whole.load_state_dict(state)
    tokens = torch.randint(40, (2, 24))
    with torch.inference_mode():
        torch.testing.assert_close(grouped(tokens), whole(tokens))


def write_qwens_tokenizer(path: Path) -> None:
    """Small, with the normalizer and the splitting of Qwen's: numbers digit by digit, text in NFC."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    words = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([generated_text(2_000)], trainer)
    tokenizer.save(str(path))


@needs_transformers
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_another_programs_model_is_imported_trained_and_exported(kind: str, tmp_path: Path) -> None:
    """Its weights are in bf16 and in several files, its vocabulary is padded, its context long."""
    import transformers

    model_class = getattr(transformers, FORMS_OF_THEIRS[kind].model_class)
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0}
    theirs = model_class(model_class.config_class(**shape, eos_token_id=0, tie_word_embeddings=True))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    write_qwens_tokenizer(tmp_path / "theirs" / "tokenizer.json")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1

    assert import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    (tmp_path / "text.txt").write_text(generated_text(3_000))
    tokens, tokenizer = tmp_path / "tokens", tmp_path / "ours" / "tokenizer.json"
    tokenize([str(tmp_path / "text.txt")], tokens, tokenizer_file=str(tokenizer), quiet=True)
    flags = [
        "--data_dir",
        tokens,
        "--init_from",
        tmp_path / "ours",
        "--output_dir",
        tmp_path / "run",
        "--device",
        "cpu",
    ]
    flags += ["--max_seq_len", "32", "--max_steps", "2", "--batch_size", "2", "--eval_batches", "1"]
    assert train_colab_mmap.main([str(word) for word in flags]) == 0
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "again")]) == 0

    ours, tokenizer = load_model(tmp_path / "run", "cpu")
    ids = torch.tensor([tokenizer.encode("the cat sat on 12 mats").tolist()])
    again = load_hf_model(tmp_path / "again")
    assert again.config.model_type == kind and again.config.max_position_embeddings == 32
    with torch.inference_mode():
        greedy = again.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    sampling = Sampling(max_new_tokens=12, temperature=0)
    (completion,) = generate(ours, tokenizer, [ids[0].tolist()], sampling)
    assert tokenizer.decode(greedy[0, ids.size(1) :].tolist()).startswith(completion.text)
