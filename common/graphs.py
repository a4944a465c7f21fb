"""CUDA graphs: capture the kernels of a function once, and replay them with one launch. For small models, launching
kernels from Python takes longer than running them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
MAX_UNUSED_SHARE = 0.1  # share of a GPU's memory that deleted graphs may keep


class Capture(Protocol):
    """Records work whose inputs and results are tensors at fixed addresses: a replay reads and overwrites them. Tests
    on a CPU use a capture that repeats the operations."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run the work once on the capturing stream, to set up libraries and allocators."""

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Capture the work without running it. Return a function that replays it, and its result."""


class GraphCapture:
    """Records CUDA graphs that share a memory pool.

    `is_kept`: these graphs outlive others that are captured and deleted meanwhile. When a graph is deleted, torch 2.12
    to 2.14 free the cuBLAS workspace of its stream, which all graphs captured there use (pytorch issue 193402). And
    torch.cuda.Stream hands out the same 32 streams in turn, so kept graphs take streams of another priority.
    """

    def __init__(self, is_kept: bool = False) -> None:
        self.stream = torch.cuda.Stream(priority=-1 if is_kept else 0)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # torch.cuda.graph() would empty the allocator's cache. Thread-local, because other threads read batches and
            # write checkpoints meanwhile.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                self.end_capture(graph)
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, result

    def end_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. If it failed, also end it for the allocator and the random generator: torch up to 2.12
        leaves both capturing (pytorch pull request 180395), so memory is never returned and dropout raises."""
        try:
            graph.capture_end()
        except RuntimeError:
            device = self.stream.device.index
            generator = torch.cuda.default_generators[device]
            with contextlib.suppress(Exception):  # torch 2.13 has ended it
                torch._C._cuda_endAllocateToPool(device, self.pool)
            with contextlib.suppress(Exception):
                generator.graphsafe_set_state(generator.clone_state())
            raise


def free_unused_memory(device: torch.device) -> None:
    """Give back the memory of deleted graphs if it is much: the allocator reuses a graph's pool for no other work."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if unused > MAX_UNUSED_SHARE * torch.cuda.get_device_properties(device).total_memory:
            torch.cuda.empty_cache()
