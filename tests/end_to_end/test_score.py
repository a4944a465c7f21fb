"""generate.py --score as its users meet it: the table, the JSON, and one clear message for each mistake."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest
import torch

import generate as script
from generation import loading
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import columns, with_large_weights
from tests.models import save_checkpoint
from tests.tokenization.documents import epub
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import tokenize
from tokenizer import CharacterTokenizer, load_tokenizer
from tokenizer_bpe import BPETokenizer
from training.config import Config
from training.optimizer import build_optimizer

CONTEXT = 32
KEYS = ["file", "tokens", "bytes", "characters", "loss", "perplexity", "bits_per_byte", "bits_per_character", "stride"]
KEYS += ["checkpoint"]


@pytest.fixture(autouse=True)
def folder_with_texts(tmp_path, monkeypatch):
    """The current folder, without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("one.txt").write_text("bad cafe\n" * 20)
    Path("two.txt").write_text("bad\n<|endoftext|>\na cafe faced\n")


def save(path: Path, tokenizer: CharacterTokenizer | BPETokenizer, width: int = 16, state: dict | None = None) -> Path:
    torch.manual_seed(0)
    model = TransformerLanguageModel(ModelConfig(tokenizer.vocab_size, width, 2, 1, max_seq_len=CONTEXT))
    optimizer = build_optimizer(with_large_weights(model), Config())
    save_checkpoint(path, model, optimizer, tokenizer.to_json().encode(), tokenizer.kind, state or {"step": 1})
    return path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """The newest run, of characters."""
    return save(Path("runs/letters/checkpoints/step_00000001"), CharacterTokenizer.train("\n abcdef"))


@pytest.fixture
def bpe_checkpoint(tmp_path) -> Path:
    return save(tmp_path / "bpe_model", BPETokenizer.train(["the cat and the dog"] * 4, vocab_size=265))


