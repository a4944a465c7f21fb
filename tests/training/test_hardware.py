"""Device, precision and compilation: what is chosen on which machine, why, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.machine import available_ram, bf16_flag, exact_device, has_kernels, pick_device
from common.output import say_once
from common.script import count_cores
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import CPU, hardware_of
from training.config import Config, Forecast
from training.data import choose_placement
from training.hardware import Units, choose_compile, choose_precision

SHAPE = ModelConfig(11, 8, 2, 1, max_seq_len=4)
T4, A100, H200 = (Units("cuda", capability, has_triton=True) for capability in ((7, 5), (8, 0), (9, 0)))
MAC, PLAIN, AMX = Units("mps"), Units("cpu"), Units("cpu", bf16="AMX")


@pytest.mark.parametrize(
    ("requested", "width", "units", "precision", "said"),
    [
        ("auto", 768, AMX, "bf16", "AMX"),
        ("auto", 768, PLAIN, "fp32", "neither AMX nor AVX512-BF16"),
        ("auto", 128, AMX, "fp32", "embed_dim 128"),
        ("bf16", 128, PLAIN, "bf16", "as configured"),
        ("fp16", 768, AMX, None, "--precision fp16"),
        ("auto", 128, H200, "bf16", "9.0"),
        ("auto", 128, A100, "bf16", "8.0"),
        ("auto", 768, T4, "fp16", "7.5"),
        ("bf16", 768, T4, None, "--precision bf16 needs CUDA capability 8.0, and this GPU has 7.5"),
        ("fp32", 768, T4, "fp32", "as configured"),
        ("auto", 768, MAC, "fp32", "Apple"),
        ("bf16", 768, MAC, None, "--precision bf16"),
        ("fp16", 768, MAC, None, "--precision fp16"),
    ],
)
def test_the_precision_is_the_fastest_that_the_device_has(
    requested: str, width: int, units: Units, precision: str | None, said: str
) -> None:
    if precision is None:
        with pytest.raises(ConfigError, match=said):
            choose_precision(requested, width, units)
    else:
        chosen, reason = choose_precision(requested, width, units)
        assert chosen == precision and said in reason


@pytest.mark.parametrize(
    ("flags", "limit", "found"),
    [
        ("avx2 avx512f amx_tile amx_bf16", "ALL", "AMX"),
        ("avx2 avx512f avx512_bf16", "ALL", "AVX512-BF16"),
        ("avx2 avx512f amx_tile", "ALL", None),
        ("avx512_bf16 amx_bf16", "avx512_core_bf16", "AVX512-BF16"),
        ("avx512_bf16 amx_bf16", "AVX512_CORE", None),
        ("avx512_bf16 amx_bf16", "AVX2", None),
    ],
)
def test_the_units_of_a_cpu_count_unless_they_are_switched_off(flags: str, limit: str, found: str | None) -> None:
    assert bf16_flag(f"model name\t: Some CPU\nflags\t\t: fpu {flags} sse2\n\nflags\t\t: fpu\n", limit) == found
    assert bf16_flag("", limit) is None


@pytest.mark.parametrize(
    ("values", "units", "compiles", "said"),
    [
        ({"embed_dim": 768}, PLAIN, False, "hardly faster"),
        ({"position": "rope", "embed_dim": 768, "num_layers": 12, "max_steps": 10_000}, PLAIN, True, "saves about"),
        ({"position": "rope", "max_steps": 10}, PLAIN, False, "might save"),
        ({"position": "rope", "minutes": 2}, PLAIN, False, "might save"),
        ({"position": "rope", "minutes": 60}, PLAIN, True, "saves about"),
        ({"qk_norm": True, "epochs": 3}, PLAIN, True, "a third of each step"),
        ({}, A100, True, "GPU"),
        ({}, A100._replace(has_triton=False), False, "torch.compile needs Triton"),
        ({"compile": "on"}, A100._replace(has_triton=False), True, "as configured"),
        ({"compile": "off"}, A100, False, "as configured"),
        ({}, MAC, False, "Apple"),
    ],
)
def test_a_gpu_compiles_and_a_cpu_where_the_run_repays_it(
    values: dict[str, Any], units: Units, compiles: bool, said: str
) -> None:
    config = Config(**values)
    chosen, reason, _ = choose_compile(config, config, units)
    assert chosen is compiles and said in reason


def test_few_epochs_of_a_short_text_are_not_worth_compiling_for() -> None:
    config = Config(position="rope", epochs=3)
    assert not choose_compile(config, config, PLAIN, steps=3)[0]
    assert choose_compile(config, config, PLAIN, steps=100_000)[0]


def test_the_cpu_quota_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores, read = count_cores(), Path.read_text
    for quota, expected in (("50000 100000\n", 1), ("max 100000\n", cores), ("no number", cores)):
        monkeypatch.setattr(
            Path, "read_text", lambda path, *a, q=quota, **k: q if path.name == "cpu.max" else read(path, *a, **k)
        )
        assert count_cores() == expected


def test_what_compiling_takes_follows_what_other_programs_leave_of_a_cpu() -> None:
    def chosen(cpu_share: float) -> tuple[bool, str, float | None]:
        config = Config(position="rope", minutes=8, forecast=Forecast(2.0, 0.1, 1000.0, cpu_share))
        return choose_compile(config, config, PLAIN)

    free, busy = chosen(1.0), chosen(0.2)
    assert free[0] and "takes about 24 s" in free[1] and free[2]
    assert not busy[0] and "takes about 120 s" in busy[1]


def test_a_run_that_is_continued_stays_compiled_or_not() -> None:
    """Other minutes would have another answer, and a compiled step rounds in another way."""
    for minutes, was in ((60.0, False), (0.1, True)):
        config = Config(position="rope", minutes=minutes)
        assert choose_compile(config, config, PLAIN, was_compiled=was)[::2] == (was, None)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_run_in_the_chosen_precision_and_weights_stay_fp32(precision: str, dtype: torch.dtype) -> None:
    hardware = dataclasses.replace(CPU, compiles=True, precision=precision)
    model = TransformerLanguageModel(SHAPE)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with hardware.autocast():
        assert model(tokens).dtype == dtype
        loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert not hardware.grad_scaler().is_enabled()


CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("built_for", "capability", "fits"),
    [
        (CU126, (6, 0), True),  # P100
        (CU130, (6, 0), False),
        (CU126, (6, 1), True),  # GTX 1080
        (CU130, (7, 0), False),  # V100
        (CU130, (7, 5), True),  # T4
        (CU130, (8, 9), True),  # L4, by the kernels for 8.6
        (["sm_80", "sm_90a"], (9, 0), True),
        (CU126, (12, 0), False),  # RTX 5090
        (CU130, (13, 0), True),  # compiled by the driver
        (["gfx90a", "gfx942"], (9, 4), True),
    ],
)
def test_a_gpu_that_torch_has_kernels_for_is_known(
    built_for: list[str], capability: tuple[int, int], fits: bool
) -> None:
    assert has_kernels(built_for, capability) is fits


def test_a_gpu_without_kernels_is_not_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    card = {
        "is_available": True,
        "get_arch_list": CU130,
        "get_device_capability": (6, 0),
        "get_device_name": "Tesla P100-PCIE-16GB",
    }
    for name, value in card.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert [pick_device("auto").type for _ in range(3)] == ["cpu"] * 3
    assert capsys.readouterr().out.count("no kernels for Tesla P100-PCIE-16GB (sm_60)") == 1
    with pytest.raises(ConfigError, match=r"no kernels for Tesla P100.*torch<2.15.*--device cpu"):
        pick_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_what_to_do() -> None:
    for name, said in (("cuda", "Change runtime type"), ("mps", "macOS 14")):
        with pytest.raises(ConfigError, match=f"--device {name}.*{said}.*--device auto"):
            pick_device(name)


def test_apples_gpus_have_the_memory_of_the_machine_and_no_fp64() -> None:
    device = torch.device("mps", 0)
    assert choose_placement(10**6, Config(), dataclasses.replace(CPU, device=device)) == "ram"
    assert exact_device(device).type == "cpu"


@pytest.mark.parametrize(
    ("name", "configured", "units"),
    [
        ("NVIDIA A100-SXM4-40GB", None, 8.0),
        ("NVIDIA A100-SXM4-40GB", 11.5, 11.5),
        ("NVIDIA A100-SXM4-40GB", 0.0, None),
        ("Tesla T4", None, None),
        ("Tesla T4", 1.8, 1.8),
        ("NVIDIA RTX A1000", None, None),
    ],
)
def test_units_are_known_on_an_a100_or_as_configured(name: str, configured: float | None, units: float | None) -> None:
    assert dataclasses.replace(CPU, name=name).units_per_hour(Config(units_per_hour=configured)) == units


def test_the_description_gives_every_choice_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    hardware = hardware_of(Config(device="cpu", embed_dim=768))
    device, precision, compiling = hardware.describe().splitlines()
    assert hardware.name in device and "cores), limited to AVX2" in device
    assert f"{hardware.precision}: {hardware.precision_reason}" in precision
    assert f"off: {hardware.compile_reason}" in compiling
    assert not hardware.is_cuda and hardware.peak_flops is None
    assert hardware.memory_bytes is None or hardware.memory_bytes >= (available_ram() or 0) > 2**20
    assert hardware.peak_memory() is None or hardware.peak_memory() > 2**20
