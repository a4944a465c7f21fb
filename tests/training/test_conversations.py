"""Training on conversations: whole ones in windows, the loss over answers, and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import train_colab_mmap
from common.checkpoint import open_checkpoint
from common.lora import add_adapters
from generate import load_checkpoint
from model import IGNORE_INDEX, TransformerLanguageModel
from tests.helpers import hardware_of, open_tokens, run_script, with_large_weights
from tokenization.metadata import TokenMetadata, read_tokens
from tokenize_local_bpe import tokenize
from tokenizer import load_tokenizer
from train_colab_mmap import make_run
from training.compilation import compile_model
from training.config import parse_config
from training.data import TokenData, pack
from training.records import read_metrics
from training.timing import Machine

COLORS = ("red", "green", "blue", "white", "black", "grey", "brown", "pink")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens of 200 short conversations, every tenth of two turns."""
    folder = tmp_path_factory.mktemp("chats")
    rows = []
    for i in range(200):
        color, other = COLORS[i % 8], COLORS[(i * 3 + 1) % 8]
        turns = [("user", f"Is {color} a color?"), ("assistant", f"{color} is a color.")]
        if i % 10 == 0:
            turns += [("user", f"And {other}?"), ("assistant", f"{other} too.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize([str(folder / "chats.jsonl")], folder / "tokens", format="chat", vocab_size=300, quiet=True)
    return folder / "tokens"


def flags(data_dir: Path, run: Path, **options: Any) -> list[str]:
    values: dict[str, Any] = {
        "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_seq_len": 96, "batch_size": 6, "max_steps": 6,
        "device": "cpu", "compile": "off", "eval_interval": 3, "learning_rate": 0.01, "checkpoint_minutes": 0,
    } | options  # fmt: skip
    given = [f"--{key}={value}" for key, value in values.items()]
    return [*given, f"--data_dir={data_dir}", f"--output_dir={run}"]


def train(*arguments: Any, **options: Any) -> SimpleNamespace:
    return run_script(train_colab_mmap.main, *flags(*arguments, **options))


def open_data(chats: Path, **options: Any) -> TokenData:
    config = parse_config(flags(chats, Path("unused"), **options))
    return open_tokens(config, hardware_of(config))


def test_cudnns_attention_is_left_out_where_there_is_a_mask(chats: Path, tmp_path: Path) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        make_run(parse_config(flags(chats, tmp_path / "run")))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(True)
        Machine().candidate(parse_config(["--device", "cpu"]), 300, is_chat=True)  # before the dial compiles
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# Packing


@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=40),
    length=st.integers(2, 24),
)
def test_every_conversation_lies_whole_in_one_window(lengths: list[tuple[int, int]], length: int) -> None:
    """Each is a 0, a question of ids of its own, and an answer of likewise; the mask is on the answer."""
    parts, mask, number = [], [], 1
    for question, answer in lengths:
        ids = [0, *range(number, number + question + answer)]
        number += question + answer
        parts.append(ids)
        mask.append([False] * (1 + question) + [True] * answer)
    starts = np.cumsum([0, *map(len, parts[:-1])])
    packed = pack(np.concatenate(parts), np.concatenate(mask), starts, length)
    windows = np.where(packed.windows < 0, ~packed.windows, packed.windows).tolist()
    learnable = [(ids, m) for ids, m in zip(parts, mask, strict=True) if any(m[:length])]
    assert packed.conversations == len(learnable) and packed.left_out == len(parts) - len(learnable)
    assert packed.cut == sum(len(ids) > length for ids, _ in learnable)
    for ids, _ in learnable:
        text = ids[:length]
        assert sum(any(row[i : i + len(text)] == text for i in range(length)) for row in windows) == 1, "whole, once"
    counted = sorted(i for (ids, m) in learnable for i, c in zip(ids[:length], m[:length], strict=True) if c)
    assert sorted(packed.windows[packed.windows >= 0].tolist()) == counted
    assert all((row >= 0).any() for row in packed.windows), "every window has something to learn"
    assert len(windows) <= len(learnable) and packed.answers == len(packed.ids)
    sizes = sorted(min(len(ids), length) for ids, _ in learnable)
    assert len(windows) <= max(1, -(-2 * sum(sizes) // length)), "no two windows could have been one"


def test_windows_hold_what_the_template_made(chats: Path) -> None:
    data = open_data(chats)
    tokenizer = load_tokenizer(chats / "bpe_tokenizer.json")
    tokens = read_tokens(chats / "tokens_bpe.bin", data.metadata, mapped=False)
    trained_on = tokenizer.decode(tokens[: data.metadata.train_tokens])
    inputs, targets, starts = data.batch(0, data.windows)
    assert inputs.min() >= 0 and inputs.shape == targets.shape == (data.windows, 96)
    shown = {tokenizer.decode(row).rstrip() for row in inputs.tolist()}
    assert any(text.startswith("<|endoftext|>User: Is ") and " is a color.<|endoftext|>" in text for text in shown)
    learned = tokenizer.decode(targets[targets != IGNORE_INDEX].tolist())
    begun = (inputs == tokenizer.end_of_text_id) & (starts == torch.arange(96))
    assert begun.sum() >= trained_on.count("User: Is ") > 140 and begun[:, 0].all() and (starts.diff(dim=1) >= 0).all()
    answer = " is a color.<|endoftext|>"
    assert "User" not in learned and learned.count(answer) == trained_on.count(answer)


# The loss


@torch.no_grad()
def reference(
    model: TransformerLanguageModel, inputs: torch.Tensor, targets: torch.Tensor, starts: torch.Tensor
) -> float:
    """Mean over the answers' tokens, each conversation given to the model alone."""
    losses = []
    for row in range(len(inputs)):
        for start in starts[row].unique():
            own = starts[row] == start
            logits, wanted = model(inputs[row, own][None])[0], targets[row, own]
            losses.append(F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="none")[wanted >= 0])
    return torch.cat(losses).double().mean().item()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "rope"},
        {"position": "rope", "qk_norm": True, "norm": "rmsnorm"},
        pytest.param({"lora_rank": 4, "init_from": "x"}, marks=pytest.mark.extras("peft")),
        {"activation_checkpointing": True},
        {"compile": "on"},
    ],
    ids=str,
)
def test_a_conversation_has_the_loss_in_its_window_that_it_has_alone(options: dict[str, Any], chats: Path) -> None:
    """At generation it stands alone, from position 0 on."""
    config = parse_config(flags(chats, Path("unused"), **options))
    hardware = hardware_of(config)
    data = open_tokens(config, hardware)
    torch.manual_seed(1)
    model = TransformerLanguageModel(config.shape(data.vocab_size))
    model.activation_checkpointing = config.activation_checkpointing
    if config.lora_rank:
        add_adapters(model, config.lora())
    with_large_weights(model)
    batch = data.batch(0, 6)
    alone = reference(model, *batch)
    assert compile_model(model, hardware, batch)[0](*batch).item() == pytest.approx(alone, rel=1e-5)
    assert model(*batch[:2]).item() != pytest.approx(alone, rel=1e-3), "the model is blind to the others anyway"


