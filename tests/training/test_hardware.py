"""Device, precision and compilation: what is chosen on which machine, why, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import common.machine
from common.errors import ConfigError
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import CPU, hardware_of
from training.config import Config, Forecast
from training.data import choose_placement
from training.hardware import clear_frames, detect_hardware

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu sse2 {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
WIDE = Config(embed_dim=768)
SHAPE = ModelConfig(11, 8, 2, 1, max_seq_len=4)

FakeCuda = Callable[[str, tuple[int, int]], None]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine without a GPU whose CPU has the given flags."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda flags: monkeypatch.setattr(common.machine, "cpu_info", lambda: CPUINFO.format(flags))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A machine with a GPU of the given name and compute capability, as far as PyTorch is asked about it."""

    def fake(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        told = SimpleNamespace(total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: told)
        monkeypatch.setattr(importlib.util, "find_spec", lambda package: object())  # a build for a GPU brings Triton

    before = torch.get_float32_matmul_precision()
    switches = torch.backends.cuda
    is_enabled = switches.cudnn_sdp_enabled()
    yield fake
    torch.set_float32_matmul_precision(before)
    switches.enable_cudnn_sdp(is_enabled)


# Precision


@pytest.mark.parametrize(
    ("flags", "precision", "said"),
    [
        ("avx2 avx512f amx_tile amx_bf16", "bf16", "AMX"),
        ("avx2 avx512f avx512_bf16", "bf16", "AVX512-BF16"),
        ("avx2 avx512f amx_tile", "fp32", "neither AMX nor AVX512-BF16"),
        ("", "fp32", "neither"),
    ],
)
def test_a_cpu_computes_in_bf16_where_it_has_it(cpu: Callable, flags: str, precision: str, said: str) -> None:
    cpu(flags)
    hardware = hardware_of(WIDE)
    assert hardware.precision == precision and said in hardware.precision_reason
    assert hardware.device.type == "cpu" and not hardware.is_cuda
    assert "Some CPU @ 2.0GHz" in hardware.name
    assert hardware.peak_flops is None


@pytest.mark.parametrize(
    ("limit", "precision"), [("AVX2", "fp32"), ("AVX512_CORE", "fp32"), ("avx512_core_bf16", "bf16"), ("ALL", "bf16")]
)
def test_units_that_are_switched_off_do_not_count(
    cpu: Callable, limit: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu("avx2 avx512f avx512_bf16 amx_bf16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    hardware = hardware_of(WIDE)
    assert hardware.precision == precision and hardware.name.endswith("cores), limited to AVX2")
    assert ("AMX" in hardware.precision_reason) == (limit in ("AVX2", "AVX512_CORE", "ALL"))


def test_a_small_model_stays_in_fp32_on_a_cpu(cpu: Callable) -> None:
    cpu("amx_bf16")
    hardware = hardware_of(Config(embed_dim=128))
    assert hardware.precision == "fp32" and "128" in hardware.precision_reason


def test_a_cpu_that_tells_nothing_computes_in_fp32(cpu: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu("")
    monkeypatch.setattr(common.machine, "cpu_info", lambda: "")
    hardware = hardware_of(WIDE)
    assert hardware.precision == "fp32" and hardware.name


@pytest.mark.parametrize(
    ("capability", "precision"), [((8, 0), "bf16"), ((9, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16")]
)
def test_a_gpu_computes_in_bf16_from_capability_8(cuda: FakeCuda, capability: tuple, precision: str) -> None:
    cuda("NVIDIA Something", capability)
    hardware = hardware_of(Config())
    assert hardware.is_cuda and hardware.precision == precision
    assert "{}.{}".format(*capability) in hardware.precision_reason
    assert hardware.grad_scaler().is_enabled() == (precision == "fp16")
    assert hardware.compiles and hardware.compile_reason
    assert hardware.memory_bytes == 80 * 2**30


def test_bf16_on_a_gpu_without_it_is_refused(cuda: FakeCuda) -> None:
    cuda("Tesla T4", (7, 5))
    with pytest.raises(ConfigError) as caught:
        hardware_of(Config(precision="bf16"))
    assert "--precision bf16" in str(caught.value) and "7.5" in str(caught.value)
    assert hardware_of(Config(precision="fp32")).precision == "fp32"


def test_fp16_on_a_cpu_is_refused(cpu: Callable) -> None:
    cpu("amx_bf16")
    with pytest.raises(ConfigError, match="--precision fp16"):
        hardware_of(Config(precision="fp16"))


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


# Device


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac with a GPU of Apple's, as far as PyTorch is asked about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 2**30)
    monkeypatch.setattr(common.machine, "cpu_info", lambda: "")


def test_the_gpu_of_a_mac_is_taken_when_asked_for(mac: None) -> None:
    on_cpu, on_gpu = hardware_of(WIDE), hardware_of(dataclasses.replace(WIDE, device="mps", position="rope"))
    assert on_cpu.device.type == "cpu" and "--device mps" in on_cpu.describe()
    assert on_gpu.device == torch.device("mps", 0) and not on_gpu.is_cuda and "--device mps" not in on_gpu.describe()
    assert (on_gpu.precision, on_gpu.compiles, on_gpu.memory_bytes) == ("fp32", False, 12 * 2**30)
    assert choose_placement(10**6, WIDE, on_gpu) == "ram", "which is the GPU's memory, too"
    assert common.machine.exact_device(on_gpu.device).type == "cpu" and not common.machine.has_fast_bf16(on_gpu.device)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_a_mac_is_refused(mac: None, precision: str) -> None:
    with pytest.raises(ConfigError, match=f"--precision {precision}"):
        hardware_of(Config(device="mps", precision=precision))


def test_cuda_without_a_gpu_is_refused_with_what_to_do(cpu: Callable) -> None:
    cpu("")
    with pytest.raises(ConfigError) as caught:
        hardware_of(Config(device="cuda"))
    assert all(said in str(caught.value) for said in ("--device cuda", "Change runtime type", "--device auto"))


@pytest.mark.parametrize("config", [Config(use_gpu=False), Config(device="cpu")])
def test_a_gpu_that_is_not_wanted_is_left_alone(cuda: FakeCuda, config: Config) -> None:
    cuda("NVIDIA A100-SXM4-80GB", (8, 0))
    before = torch.get_float32_matmul_precision()
    hardware = hardware_of(config)
    assert hardware.device.type == "cpu" and hardware.peak_flops is None
    assert hardware.units_per_hour(config) is None
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_the_peak_is_that_of_the_part_and_not_of_one_whose_name_is_in_its(
    cuda: FakeCuda, name: str, tera: int | None
) -> None:
    cuda(name, (8, 0))
    peak = hardware_of(Config()).peak_flops
    assert peak == (None if tera is None else pytest.approx(tera * 1e12, rel=0.01))


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
def test_units_are_known_on_an_a100_or_as_configured(
    cuda: FakeCuda, name: str, configured: float | None, units: float | None
) -> None:
    cuda(name, (8, 0))
    config = Config(units_per_hour=configured)
    assert hardware_of(config).units_per_hour(config) == units


def test_the_description_gives_every_choice_with_its_reason(cpu: Callable) -> None:
    cpu("amx_bf16")
    hardware = hardware_of(WIDE)
    lines = hardware.describe().splitlines()
    assert len(lines) == 3 and hardware.name in lines[0]
    assert "bf16" in lines[1] and hardware.precision_reason in lines[1]
    assert "off" in lines[2] and hardware.compile_reason in lines[2]


def test_memory_is_that_of_this_machine() -> None:
    hardware = hardware_of(Config(device="cpu"))
    assert hardware.memory_bytes is None or hardware.memory_bytes >= common.machine.available_ram() > 2**20
    assert hardware.peak_memory() is None or hardware.peak_memory() > 2**20


# Compilation


@pytest.mark.parametrize(
    ("values", "compiles", "said"),
    [
        ({"embed_dim": 768}, False, "hardly faster"),
        ({"position": "rope", "embed_dim": 768, "num_layers": 12, "max_steps": 10_000}, True, "save about"),
        ({"position": "rope", "max_steps": 10}, False, "of this run"),
        ({"position": "rope", "minutes": 2}, False, "of this run"),
        ({"position": "rope", "minutes": 60}, True, "of this run"),
        ({"qk_norm": True, "epochs": 3}, True, "a third of each step"),
    ],
)
def test_a_cpu_compiles_where_the_run_repays_it(cpu: Callable, values: dict, compiles: bool, said: str) -> None:
    cpu("")
    hardware = hardware_of(Config(**values))
    assert hardware.compiles is compiles and said in hardware.compile_reason


def test_what_compiling_takes_follows_what_other_programs_leave_of_a_cpu(cpu: Callable) -> None:
    cpu("")
    free, busy = (
        hardware_of(Config(position="rope", minutes=8, forecast=Forecast(2.0, 0.1, 1000.0, share)))
        for share in (1.0, 0.2)
    )
    assert free.compiles and "take about 24 s" in free.compile_reason and free.compile_limit
    assert not busy.compiles and "take about 120 s" in busy.compile_reason


def test_a_run_that_is_continued_stays_compiled_or_not(cpu: Callable) -> None:
    """Other minutes would have another answer, and a compiled step rounds in another way."""
    cpu("")
    for minutes, was in ((60.0, False), (0.1, True)):
        config = Config(position="rope", minutes=minutes)
        hardware = detect_hardware(config, config, was_compiled=was)
        assert hardware.compiles is was and hardware.compile_limit is None


def test_a_gpu_compiles_with_triton_or_when_asked_to(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda("NVIDIA A100-SXM4-40GB", (8, 0))
    assert hardware_of(Config()).compiles
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == "triton" else object())
    hardware = hardware_of(Config())
    assert not hardware.compiles and "Compile    off: torch.compile needs Triton" in hardware.describe()
    assert hardware_of(Config(compile="on")).compiles


# TF32 and memory


@pytest.mark.parametrize("precision", ["auto", "fp32", "fp16"])
@pytest.mark.parametrize("before", ["highest", "high"])
def test_fp32_is_fp32_on_a_gpu_during_a_run_and_after_it(cuda: FakeCuda, precision: str, before: str) -> None:
    """What the process allowed before does not matter: NVIDIA's containers allow TF32."""
    cuda("NVIDIA H200", (9, 0))
    torch.set_float32_matmul_precision(before)
    hardware_of(Config(precision=precision))
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_frames_of_all_chained_errors_let_go_of_their_tensors() -> None:
    """As when memory runs out while the backward pass is compiled: the compiler raises its own error in its turn."""
    held = []

    def holds() -> torch.Tensor:
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        return tensor

    def allocates() -> None:
        activations = holds()
        raise torch.OutOfMemoryError(f"CUDA out of memory beside {len(activations)}")

    def lowers() -> None:
        graph = holds()
        try:
            allocates()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{error}, lowering {len(graph)}") from error

    def compiles() -> None:
        inputs = holds()
        try:
            lowers()
        except RuntimeError:
            raise ValueError(f"the backend failed on {len(inputs)}")  # noqa: B904 (a context, and no cause)

    try:
        compiles()
    except ValueError as error:
        failure = error
    assert isinstance(failure.__context__, RuntimeError) and failure.__cause__ is None
    failure.__context__.__cause__.__context__ = failure  # type: ignore[union-attr]  # a circle
    gc.collect()
    assert len(held) == 3 and all(tensor() is not None for tensor in held)
    clear_frames(failure)
    gc.collect()
    assert all(tensor() is None for tensor in held)


@pytest.mark.parametrize(("version", "allowed"), [("2.13.0+cpu", True), ("2.9.1", False)])
def test_cudnns_attention_is_left_out_where_it_reads_out_of_bounds(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, version: str, allowed: bool
) -> None:
    cuda("NVIDIA H200", (9, 0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        hardware_of(Config())
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
