"""--profile: the parts of a step are timed, add up, and one sentence says what to do; nothing is written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.lora import add_adapters
from model import TransformerLanguageModel
from tests.helpers import CPU
from training.config import TrainConfig
from training.machine.hardware import Hardware
from training.planning.profile import (
    NOTICEABLE,
    PARTS,
    STEP_PARTS,
    Stopwatch,
    limit,
    matrix_products,
    measure,
    split_on_cpu,
    split_on_gpu,
)

CONFIG = TrainConfig(batch_size=8)

seconds = st.floats(0.0, 100.0)
step_parts = st.fixed_dictionaries(dict.fromkeys(STEP_PARTS, seconds))
positive_parts = st.fixed_dictionaries(dict.fromkeys(PARTS, st.floats(0.001, 100.0)))


def fast_hardware(device: str = "cpu", **values: Any) -> Hardware:
    return dataclasses.replace(CPU, device=torch.device(device), **{"precision": "bf16", "compiles": True, **values})


def parts_of(**shares: float) -> dict[str, float]:
    """Parts of a step of one second; what is not named is computed."""
    parts = {**dict.fromkeys(PARTS, 0.0), **shares}
    rest = 1 - sum(shares.values())
    return {**parts, "forward": rest / 3, "backward": 2 * rest / 3}


# Through the trainer


@pytest.fixture(scope="module")
def profiled(train, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("profile") / "run"
    return train(folder, extra=("--profile",)), folder


def test_the_parts_are_printed_and_add_up(profiled) -> None:
    result, _ = profiled
    assert result.code == 0, result.err
    printed = dict(re.findall(r"^  (\w+) +(\d+\.\d+) +\d+%$", result.out, flags=re.MULTILINE))
    assert tuple(printed) == PARTS
    total = float(re.search(r"^  in all +(\d+\.\d+) ", result.out, flags=re.MULTILINE)[1])
    assert sum(map(float, printed.values())) == pytest.approx(total, abs=0.0001 * len(PARTS))
    for part in ("data", "forward", "backward", "optimizer", "logging"):
        assert float(printed[part]) > 0, part


def test_the_floor_is_what_the_products_alone_take(profiled) -> None:
    result, _ = profiled
    total = float(re.search(r"^  in all +(\d+\.\d+) ", result.out, flags=re.MULTILINE)[1])
    said = re.search(r"^Floor +(\S+) s: .* at (\S+)FLOP/s; the step reaches (\S+)FLOP/s$", result.out, re.MULTILINE)
    assert 0 < float(said[1]) < total
    floor, reached = (float(text[:-1]) * {"M": 1e6, "G": 1e9}[text[-1]] for text in (said[2], said[3]))
    assert reached < floor


@pytest.mark.parametrize("rank", [0, 2])
def test_each_product_of_a_step_is_counted(rank: int) -> None:
    config = TrainConfig(embed_dim=16, num_heads=2, num_layers=3, max_seq_len=8, batch_size=4, lora_rank=rank)
    model = TransformerLanguageModel(config.model_config(50))
    if rank:
        add_adapters(model, config.lora())
    seconds, flops = matrix_products(model, config, CPU)
    products = 2 if rank else 3  # frozen weights have no gradients
    assert seconds * flops == pytest.approx(2 * products * 32 * (3 * 12 * 16 * 16 + 50 * 16))


def test_one_line_says_what_limits_the_run(profiled) -> None:
    result, _ = profiled
    assert len(re.findall(r"^Limit +\S.*\.$", result.out, flags=re.MULTILINE)) == 1


def test_no_run_is_written(profiled) -> None:
    result, folder = profiled
    assert not folder.exists()
    assert "no run was written" in result.out
    assert "step 1/" not in result.out  # the report that is timed is not shown


def test_a_run_in_progress_stays_as_it_is(train, tmp_path) -> None:
    folder = tmp_path / "run"
    assert train(folder, max_steps=6).code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert train(folder, extra=("--profile",)).code == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_without_reports_logging_takes_nothing(train, tmp_path) -> None:
    result = train(tmp_path / "run", extra=("--profile",), log_interval=0, micro_batch_size=2)
    assert re.search(r"^  logging +0\.0000 +0%$", result.out, flags=re.MULTILINE)


def test_profiling_and_a_dry_run_exclude_each_other(train, tmp_path) -> None:
    result = train(tmp_path / "run", extra=("--profile", "--dry_run"))
    assert result.code == 2
    assert "--dry_run" in result.err and "--profile" in result.err


# Adding up


def test_a_stopwatch_adds_the_times_of_a_part_and_leaves_out_what_is_between_steps() -> None:
    watch = Stopwatch()
    for part in ("data", "forward", "backward", "forward", "backward", "optimizer", "end") * 2:
        watch.begin(part)
    assert watch.sums(lambda one, other: 1) == {"data": 2, "forward": 4, "backward": 4, "optimizer": 2}


@given(step_parts, step_parts, st.integers(1, 64))
def test_on_a_cpu_the_parts_add_up_to_the_wall_clock(wall: dict, cpu: dict, threads: int) -> None:
    parts = split_on_cpu(wall, cpu, threads)
    assert sum(parts.values()) == pytest.approx(sum(wall.values()))
    assert all(0 <= parts[part] <= wall[part] for part in STEP_PARTS)
    assert parts["idle"] >= 0
    assert parts["data"] == wall["data"]  # waiting for a disk counts as reading, not as idle


def test_on_a_cpu_threads_that_wait_are_idle() -> None:
    wall = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 1.0}
    cpu = {"data": 0.0, "forward": 4.0, "backward": 16.0, "optimizer": 2.0}
    assert split_on_cpu(wall, cpu, 2) == {"data": 1, "forward": 2, "backward": 8, "optimizer": 1, "idle": 2}


@given(seconds, step_parts, seconds)
def test_on_a_gpu_the_parts_add_up_to_the_wall_clock(wall: float, device: dict, reading: float) -> None:
    parts = split_on_gpu(wall, device, reading)
    assert sum(parts.values()) == pytest.approx(max(wall, sum(device.values())))
    assert all(parts[part] == device[part] for part in STEP_PARTS if part != "data")
    assert parts["idle"] >= 0 and device["data"] <= parts["data"] <= device["data"] + reading


def test_a_gpu_that_waits_for_data_is_not_called_idle() -> None:
    device = {"data": 0.1, "forward": 1.0, "backward": 2.0, "optimizer": 0.4}
    assert split_on_gpu(3.5, device, 5.0)["data"] == 0.1  # read while the GPU computes: it costs nothing
    starved = split_on_gpu(5.5, device, 5.0)
    assert starved["data"] == pytest.approx(2.1) and starved["idle"] == 0
    late = split_on_gpu(5.5, device, 0.5)
    assert late["data"] == pytest.approx(0.6) and late["idle"] == pytest.approx(1.5)


class Clock:
    """A machine whose time passes when the test says so; its GPU does everything at once."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def sleep_on_device(self, cycles: int) -> None:
        self.now += cycles / 1e9

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, clock: Clock):
        self.clock = clock

    def record(self) -> None:
        self.moment = self.clock.now

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.moment - self.moment)