def test_the_loss_is_over_answers_and_does_not_depend_on_slices(chats: Path, tmp_path: Path) -> None:
    rows = {}
    for micro in (6, 4, 1):
        assert train(chats, tmp_path / str(micro), micro_batch_size=micro, log_interval=1).code == 0
        rows[micro] = read_metrics(tmp_path / str(micro))
    for micro in (4, 1):
        for key in ("train_loss", "val_loss", "grad_norm"):
            found = [row[key] for row in rows[micro] if key in row]
            assert found == pytest.approx([row[key] for row in rows[6] if key in row], rel=1e-4)

    config = parse_config(flags(chats, tmp_path / "6"))
    data = open_data(chats)
    torch.manual_seed(config.seed)
    model = TransformerLanguageModel(config.shape(data.vocab_size))
    assert rows[6][0]["train_loss"] == pytest.approx(reference(model, *data.batch(0, 6)), rel=1e-4)
    trained, _ = load_checkpoint(open_checkpoint(tmp_path / "6"), "cpu", torch.float32)
    batch = data.validation_batch(0, data.val_windows, data.val_windows)
    targets, val_loss = batch[1], reference(trained, *batch)
    last = [row for row in rows[6] if "val_loss" in row][-1]
    assert last["val_loss"] == pytest.approx(val_loss, rel=1e-4)
    answers = data.tokenizer.decode(targets[targets != IGNORE_INDEX].tolist()).replace("<|endoftext|>", "")
    bits = val_loss / np.log(2) * int((targets != IGNORE_INDEX).sum()) / len(answers.encode())
    assert last["val_bits_per_byte"] == pytest.approx(bits, rel=1e-4)


