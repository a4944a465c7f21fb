"""How a step is executed: compiled, and on a GPU recorded as CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType

import torch

from common.errors import is_out_of_memory
from common.graphs import GraphRecorder, Recorder
from common.output import log
from common.script import world
from model import TransformerLanguageModel
from training.config import AUTOMATIC_SOURCES, Config
from training.hardware import Hardware, clear_frames, return_freed_memory
from training.memory import estimate_memory, halve_until_it_fits, smallest_rows
from training.parallel import any_process, data_parallel, is_collective_error, no_sync
from training.run import Run
from training.step import Batch, StepResult, compute_update


class CompiledParts(torch.nn.Module):
    """The model's loss, computed by its parts, each compiled: the blocks one by one, since they all share one compiled
    function. So compiling takes as long for 24 layers as for 2.

    For GPUs, where compiling a whole model takes up to a minute. On a CPU steps would be 1 to 4% slower, and compiling
    is shorter there.
    """

    def __init__(self, model: TransformerLanguageModel):
        super().__init__()
        self.model = model
        compiled = functools.partial(torch.compile, dynamic=False)
        self.embed_texts, self.loss = compiled(model.embed_texts), compiled(model.loss)
        self.blocks = [compiled(block) for block in model.blocks]  # a list: their parameters are the model's

    def undo(self) -> None:
        """Compute with the uncompiled parts from now on."""
        self.embed_texts, self.loss, self.blocks = self.model.embed_texts, self.model.loss, list(self.model.blocks)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss, as the model's `forward` does."""
        x, rotation, mask = self.embed_texts(tokens, starts)
        for block in self.blocks:
            x = self.model.apply_block(block, x, rotation, mask)
        loss: torch.Tensor = self.loss(x, targets)
        return loss


class TookTooLong(BaseException):
    """Not an Exception: the compiler handles those."""


def compile_model(
    model: TransformerLanguageModel, hardware: Hardware, example: tuple[torch.Tensor, ...], evaluates: bool = False
) -> tuple[Callable[..., torch.Tensor], str]:
    """Compile the model, and try it on the batch `example`, forward and backward and, if the run `evaluates`, without
    gradients: so nothing is left to compile after the first step.

    If compiling fails or takes longer than `hardware.compile_limit`, says so once and returns the model uncompiled, and
    the reason: it is slower, with the same results. One of several processes may fail alone: they exchange nothing
    here.
    """
    if not hardware.compiles:
        return data_parallel(model), ""
    started = time.perf_counter()
    torch.compiler.reset()  # an earlier run in this process (a notebook) counts towards PyTorch's limit
    # Split the graph so that all-reduce overlaps the backward pass; impossible with activation checkpointing.
    torch._dynamo.config.optimize_ddp = not model.activation_checkpointing
    inner = data_parallel(CompiledParts(model) if hardware.is_cuda else model)
    step_model = inner if hardware.is_cuda else torch.compile(inner, dynamic=False)
    # Its products in fp32 are fp32 on purpose.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* not enabled", UserWarning)
    warnings.filterwarnings("ignore", "Error detected in", UserWarning)  # of where a signal came
    try:
        with time_limit(hardware.compile_limit):
            with no_sync(inner):
                with hardware.autocast():
                    loss = step_model(*example)
                # This compiles the backward pass. On a GPU, autograd would do that in another thread while this one
                # waits, and only this thread handles signals.
                with torch.autograd.set_multithreading_enabled(False):
                    loss.backward()
            if evaluates:
                model.eval()
                with torch.no_grad(), hardware.autocast():
                    step_model(*example)
    except BaseException as error:
        forget_unfinished()
        if is_out_of_memory(error) or is_collective_error(error) or not isinstance(error, Exception | TookTooLong):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"torch.compile failed ({first_line}); training continues uncompiled. --compile off skips the attempt.")
        return uncompiled(inner), first_line
    finally:
        model.train()
        model.zero_grad(set_to_none=True)
    hardware.synchronize()
    print(f"Compiled in {time.perf_counter() - started:.0f} s, a first pass over {len(example[0])} sequences included.")
    return step_model, ""