def test_a_gpu_is_held_while_the_host_queues_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host takes to queue its work counts only as far as the step gets longer by it."""
    clock = Clock()
    held = []
    monkeypatch.setattr("training.planning.profile.time", clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (held.append(cycles), clock.sleep_on_device(cycles)))

    def step(watch: Stopwatch) -> None:
        for part, on_host, on_device in zip(STEP_PARTS, (2.0, 3.0, 4.0, 1.0), (0.5, 1.0, 2.0, 0.25), strict=True):
            watch.begin(part)
            clock.now += on_device if watch.on_device else on_host

    parts = measure(step, 3, fast_hardware("cuda"))
    assert parts == pytest.approx({"data": 2.5, "forward": 1, "backward": 2, "optimizer": 0.25, "idle": 4.25})
    assert held[1:] == [pytest.approx(10e9)] * 3  # after a calibration, as long as the host takes


# The sentence


@given(
    positive_parts,
    st.sampled_from(["cpu", "cuda"]),
    st.booleans(),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from(["gpu", "ram", "mmap"]),
    st.sampled_from([None, 0.41]),
)
def test_it_is_one_sentence_with_a_share_whatever_the_parts(
    parts: dict, device: str, compiles: bool, precision: str, placement: str, mfu: float | None
) -> None:
    hardware = fast_hardware(device, compiles=compiles, precision=precision)
    sentence = limit(parts, CONFIG, hardware, placement, mfu)
    assert sentence[0].isupper() and sentence.endswith(".")
    assert not re.search(r"[.!?]\s", sentence)
    assert re.search(r"\d+%", sentence)
    assert sentence == limit({part: 4 * value for part, value in parts.items()}, CONFIG, hardware, placement, mfu)
    if compiles:
        assert "--compile on" not in sentence  # it is
    if precision != "fp32":
        assert "--precision" not in sentence
    if placement != "mmap" and device == "cpu":
        assert "--placement" not in sentence


@pytest.mark.parametrize(
    ("part", "device", "placement", "said"),
    [
        ("data", "cpu", "mmap", ("Reading data", "local", "--placement ram")),
        ("data", "cuda", "ram", ("Reading data", "--placement gpu")),
        ("data", "cuda", "gpu", ("Reading data",)),
        ("optimizer", "cpu", "ram", ("optimizer", "--batch_size", "--gradient_accumulation_steps")),
        ("logging", "cpu", "ram", ("--log_interval", "now 10")),
        ("idle", "cuda", "gpu", ("host", "--batch_size")),
        ("idle", "cpu", "ram", ("cores", "other programs")),
    ],
)
@pytest.mark.parametrize("share", [0.2, 0.4, 0.9])
def test_a_part_that_takes_much_is_named_with_what_to_do(
    part: str, device: str, placement: str, said: tuple[str, ...], share: float
) -> None:
    sentence = limit(parts_of(**{part: share}), CONFIG, fast_hardware(device), placement)
    assert f"{share:.0%}" in sentence
    assert all(words in sentence for words in said), sentence


def test_parts_that_take_little_are_not_worth_a_word() -> None:
    parts = parts_of(**dict.fromkeys(("data", "optimizer", "logging", "idle"), 0.9 * NOTICEABLE))
    assert "computation is the limit" in limit(parts, CONFIG, fast_hardware(), "mmap")


def test_the_computation_is_told_with_what_it_reaches_of_the_peak() -> None:
    sentence = limit(parts_of(optimizer=0.07), CONFIG, fast_hardware("cuda"), "gpu", mfu=0.41)
    assert "93% of a step at 41% of the GPU's peak" in sentence


def test_what_is_off_is_suggested_before_smaller_models() -> None:
    computing = parts_of()
    assert "--precision on auto" in limit(computing, CONFIG, fast_hardware("cuda", precision="fp32"), "gpu")
    assert "--compile on" in limit(computing, CONFIG, fast_hardware("cuda", compiles=False), "gpu")
    assert "smaller model" in limit(computing, CONFIG, fast_hardware("cuda"), "gpu")
    idle = parts_of(idle=0.3)
    assert "--compile on" in limit(idle, CONFIG, fast_hardware("cuda", compiles=False), "gpu")
    accumulating = dataclasses.replace(CONFIG, micro_batch_size=2)
    assert "--micro_batch_size, now 2" in limit(idle, accumulating, fast_hardware("cuda"), "gpu")