def test_it_learns_to_answer_and_resumes_exactly(chats: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    options = {"max_steps": 150, "eval_interval": 50, "checkpoint_steps": 75}
    assert train(chats, tmp_path / "whole", **options).code == 0
    rows = read_metrics(tmp_path / "whole")
    assert rows[-1]["val_loss"] < rows[0]["train_loss"] / 10
    options["use_lr_scheduler"] = "constant"  # of which the first half is that of the whole
    assert train(chats, tmp_path / "halves", **(options | {"max_steps": 75})).code == 0
    again = train(chats, tmp_path / "halves", **options)
    assert again.code == 0 and "Continuing from" in again.out
    straight = train(chats, tmp_path / "straight", **options)
    assert straight.code == 0
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "step_00000150" / "model.safetensors")
        for name in ("halves", "straight")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (
        open_checkpoint(tmp_path / "whole").chat_template()
        == TokenMetadata.read(chats / "tokens_bpe_metadata.json").chat_template
    )


def test_the_tokenizer_and_template_come_from_the_checkpoint_alone(chats: Path, tmp_path: Path) -> None:
    import generate

    assert train(chats, tmp_path / "run", max_steps=150, eval_interval=0).code == 0
    asked = ["--checkpoint", tmp_path / "run", "--prompt", "Is red a color?", "--temperature", "0"]
    answer = run_script(generate.main, *asked, "--max_new_tokens", "20")
    assert (
        answer.code == 0 and answer.out.startswith("Is red a color?\n") and answer.out.rstrip().endswith(" is a color.")
    )


# What is told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_seq_len": 4}, "max_seq_len 4 is too short for the conversations"),
        ({"placement": "mmap"}, "--placement mmap works for text only"),
        ({"stop_after_worse": 2, "eval_interval": 0}, "--stop_after_worse needs evaluations"),
    ],
)
def test_contradictory_flags(chats: Path, tmp_path: Path, options: dict, said: str) -> None:
    result = train(chats, tmp_path / "run", **options)
    assert result.code == 2 and said in result.err and not (tmp_path / "run").exists()


def flip_a_bit(folder: Path) -> None:
    mask = folder / "tokens_bpe_mask.bin"
    content = bytearray(mask.read_bytes())
    content[3] ^= 4
    mask.write_bytes(content)


def edit(folder: Path, **values: Any) -> None:
    path = folder / "tokens_bpe_metadata.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "tokens_bpe_mask.bin").unlink(), "tokens_bpe_mask.bin is missing"),
        (lambda folder: (folder / "tokens_bpe_mask.bin").write_bytes(b"x"), "does not match"),
        (flip_a_bit, "does not match"),
        (lambda folder: edit(folder, mask_file=None), "mask_file is missing, but chat_template is set"),
        (lambda folder: edit(folder, mask_file="../x"), "is not a file in the same folder"),
        (lambda folder: edit(folder, chat_template={"user": 1}), "a text is needed"),
        (lambda folder: edit(folder, train_split_index=17), "no conversation begins at the start of a split"),
    ],
)
def test_a_damaged_folder(chats: Path, tmp_path: Path, harm: Callable[[Path], Any], said: str) -> None:
    import shutil

    shutil.copytree(chats, tmp_path / "tokens")
    harm(tmp_path / "tokens")
    result = train(tmp_path / "tokens", tmp_path / "run")
    assert result.code == 3 and said in result.err and "Traceback" not in result.err


# Base against tuned, and when to stop


@pytest.fixture(scope="module")
def base(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    assert train(chats, run, max_steps=2, eval_interval=0).code == 0
    return run


def test_it_stops_where_the_validation_loss_gets_no_better(chats: Path, tmp_path: Path) -> None:
    options = {"max_steps": 400, "eval_interval": 5, "learning_rate": 0.2, "stop_after_worse": 3}
    result = train(chats, tmp_path / "run", **options)
    assert result.code == 0 and "early: the last 3 evaluations were no better" in result.out
    assert f"--checkpoint {tmp_path / 'run' / 'best'}" in result.out
    rows = [row for row in read_metrics(tmp_path / "run") if "val_loss" in row]
    best = min(rows, key=lambda row: row["val_loss"])
    assert rows[-1]["step"] == best["step"] + 15 < 400
    assert open_checkpoint(tmp_path / "run" / "best").training_state()["step"] == best["step"]
    again = train(chats, tmp_path / "run", **options)
    assert again.code == 0 and "This run is finished" in again.out and "--stop_after_worse 6" in again.out
    longer = train(chats, tmp_path / "run", **(options | {"stop_after_worse": 0, "max_steps": rows[-1]["step"] + 2}))
    assert longer.code == 0 and "Continuing from" in longer.out, longer.err
