"""Samples and the summary at the end of a run."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest

import train_colab_mmap
from tests.helpers import WORDS, run_script
from tests.languages import MARKED
from tokenizer_bpe import BPETokenizer
from training.evaluate import SAMPLE_PROMPT_TOKENS, cut_at_word, trim_partial_characters
from training.records import read_samples
from training.summary import judge_losses


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_short_documents_and_a_vocabulary_without_a_space(kind: str, tmp_path: Path) -> None:
    """The beginning of a document is given as ids: no special token's name and no space gets into a prompt."""
    (tmp_path / "dna.txt").write_text("\n<|endoftext|>\n".join(["ACGT", "TTGA", "CCA", "GATTACA"] * 200))
    words = ["--input", tmp_path / "dna.txt", "--tokenizer", kind, *(["--vocab_size", 270] if kind == "bpe" else [])]
    shape = "--num_layers 1 --embed_dim 16 --num_heads 2 --max_seq_len 16 --max_steps 3 --eval_interval 1 --device cpu"
    flags = [*words, *shape.split(), "--data_dir", tmp_path / "tokens", "--output_dir", tmp_path / "run"]
    result = run_script(train_colab_mmap.main, *flags)
    assert result.code == 0, result.err
    prompts = read_samples(tmp_path / "run")[-1].prompts
    assert len(prompts) == 3 and not any("<|" in prompt or " " in prompt for prompt in prompts)


def test_a_script_of_several_bytes_a_letter(tmp_path: Path) -> None:
    """A vocabulary of single bytes cuts the tokens of a sample anywhere; what is shown has whole letters with their
    marks. The summary gives the loss per character, too."""
    sentences = [word for sentence in MARKED.values() for word in sentence.split()]
    draw = random.Random(1)
    (tmp_path / "a.txt").write_text(" ".join(draw.choices(sentences, k=4000)), encoding="utf-8")
    shape = "--num_layers 1 --embed_dim 16 --num_heads 2 --max_seq_len 16 --max_steps 3 --eval_interval 1 --device cpu"
    words = ["--input", tmp_path / "a.txt", "--vocab_size", 262, *shape.split(), "--data_dir", tmp_path / "tokens"]
    result = run_script(train_colab_mmap.main, *words, "--output_dir", tmp_path / "run")
    assert result.code == 0, result.err
    prompts = read_samples(tmp_path / "run")[-1].prompts
    assert len(prompts) == 3 and all(prompts)
    for prompt in prompts:
        assert "\ufffd" not in prompt and unicodedata.category(prompt[0])[0] != "M"
    assert " bits per byte or " in (tmp_path / "run" / "summary.md").read_text(encoding="utf-8")


def test_a_prompt_ends_where_a_word_ends() -> None:
    text = " ".join(WORDS)
    tokenizer = BPETokenizer.train([text], 300)
    ids = tokenizer.encode(text).tolist()
    for start in range(0, len(ids) - 20, 7):
        shown = tokenizer.decode(cut_at_word(ids[start : start + SAMPLE_PROMPT_TOKENS + 1], tokenizer))
        assert shown.split()[-1] in [*WORDS, shown.strip()]


@pytest.mark.parametrize("language", MARKED)
def test_a_prompt_has_whole_letters_wherever_it_begins_and_ends(language: str) -> None:
    text = MARKED[language]
    tokenizer = BPETokenizer.train([text], 262)
    ids = tokenizer.encode(text).tolist()
    for start in range(0, len(ids) - 12, 5):
        shown = tokenizer.decode(trim_partial_characters(ids[start : start + 12], tokenizer))
        assert "\ufffd" not in shown and shown in text
        assert not shown or unicodedata.category(shown[0])[0] != "M"


def test_what_the_losses_mean() -> None:
    def told(*losses: float, has_read_all: bool = False) -> str:
        rows = [{"epoch": i, "train_loss": 1.0, "val_loss": loss} for i, loss in enumerate(losses, 1)]
        return judge_losses(rows, rows, len(losses), has_read_all=has_read_all).get("Verdict", "")

    assert told(3.0, 2.5, 2.0).startswith("still falling") and "time" in told(3.0, 2.5, 2.0)
    assert "time" not in told(3.0, 2.5, 2.0, has_read_all=True), "more passes would not help"
    assert told(3.0, 2.0, 2.005).startswith("level"), "within the noise"
    assert told(2.000, 2.001, 2.002, 2.003).startswith("level") and told(2.0, 2.0, 2.0, 2.0).startswith("level")
    assert told(3.0, 2.0, 2.4) == "memorising since epoch 2; use best/"
    assert told(3.0, 2.0) == "", "too few to tell"
