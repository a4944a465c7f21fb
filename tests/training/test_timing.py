"""The measurements of the dial on this machine."""

from __future__ import annotations

import pytest
import torch

from training import timing
from training.config import parse_config
from training.timing import Candidate, Machine

FLAGS = "--data_dir x --device cpu --compile off --num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 64"


def candidate(*flags: str, is_chat: bool = False) -> Candidate:
    return Machine().candidate(parse_config([*FLAGS.split(), *flags]), 100, is_chat)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("flags", [(), ("--optimizer", "muon", "--grad_clip", "0")])
def test_steps_take_time(flags: tuple[str, ...], is_chat: bool) -> None:
    machine, threads = Machine(), torch.get_num_threads()
    began = machine.now()
    steps = machine.time_steps(candidate(*flags, is_chat=is_chat), 128, threads, 0.05)
    took = machine.now() - began
    assert 0 < steps.update < took and 0 < 128 * steps.per_token < took and steps.min_pass == 0
    assert steps.scatter >= 0 and 0 < steps.cpu_share <= 1


def test_a_huge_context_is_timed_in_part() -> None:
    machine, threads = Machine(), torch.get_num_threads()
    huge = candidate("--max_seq_len", "100000", "--position", "rope")
    assert (
        machine.time_steps(huge, 1000, threads, 0.05).per_token
        > machine.time_steps(candidate(), 1000, threads, 0.05).per_token
    )


def test_the_model_that_is_compiled_is_the_one_that_is_timed() -> None:
    """Uncompiled here, where compiling takes longer than this test may."""
    compiling, seconds = Machine().compile(candidate(), 2, 0.01)
    assert compiling > 0 and seconds > 0


def test_steps_that_cannot_be_captured_are_timed_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose driver refuses CUDA graphs; the training goes on without them, too."""

    class Failing:
        def warm_up(self, work: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    for name, stand_in in (("can_capture", lambda *_: True), ("GraphCapture", Failing)):
        monkeypatch.setattr(timing, name, stand_in)
    assert Machine().time_steps(candidate(), 128, 1, 0.05).update > 0
