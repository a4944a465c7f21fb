"""The speed ladder: every rung is the same mathematics, the results are written, a rung that fails stops no other."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import ladder, rungs
from benchmarks.rungs import NAMES, Rung
from common import machine as machine_module
from common.errors import UserError
from common.machine import has_fast_bf16
from tests.forked import fork_what_is_measured
from tests.helpers import CPU, columns
from tools import speed_ladder
from training.config import SCHEMA, TrainConfig
from training.machine.hardware import Hardware
from training.numbers.data import TokenData

TINY = ("--num_layers", "1", "--embed_dim", "16", "--num_heads", "2", "--max_seq_len", "16", "--device", "cpu")
CONFIG = TrainConfig(embed_dim=64, num_heads=2, num_layers=2, max_seq_len=32, batch_size=32, device="cpu")
CONFIG = dataclasses.replace(CONFIG, sources=dict.fromkeys(SCHEMA, "default"))
HAS_BF16 = has_fast_bf16(torch.device("cpu"))


def with_memory(memory_bytes: int | None = None) -> Hardware:
    return dataclasses.replace(CPU, memory_bytes=memory_bytes)


def measured(seconds: float, **values: Any) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "compile_seconds": None,
        "peak_memory": 10**9,
        "losses": [1.0, 1.0],
        "precision": "fp32",
        "compiled": False,
        "tokens": "ram",
        **values,
    }


# The whole tool


@pytest.fixture(scope="module")
def climbed(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the tool prints and writes, torch.compile switched off: it alone takes most of a minute."""
    output = tmp_path_factory.mktemp("ladder")
    words = ["--data_dir", str(token_folder), "--output_dir", str(output), "--rounds", "1", "--batch_size", "2", *TINY]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        fork_what_is_measured(patch)
        assert speed_ladder.main(words) == 0
    return printed.getvalue(), output


def test_every_rung_is_in_the_printed_and_the_written_table(climbed: tuple[str, Path]) -> None:
    printed, output = climbed
    (written,) = output.glob("speed_ladder-*.md")
    for text in (printed, written.read_text()):
        rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert [row for row, name in zip(rows, NAMES.values(), strict=True) if not row.startswith(f"| {name}")] == []
        assert "| 1.00x |" in rows[0]
    assert "2 x 16 tokens, as given" in printed
    assert f"({written.stem}.png)" in written.read_text()


def test_the_rungs_are_the_same_mathematics(climbed: tuple[str, Path]) -> None:
    """The same loss on the same sequences, and again after updates of the weights."""
    _, output = climbed
    (path,) = output.glob("*.json")
    rungs = json.loads(path.read_text())["rungs"]
    assert [rung["name"] for rung in rungs] == list(NAMES.values())
    baseline = rungs[Rung.BASELINE]["losses"]
    assert baseline[0] > baseline[1]
    assert "failed" in rungs.pop(Rung.COMPILE)["missing"]
    assert HAS_BF16 or "left out" in rungs.pop(Rung.COMPILE)["missing"]  # the next one, once that is gone
    for rung in rungs:
        tolerance = 1e-5 if rung["precision"] == "fp32" else 5e-3
        assert rung["losses"] == pytest.approx(baseline, rel=tolerance), rung["name"]
    if HAS_BF16:
        assert [rung["precision"] for rung in rungs] == ["fp32"] * 3 + ["bf16"] * 2 + ["fp32"]
    else:
        assert [rung["precision"] for rung in rungs] == ["fp32"] * 5
    assert [rung["tokens"] for rung in rungs] == ["mmap"] + ["ram"] * (len(rungs) - 1)