def uncompiled(step_model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the uncompiled form of what `compile_model` returned."""
    inner: Callable[..., torch.Tensor] = getattr(step_model, "_orig_mod", step_model)
    parts = getattr(inner, "module", inner)  # inside DistributedDataParallel
    if isinstance(parts, CompiledParts):
        parts.undo()
    return inner


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TookTooLong inside after so many seconds, as soon as this thread waits for the C++ compiler's processes:
    an exception inside one of PyTorch's operations can end the process. Not on Windows, which has no such signal, nor
    in a thread."""
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            raise TookTooLong(f"it took longer than {seconds:.0f} s, twice its forecast: this machine is slow or busy")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # and again, until this thread waits
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def forget_unfinished() -> None:
    """Clean up after an attempt that failed or was stopped. Cancel queued jobs, or the process would wait for them when
    it ends. Clear PyTorch's record of them, or the next attempt in this process (a notebook) would fail too."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import clear_caches

    if AsyncCompile.pool.cache_info().currsize:
        AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
        AsyncCompile.pool.cache_clear()
    clear_caches()


MAX_MEMORY_SHARE = 0.4  # a recording keeps its own activations, beside those of unrecorded work


class RecordedStep:
    """The parts of a run's steps, recorded. What changes from step to step is in tensors that stay where they are:
    tokens, the weight of a micro-batch, the learning rate, gradients. The next replay overwrites what one returns."""

    def __init__(self, run: Run, recorder: Recorder):
        self.run, device = run, run.data.device
        self.rows = run.rows_at_once
        self.inputs = [part.clone() for part in run.data.batch(0, self.rows)]
        self.weight, self.total, self.rate, self.evaluated = torch.zeros(4, device=device).unbind()
        run.optimizer.tensors()  # allocate them
        self.warm_up(recorder)
        # The first pass of a step writes gradients, the others add to them.
        self.replay_first, _ = recorder.record(self.first_pass)
        self.replay_next, _ = recorder.record(self.next_pass)
        self.replay_update, self.result = recorder.record(lambda: compute_update(run, self.total, self.rate))
        self.gradients = [parameter.grad for parameter in run.model.parameters()]  # they stay where they are
        run.optimizer.zero_grad(set_to_none=True)
        if run.config.eval_interval:
            run.model.eval()
            recorder.warm_up(self.evaluation_pass)
            self.replay_evaluation, _ = recorder.record(self.evaluation_pass)
            run.model.train()

    def warm_up(self, recorder: Recorder) -> None:
        """Do both passes and an update that is skipped, and restore what these count."""
        run = self.run
        recorder.warm_up(self.first_pass)
        recorder.warm_up(self.next_pass)
        counts = [run.skips]
        if run.scaler.is_enabled():
            assert run.scaler._scale is not None and run.scaler._growth_tracker is not None  # since the first pass
            counts += [run.scaler._scale, run.scaler._growth_tracker]
        before = [tensor.clone() for tensor in counts]
        self.total.fill_(torch.nan)
        recorder.warm_up(lambda: compute_update(run, self.total, self.rate))
        torch._foreach_copy_(counts, before)
        run.optimizer.zero_grad(set_to_none=True)
        return_freed_memory(run.hardware.device)  # to the pool of the recordings

    # What is recorded

    def first_pass(self) -> None:
        """Forward and backward of a step's first micro-batch."""
        self.total.copy_(self.backward())

    def next_pass(self) -> None:
        self.total += self.backward()

    def backward(self) -> torch.Tensor:
        run = self.run
        with run.hardware.autocast():
            loss = run.step_model(*self.inputs)
        loss = loss * self.weight
        run.scaler.scale(loss).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluation_pass(self) -> None:
        with self.run.hardware.autocast():
            self.evaluated.copy_(self.run.step_model(*self.inputs))

    # What replays it

    def accumulate(self, micro_batches: Iterable[Batch], weights: Iterable[float | torch.Tensor]) -> torch.Tensor:
        """Forward and backward of micro-batches of `rows` sequences. Returns the sum of their weighted losses, ()."""
        replay = self.replay_first
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            torch._foreach_copy_(self.inputs, micro_batch)
            self.weight.copy_(weight) if isinstance(weight, torch.Tensor) else self.weight.fill_(weight)
            replay()
            replay = self.replay_next
        return self.total

    def apply_update(self, lr: float) -> StepResult:
        self.rate.fill_(lr)
        self.replay_update()
        return self.result._replace(lr=lr)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch of `rows` sequences, ()."""
        torch._foreach_copy_(self.inputs, batch)
        self.replay_evaluation()
        return self.evaluated


def prepare(run: Run) -> None:
    """Compile the model for the run's micro-batches and record its steps, if that is not done."""
    if run.compiled_rows != run.rows_at_once:
        compile_run(run)
        run.recorded = record_step(run)


def compile_run(run: Run) -> None:
    """Set `step_model` for the current `rows_at_once`, and try it on the first sequences. If compiling fails in one of
    the processes, all train uncompiled. That takes more memory, so the micro-batch is fitted again, unless it was
    given.

    Raises MemoryExhausted if one sequence does not fit.
    """
    run.optimizer.tensors()  # allocate them now: if memory runs out, then before compiling takes its time
    example = run.data.batch(0, run.rows_at_once) if run.hardware.compiles else ()
    run.step_model, failure = compile_model(run.model, run.hardware, example, bool(run.config.eval_interval))
    if any_process(bool(failure))[0]:
        if not failure:
            print("torch.compile failed in another process; training continues uncompiled in all of them.")
            # For another micro-batch, the first step would compile again.
            run.step_model = uncompiled(run.step_model)
        reason = f"torch.compile failed ({failure or 'in another process'})"
        run.hardware = replace(run.hardware, compiles=False, compile_reason=reason)
        if run.micro_batch_source in AUTOMATIC_SOURCES:
            rows, source = halve_until_it_fits(run.config, run.model, run.hardware, run.data.gpu_bytes)
            if rows >= run.micro_batch_size:  # it may have been halved already
                rows, source = run.micro_batch_size, run.micro_batch_source
            run.micro_batch_size, run.micro_batch_source = smallest_rows(rows, source)
    run.compiled_rows = run.rows_at_once
    run.state.compiled = None if run.hardware.is_cuda else run.hardware.compiles


def can_record(config: Config, hardware: Hardware, needed: int) -> bool:
    """Return whether steps are recorded that take `needed` bytes of memory: in one process, on a GPU with room for two
    such steps, without activation checkpointing (it reads the random state)."""
    if config.graphs == "off" or config.activation_checkpointing or world().size > 1:
        return False
    return hardware.is_cuda and needed <= MAX_MEMORY_SHARE * (hardware.memory_bytes or 0)


def record_step(run: Run) -> RecordedStep | None:
    """Record the steps of a run. Returns None where they are not recorded (see `can_record`), or if that fails."""
    needed = estimate_memory(run.config, run.model, run.hardware, run.rows_at_once)
    if not can_record(run.config, run.hardware, needed):
        return None
    try:
        return RecordedStep(run, GraphRecorder())
    except RuntimeError as error:
        clear_frames(error)
        run.optimizer.zero_grad(set_to_none=True)
        run.model.train()
        return_freed_memory(run.hardware.device)
        log.info(f"Steps are not recorded as CUDA graphs ({str(error).splitlines()[0]}); training continues without.")
        return None
