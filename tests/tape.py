"""Imitate CUDA graphs on a CPU: record operations once and repeat them on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Tape(TorchDispatchMode):
    """Records every operation inside, with its numbers as they are now. Raises where the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()  # storages that the captured operations allocated
        self.changed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # other tensors that they write, and before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError(f"{func}: the host waits for the device")
        named = zip(func._schema.arguments, args, strict=False)
        for tensor in tree_leaves([value for about, value in named if about.alias_info and about.alias_info.is_write]):
            if address(tensor) not in self.made | self.changed.keys():
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self.changed[address(tensor)] = whole, whole.clone()
        known = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **kwargs)
        self.made |= {address(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)} - known
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Restore what the captured operations changed: a GPU does not do what it records."""
        for whole, before in self.changed.values():
            whole.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            fresh = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                if isinstance(old, torch.Tensor) and address(old) != address(new):
                    old.detach().copy_(new)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeCapture:
    """A `Capture` of common/graphs.py on the CPU. `launches` counts what the host has launched."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        tape = Tape()
        with tape:
            result = work()
        with torch.no_grad():
            tape.undo()
        self.tapes.append(tape)
        return tape.replay, result
