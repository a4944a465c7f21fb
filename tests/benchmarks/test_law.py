"""The law's benchmark: which text a run learns from, and the constants that are fitted to what runs measured."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import law
from tests.helpers import WORDS, open_tokens
from tokenization.metadata import TokenMetadata, metadata_files
from training.config import Config
from training.planning.law import Law

TRUE = Law(0.8, 5.0, 0.22, 40.0, 0.3, 5.0, 0.25)


def test_what_is_held_out_is_of_other_books(tmp_path: Path) -> None:
    draw = random.Random(3)
    books = [f"{number} " + " ".join(draw.choices(WORDS, k=20_000)) for number in range(10)]
    file = tmp_path / "books.txt"
    file.write_text("\n<|endoftext|>\n".join([*books, "too short"]))
    assert law.documents(str(file)) == books
    folder = law.prepare(books, 0.05, tmp_path)
    metadata = TokenMetadata.read(metadata_files(folder)[0])
    assert metadata.train_bytes == pytest.approx(50_000, rel=0.01)
    train_on, held_out = ((folder / f"{name}.txt").read_text() for name in ("train", "held_out"))
    assert open_tokens(Config(data_dir=str(folder), max_seq_len=16)).metadata.val_bytes == len(held_out)
    assert held_out in books[5] and train_on.split("\n\n")[0] in books[0]
    assert law.prepare([], 0.05, tmp_path) == folder  # not made again


def test_the_law_of_runs_that_obey_one_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = []
    for run in law.RUNS:
        sizes = {"bytes": run.megabytes * 1e6, "parameters": law.block_parameters(run)}
        lowest = TRUE.loss(sizes["parameters"], sizes["bytes"], run.passes)
        runs.append(run._asdict() | sizes | {"lowest": lowest, "last": lowest, "at_epoch": run.passes, "seconds": 1})
    (tmp_path / "law.json").write_text(json.dumps({"runs": runs}))
    books = tmp_path / "books.txt"
    books.write_text("nothing is trained, all runs are there")
    assert law.main(["--books", str(books), "--output_dir", str(tmp_path), "--device", "cpu"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if " MB |" in line]
    assert len(rows) == len(law.RUNS) and all(abs(float(row[6])) < 0.02 for row in rows)
    assert sum("not fitted" in row[7] for row in rows) >= 4
