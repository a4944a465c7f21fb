"""A generation step whose kernels a GPU records once and replays without Python."""

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
    """Another cache's tokens, continued one at a time with shapes and addresses that never change.

    The lengths are on the device too, and attention always reads the whole capacity under a mask: a step is then the
    same sequence of kernels every time, which CUDA can record once and replay without Python.
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
    """`model.next_logits` with a StaticKVCache, recorded at the second call and replayed from then on.

    Launching a model's kernels from Python takes longer than a GPU takes to run them for one token. A CUDA graph
    launches all of them at once; torch.compile would fuse them as well, but takes longer to compile than to answer.
    The logits returned are overwritten by the next call.
    """

    def __init__(self, model: TransformerLanguageModel, cache: StaticKVCache):
        self.model, self.cache = model, cache
        self.tokens: torch.Tensor | None = None  # (B,), where the recording reads them
        self.replay: Callable[[], torch.Tensor] | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tokens is None:  # not recorded: libraries start up in the first step
            self.tokens = tokens.clone()
            return self.model.next_logits(self.cache, self.tokens)
        self.tokens.copy_(tokens)
        if self.replay is None:
            self.replay = self.recorded(self.tokens)
        return self.replay()

    def recorded(self, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The step that reads `tokens`, as a recording or, where that fails, as it is: slower, with the same result."""
        lengths = self.cache.lengths

        def step() -> torch.Tensor:
            return self.model.next_logits(self.cache, tokens)

        try:
            graph, logits = record(step)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            warnings.warn(f"no CUDA graph ({error}): generation goes on without, more slowly", stacklevel=2)
            return step
        finally:
            self.cache.lengths = lengths  # recording does not run what it records

        cache = self.cache  # not self, which holds this function: a cycle would keep the cache's memory

        def replay() -> torch.Tensor:
            graph.replay()
            KVCache.advance(cache, 1)  # the lengths on the device are advanced by the replay
            return logits

        return replay


class Recorder:
    """Records CUDA graphs as `torch.cuda.graph` does, but without emptying the allocator's cache first: a training that
    generates text between two steps would have to allocate everything anew after it.

    A graph works in a pool of memory of its own, which nothing else is given even after its end, as long as there is
    other memory. So the next graph takes over the pool of the last one, unless that is still in use: they would
    overwrite each other's logits.
    """

    def __init__(self) -> None:
        self.alone = threading.Lock()
        self.stream: torch.cuda.Stream | None = None  # blocks of a pool belong to a stream
        self.last: torch.cuda.CUDAGraph | None = None  # kept, for a pool ends with the last graph in it
        self.logits: Callable[[], torch.Tensor | None] = lambda: None  # of that graph; None once nobody can read them

    def record(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Raises RuntimeError where a step cannot be recorded, or finds no memory."""
        with self.alone:
            return self.record_alone(step)

    def record_alone(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, is_free = torch.cuda.CUDAGraph(), self.logits() is None
        pool = self.last.pool() if self.last is not None and is_free else torch.cuda.graph_pool_handle()
        self.stream = self.stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        with garbage_left_alone(), torch.cuda.stream(self.stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")  # a thread may be reading batches
                logits = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more
                    end_recording(graph, pool)
                raise
            end_recording(graph, pool)
        self.last, self.logits = graph, weakref.ref(logits)
        return graph, logits


def end_recording(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Raises RuntimeError if something was not permitted: torch then leaves out to tell its allocator that the
    recording is over, and nothing could be given back to the system any more."""
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError, AttributeError):  # it has been told; there is no such function any more
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise


@contextlib.contextmanager
def garbage_left_alone() -> Iterator[None]:
    """The garbage collector might free what must not be freed while CUDA records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


recorder = Recorder()


def record(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Record a CUDA graph of `step`. Returns it and the tensor it writes its result to at each replay.

    Raises RuntimeError where that is not possible.
    """
    try:
        return recorder.record(step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()  # what the allocator does by itself where memory runs out, but not while CUDA records
    return recorder.record(step)