def test_json_is_an_object_per_file_with_the_documented_keys(checkpoint, rows):
    made = rows("--score", "one.txt", "two.txt")
    assert [list(row) for row in made] == [KEYS, KEYS]
    assert [row["file"] for row in made] == ["one.txt", "two.txt"]
    assert [row["tokens"] for row in made] == [179, 2 + 12]  # the first character of a document is not predicted
    for row in made:
        assert row["bytes"] == row["characters"] == row["tokens"]
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))
        assert (row["stride"], row["checkpoint"]) == (CONTEXT // 2, str(checkpoint))


def test_the_loss_is_the_models_own(checkpoint, rows):
    Path("short.txt").write_text("a cafe faced bad")
    model, tokenizer = script.load_model(checkpoint)
    ids = torch.tensor(tokenizer.encode("a cafe faced bad").tolist())[None]
    with torch.no_grad():
        expected = model(ids[:, :-1], ids[:, 1:]).item()
    assert rows("--score", "short.txt", "--checkpoint", checkpoint)[0]["loss"] == pytest.approx(expected, abs=1e-5)


def test_the_table_has_a_row_for_each_file_and_all(checkpoint, run, rows):
    code, out, err = run("--score", "one.txt", "two.txt", "--stride", 8)
    assert (code, err) == (0, "")
    begins, first, blank, head, _, *lines, _, meaning = out.splitlines()
    assert begins == "Scoring    one.txt, two.txt ..."
    assert " bits per byte: " in meaning
    assert first == f"{checkpoint}: fp32, windows of {CONTEXT} tokens, stride 8" and not blank
    assert columns(head) == ["text", "tokens", "bytes", "loss", "perplexity", "bits per byte"]
    cells = [columns(line) for line in lines]
    assert [row[0] for row in cells] == ["one.txt", "two.txt, 2 documents", "total"]
    assert [row[1] for row in cells] == ["179", "14", "193"]
    one, two = rows("--score", "one.txt", "two.txt", "--stride", 8)
    assert cells[0][3] == f"{one['loss']:.4f}" and cells[1][5] == f"{two['bits_per_byte']:.4f}"
    nats = sum(row["loss"] * row["tokens"] for row in (one, two))
    assert float(cells[2][3]) == pytest.approx(nats / 193, abs=1e-4)


def test_text_that_was_trained_on_is_named(run):
    Path("one.txt").write_text("bad cafe\n" * 200)
    metadata = TokenMetadata.read(tokenize(["one.txt"], quiet=True, tokenizer="char"))
    tokenizer = load_tokenizer(metadata.path_beside("tokenizer_file"))
    state = {"step": 1, "data": {"tokens_sha256": metadata.tokens_sha256}, "config": {}}
    save(Path("runs/one/checkpoints/step_00000001"), tokenizer, state=state)
    code, _, err = run("--score", "one.txt", "two.txt", "--json")
    assert code == 0 and "one.txt" in err and "two.txt" not in err
    Path("one.txt").write_text("bad cafe\n" * 20)
    assert run("--score", "one.txt")[2] == ""


def test_stride_changes_the_context_and_nothing_else(checkpoint, rows):
    made = [rows("--score", "one.txt", "--stride", stride)[0] for stride in (1, CONTEXT)]
    assert made[0]["tokens"] == made[1]["tokens"] and made[0]["loss"] != made[1]["loss"]
    assert [row["stride"] for row in made] == [1, CONTEXT]
    default = rows("--score", "one.txt")[0]
    assert default == rows("--score", "one.txt", "--stride", CONTEXT // 2)[0]


def test_any_text_under_bpe_from_each_kind_of_file(bpe_checkpoint, rows):
    text = "the cat and the døg\n😀 "
    Path("a.txt").write_text(text, encoding="utf-8")
    Path("b.md.gz").write_bytes(gzip.compress(text.encode()))
    Path("c.jsonl").write_text(json.dumps({"text": text}))
    made = rows("--checkpoint", bpe_checkpoint, "--score", "a.txt", "b.md.gz", "c.jsonl")
    assert len({row["loss"] for row in made}) == 1
    assert {row["bytes"] for row in made} == {len(text.encode())}
    assert made[0]["bits_per_byte"] == pytest.approx(
        made[0]["loss"] * made[0]["tokens"] / math.log(2) / made[0]["bytes"]
    )


def test_fp32_where_generation_is_bf16(tmp_path, monkeypatch, rows):
    monkeypatch.setattr("common.machine.cpu_bf16_flag", lambda: "AMX")
    wide = save(tmp_path / "wide", CharacterTokenizer.train("\n abcdef"), width=loading.CPU_BF16_MIN_WIDTH)
    assert script.load_model(wide)[0].token_embedding.weight.dtype == torch.bfloat16
    seen = []
    real = script.load_checkpoint
    monkeypatch.setattr(script, "load_checkpoint", lambda *given: seen.append(real(*given)) or seen[-1])
    rows("--score", "two.txt", "--checkpoint", wide)
    assert seen[0][0].token_embedding.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stride", "8"], "--stride needs --score"),
        (["--score"], "--score is missing; at least one FILE is needed"),
        (["--score", "one.txt", "--stride", "0"], "--stride is 0; allowed: at least 1"),
        (["--score", "one.txt", "--stride", "33"], "--stride 33 is above 32"),
    ],
)
def test_strides_out_of_range(checkpoint, fails, argv, said):
    assert re.search(said, fails(2, *argv))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", r"it is empty \(empty.txt\)"),
        ("one_token.txt", b"a", "one_token.txt .* no document has two tokens"),
        ("latin.txt", b"caf\xe9s", r"it is not UTF-8.* \(latin.txt\)"),
        (
            "strange.txt",
            b"bad\ncafe!",
            "strange.txt cannot be scored: 1 character is not in the vocabulary: '!' .* line 2, column 5",
        ),
        ("missing.txt", None, "No such file or folder: missing.txt"),
        ("", None, "has an empty name"),
    ],
)
def test_files_that_cannot_be_scored(checkpoint, fails, name, content, said):
    if content is not None:
        Path(name).write_bytes(content)
    assert re.search(said, fails(3, "--score", name))


def test_a_file_without_text_among_others_is_left_out(checkpoint, run):
    Path("empty.txt").write_bytes(b"")
    code, out, err = run("--score", "empty.txt", "one.txt", "--json")
    assert code == 0 and [json.loads(line)["file"] for line in out.splitlines()] == ["one.txt"]
    assert "Left out: empty.txt: it is empty" in err


def test_a_book_is_scored_like_its_text(checkpoint, run):
    text = Path("one.txt").read_text()
    Path("one.epub").write_bytes(epub([f"<pre>{text}</pre>"]))
    code, out, err = run("--score", "one.epub", "one.txt", "--json")
    book, plain = map(json.loads, out.splitlines())
    assert code == 0 and book["bytes"] == pytest.approx(plain["bytes"], abs=2), err