def test_the_figures_agree_with_each_other(climbed: tuple[str, Path]) -> None:
    _, output = climbed
    (path,) = output.glob("*.json")
    results = json.loads(path.read_text())
    assert results["tokens_per_step"] == 32 and results["rounds"] == 1
    baseline = results["rungs"][0]["seconds"]["median"]
    timed = [rung for rung in results["rungs"] if "missing" not in rung]
    assert len(timed) == len(NAMES) - 1 - (not HAS_BF16)
    for rung in timed:
        seconds = rung["seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
        assert rung["speed_up"] == pytest.approx(baseline / seconds["median"])
        assert rung["share_of_peak"] is None  # no CPU's peak is known
        assert rung["peak_memory"] > 0


def test_the_chart_is_a_picture(climbed: tuple[str, Path]) -> None:
    _, output = climbed
    (path,) = output.glob("*.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_a_rung_that_fails_stops_no_other(climbed: tuple[str, Path]) -> None:
    printed, _ = climbed
    assert "| + torch.compile | failed: torch.compile is switched off" in printed
    assert ("| + mixed precision (bf16, not compiled) |" if HAS_BF16 else "| + mixed precision | left out") in printed


@pytest.mark.parametrize(("flags", "precision"), [("avx2", "fp32"), ("avx512_bf16", "bf16"), ("amx_bf16", "bf16")])
def test_a_rung_for_units_that_the_machine_lacks_is_left_out_and_said_so(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: str, precision: str
) -> None:
    """bf16 on a CPU without units for it takes ten minutes a step."""
    climbed: list[str] = []

    def in_turn(commands: dict[str, list[str]], *rest: Any) -> dict[str, list[dict[str, Any]]]:
        climbed.extend(commands)
        return {name: [measured(1.0)] for name in commands}

    monkeypatch.setattr(machine_module, "cpu_info", lambda: f"flags : fpu {flags}\n")
    monkeypatch.setattr(ladder, "measure_in_turn", in_turn)
    words = ["--data_dir", str(token_folder), "--output_dir", str(tmp_path), "--device", "cpu", "--batch_size", "2"]
    assert speed_ladder.main([*words, *TINY]) == 0
    assert rungs.mixed_precision(torch.device("cpu")) == precision
    printed = capsys.readouterr().out
    if precision == "bf16":
        assert climbed == list(NAMES.values()) and "left out" not in printed
    else:
        assert climbed == [name for rung, name in NAMES.items() if rung != Rung.MIXED]
        assert "Rung       + mixed precision is left out: this CPU has neither AMX nor AVX512-BF16" in printed
        assert "| + mixed precision | left out: this CPU has neither AMX nor AVX512-BF16" in printed


# The pieces


@pytest.mark.parametrize("T", [1, 7])
def test_materialized_attention_is_attention(T: int) -> None:
    q, k, v = torch.randn(3, 2, 3, T, 8, generator=torch.Generator().manual_seed(0)).unbind()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(rungs.materialized_attention(q, k, v, is_causal=True), expected)


def test_rows_gathered_one_by_one_are_the_same_rows(token_folder: Path) -> None:
    config = dataclasses.replace(CONFIG, data_dir=str(token_folder))
    data = TokenData.open(config, with_memory())
    starts = torch.tensor([0, 5, 900, 17]).numpy()
    one_by_one, at_once = rungs.gather_row_by_row(data, starts), data.gather(starts)
    assert torch.equal(one_by_one, at_once) and one_by_one.dtype == at_once.dtype


def test_tokens_are_made_up_only_where_none_are_named_or_there(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "SYNTHETIC_TOKENS", 50_000)
    named = dataclasses.replace(CONFIG, data_dir=str(token_folder))
    assert ladder.find_tokens(named, tmp_path) == (named, f"the tokens of {token_folder}")
    config, words = ladder.find_tokens(CONFIG, tmp_path)
    assert "50,000 random tokens" in words and (Path(config.data_dir) / "tokens.bin").exists()
    Path("datasets_cache").symlink_to(token_folder)
    assert ladder.find_tokens(CONFIG, tmp_path) == (CONFIG, "the tokens of datasets_cache")


def test_a_folder_that_is_named_and_not_there_is_an_error(tmp_path: Path, capsys: Any) -> None:
    assert speed_ladder.main(["--data_dir", str(tmp_path / "nowhere"), *TINY]) == 3
    assert "nowhere" in capsys.readouterr().err


# The batch


def test_a_step_is_made_small_enough_for_the_scores_too() -> None:
    config = dataclasses.replace(CONFIG, max_seq_len=1024)
    whole = ladder.baseline_memory(config, 1000, CPU)
    assert whole > 4 * 32 * 2 * 1024**2 * 2  # rows, heads, T * T, layers
    assert ladder.fit_memory(config, 1000, with_memory(10 * whole)) is config
    assert ladder.fit_memory(config, 1000, with_memory(None)) is config
    assert ladder.fit_memory(config, 1000, with_memory(whole // 2)).sequences_per_step < 16
    assert ladder.fit_memory(config, 1000, with_memory(1)).sequences_per_step == 1


@pytest.mark.parametrize(("seconds_of_two", "sequences"), [(0.01, 32), (1.0, 12), (4.0, 3), (60.0, 1)])
def test_on_a_cpu_a_step_of_the_baseline_takes_some_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_of_two: float, sequences: int
) -> None:
    def in_turn(commands: Mapping[str, Sequence[str]], rounds: int, failed: object) -> dict[str, list[dict[str, Any]]]:
        (command,) = commands.values()
        probed = json.loads(Path(command[-1].removeprefix("--config=")).read_text())
        assert probed["batch_size"] == 2 and rounds == 1
        return {name: [measured(seconds_of_two)] for name in commands}

    monkeypatch.setattr(ladder, "measure_in_turn", in_turn)
    config, reason = ladder.choose_batch(CONFIG, 100, with_memory(10**12), tmp_path)
    assert config.sequences_per_step == sequences
    assert reason == "as configured" if sequences == 32 else "instead of 32" in reason


def test_a_batch_that_was_given_is_measured(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, sources={**CONFIG.sources, "batch_size": "flag"})
    assert ladder.choose_batch(config, 100, with_memory(1), tmp_path) == (config, "as given")


def test_a_baseline_that_cannot_be_measured_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turn(commands: object, rounds: int, failed: Any) -> dict:
        failed("The baseline", "error: no space")
        return {}

    monkeypatch.setattr(ladder, "measure_in_turn", in_turn)
    with pytest.raises(UserError, match="no space"):
        ladder.choose_batch(CONFIG, 100, with_memory(10**12), tmp_path)


def test_a_rung_is_told_the_configuration_that_was_resolved(tmp_path: Path) -> None:
    from training.config import parse_config

    given = parse_config(["--model_size", "tiny", "--num_layers", "4", "--epochs", "3", "--input", "x"])
    command = ladder.rung_command(Rung.RAM, 7, given, tmp_path)
    assert "--rung=1" in command and "--steps=7" in command
    told = parse_config([command[-1]])
    done = {"input", "model_size", "output_dir"}
    assert told.output_dir == str(tmp_path)
    assert {k: v for k, v in told.values().items() if k not in done} == {
        k: v for k, v in given.values().items() if k not in done
    }


# The results


def test_a_rung_that_failed_is_shown_with_its_reason_and_the_others_go_on() -> None:
    times = dict(zip(NAMES.values(), (8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 0.5), strict=True))
    del times[NAMES[Rung.COMPILE]]
    results = {name: [measured(seconds), measured(3 * seconds), measured(seconds)] for name, seconds in times.items()}
    rows = ladder.summarize(results, {NAMES[Rung.COMPILE]: "failed: no compiler"}, floor_seconds=0.25)
    lines = ladder.table(rows).splitlines()[2:]
    assert len(lines) == len(NAMES)
    assert "failed: no compiler" in lines[Rung.COMPILE]
    assert "0.5 (0.5 to 1.5) | 16.00x | 1.00 GB | 50% |" in lines[Rung.OURS]
    assert "(fp32, not compiled)" in lines[Rung.MIXED]


def test_the_blogs_seconds_stand_beside_the_same_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "max_seq_len": 512, "batch_size": 64}
    theirs = dataclasses.replace(CONFIG, **shape)
    gpu = dataclasses.replace(CPU, device=torch.device("cuda", 0))
    assert ladder.is_the_blogs(theirs, 32_000, gpu)
    assert not ladder.is_the_blogs(theirs, 32_000, CPU)
    assert not ladder.is_the_blogs(theirs, 50_257, gpu)
    assert not ladder.is_the_blogs(dataclasses.replace(theirs, batch_size=32), 32_000, gpu)

    results = {name: [measured(1.0)] for name in NAMES.values() if name != NAMES[Rung.RAM]}
    rows = ladder.summarize(results, {NAMES[Rung.RAM]: "failed: x"}, None, beside_blog=True)
    told = [columns(line)[-1] for line in ladder.table(rows).splitlines()]
    assert told[0] == "the blog's A100, s/step"
    assert told[2:] == ["1.6", "0.8", "0.5", "0.35", "0.225", "0.1", ""]
    assert "blog" not in ladder.table(ladder.summarize(results, {}, None))


def test_what_is_measured_is_written_at_once(
    token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Killed after the first rung, the ladder leaves it; and only the rungs that were asked for are measured."""
    asked: list[str] = []

    def in_turn(commands: dict[str, list[str]], rounds: int, failed: Any, so_far: Any) -> None:
        asked.extend(commands)
        so_far({NAMES[Rung.BASELINE]: [measured(2.0)]})
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "measure_in_turn", in_turn)
    words = ["--data_dir", str(token_folder), "--output_dir", str(tmp_path), "--batch_size", "2", *TINY]
    assert speed_ladder.main([*words, "--only", "baseline", "this trainer"]) == 130
    assert asked == [NAMES[Rung.BASELINE], NAMES[Rung.OURS]]
    (path,) = tmp_path.glob("*.json")
    baseline, ram, *_, ours = json.loads(path.read_text())["rungs"]
    assert baseline["seconds"]["median"] == 2.0
    assert ram["missing"] == "not asked for" and ours["missing"] == ""
    assert speed_ladder.main([*words, "--only", "flash"]) == 2
    assert "--only 'flash' is not known. There are: baseline, " in capsys.readouterr().err


def test_without_a_baseline_there_is_no_speed_up(tmp_path: Path) -> None:
    results = {NAMES[Rung.OURS]: [measured(1.0, compile_seconds=30.0), measured(1.0, compile_seconds=5.0)]}
    rows = ladder.summarize(results, {}, floor_seconds=None)
    assert [row.get("speed_up") for row in rows] == [None] * len(NAMES)
    assert "| - | 1.00 GB | - | 30 s |" in ladder.table(rows)
    ladder.draw(rows, "one bar", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").exists()


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--steps", "0"), ("--round", "2"), ("--batchsize", "2")])
def test_wrong_flags_are_refused(words: tuple[str, ...]) -> None:
    assert speed_ladder.main([*words, *TINY]) == 2
