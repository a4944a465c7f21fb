"""The speed ladder: every rung is the same mathematics, and one that fails stops no other."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import speed_ladder
from benchmarks.speed_ladder import NAMES, Rung, gather_row_by_row, materialized_attention
from common.machine import has_fast_bf16
from tests.forked import fork_what_is_measured
from tests.helpers import CPU, open_tokens
from training.config import Config

TINY = ("--num_layers", "1", "--embed_dim", "16", "--num_heads", "2", "--max_seq_len", "16", "--device", "cpu")
HAS_BF16 = has_fast_bf16(torch.device("cpu"))


@pytest.fixture(scope="module")
def climbed(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What is printed and written, torch.compile switched off: it alone takes most of a minute."""
    output = tmp_path_factory.mktemp("ladder")
    words = ["--data_dir", str(token_folder), "--output_dir", str(output), "--rounds", "1", "--batch_size", "2", *TINY]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        fork_what_is_measured(patch)
        assert speed_ladder.main(words) == 0
    return printed.getvalue(), output


def test_every_rung_is_in_the_table_and_one_that_fails_stops_no_other(climbed: tuple[str, Path]) -> None:
    printed, output = climbed
    (written,) = output.glob("speed_ladder-*.md")
    for text in (printed, written.read_text()):
        rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert [row for row, name in zip(rows, NAMES.values(), strict=True) if not row.startswith(f"| {name}")] == []
        assert "| 1.00x |" in rows[0]
        assert "| + torch.compile | failed: error: torch.compile is switched off" in text


def test_the_rungs_are_the_same_mathematics(climbed: tuple[str, Path]) -> None:
    """The same loss on the same sequences, and again after updates of the weights."""
    _, output = climbed
    (path,) = output.glob("*.json")
    rungs = {name: rows[0] for name, rows in json.loads(path.read_text())["rungs"].items()}
    left_out = {NAMES[Rung.COMPILE]} | (set() if HAS_BF16 else {NAMES[Rung.MIXED]})
    assert list(rungs) == [name for name in NAMES.values() if name not in left_out]
    baseline = rungs["baseline"]["losses"]
    assert baseline[0] > baseline[1]
    for name, rung in rungs.items():
        assert rung["losses"] == pytest.approx(baseline, rel=1e-5 if rung["precision"] == "fp32" else 5e-3), name


@pytest.mark.parametrize("T", [1, 7])
def test_materialized_attention_is_attention(T: int) -> None:
    q, k, v = torch.randn(3, 2, 3, T, 8, generator=torch.Generator().manual_seed(0)).unbind()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(materialized_attention(q, k, v, is_causal=True), expected)


def test_rows_gathered_one_by_one_are_the_same_rows(token_folder: Path) -> None:
    data = open_tokens(Config(max_seq_len=32, data_dir=str(token_folder)), CPU)
    starts = torch.tensor([0, 5, 900, 17]).numpy()
    torch.testing.assert_close(gather_row_by_row(data, starts), data.gather(starts))
