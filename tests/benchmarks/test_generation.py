"""The generation benchmark at toy size: its contestants in this process, and the whole command with ours alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import generation
from tests.forked import fork_what_is_measured

SHAPE = {"vocab_size": 80, "embed_dim": 64, "num_heads": 2, "num_layers": 2, "max_seq_len": 32}
TOY = [f"--{name}={value}" for name, value in {**SHAPE, "new_tokens": 3, "rounds": 1}.items()]
TOY += ["--held", "4", "20", "--batches", "1", "3"]
GREEDY = {"4 held, batch 1, greedy", "20 held, batch 1, greedy"}
SAMPLED = {"16 held, batch 1, sampled", "16 held, batch 3, sampled"}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["ours, fp32", "ours, bf16", "Hugging Face, fp32"])
def test_a_contestant_is_timed_at_each_length_and_batch_size(name: str, capsys: pytest.CaptureFixture) -> None:
    if name.startswith("Hugging Face"):
        pytest.importorskip("transformers")
    assert generation.main([*TOY, "--contestant", name]) == 0
    times = json.loads(capsys.readouterr().out)
    assert set(times) == GREEDY | SAMPLED
    assert all(0 < milliseconds < 60_000 for milliseconds in times.values())


def test_nanogpt_is_taken_from_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "model.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "@dataclass\n"
        "class GPTConfig:\n"
        "    block_size: int\n    vocab_size: int\n    n_layer: int\n    n_head: int\n    n_embd: int\n"
        "    dropout: float\n    bias: bool\n"
        "class GPT(torch.nn.Module):\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "        print('number of parameters')\n"
        "    def generate(self, tokens, count):\n"
        "        return torch.cat([tokens, tokens[:, -count:]], dim=1)\n"
    )
    assert generation.main([*TOY, "--nanogpt", str(tmp_path), "--contestant", "nanoGPT, fp32"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == GREEDY


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(generation, "RESULTS", tmp_path)
    fork_what_is_measured(monkeypatch)
    assert generation.main([*TOY, "--only", "ours, fp32", "nobody, fp32", "--write", "toy"]) == 0
    printed = capsys.readouterr().out
    assert "nobody, fp32 failed" in printed
    table = printed[printed.index("Milliseconds") :].strip()
    assert table in (tmp_path / "generation-toy.md").read_text()
    results = json.loads((tmp_path / "generation-toy.json").read_text())
    assert set(results["ms_per_step"]) == {"ours, fp32"}
    assert set(results["ms_per_step"]["ours, fp32"]) == GREEDY | SAMPLED
    assert results["model"]["embed_dim"] == 64 and results["machine"]["torch"] == torch.__version__


def test_lengths_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert generation.main([*TOY, "--held", "30"]) == 2
    assert "33 tokens must fit in max_seq_len 32" in capsys.readouterr().err
