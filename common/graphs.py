"""CUDA graphs: record the kernels of a function once, and replay them with one launch. For small models, launching
kernels from Python takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """Records work whose inputs and results are tensors at fixed addresses: a replay reads and overwrites them. Tests
    on a CPU use a recorder that repeats the operations."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run the work once on the recording stream, to set up libraries and allocators."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record the work without running it. Return a function that replays it, and its result."""


class GraphRecorder:
    """Records CUDA graphs that share a memory pool."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # torch.cuda.graph() would empty the allocator's cache. Thread-local, because other threads read batches and
            # write checkpoints meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, result
