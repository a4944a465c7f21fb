"""The generation benchmark at toy size: its contestants in this process, and the whole command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generation
from tests.forked import fork_what_is_measured

TOY = ["--toy", "--device", "cpu", "--new_tokens", "3", "--rounds", "1", "--held", "4", "20", "--batches", "1", "3"]
GREEDY, SAMPLED = {"4 held", "20 held"}, {"batch 1", "batch 3"}


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
    fork_what_is_measured(monkeypatch)
    monkeypatch.setattr(generation, "cpu_bf16_flag", lambda: None)
    assert generation.main([*TOY, "--output_dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out.partition("\n\nFiles")[0]
    (written,) = tmp_path.glob("generation-*.md")
    assert table in written.read_text() and "| ours, fp32 | " in table
    results = json.loads(written.with_suffix(".json").read_text())
    assert set(results["ms_per_step"]["ours, fp32"][0]) == GREEDY | SAMPLED


def test_lengths_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert generation.main([*TOY, "--held", "30"]) == 2
    assert "33 tokens must fit in max_seq_len 32" in capsys.readouterr().err
