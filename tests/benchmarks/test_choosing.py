"""The script behind docs/choosing.md: its runs are the trainer's, on texts that are parts of each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import choosing
from common.errors import DataError
from tests.forked import fork_what_is_measured
from tests.helpers import generated_text
from training.config import parse_config

SIZES = [(0.002, 300), (0.004, 280), (0.004, 300)]  # megabytes, vocabulary


@pytest.mark.parametrize("case", [*choosing.RECIPES, *choosing.CONFIGS], ids=lambda case: case.name)
def test_every_case_is_a_configuration_that_holds(case: choosing.Case) -> None:
    flags = choosing.flags_of(case, train_tokens=1_000_000)
    config = parse_config([word for key, value in flags.items() for word in (f"--{key}", str(value))])
    assert config.optimizer == ("muon" if "modern" in case.config else "adamw")
    assert case.parameters == 12 * config.num_layers * config.embed_dim**2


def test_texts_are_parts_of_each_other_and_none_holds_the_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "PASSAGE", 100)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"Paragraph {i} of {generated_text(150, seed=i)}\n\n" for i in range(200)))
    cases = [choosing.Case(size, 32, 3e-3, 1, vocabulary=vocabulary) for size, vocabulary in SIZES]
    found = choosing.tokenized([str(corpus)], cases, 0.001, tmp_path)
    small, large = ((tmp_path / f"{size}mb.txt").read_text() for size in (0.002, 0.004))
    validation = (tmp_path / "validation.txt").read_text()
    assert large.startswith(small) and 4000 <= len(large) < 4300
    assert not set(validation.split("\n\n")) & set(large.split("\n\n")) - {""}
    assert {key: metadata.vocab_size for key, metadata in found.items()} == {size: size[1] for size in SIZES}
    assert [metadata.val_bytes for metadata in found.values()] == [len(validation)] * 3
    assert found[0.002, 300].train_bytes == len(small)
    with pytest.raises(DataError, match="smaller than the"):
        choosing.tokenized([str(corpus)], [choosing.Case(1, 32, 3e-3, 1)], 0.001, tmp_path)


def test_runs_end_in_a_table_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fork_what_is_measured(monkeypatch)
    toy = {"PASSAGE": 500, "VALIDATION_MB": 0.002, "LAYERS": 1, "CONTEXT": 16, "EVALUATIONS": 2}
    for name, value in toy.items():
        monkeypatch.setattr(choosing, name, value)
    cases = [choosing.Case(0.01, 32, 3e-3, 2, dropout, vocabulary=300) for dropout in (0, 0.5)]
    monkeypatch.setitem(choosing.CASES, "configs", (cases, "few"))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(generated_text(300, seed=i) for i in range(60)))
    argv = ["--input", str(corpus), "--runs_dir", str(tmp_path / "runs"), "--output_dir", str(tmp_path)]
    assert choosing.main([*argv, "--device", "cpu", "--cases", "configs"]) == 0
    printed = capsys.readouterr().out
    assert "| 0.01 MB | 0.01M | 0.003 | 2 | dropout 0.5, vocabulary 300 |" in printed
    plain, dropped = json.loads((tmp_path / "few.json").read_text())["runs"]
    assert plain["best"] < 8 and plain["best"] != dropped["best"] and plain["tokens"] == dropped["tokens"]
    assert len(plain["curve"]) in (2, 3) and plain["curve"][-1][0] == pytest.approx(2, abs=0.05)
    assert "| 0.01 MB | 0.01M |" in (tmp_path / "few.md").read_text()
    assert (tmp_path / "few.png").stat().st_size > 1000
