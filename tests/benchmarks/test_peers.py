"""Ours beside its peers: what is measured, what is written, and the table of speeds, which follows from the results."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants import cases
from benchmarks.peers import main, performance_table, with_table
from tests.forked import fork_what_is_measured
from tests.helpers import ROOT

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


def run_of(tokens_per_second: float, **more: Any) -> dict[str, Any]:
    figures = {"parameters": 1000, "ms_per_step": 1e6 / tokens_per_second, "steps": 9, "peak_memory_gb": 1.5}
    return {"tokens_per_second": tokens_per_second, "startup_seconds": 3.0, **figures, **more}


def results_file(folder: Path, device: str, measured: dict[str, list]) -> None:
    case = dataclasses.asdict(cases(False)["toy"])
    machine = {"device": device, "cuda": False, "cores": 2, "date": "2026-11-21"}
    content = {"machine": machine, "left_out": {}, "cases": {"toy": {"case": case, "measured": measured}}}
    (folder / f"training-{device}.json").write_text(json.dumps(content))


def test_everyone_present_is_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_what_is_measured(monkeypatch)
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "model.py").write_text(NANOGPT)
    flags = ["--cases", "toy", "--rounds", "1", "--seconds", "0.02", "--device", "cpu", "--nanogpt"]
    assert main([*flags, str(tmp_path / "nanoGPT"), "--output_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    (path,) = tmp_path.glob("training-cpu-*.json")
    results = json.loads(path.read_text())
    has_transformers = importlib.util.find_spec("transformers") is not None
    measured = results["cases"]["toy"]["measured"]
    assert list(measured) == ["ours", "plain PyTorch", *["transformers"] * has_transformers, "nanoGPT"]
    counts = {name: rows[0]["parameters"] for name, rows in measured.items()}
    assert counts.pop("nanoGPT") == counts["ours"] - 65 * 32
    assert len(set(counts.values())) == 1
    for rows in measured.values():
        assert len(rows) == 1 and rows[0]["steps"] >= 1 and rows[0]["startup_seconds"] > 0
        assert rows[0]["tokens_per_second"] == pytest.approx(4 * 16 / rows[0]["ms_per_step"] * 1000)
    document = path.with_suffix(".md").read_text()
    for name in measured:
        assert f"| {name} | " in document and f"| {name} | " in out
    assert results["command"] in document and "for a run of 100 steps" in document


def test_the_cases_are_those_of_the_configs() -> None:
    for name in ("shakespeare_char", "gpt2_small"):
        config = json.loads((ROOT / "configs" / f"{name}.json").read_text())
        case = dataclasses.asdict(cases(True)[name])
        shape = ("num_layers", "embed_dim", "num_heads", "max_seq_len", "batch_size")
        assert {key: case[key] for key in shape} == {key: config[key] for key in shape}
    assert cases(False)["gpt2_small"].batch_size == 4


def test_speedups_are_taken_round_by_round(tmp_path: Path) -> None:
    """A machine that is twice as fast in the second round says nothing about the contestants."""
    runs = {
        "ours": [run_of(3000), run_of(6000), run_of(3300)],
        "plain PyTorch": [run_of(1000), run_of(2000), run_of(1000)],
    }
    results_file(tmp_path, "machine-b", runs)
    results_file(tmp_path, "machine-a", {"ours": [run_of(50)], "nanoGPT": [run_of(100)]})
    first, second = performance_table(tmp_path).splitlines()[2:]
    assert first == "| [machine-a](training-machine-a.md), 2026-11-21 | toy (1k) | 50 |  |  | 0.50x |"
    assert "| 3,300 | 3.00x |  |  |" in second


def test_the_page_of_benchmarks_shows_the_results_on_record() -> None:
    """`python benchmarks/peers.py --update_readme` after new results."""
    readme = (ROOT / "docs/benchmarks/README.md").read_text(encoding="utf-8")
    assert with_table(readme, performance_table()) == readme
