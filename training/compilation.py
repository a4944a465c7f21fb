"""Compile the model for a run's micro-batches."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import torch

from common.errors import is_out_of_memory
from model import TransformerLanguageModel
from training.captured import capture_step
from training.hardware import Hardware
from training.memory import estimate_micro_batch, smallest_rows
from training.parallel import any_process, data_parallel, is_collective_error, no_sync
from training.run import Run
from training.stop import Abandoned


class CompiledParts(torch.nn.Module):
    """The model with each part compiled on its own. All blocks share one compiled function, so compiling takes as long
    for 24 layers as for 2.

    Used on GPUs, where compiling a whole model takes up to a minute. On a CPU compiling is shorter, and steps would be
    1 to 4% slower.
    """

    def __init__(self, model: TransformerLanguageModel):
        super().__init__()
        self.model = model
        compiled = functools.partial(torch.compile, dynamic=False)
        self.embed_texts, self.loss = compiled(model.embed_texts), compiled(model.loss)
        # A list, because their parameters belong to the model.
        self.blocks = [compiled(block) for block in model.blocks]

    def use_uncompiled(self) -> None:
        """Use the uncompiled parts from now on."""
        self.embed_texts, self.loss, self.blocks = self.model.embed_texts, self.model.loss, list(self.model.blocks)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss, (), as the model's `forward` does."""
        x, rotation, mask = self.embed_texts(tokens, starts)
        for block in self.blocks:
            x = self.model.apply_block(block, x, rotation, mask)
        loss: torch.Tensor = self.loss(x, targets)
        return loss


class CompileTimeout(BaseException):
    """Compiling took too long. A BaseException, because the compiler catches every Exception."""


def compile_model(
    model: TransformerLanguageModel, hardware: Hardware, example: tuple[torch.Tensor, ...], evaluates: bool = False
) -> tuple[Callable[..., torch.Tensor], str]:
    """Compile the model and run it on the batch `example`: forward, backward and, if the run `evaluates`, without
    gradients. Nothing is left to compile after the first step. Return the model, and "" or the reason for a failure.

    If compiling fails or takes longer than `hardware.compile_limit`, print so and return the uncompiled model: it is
    slower, with the same results. Processes exchange nothing here, so one of several may fail alone.
    """
    if not hardware.compiles:
        return data_parallel(model), ""
    started = time.perf_counter()
    # Split the graph so that all-reduce overlaps the backward pass; impossible with activation checkpointing.
    torch._dynamo.config.optimize_ddp = not model.activation_checkpointing
    inner = data_parallel(CompiledParts(model) if hardware.is_cuda else model)
    step_model = inner if hardware.is_cuda else torch.compile(inner, dynamic=False)
    # fp32 products are fp32 on purpose.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* not enabled", UserWarning)
    warnings.filterwarnings("ignore", "Error detected in", UserWarning)  # the place where the time limit struck
    try:
        torch.compiler.reset()  # an earlier run in this process (a notebook) counts towards PyTorch's limit
        with _time_limit(hardware.compile_limit):
            with no_sync(inner):
                with hardware.autocast():
                    loss = step_model(*example)
                # This compiles the backward pass. On a GPU, autograd would do that in another thread, and only this
                # one handles the signal of the time limit.
                with torch.autograd.set_multithreading_enabled(False):
                    loss.backward()
            if evaluates:
                model.eval()
                with torch.no_grad(), hardware.autocast():
                    step_model(*example)
    except BaseException as raised:
        cancel_compilation()
        error = _find_interruption(raised) or raised
        if error is not raised and not isinstance(error, CompileTimeout):
            raise error from None
        if is_out_of_memory(error) or is_collective_error(error) or not isinstance(error, Exception | CompileTimeout):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = "Compiling was stopped" if isinstance(error, CompileTimeout) else "torch.compile failed"
        failure = f"{what} ({first_line})"
        print(f"{failure}; training continues uncompiled. --compile off skips the attempt.")
        return undo_compile(inner), failure
    finally:
        model.train()
        model.zero_grad(set_to_none=True)
    hardware.synchronize()
    print(
        f"Compiled in {time.perf_counter() - started:.0f} s, including a first pass over {len(example[0])} sequences."
    )
    return step_model, ""


def _find_interruption(error: BaseException | None) -> BaseException | None:
    """Return the signal's exception behind an error of torch 2.9, which fails while it handles one."""
    while error is not None and not isinstance(error, Abandoned | CompileTimeout | KeyboardInterrupt):
        error = error.__context__
    return error


def undo_compile(step_model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the uncompiled form of what `compile_model` returned."""
    inner: Callable[..., torch.Tensor] = getattr(step_model, "_orig_mod", step_model)
    parts = getattr(inner, "module", inner)  # inside DistributedDataParallel
    if isinstance(parts, CompiledParts):
        parts.use_uncompiled()
    return inner


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise CompileTimeout inside after `seconds`, as soon as this thread waits for the C++ compiler's processes: an
    exception inside one of PyTorch's operations can end the process. No effect on Windows, which lacks the signal, and
    outside the main thread."""
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_timeout(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            raise CompileTimeout(f"not done after {seconds:.0f} s, twice the forecast")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # repeated until this thread waits
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cancel_compilation() -> None:
    """Clean up after compiling failed. Cancel queued jobs, because the process would wait for them at its end. Clear
    PyTorch's caches, because the next attempt in this process (a notebook) would fail too."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import clear_caches

    if AsyncCompile.pool.cache_info().currsize:
        AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
        AsyncCompile.pool.cache_clear()
    with contextlib.suppress(OSError):  # the folder of the cache is gone, and was the reason
        clear_caches()


def prepare(run: Run) -> None:
    """Compile the model for the run's micro-batches, set `step_model`, and capture the steps. If compiling fails in one
    process, all train uncompiled. That takes more memory, so the micro-batch is fitted again, unless it was given.

    Raises MemoryExhausted if one sequence does not fit.
    """
    run.optimizer.tensors()  # allocated now, so that a lack of memory shows before compiling
    example = run.data.batch(0, run.rows_at_once) if run.hardware.compiles else ()
    run.step_model, failure = compile_model(run.model, run.hardware, example, bool(run.config.eval_interval))
    if any_process(bool(failure)):
        if not failure:
            print("torch.compile failed in another process; training continues uncompiled in all of them.")
            # A different micro-batch would compile again in the first step.
            run.step_model = undo_compile(run.step_model)
        reason = failure or "torch.compile failed in another process"
        run.hardware = replace(run.hardware, compiles=False, compile_reason=reason)
        if run.config.micro_batch_size is None:
            rows = estimate_micro_batch(run.config, run.model, run.hardware, run.data.gpu_bytes)
            run.micro_batch_size = smallest_rows(min(rows, run.micro_batch_size))
    run.optimizer.compiles = run.hardware.compiles and run.hardware.is_cuda
    run.state.compiled = run.hardware.compiles if run.hardware.device.type == "cpu" else None
    run.captured = capture_step(run)
