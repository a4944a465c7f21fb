"""How cost grows: every point is a run the trainer accepts, and what is measured ends in a table and a plot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scaling import AXES, axes, data_sizes, draw, main, table
from tests.forked import fork_what_is_measured
from training.config import parse_config


def run_of(tokens_per_second: float, **more: Any) -> dict[str, Any]:
    figures = {"parameters": 1000, "ms_per_step": 5.0, "startup_seconds": 2.5, "peak_memory_gb": 0.5}
    choices = {"precision": "fp32", "compiled": False, "placement": "ram"}
    return {"tokens_per_second": tokens_per_second, **figures, **choices, **more}


def test_points_are_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_what_is_measured(monkeypatch)
    flags = ["--toy", "--axes", "data", "--rounds", "1", "--seconds", "0.02", "--device", "cpu"]
    assert main([*flags, "--output_dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("scaling-cpu-*.json")
    measured = json.loads(path.read_text())["axes"]
    assert {axis: list(points) for axis, points in measured.items()} == {"data": ["1", "2"]}
    rows = [row for points in measured.values() for runs in points.values() for row in runs]
    assert all(row["tokens_per_second"] > 0 and row["startup_seconds"] > 0 for row in rows)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = path.with_suffix(".md").read_text()
    assert "size of the token file in MB" in document
    assert f"]({path.stem}.png)" in document and "| 2 | " in capsys.readouterr().out


@pytest.mark.parametrize("size", ["cpu", "cuda", "toy"])
def test_every_point_is_a_configuration(size: str) -> None:
    points = axes(size, [1, 10])
    assert list(points) == list(AXES)
    for axis in points.values():
        assert len(axis) >= 2
        for flags in axis.values():
            given = {key: value for key, value in flags.items() if key not in ("data_mb", "vocab_size")}
            config = parse_config([word for key, value in given.items() for word in (f"--{key}", str(value))])
            config.model_config(flags["vocab_size"])


@pytest.mark.parametrize("size", ["cpu", "cuda"])
def test_one_thing_changes_at_a_time(size: str) -> None:
    points = axes(size, [1, 10])
    assert len({p["batch_size"] * p["max_seq_len"] for p in points["context"].values()}) == 1
    assert len({(p["batch_size"], p["max_seq_len"]) for p in points["model"].values()}) == 1
    for axis, key in (("data", "data_mb"), ("batch", "batch_size"), ("model", "config")):
        rest = [{k: v for k, v in p.items() if k != key} for p in points[axis].values()]
        assert all(other == rest[0] for other in rest)


def test_token_files_too_large_for_this_machine_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, said = data_sizes("cpu", tmp_path, free_ram=2_000_000_000)
    assert sizes == [1, 10, 100] and "above 100 MB are left out: 2.0 GB" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    assert data_sizes("cpu", tmp_path, free_ram=10**12) == ([1, 10, 100, 1000, 5000], "")


def test_tables_and_plot_take_any_number_of_axes_and_unknown_memory(tmp_path: Path) -> None:
    points = {"64": [run_of(1000), run_of(1200)], "128": [run_of(900, compiled=True, peak_memory_gb=None)]}
    first, second = table("context", points).splitlines()[2:]
    assert first == "| 64 | 1,000 | 1,100 (1,000 to 1,200) | 5.0 | 2.5 (2.5 to 2.5) | 0.50 | fp32 | ram |"
    assert "unknown | fp32, compiled |" in second
    models = {"tiny": [run_of(1000)], "gpt2_small": [run_of(10, parameters=134_601_216)]}
    for axes_drawn in ({"context": points}, {"data": points, "context": points, "model": models, "batch": points}):
        draw(axes_drawn, "a machine", tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000


def test_an_unknown_axis_is_explained(capsys: pytest.CaptureFixture) -> None:
    assert main(["--axes", "width"]) == 2
    assert "There are: data, context, model, batch" in capsys.readouterr().err
