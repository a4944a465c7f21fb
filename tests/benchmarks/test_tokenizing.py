"""The benchmark of the pre-tokenizer, at toy size."""

from __future__ import annotations

import pytest

from benchmarks.tokenizing import main as benchmark


def test_the_benchmark_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark(["--generate_mb", "0.2", "--vocab_size", "400"]) == 0
    printed = capsys.readouterr().out
    rows = ("learning the vocabulary", "encoding alone, 1 thread", "the whole command", "`tokenizers` alone")
    assert all(f"| {row}" in printed for row in rows)
