"""tools/compare.py on runs whose tokens are there, are gone, or are other ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from common.checkpoint import make_entry, write_manifest
from tests.helpers import run_script
from tests.training.helpers import checkpoint_of
from tools import compare


def test_a_run_that_learned_more_is_better_and_it_says_how_soon(
    unbroken: Path, train: Callable, tmp_path: Path
) -> None:
    longer = tmp_path / "longer"
    assert train(longer, max_steps=60).code == 0
    shutil.copytree(checkpoint_of(unbroken), bare := tmp_path / "bare")
    for name in ("training_state.json", "optimizer.safetensors"):
        (bare / name).unlink()
    write_manifest(bare, {path.name: make_entry(path) for path in bare.iterdir() if path.name != "manifest.json"})
    said = run_script(compare.main, unbroken, longer, bare)
    assert said.code == 0, said.err
    assert re.search(r"longer is better than run by [\d.]+ \+- [\d.]+ bits per byte", said.out)
    assert re.search(r"reaches the last loss of run, [\d.]+, in [\d.]+ of its time", said.out)
    assert "do not differ measurably" not in said.out and "longer is better than bare" in said.out
    assert "training text of bare is unknown" in said.out
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in said.out.splitlines() if row.startswith("| ")}
    (bits,) = (cells for name, cells in rows.items() if name.startswith("| bits per byte"))
    assert bits[2].startswith(f"{bits[0]} (+0.000 ± 0.000)")
    assert sum("| held-out beginning" in name for name in rows) == 1 and len(rows) >= 9


def test_no_common_held_out_text_is_one_sentence(
    unbroken: Path, copy_of: Path, train: Callable, tmp_path: Path
) -> None:
    alone = run_script(compare.main, unbroken)
    assert alone.code == 2 and "RUN RUN" in alone.err

    for path in copy_of.glob("**/training_state.json"):  # of a machine whose tokens are gone
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"data": {"tokens_sha256": "0" * 64}}))
        files = (file for file in path.parent.iterdir() if file.is_file() and file.name != "manifest.json")
        write_manifest(path.parent, {file.name: make_entry(file) for file in files})
    said = run_script(compare.main, copy_of, copy_of / "best")
    assert said.code == 3 and "tokens are gone" in said.err and "--score FILE" in said.err


def test_runs_on_different_texts_have_no_winner(
    unbroken: Path, train: Callable, short_token_folder: Path, tmp_path: Path
) -> None:
    assert train(tmp_path / "other", data_dir=short_token_folder).code == 0
    said = run_script(compare.main, unbroken, tmp_path / "other")
    assert said.code == 0, said.err
    assert "different texts" in said.out and "better than" not in said.out
    assert "held out by run" in said.out and "held out by other" in said.out
