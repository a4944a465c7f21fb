"""--profile: where the time of a step goes, and one sentence on what limits the run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import CPU
from training.hardware import Hardware
from training.inspections import STEP_PARTS, describe_limit


def fast_hardware(device: str = "cpu", **values: Any) -> Hardware:
    return dataclasses.replace(CPU, device=torch.device(device), **{"precision": "bf16", "compiles": True, **values})


def parts_of(**shares: float) -> dict[str, float]:
    """Parts of a step of one second; what is not named is computed."""
    rest = 1 - sum(shares.values())
    return dict.fromkeys(STEP_PARTS, 0.0) | shares | {"gradients": rest}


@pytest.fixture(scope="module")
def profiled(train, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("profile") / "run"
    return train(folder, extra=("--profile",)), folder


def test_the_parts_are_printed_and_add_up(profiled) -> None:
    result, folder = profiled
    assert result.code == 0, result.err
    printed = dict(re.findall(r"^  (\w+) +(\d+\.\d+) +\d+%$", result.out, flags=re.MULTILINE))
    assert tuple(printed) == STEP_PARTS and all(float(seconds) > 0 for seconds in printed.values())
    total = float(re.search(r"^  total +(\d+\.\d+) ", result.out, flags=re.MULTILINE)[1])
    assert sum(map(float, printed.values())) == pytest.approx(total, abs=0.0001 * len(STEP_PARTS))
    assert len(re.findall(r"^Limit +\S.*\.$", result.out, flags=re.MULTILINE)) == 1
    assert re.search(r"^ *aten::\S+ +[\d.]+% +[\d.]+[mu]s", result.out, flags=re.MULTILINE)
    assert not folder.exists() and "no run was written" in result.out


def test_a_run_in_progress_stays_as_it_is(train, tmp_path) -> None:
    folder = tmp_path / "run"
    assert train(folder, max_steps=6).code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert train(folder, extra=("--profile",)).code == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_profiling_and_a_dry_run_exclude_each_other(train, tmp_path) -> None:
    result = train(tmp_path / "run", extra=("--profile", "--dry_run"))
    assert result.code == 2
    assert "--dry_run" in result.err and "--profile" in result.err


@pytest.mark.parametrize(
    ("part", "device", "placement", "said"),
    [
        ("data", "cpu", "mmap", ("Reading data", "local", "--placement ram")),
        ("data", "cuda", "ram", ("Reading data", "--placement gpu")),
        ("data", "cuda", "gpu", ("Reading data", "larger model")),
        ("data", "cpu", "ram", ("Reading data", "larger model")),
        ("update", "cpu", "ram", ("optimizer", "--batch_size", "--gradient_accumulation_steps")),
    ],
)
def test_a_part_that_takes_much_is_named_with_what_to_do(
    part: str, device: str, placement: str, said: tuple[str, ...]
) -> None:
    sentence = describe_limit(parts_of(**{part: 0.4}), fast_hardware(device), placement)
    assert "40%" in sentence and all(words in sentence for words in said), sentence


def test_what_is_off_is_suggested_before_smaller_models() -> None:
    for hardware, said in (
        (fast_hardware("cuda", precision="fp32"), "leave --precision out"),
        (fast_hardware("cuda", compiles=False), "--compile on"),
        (fast_hardware("cuda"), "smaller model"),
    ):
        assert said in describe_limit(parts_of(), hardware, "gpu")
