"""A generation step as a CUDA graph: the GPU records its kernels once and replays them without Python."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.errors import is_out_of_memory
from model import KVCache, TransformerLanguageModel


class StaticKVCache(KVCache):
    """Continues another cache by one token at a time. Its shapes and addresses never change.

    The lengths are on the device too, and attention always reads the whole capacity, with a mask. So every step is the
    same sequence of kernels, which CUDA can record and replay.
    """

    def __init__(self, cache: KVCache):
        self.keys, self.values = cache.keys, cache.values
        self.rows = torch.arange(len(cache.lengths), device=cache.keys.device)[:, None]  # (B, 1)
        self.slots = torch.arange(cache.keys.size(3), device=cache.keys.device)  # (capacity,)
        self.next = torch.zeros_like(self.rows)  # (B, 1), the position of each row's next token
        self.truncate(cache.lengths)

    def place(self, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert T == 1, "one token a row at a time"
        return self.next, (self.slots <= self.next)[:, None, None]  # mask: (B, 1, 1, capacity)

    def write(
        self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, positions] = k.transpose(1, 2).to(keys.dtype)
        values[self.rows, :, positions] = v.transpose(1, 2).to(values.dtype)
        return keys.to(k.dtype), values.to(v.dtype)

    def advance(self, T: int) -> None:
        super().advance(T)
        self.next += T

    def truncate(self, lengths: list[int]) -> None:
        super().truncate(lengths)
        self.next.copy_(torch.tensor(lengths)[:, None])


class StaticStep:
    """`model.next_logits` with a StaticKVCache. The second call records it, later calls replay the recording.

    For one token, Python takes longer to launch a model's kernels than a GPU takes to run them. A CUDA graph launches
    all of them at once. torch.compile would fuse them too, but compiling takes longer than an answer. The next call
    overwrites the logits.
    """

    def __init__(self, model: TransformerLanguageModel, cache: StaticKVCache):
        self.model, self.cache = model, cache
        self.tokens: torch.Tensor | None = None  # (B,), the input of the recording
        self.replay: Callable[[], torch.Tensor] | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tokens is None:  # not recorded: libraries initialize themselves in the first step
            self.tokens = tokens.clone()
            return self.model.next_logits(self.cache, self.tokens)
        self.tokens.copy_(tokens)
        if self.replay is None:
            self.replay = self.recorded(self.tokens)
        return self.replay()

    def recorded(self, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The step that reads `tokens`: a recording, or the plain function if that fails (slower, the same result)."""
        lengths = self.cache.lengths

        def step() -> torch.Tensor:
            return self.model.next_logits(self.cache, tokens)

        try:
            graph, logits = record(step)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            warnings.warn(f"no CUDA graph ({error}): generation continues without one, more slowly", stacklevel=2)
            return step
        finally:
            self.cache.lengths = lengths  # recording runs no kernel, but it advanced the lengths on the host

        cache = self.cache  # not self, which refers to this function: a cycle would keep the cache's memory

        def replay() -> torch.Tensor:
            graph.replay()
            KVCache.advance(cache, 1)  # on the host; the replay advances the lengths on the device
            return logits

        return replay


class Recorder:
    """Records CUDA graphs like `torch.cuda.graph`, but does not empty the allocator's cache first: a training that
    generates text between two steps would have to allocate everything again.

    A graph has its own pool of memory. The allocator gives it to nothing else while other memory is free, even after
    the graph is gone. So the next graph reuses the pool of the last one, unless that one's logits are still in use: the
    two would overwrite each other's.
    """

    def __init__(self) -> None:
        self.alone = threading.Lock()
        self.stream: torch.cuda.Stream | None = None  # blocks of a pool belong to a stream
        self.last: torch.cuda.CUDAGraph | None = None  # kept because a pool ends with its last graph
        self.logits: Callable[[], torch.Tensor | None] = lambda: None  # of that graph; None once they are freed

    def record(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Raises RuntimeError if the step cannot be recorded, or if memory runs out."""
        with self.alone:
            return self.record_alone(step)

    def record_alone(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, is_free = torch.cuda.CUDAGraph(), self.logits() is None
        pool = self.last.pool() if self.last is not None and is_free else torch.cuda.graph_pool_handle()
        self.stream = self.stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        with no_garbage_collection(), torch.cuda.stream(self.stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")  # another thread may be reading batches
                logits = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more
                    end_recording(graph, pool)
                raise
            end_recording(graph, pool)
        self.last, self.logits = graph, weakref.ref(logits)
        return graph, logits


def end_recording(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Raises RuntimeError if the step did something that a recording does not allow. torch then does not tell its
    allocator that the recording is over, so this function does: else no memory could be given back to the system."""
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError, AttributeError):  # torch did tell it, or has no such functions
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The garbage collector might free memory that must not be freed while CUDA records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


recorder = Recorder()


def record(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Record a CUDA graph of `step`. Returns it and the tensor to which each replay writes its result.

    Raises RuntimeError if that is not possible.
    """
    try:
        return recorder.record(step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()  # out of memory, the allocator does this by itself, but not while CUDA records
    return recorder.record(step)
