"""Choose device, precision and compilation for a run, each with its reason."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from common.errors import ConfigError
from common.machine import cpu_bf16_flag, device_name, name_contains, peak_flops, pick_device, total_ram
from common.script import count_cores, world
from model_config import ModelConfig
from training.config import Config

# On a CPU with these units, autocast's casts cost more than the faster matrix products save below this width.
# Measured: with AMX a step of 4 x 128, context 64, is 1.3 times slower in bf16, and 4 x 256, context 256, 2 times
# faster. With AVX512-BF16 alone, 4 x 128 is 1.05 to 1.3 times faster (docs/benchmarks/what_was_tried.md).
CPU_BF16_MIN_WIDTH = {"AMX": 256, "AVX512-BF16": 128}

# Compiling on a CPU was measured at 4 and 12 layers. The saving is a share of a step with rotary positions and qk_norm;
# the FLOP/s of a core in such steps are rough.
CPU_COMPILE_SECONDS = 12.0
CPU_COMPILE_SECONDS_PER_LAYER = 3.0
CPU_COMPILE_SAVING = 0.3
CPU_FLOPS_PER_CORE = 1e11
CPU_DROPOUT_SLOWDOWN = 1.2  # compiled, because of the random numbers; uncompiled it is 1.1
CPU_COMPILE_MARGIN = 3  # the estimate is rough, and a short run should start soon
# On a GPU, compiling took 12 to 19 s on the host of an H200; hosts with few cores are assumed to take twice as long.
# Compiled passes took 0.5 to 0.52 of the time at 4 x 256 and 12 x 768 (docs/benchmarks/gpu-nvidia-h200.md).
GPU_COMPILE_SECONDS = 15.0
FEW_CORES = 4
GPU_COMPILED_PASS_RATIO = 0.5
COMPILE_TIMEOUT_FACTOR = 2  # relative to the forecast

MAX_SHARE_IF_SPILLING = 0.95  # share of the free GPU memory, where the driver spills into host memory

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h

DEFAULT_THREADS = min(torch.get_num_threads(), count_cores())  # OMP_NUM_THREADS, or one per core
A100_UNITS_PER_HOUR = 8.0  # Google Colab's rate, as the blog's author paid it


class Units(NamedTuple):
    """The properties of a device that precision and compilation depend on."""

    kind: str  # "cuda", "mps" or "cpu"
    capability: tuple[int, int] = (0, 0)  # CUDA only
    bf16: str | None = None  # a CPU's instructions for bf16
    has_triton: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Units:
        if device.type != "cuda":
            return cls(device.type, bf16=cpu_bf16_flag())
        return cls("cuda", torch.cuda.get_device_capability(device), has_triton=find_spec("triton") is not None)


@dataclass(frozen=True)
class Hardware:
    device: torch.device
    name: str
    precision: str  # "bf16", "fp16" or "fp32"
    precision_reason: str
    compiles: bool
    compile_reason: str
    peak_flops: float | None  # sum over all processes
    memory_bytes: int | None  # total, not free: the GPU's, else this process's share of the machine's
    compile_limit: float | None = None  # timeout for compiling, in seconds
    processes: int = 1  # that train together; each has a share of a step's sequences
    local_processes: int = 1  # those on this machine

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute matrix products inside in the chosen precision; weights stay fp32."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler, enabled for fp16 only, because its gradients would underflow."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_memory(self) -> int | None:
        """Return the peak memory so far, in bytes: allocated on the GPU, else resident in this process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated()
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()  # the driver keeps freed memory
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024

    def units_per_hour(self, config: Config) -> float | None:
        """Return the compute units per hour: as configured, else the known rate of an A100, else None."""
        if config.units_per_hour is not None:
            return config.units_per_hour or None
        return A100_UNITS_PER_HOUR if name_contains(self.name, "A100") else None

    def describe(self) -> str:
        has_unused_gpu = self.device.type == "cpu" and torch.backends.mps.is_available()
        return (
            f"Device     {self.name}{'; --device mps uses its GPU, which is untested' if has_unused_gpu else ''}\n"
            f"Precision  {self.precision}: {self.precision_reason}\n"
            f"Compile    {'on' if self.compiles else 'off'}: {self.compile_reason}"
        )


