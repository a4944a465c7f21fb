"""--profile: where the time of a step goes."""

from __future__ import annotations

import re


def test_the_longest_operations_and_the_largest_part_are_printed(train, tmp_path) -> None:
    folder = tmp_path / "run"
    assert train(folder, max_steps=6).code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = train(folder, extra=("--profile",))
    assert result.code == 0, result.err
    assert re.search(r"^ *aten::\S+ +[\d.]+% +[\d.]+[mu]s", result.out, flags=re.MULTILINE)
    assert re.search(r"^Profile    (reading data|the model|the update) takes \d+% of a step", result.out, re.MULTILINE)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_profiling_and_a_dry_run_exclude_each_other(train, tmp_path) -> None:
    result = train(tmp_path / "run", extra=("--profile", "--dry_run"))
    assert result.code == 2
    assert "--dry_run" in result.err and "--profile" in result.err
