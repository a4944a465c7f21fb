"""Evaluation: a mean over fixed windows that leaves the training as it was, and prompts with known answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.checkpoint import Checkpoint
from common.errors import DataError
from model import TransformerLanguageModel
from tests.helpers import call_before, run_of
from tokenization.metadata import TokenMetadata
from tokenizer import CharacterTokenizer
from training import saver
from training.config import Config
from training.data import TokenData, layout_of_text
from training.evaluate import Answer, answer_prompts, bits_per_byte, read_prompts, validation_loss
from training.run import Prompt
from training.state import read_state
from training.store import Store

CHARACTERS = "abcdefghij .?"
TRAIN_TOKENS = 100
VAL_TOKENS = 165  # 20 windows of 8, and some tokens over
CONFIG = Config(embed_dim=16, num_heads=2, num_layers=1, max_seq_len=8, dropout=0.4, batch_size=6, eval_batches=0)


@pytest.fixture
def data() -> TokenData:
    tokens = np.random.default_rng(0).integers(0, len(CHARACTERS), TRAIN_TOKENS + VAL_TOKENS).astype(np.uint16)
    metadata = TokenMetadata(len(CHARACTERS), len(tokens), TRAIN_TOKENS, dtype="uint16", val_bytes=330)
    tokenizer = CharacterTokenizer(CHARACTERS)
    return TokenData(
        metadata,
        tokens,
        tokenizer,
        b"{}",
        layout_of_text(metadata, CONFIG.max_seq_len),
        CONFIG,
        torch.device("cpu"),
        "ram",
    )


@pytest.fixture
def model() -> TransformerLanguageModel:
    torch.manual_seed(0)
    model = TransformerLanguageModel(CONFIG.shape(len(CHARACTERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def plain_loss(model: TransformerLanguageModel, data: TokenData, windows: list[int]) -> float:
    """The definition, one window at a time and straight from the tokens."""
    tokens = data.tokens.long()
    model.eval()
    losses = []
    for window in windows:
        start = TRAIN_TOKENS + window * CONFIG.max_seq_len
        inputs, targets = tokens[start : start + 8], tokens[start + 1 : start + 9]
        with torch.no_grad():
            losses.append(F.cross_entropy(model(inputs[None])[0].double(), targets).item())
    model.train()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("rows", [1, 4, 6, 7, 20, 64])
def test_the_loss_is_the_mean_over_every_window(model, data: TokenData, rows: int) -> None:
    """The last batch may be partly filled (6, 7) or the only one (64)."""
    config = dataclasses.replace(CONFIG, batch_size=rows)
    assert validation_loss(run_of(model, data, config)) == pytest.approx(plain_loss(model, data, range(20)))


def test_eval_batches_limits_the_windows(model, data: TokenData) -> None:
    config = dataclasses.replace(CONFIG, batch_size=5, eval_batches=2)
    evenly = list(range(0, 20, 2))
    assert validation_loss(run_of(model, data, config)) == pytest.approx(plain_loss(model, data, evenly))
    more_than_there_is = dataclasses.replace(CONFIG, eval_batches=1000)
    whole = plain_loss(model, data, range(20))
    assert validation_loss(run_of(model, data, more_than_there_is)) == pytest.approx(whole)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 6])
def test_the_micro_batch_does_not_change_what_is_evaluated(model, data: TokenData, micro_batch_size: int) -> None:
    config = dataclasses.replace(CONFIG, eval_batches=2)
    sliced = dataclasses.replace(config, micro_batch_size=micro_batch_size)
    expected = validation_loss(run_of(model, data, config))
    assert validation_loss(run_of(model, data, sliced)) == pytest.approx(expected)


def test_evaluation_changes_nothing_of_the_training(model, data: TokenData) -> None:
    """No random numbers drawn, no gradients left, training mode on, the same answer again."""
    random_state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = validation_loss(run_of(model, data, CONFIG))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert validation_loss(run_of(model, data, CONFIG)) == first


def test_answering_prompts_changes_nothing_of_the_training(model, data: TokenData) -> None:
    random_state = torch.get_rng_state()
    answers = answer_prompts(run_of(model, data, CONFIG, [Prompt("abc", "x"), Prompt("j")]))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert [answer.prompt.text for answer in answers] == ["abc", "j"]
    assert answers == answer_prompts(run_of(model, data, CONFIG, [Prompt("abc", "x"), Prompt("j")]))


def test_bits_per_byte_is_the_code_length_of_the_split_over_its_bytes(data: TokenData) -> None:
    total_bits = math.log2(5) * VAL_TOKENS  # as if each token were one of five equally likely ones
    assert bits_per_byte(math.log(5), data) == pytest.approx(total_bits / 330)


@pytest.mark.parametrize("val_bytes", [None, 0])
def test_bits_per_byte_is_unknown_where_the_bytes_are(data: TokenData, val_bytes: int | None) -> None:
    data.layout = layout_of_text(dataclasses.replace(data.metadata, val_bytes=val_bytes), data.seq_len)
    assert bits_per_byte(1.0, data) is None


# Prompts


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_are_read_with_and_without_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "a?", "answer": "b"}', "", '{"prompt": "c?"}', '{"prompt": "é"}')
    assert read_prompts(path) == [Prompt("a?", "b"), Prompt("c?"), Prompt("é")]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a"',
        '{"question": "a"}',
        '{"prompt": 3}',
        '{"prompt": null}',
        '{"prompt": "a", "answer": 3}',
        '["a"]',
        '"a"',
        "3",
        "null",
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "a"}', "", line)
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value) and "line 3" in str(caught.value)


def test_a_prompts_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    write(tmp_path / "empty.jsonl")
    for name, said in (("absent.jsonl", "No such file"), ("latin.jsonl", "byte 12"), ("empty.jsonl", "no prompts")):
        with pytest.raises(DataError) as caught:
            read_prompts(tmp_path / name)
        assert name in str(caught.value) and said in str(caught.value)


def test_an_answer_is_right_when_it_matches_but_for_white_space_around_it() -> None:
    assert Answer(Prompt("a", "Paris."), " Paris.\n").right is True
    assert Answer(Prompt("a", "Paris."), "paris.").right is False
    assert Answer(Prompt("a", "Paris."), "Paris. And").right is False
    assert Answer(Prompt("a"), "anything").right is None
    assert Answer(Prompt("a", ""), "").right is True


@pytest.mark.parametrize("line", ["9" * 5000, '{"prompt": ' * 100_000], ids=["digits", "nested"])
def test_prompts_that_no_reader_can_take_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(DataError, match="line 1"):
        read_prompts(tmp_path / "prompts.jsonl")


def test_better_weights_of_a_large_model_are_saved_now_and_then_and_at_the_end(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[str, bool]] = []

    def noted(store: Store, contents: Any, target: Path, also: Sequence[str]) -> None:
        saved.append((target.name[-2:], "best" in also))

    call_before(monkeypatch, Store, "save", noted)
    monkeypatch.setattr(saver, "LARGE_CHECKPOINT_BYTES", 0)
    assert train(tmp_path / "run", eval_interval=6, checkpoint_steps=18).code == 0
    assert saved == [("06", True), ("18", False), ("24", True)]
    state = read_state(Checkpoint(tmp_path / "run/best")).state
    assert state.step == state.best_step == 24