def _keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system.

    Each step frees and allocates gigabytes of activations. By default glibc maps each large block again, and the kernel
    clears its pages: half of a step's time at a vocabulary of 32,000 (docs/benchmarks/what_was_tried.md).
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has no mallopt
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)  # never


@contextlib.contextmanager
def freeze_garbage() -> Iterator[None]:
    """Make the garbage collector ignore, inside, the objects that exist now, instead of scanning them each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def configure_device(
    config: Config, shape: ModelConfig, was_compiled: bool | None = None, steps: int | None = None
) -> Hardware:
    """Choose device, precision and compilation for a model of this shape, and set up this process: fp32 precision and
    the memory limit on a GPU, malloc and threads on a CPU. `was_compiled`, `steps`: see `choose_compile`.

    Raises ConfigError if the machine lacks what was requested.
    """
    device = pick_device(config.device if config.use_gpu else "cpu")
    use_cuda = device.type == "cuda"
    name = device_name(device)
    units, ranks = Units.of(device), world()
    precision, precision_reason = choose_precision(config.precision, shape.embed_dim, units)
    peak = peak_flops(name) if use_cuda else None
    compiles, compile_reason, limit = choose_compile(config, shape, units, was_compiled, steps)
    if use_cuda:
        # No TF32: runs, scores and answers in fp32 are exact, and bf16 and fp16 steps have no fp32 products.
        with warnings.catch_warnings(action="ignore"):  # torch 2.9 and 2.10 name a newer function
            torch.set_float32_matmul_precision("highest")
        if spills_to_host():
            limit_memory(device)
        memory: int | None = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "mps":
        memory = torch.mps.recommended_max_memory()
    else:
        _keep_freed_memory()
        torch.set_num_threads(config.threads or DEFAULT_THREADS)
        memory = total_ram()
        memory = memory and memory // ranks.local_size
    peak = peak and peak * ranks.size
    return Hardware(
        device, name, precision, precision_reason, compiles, compile_reason, peak, memory, limit, ranks.size,
        ranks.local_size,
    )  # fmt: skip


def set_attention_backend(has_mask: bool) -> None:
    """Enable or disable cuDNN's attention, the fastest on a Hopper GPU. Call this before anything is compiled, because
    the compiler's cache ignores the choice (pytorch issue 185449).

    cuDNN 9.10, which comes with torch 2.9, reads out of bounds in the backward pass (pytorch issues 169849, 171627).
    With a mask, gradients may be infinite or NaN (pytorch issue 196678).
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    torch.backends.cuda.enable_cudnn_sdp(version >= (2, 10) and not has_mask)


def choose_precision(requested: str, embed_dim: int, units: Units) -> tuple[str, str]:
    """Return (precision, reason): bf16 where the device has it, else fp16 with a gradient scaler on CUDA, else fp32.

    Raises ConfigError if the device lacks what was requested.
    """
    capability = "{}.{}".format(*units.capability)
    if requested == "bf16" and units.kind == "cuda" and units.capability < (8, 0):
        raise ConfigError(
            f"--precision bf16 needs CUDA capability 8.0, and this GPU has {capability}. Leave --precision out to use "
            "fp16."
        )
    if requested == "bf16" and units.kind == "mps":
        raise ConfigError(
            "--precision bf16 gives wrong results on Apple's GPUs: attention in half precision lets tokens see later "
            "tokens (pytorch issue 195910). Leave --precision out to use fp32."
        )
    if requested == "fp16" and units.kind != "cuda":
        raise ConfigError("--precision fp16 needs a CUDA GPU. Leave it out, or use bf16 or fp32.")
    if requested != "auto":
        return requested, "as configured"
    if units.kind == "cuda":
        if units.capability >= (8, 0):
            return "bf16", f"CUDA capability {capability} has bf16 tensor cores"
        return "fp16", f"CUDA capability {capability} has no bf16 tensor cores; gradients are scaled"
    if units.kind == "mps":
        return "fp32", "attention in half precision is wrong on Apple's GPUs (pytorch issue 195910)"
    if units.bf16 is None:
        return "fp32", "this CPU has neither AMX nor AVX512-BF16"
    if embed_dim < (least := CPU_BF16_MIN_WIDTH[units.bf16]):
        return "fp32", f"bf16 is slower on this CPU at embed_dim {embed_dim}, below {least}"
    return "bf16", f"this CPU has {units.bf16}"


