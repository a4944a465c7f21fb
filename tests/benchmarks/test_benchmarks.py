"""The benchmark scripts at toy size: each measures what it says, and writes it down."""

from __future__ import annotations

import json
import random
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
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_law_of_runs_that_obey_one_is_found(tmp_path: Path) -> None:
    draw = random.Random(3)
    books = [f"{number} " + " ".join(draw.choices(WORDS, k=20_000)) for number in range(10)]
    (tmp_path / "books.txt").write_text("\n<|endoftext|>\n".join([*books, "too short"]))
    variants = learning.build_law_runs(str(tmp_path / "books.txt"), tmp_path)
    assert (tmp_path / "books_0.1.txt").read_text().startswith(books[0][len(books[0]) // 3 :][:10_000] + "\n\n")
    runs = [learning.measure_sizes(words) for words in variants.values()]
    assert len(runs) == len(learning.LAW_RUNS) and runs[0]["bytes"] == pytest.approx(0.9e5, rel=0.01)
    for run, (megabytes, _, _) in zip(runs, learning.LAW_RUNS, strict=True):  # the small books here are soon used up
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


@pytest.mark.parametrize("part", ["machine", "steps", "gpt2_small", "generation"])
def test_the_list_for_a_gpu_runs_through_as_a_toy(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--toy", "--part", part, "--folder", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FIGURES ")]
    figures = [json.loads(line.removeprefix("FIGURES ")) for line in lines]
    assert figures and all(values for each in figures for values in each.values())
