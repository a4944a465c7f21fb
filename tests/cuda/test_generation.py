"""Text from a GPU: that of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoint import open_checkpoint
from generation.completion import generate
from generation.sampling import Sampling
from generation.stream import stream
from model import TransformerLanguageModel
from tests.cuda.helpers import DEVICE, opened, waiting_forbidden
from tests.generation.helpers import CHARACTERS, CONTEXT, changed, either_way, random_model
from tokenizer import CharacterTokenizer, load_tokenizer

pytestmark = pytest.mark.cuda


@either_way
def test_a_gpu_gives_the_text_of_the_cpu(sampling: Sampling) -> None:
    """Rows of different lengths, to the end of the context and past it, more than once."""
    characters, model = CharacterTokenizer.train(CHARACTERS), random_model(len(CHARACTERS))
    prompts = ["a", "badge", "abcdefgh" * 2, "hh"]
    sampling = changed(sampling, max_new_tokens=3 * CONTEXT, repetition_penalty=1.5)
    expected = generate(model, characters, prompts, sampling)
    assert generate(model.to(DEVICE), characters, prompts, sampling) == expected


def test_generation_leaves_cudnns_attention_out_and_back_in() -> None:
    """cuDNN plans each new length anew."""
    model, seen = random_model(len(CHARACTERS)).to(DEVICE), []
    model.ln_f.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    for _ in stream(model, [[1]], Sampling(max_new_tokens=3), torch.zeros(len(CHARACTERS), device=DEVICE)):
        assert torch.backends.cuda.cudnn_sdp_enabled(), "it leaks to the caller"
    assert not any(seen) and len(seen) == 3


def test_the_host_waits_for_nothing_between_two_tokens() -> None:
    """This includes prompts of different lengths."""
    model = random_model(len(CHARACTERS)).to(DEVICE)
    bias = torch.zeros(len(CHARACTERS), device=DEVICE)
    tokens = stream(model, [[1], [2, 3, 4]], Sampling(max_new_tokens=10), bias)
    next(tokens)
    with waiting_forbidden():
        for _ in range(3):
            next(tokens)


def test_greedy_text_is_that_of_the_cpu(tmp_path: Path, train: Callable, token_folder: Path) -> None:
    """The model has learned its text, because an untrained one has nearly equal probabilities."""
    flags = {"precision": "fp32", "compile": "off", "dropout": 0.0, "eval_interval": 0, "checkpoint_steps": 0}
    result = train(tmp_path / "run", device=DEVICE, max_steps=300, **flags)
    assert result.code == 0, result.err
    checkpoint = open_checkpoint(tmp_path / "run")
    tokenizer = load_tokenizer(token_folder / "tokenizer.json")
    sampling = Sampling(max_new_tokens=40, temperature=0)  # beyond the context of 16
    texts = {}
    for device in ("cpu", DEVICE):
        model = TransformerLanguageModel(checkpoint.model_config())
        checkpoint.load_weights(model)
        completions = generate(model.to(device).eval(), tokenizer, ["the cat", "on a mat and saw", "d"], sampling)
        texts[device] = [completion.text for completion in completions]
    assert texts[DEVICE] == texts["cpu"]


def test_the_sampled_draws_are_those_of_the_cpu(tokens: Path) -> None:
    """The same seed gives the same text wherever it runs; in fp64, so that no draw falls between two tokens."""
    training = opened(tokens, "--compile", "off")
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=3)
    texts = []
    for device in (DEVICE, "cpu"):
        model = training.model.to(device, torch.float64).eval()
        texts.append([c.text for c in generate(model, training.data.tokenizer, ["\u0100\u0101"] * 2, sampling)])
    assert texts[0] == texts[1]