def spills_to_host() -> bool:
    """Return whether the driver spills GPU allocations into host memory, as on Windows and in WSL."""
    return platform.system() == "Windows" or "microsoft" in platform.uname().release.lower()


def limit_memory(device: torch.device) -> None:
    """Let PyTorch run out of memory where the GPU's own ends. In host memory a step would crawl, without an error that
    makes the trainer take a smaller micro-batch."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)  # an earlier run in this process may hold memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (MAX_SHARE_IF_SPILLING * free + reserved) / total), device)


def compile_seconds(num_layers: int, cpu_share: float = 1.0) -> float:
    """Return the expected seconds to compile on a CPU. `cpu_share`: what other programs leave of it."""
    return (CPU_COMPILE_SECONDS + CPU_COMPILE_SECONDS_PER_LAYER * num_layers) / cpu_share


def gpu_compile_seconds() -> float:
    """Return the expected seconds to compile for a GPU, on its host. Layers share their code, so depth does not
    matter."""
    return GPU_COMPILE_SECONDS * (2 if count_cores() <= FEW_CORES else 1)


def choose_compile(
    config: Config, shape: ModelConfig, units: Units, was_compiled: bool | None = None, steps: int | None = None
) -> tuple[bool, str, float | None]:
    """Return whether to compile, the reason, and the timeout in seconds.

    Compiles on a GPU with Triton; on a CPU only the modern form, if the run is long enough to repay it. A resumed run
    on a CPU stays as it was (`was_compiled`), so that its arithmetic stays the same. `steps`: those of the whole run,
    if they are known; its minutes may be over before.
    """
    if config.compile != "auto":
        return config.compile == "on", "as configured", None
    if units.kind == "mps":
        return False, "not tested on Apple's GPUs", None
    if units.kind == "cuda":
        if not units.has_triton:
            return False, "on a GPU torch.compile needs Triton, which is not installed", None
        return True, "on a GPU", None
    if was_compiled is not None:
        return was_compiled, "as in the session before", None
    if shape.position != "rope" and not shape.qk_norm:
        return False, "a compiled step of this model is hardly faster on a CPU", None
    flops = 72 * shape.num_layers * shape.embed_dim**2 * config.sequences_per_process * shape.max_seq_len
    step = flops / (CPU_FLOPS_PER_CORE * count_cores())  # seconds
    seconds = (steps or config.max_steps) * step or 60 * config.minutes
    if config.minutes:
        seconds = min(seconds, 60 * config.minutes)
    takes = compile_seconds(shape.num_layers, config.forecast.cpu_share if config.forecast else 1.0)
    limit = COMPILE_TIMEOUT_FACTOR * (takes + step)
    if not seconds:
        return True, "saves about a third of each step of this model on a CPU", limit
    saving = CPU_COMPILE_SAVING * seconds
    if saving > CPU_COMPILE_MARGIN * takes:
        return True, f"compiling takes about {takes:.0f} s and saves about {saving:.0f} s", limit
    return False, f"compiling takes about {takes:.0f} s and might save {saving:.0f} s, too little to be sure", None
