"""Between two reports the loop waits for nothing and runs little Python: on a GPU the host prepares the next step while
the device computes."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from common import graphs

FEW_STEPS, MANY_STEPS = 4, 24
MAX_CALLS_PER_STEP = 300  # calls of functions in this project; 245 in November 2026


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count this thread's calls of Python functions by (file, qualified name)."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_a_step_without_a_report_does_not_wait(tmp_path: Path, train: Callable) -> None:
    root = str(Path(__file__).parents[2])
    flags = {"device": "cpu", "eval_interval": 0, "checkpoint_steps": 0, "log_interval": 100, "dropout": 0.1}
    counts = {}
    for steps in (FEW_STEPS, MANY_STEPS):
        with counted_calls() as calls:
            assert train(tmp_path / str(steps), **flags, max_steps=steps).code == 0
        counts[steps] = calls
    more = counts[MANY_STEPS] - counts[FEW_STEPS]
    waits = {name for _, name in more} & {"Hardware.synchronize", "TransformerLanguageModel.num_parameters"}
    assert not waits
    assert not [name for file, name in more if file.endswith("traceback.py")]  # as torch.manual_seed formats
    own = sum(count for (file, _), count in more.items() if file.startswith(root))
    assert own / (MANY_STEPS - FEW_STEPS) < MAX_CALLS_PER_STEP, more.most_common(30)


def test_steps_are_recorded_on_a_stream_that_decoding_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.Stream hands out 32 streams of a priority in turn, and a graph that is deleted takes its stream's
    workspace away from the others captured there (pytorch issue 193402)."""

    counts: Counter[int] = Counter()

    class Stream:
        def __init__(self, priority: int = 0) -> None:
            self.key = priority, counts[priority] % 32
            counts[priority] += 1

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    training = graphs.GraphCapture(is_kept=True)
    assert training.stream.key not in {graphs.GraphCapture().stream.key for _ in range(100)}
