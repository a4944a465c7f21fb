"""What is written at the end of a run, and how much of it is copied from the training text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_colab_mmap
from tests.helpers import run_script
from training.records import read_samples
from training.samples import PASSAGE, copied, hashes
from training.summary import verdict

few = st.lists(st.integers(0, 3), max_size=60)


def by_hand(texts: list[np.ndarray], tokens: np.ndarray) -> tuple[float, int]:
    there = {tuple(tokens[i : i + PASSAGE]) for i in range(len(tokens) - PASSAGE + 1)}
    inside, longest = 0, 0
    for text in texts:
        begins = [tuple(text[i : i + PASSAGE]) in there for i in range(len(text) - PASSAGE + 1)]
        inside += len({i + k for i, begin in enumerate(begins) if begin for k in range(PASSAGE)})
        run = 0
        for begin in begins:
            run = run + 1 if begin else 0
            longest = max(longest, run and run + PASSAGE - 1)
    return inside / max(1, sum(map(len, texts))), longest


@given(st.lists(few, max_size=3), few, st.integers(0, 40), st.integers(0, 40))
def test_what_is_copied_is_what_a_search_finds(
    texts: list[list[int]], tokens: list[int], first: int, count: int
) -> None:
    stored = np.array(tokens, np.uint16)
    arrays = [np.array([*text, *tokens[first : first + count]], np.int32) for text in texts]
    assert copied(arrays, stored) == by_hand(arrays, stored)


def test_planted_passages_are_found_among_many_tokens() -> None:
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 50_000, 100_000).astype(np.uint16)
    texts = [draw.integers(0, 50_000, 300).astype(np.int32) for _ in range(20)]
    for text in texts[:15]:
        at, length = draw.integers(0, 99_000), draw.integers(PASSAGE, 100)
        text[100 : 100 + length] = tokens[at : at + length]
    found = copied(texts, tokens)
    assert found == by_hand(texts, tokens) and found[0] > 0.1
    around = np.concatenate([draw.integers(50_000, 65_536, 3_000_000).astype(np.uint16), tokens])
    assert copied(texts, around) == found and copied(texts[15:], around) == (0.0, 0)


def test_a_hash_depends_on_the_order() -> None:
    tokens = np.arange(PASSAGE)
    assert hashes(tokens) != hashes(tokens[::-1]) and len(hashes(tokens[1:])) == 0


def test_a_run_ends_with_samples_and_a_verdict(train: Callable, tmp_path: Path) -> None:
    result = train(tmp_path / "run", eval_interval=6)
    assert result.code == 0 and result.out.count("\nSample: ") == 3
    assert "Word for word" in result.out and "Verdict          still falling at the end" in result.out
    assert "the text was read " in result.out and "> " in (tmp_path / "run" / "summary.md").read_text()


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_short_documents_and_a_vocabulary_without_a_space(kind: str, tmp_path: Path) -> None:
    """What begins a document is given as ids: neither a name of a special token nor a space gets into a prompt."""
    (tmp_path / "dna.txt").write_text("\n<|endoftext|>\n".join(["ACGT", "TTGA", "CCA", "GATTACA"] * 200))
    words = ["--input", tmp_path / "dna.txt", "--tokenizer", kind, *(["--vocab_size", 270] if kind == "bpe" else [])]
    shape = "--num_layers 1 --embed_dim 16 --num_heads 2 --max_seq_len 16 --max_steps 3 --eval_interval 1 --device cpu"
    flags = [*words, *shape.split(), "--data_dir", tmp_path / "tokens", "--output_dir", tmp_path / "run"]
    result = run_script(train_colab_mmap.main, *flags)
    assert result.code == 0, result.err
    prompts = read_samples(tmp_path / "run")[-1].prompts
    assert len(prompts) == 3 and not any("<|" in prompt or " " in prompt for prompt in prompts)


def test_what_the_losses_mean() -> None:
    def told(*losses: float) -> str:
        rows = [{"epoch": i, "train_loss": 1.0, "val_loss": loss} for i, loss in enumerate(losses, 1)]
        return verdict(rows, rows, len(losses)).get("Verdict", "")

    assert told(3.0, 2.5, 2.0).startswith("still falling")
    assert told(3.0, 2.0, 2.005).startswith("still falling"), "within the noise"
    assert told(3.0, 2.0, 2.4) == "memorising since epoch 2: use best/"
    assert told(3.0, 2.0) == "", "too few to tell"
