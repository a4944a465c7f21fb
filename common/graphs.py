"""CUDA graphs: a GPU records the kernels of some work once, and replays them with one launch. Python takes longer to
launch the kernels of a small model than a GPU to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """Records work. Its inputs and results are tensors that stay where they are: a replay reads and overwrites them.
    On a CPU, tests use a recorder that repeats the operations."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do the work once as it will be recorded: libraries and allocators are set up then."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Return a function that replays the work, and its result. Recording does not do the work."""


class GraphRecorder:
    """Records CUDA graphs that share one pool of memory."""

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
            # Not torch.cuda.graph(), which empties the allocator's cache. Thread-local: other threads read batches and
            # write checkpoints meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, result
