"""The dial on machines that are not there, from a small card to a large one and on CPUs: it never runs out of memory,
keeps its time, and chooses well."""

from __future__ import annotations

import pytest
import torch

from tests.docs.what_you_get import DOCUMENT, SHOWN, cell_of, table_of
from tests.training.pretended import MACHINES, MINUTES, SIZES, Pretended, dial_of, trained
from training.dial import MIN_STEPS
from training.timing import Candidate, StepTimes


@pytest.mark.parametrize("name", MACHINES)
def test_every_text_and_time(name: str) -> None:
    losses: dict[tuple[float, float], float] = {}
    rows: dict[float, list[str]] = {}
    for size in SIZES:
        for minutes in MINUTES:
            machine, what = Pretended(MACHINES[name]), f"{size:g} bytes, {minutes} minutes"
            dial = dial_of(machine, size, minutes)
            choice = dial.find_best()
            run = trained(dial, choice, machine.clock)
            rows.setdefault(size, []).append(cell_of(choice, run))
            assert run.steps >= MIN_STEPS, what
            assert run.seconds <= 1.03 * 60 * minutes, what
            assert run.seconds >= 0.97 * 60 * minutes or run.all_read, what
            outcomes = [
                dial.plan_run(each, minutes, form) for each in dial.candidates for form in dial.compile_options(each)
            ]
            best = min(trained(dial, outcome, machine.clock).loss for outcome in outcomes)
            assert run.loss <= best + 0.02, what
            losses[size, minutes] = run.loss
    # A larger text takes more time to tokenize, and may have a larger vocabulary, whose gain is not in the law.
    rises = [
        (at, other, losses[at], losses[other])
        for at in losses
        for other in losses
        if other[0] >= at[0] and other[1] >= at[1] and losses[other] > losses[at] + (0.01 if other[1] > 10 else 0.04)
    ]
    assert not rises
    shown = {size: rows[size] for size in SIZES[1:]}
    said = "what the dial chooses has changed: run `python tests/docs/what_you_get.py` and commit what it writes"
    assert name not in SHOWN or table_of(name, shown) in DOCUMENT.read_text(encoding="utf-8"), said


class Smaller(Pretended):
    """A GPU whose memory ends earlier than it says: other programs hold the rest."""

    freed = 0

    def time_steps(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> StepTimes:
        if candidate.model.num_parameters() > 2e7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().time_steps(candidate, tokens, threads, seconds)

    def free(self) -> None:
        self.freed += 1


def test_a_model_that_finds_no_memory_is_not_chosen() -> None:
    machine = Smaller(MACHINES["A100 40 GB"])
    dial = dial_of(machine, 2e7, 10)
    assert dial_of(Pretended(machine.specs), 2e7, 10).find_best().candidate.model.num_parameters() > 2e7
    choice = dial.find_best()
    assert 1e7 < choice.candidate.model.num_parameters() < 2e7 and machine.freed >= len(dial.step_times[2]) + 1


def test_timing_that_takes_long_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    for minutes in (1, 60):
        dial_of(Pretended(MACHINES["laptop"]), 1e6, minutes).find_best()
        assert ("Timing     this machine" in capsys.readouterr().out) == (minutes == 60)


def test_on_a_gpu_a_short_run_is_not_compiled_and_a_long_one_is_as_it_was_timed() -> None:
    machine = Pretended(MACHINES["T4"])
    short, long = (dial_of(machine, 1e8, minutes) for minutes in (1, 60))
    assert short.build_config(short.find_best()).compile == "off" and not machine.compiled
    config = long.build_config(choice := long.find_best())
    shape = config.shape(long.text.vocab_size)
    assert config.compile == "auto" and (shape, choice.rows) in machine.compiled  # what the training will compile
    assert dial_of(machine, 1e8, 1, "--compile", "on").find_best().compiles
    assert not dial_of(machine, 1e8, 60, "--compile", "off").find_best().compiles
