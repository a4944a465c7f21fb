"""An exported folder in transformers' text generation, with nothing said but the folder's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import CHARACTERS, MODERN, TINY, bpe, write_model
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_bpe import SPECIAL_TOKENS
from tools.export_hf import main

pytestmark = pytest.mark.extras("transformers")
QWEN3 = {**MODERN, "embed_norm": False, "tie_embeddings": True}
FORMS = pytest.mark.parametrize("options", [{}, QWEN3], ids=["gpt2", "modern"])
CONTEXT = TINY["max_seq_len"]


def exported(folder: Path, tokenizer: Tokenizer, **options: Any) -> Path:
    write_model(folder / "ours", tokenizer, **options)
    assert main([str(folder / "ours"), str(folder / "theirs")]) == 0
    return folder / "theirs"


@pytest.mark.parametrize("tokenizer", [bpe(), CHARACTERS], ids=["bpe", "characters"])
@FORMS
def test_text_has_a_length_alone_and_in_a_batch(options: dict, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import pipeline

    pipe = pipeline("text-generation", str(exported(tmp_path, tokenizer, **options)))
    prompts = ["the cat sat", "a"]
    how = {"do_sample": False, "return_tensors": True}
    alone = [pipe(prompt, **how)[0]["generated_token_ids"] for prompt in prompts]
    together = [answer[0]["generated_token_ids"] for answer in pipe(prompts, batch_size=2, **how)]
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    assert [len(ids) for ids in alone] == [length + CONTEXT // 2 for length in lengths]
    padding = lengths[0] - lengths[1]
    assert padding > 0 and together[0] == alone[0]
    assert together[1] == [pipe.tokenizer.pad_token_id] * padding + alone[1]


@FORMS
def test_a_padded_batch_is_continued_as_each_prompt_alone(options: dict, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = exported(tmp_path, bpe(), **options)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def continued(prompts: list[str]) -> list[str]:
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        ids = model.generate(**batch, do_sample=False, max_new_tokens=8)
        return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :])

    prompts = ["the cat sat", "a"]
    assert continued(prompts) == [text for prompt in prompts for text in continued([prompt])]


@FORMS
def test_an_unknown_character_has_a_token_and_the_model_has_its_rows(options: dict, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = exported(tmp_path, CHARACTERS, **options)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    size = CHARACTERS.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, model.config.vocab_size) == (size, size + 1, size + 2)
    ids = tokenizer("cat A")["input_ids"]
    assert ids == [*CHARACTERS.encode("cat ").tolist(), tokenizer.unk_token_id]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    least = logits[:, size]
    assert torch.equal(least, logits[:, size + 1]) and any(torch.equal(least, logits[:, i]) for i in range(size))
    assert "become `<|unk|>`" in (folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize("tokenizer", [bpe(), CHARACTERS], ids=["bpe", "characters"])
def test_special_tokens_are_never_generated(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """They are what a model with these weights would say, and then the id 5."""
    from transformers import AutoModelForCausalLM

    folder = exported(tmp_path, tokenizer)
    pad, unknown = json.loads((folder / "generation_config.json").read_text())["suppress_tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.transformer.ln_f.weight.zero_()  # so that the logits are the same after every token
        model.lm_head.weight[[pad, unknown]] = 2 * model.transformer.ln_f.bias
        model.lm_head.weight[5] = model.transformer.ln_f.bias
        made = model.generate(torch.tensor([[6]]), do_sample=False)
        assert {*model(made).logits[0, -1].topk(2).indices.tolist()} == {pad, unknown}
    assert made[0].tolist() == [6, *[5] * (CONTEXT // 2)]


@pytest.mark.parametrize(
    "tokenizer", [bpe(), CharacterTokenizer.train("<|>endofxtpaukthc ")], ids=["bpe", "characters"]
)
def test_no_text_can_forge_a_special_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = exported(tmp_path, tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    pieces = st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "endoftext", "|>", "the cat", " "]), max_size=4)

    @given(pieces)
    def same_ids(pieces: list[str]) -> None:
        assert theirs("".join(pieces))["input_ids"] == tokenizer.encode("".join(pieces)).tolist()

    same_ids()
