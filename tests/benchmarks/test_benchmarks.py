"""The benchmark scripts at toy size: each measures what it says, and writes it down."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu, learning, peers
from benchmarks.workload import TimedRun
from tests.forked import fork_what_is_measured
from tests.helpers import WORDS, generated_text
from training.law import Law
from training.records import read_metrics

TRUE = Law(0.8, 5.0, 0.22, 40.0, 0.3, 5.0, 0.25)
# Stands for nanoGPT's model.py: its names and its tied head, over our model.
NANOGPT = """
from dataclasses import dataclass

import torch

from model import TransformerLanguageModel
from model_config import ModelConfig


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        shape = (config.vocab_size, config.n_embd, config.n_head, config.n_layer)
        self.model = TransformerLanguageModel(ModelConfig(*shape, max_seq_len=config.block_size, tie_embeddings=True))

    def forward(self, inputs, targets):
        return None, self.model(inputs, targets)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print("number of decayed parameters: many")
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


def test_a_step_is_a_step_of_the_trainer(tmp_path: Path, train: Callable, train_flags: Callable) -> None:
    """The same losses, to the last digit that is logged, dropout and accumulated gradients included."""
    flags = train_flags(tmp_path / "run", max_steps=4)
    assert train(tmp_path / "run", max_steps=4).code == 0
    logged = [row["train_loss"] for row in read_metrics(tmp_path / "run")]
    training = TimedRun.open(flags)
    losses = []
    for _ in range(4):
        training.step()
        losses.append(training.loss.item())
    assert losses == pytest.approx(logged, rel=2e-6)


def test_each_rung_of_the_ladder_is_measured_and_nanogpt_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled here, because compiling takes longer than all else."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(peers, "TOKENS", 10_000)
    fork_what_is_measured(monkeypatch)
    (tmp_path / "model.py").write_text(NANOGPT)
    shape = ["--num_layers", "1", "--embed_dim", "32", "--num_heads", "2", "--max_seq_len", "16", "--batch_size", "4"]
    flags = [*shape, "--seconds", "0.02", "--device", "cpu", "--output_dir", str(tmp_path), "--nanogpt", str(tmp_path)]
    assert peers.main(["--config", "small.json", *flags]) == 0
    (path,) = tmp_path.glob("speed_ladder-cpu-*.json")
    rungs, page = json.loads(path.read_text())["rungs"], path.with_suffix(".md").read_text()
    assert set(peers.RUNGS) - {"bf16"} <= rungs.keys()
    for rung, (seconds,) in rungs.items():
        assert seconds > 0 and f"| {rung} | {1000 * seconds:,.1f} | {4 * 16 / seconds:,.0f} | " in page


def test_the_law_of_runs_that_obey_one_is_found(tmp_path: Path) -> None:
    draw = random.Random(3)
    books = [f"{number} " + " ".join(draw.choices(WORDS, k=20_000)) for number in range(10)]
    (tmp_path / "books.txt").write_text("\n<|endoftext|>\n".join([*books, "too short"]))
    variants = learning.build_law_runs(str(tmp_path / "books.txt"), tmp_path)
    assert (tmp_path / "books_0.1.txt").read_text().startswith(books[0][len(books[0]) // 3 :][:10_000] + "\n\n")
    runs = [learning.measure_sizes(words) for words in variants.values()]
    assert len(runs) == len(learning.LAW_RUNS) and runs[0]["bytes"] == pytest.approx(0.9e5, rel=0.01)
    for run, (megabytes, *_) in zip(runs, learning.LAW_RUNS, strict=True):  # the small books here are soon used up
        run["bytes"] = 0.9e6 * megabytes
        run["lowest"] = TRUE.loss(run["parameters"], run["bytes"], run["passes"])
    rows = [line.split("|") for line in learning.judge_law(runs).splitlines() if " MB |" in line]
    assert len(rows) == len(runs) and all(abs(float(row[6])) < 0.02 for row in rows)
    assert sum("not fitted" in row[7] for row in rows) >= 4


def test_generation_and_tokenizing_are_timed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(generated_text(200_000))
    flags = ["--toy", "--device", "cpu", "--output_dir", str(tmp_path)]
    assert peers.main(["--generation", *flags]) == peers.main(["--tokenizing", str(tmp_path / "text.txt"), *flags]) == 0
    pages = "".join(page.read_text() for page in tmp_path.glob("*-cpu-*.md"))
    texts = [f"{rows} x {held}, float32" for rows, held in peers.GENERATION_CASES]
    for row in (*texts, "training the vocabulary", "encoding alone, threads: 1", "the whole command"):
        assert f"| {row} | " in pages


@pytest.fixture
def books(tmp_path: Path) -> str:
    draw = random.Random(4)
    texts = [" ".join(draw.choices(WORDS, k=7_000)) for _ in range(3)]
    (tmp_path / "some books.txt").write_text("\n<|endoftext|>\n".join(texts))
    return str(tmp_path / "some books.txt")


# Without gpt2_small_modern, which is gpt2_small with another config, and quickstart, with which card begins.
PARTS = [name for name in gpu.PARTS if name not in ("gpt2_small_modern", "quickstart", "card")]


@pytest.mark.parametrize("parts", [PARTS[:5], PARTS[5:], ["card"]], ids=["first", "second", "card"])
def test_the_list_for_a_gpu_runs_through_as_a_toy(
    parts: list[str], books: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--toy", "--books", books, "--folder", str(tmp_path / "work"), "--output", str(tmp_path / "gpu.json")]
    assert gpu.main([*flags, "--only", *parts]) == 0, capfd.readouterr().out
    figures, printed = json.loads((tmp_path / "gpu.json").read_text()), capfd.readouterr().out
    assert list(figures.pop("parts")) == parts and all(figures.values())
    assert (tmp_path / "gpu.txt").read_text().strip() in printed
    if "card" in parts:
        again, unkilled = figures["killed"], figures["quickstart"]
        assert again["loss"] == unkilled["loss"] and f"| {figures['card']['card']} | " in printed
    if "gpt2_small" in parts:
        assert "## Answers" in (tmp_path / "gpt2_small.md").read_text() and (tmp_path / "gpt2_small_loss.png").exists()


def test_a_part_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    lines: list[str] = []
    child = (
        f"import time, pathlib; print('begun', flush=True); time.sleep(3); pathlib.Path({str(tmp_path)!r}, 'x').touch()"
    )
    part = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert gpu.run_part([sys.executable, "-c", part], 1.5, lines.append) == -signal.SIGKILL and lines == ["begun\n"]
    time.sleep(2)
    assert not (tmp_path / "x").exists()


def test_parts_that_do_not_fit_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--toy", "--only", "machine", "law", "--seconds", "60", "--folder", str(tmp_path)]
    assert gpu.main([*flags, "--output", str(tmp_path / "gpu.json")]) == 0
    assert "law: left out" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == ["machine"]
