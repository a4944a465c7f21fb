"""The dial on machines that are not there, from a small card to a large one and on CPUs: it never runs out of memory,
keeps its time, and chooses well."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.training.pretended import MACHINES, Pretended
from training.config import Config, parse_config
from training.dial import EVALUATING_SHARE, FEWEST_STEPS, Choice, Dial
from training.planning.law import expected_loss, most_passes
from training.planning.text import TRAIN_SHARE, Text, vocabulary_for
from training.planning.timing import Candidate, Timed

SIZES = (5e4, 1e6, 2e7, 1e8, 1.2e10)  # bytes of text
MINUTES = (2, 10, 60, 600)


def text_of(size: float) -> Text:
    vocabulary = vocabulary_for(size)
    return Text("a text", 1, int(size), size / vocabulary.bytes_per_token, vocabulary.size, False, 1.0)


def dial_of(machine: Pretended, size: float, minutes: float, *flags: str) -> Dial:
    argv = ["--input", "text", "--minutes", str(minutes), *flags]
    return Dial(argv, text_of(size), parse_config(argv), machine)


class Trained(NamedTuple):
    """What a choice came to on a pretended machine."""

    config: Config
    steps: float
    loss: float
    seconds: float  # of the whole command
    all_read: bool  # as often as it is worth


def trained(dial: Dial, choice: Choice, spent: float) -> Trained:
    """Train as chosen, after so many seconds."""
    machine, config = dial.machine, dial.config_of(choice)
    assert isinstance(machine, Pretended)
    final = dial.candidate(config)
    spent += machine.compile_seconds(final, choice.rows) if choice.compiles else 0.0
    step = machine.step(final, choice.sequences, choice.rows, choice.compiles)
    seconds = max(1.0, 60 * dial.asked.minutes - spent) * (1 - EVALUATING_SHARE)
    of_step, in_pass = choice.sequences * config.max_seq_len, dial.text.train_tokens
    steps = min(seconds / step, config.epochs * in_pass / of_step)
    text_bytes = TRAIN_SHARE * dial.text.bytes
    loss = expected_loss(final.block_parameters, text_bytes, steps * of_step / in_pass)
    all_read = config.epochs >= most_passes(final.block_parameters, text_bytes)
    return Trained(config, steps, loss, spent + steps * step / (1 - EVALUATING_SHARE), all_read)


@pytest.mark.parametrize("name", MACHINES)
def test_every_text_and_time(name: str) -> None:
    losses: dict[tuple[float, float], float] = {}
    for size in SIZES:
        for minutes in MINUTES:
            machine, what = Pretended(MACHINES[name]), f"{size:g} bytes, {minutes} minutes"
            dial = dial_of(machine, size, minutes)
            choice = dial.choice()
            run = trained(dial, choice, machine.clock)
            assert run.steps >= FEWEST_STEPS, what
            assert run.seconds <= 1.03 * 60 * minutes, what
            assert run.seconds >= 0.97 * 60 * minutes or run.all_read, what
            outcomes = [dial.outcome(each, minutes, form) for each in dial.candidates for form in dial.forms(each)]
            best = min(trained(dial, outcome, machine.clock).loss for outcome in outcomes)
            assert run.loss <= best + 0.02, what
            losses[size, minutes] = run.loss
    rises = [
        (at, other, losses[at], losses[other])
        for at in losses
        for other in losses
        if other[0] >= at[0] and other[1] >= at[1] and losses[other] > losses[at] + 0.003
    ]
    assert not rises


class Smaller(Pretended):
    """A GPU whose memory ends earlier than it says: other programs hold the rest."""

    freed = 0

    def time_steps(self, candidate: Candidate, tokens: float, threads: int, seconds: float) -> Timed:
        if candidate.model.num_parameters() > 2e7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().time_steps(candidate, tokens, threads, seconds)

    def free(self, candidate: Candidate) -> None:
        self.freed += 1


def test_a_model_that_finds_no_memory_is_not_chosen() -> None:
    machine = Smaller(MACHINES["A100 40 GB"])
    dial = dial_of(machine, 2e7, 10)
    assert dial_of(Pretended(machine.specs), 2e7, 10).choice().candidate.model.num_parameters() > 2e7
    choice = dial.choice()
    assert 1e7 < choice.candidate.model.num_parameters() < 2e7 and machine.freed >= len(dial.timed[2]) + 1


def test_on_a_gpu_a_short_run_is_not_compiled_and_a_long_one_is_as_it_was_timed() -> None:
    machine = Pretended(MACHINES["T4"])
    short, long = (dial_of(machine, 1e8, minutes) for minutes in (1, 60))
    assert short.config_of(short.choice()).compile == "off" and not machine.compiled
    config = long.config_of(choice := long.choice())
    shape = config.shape(long.text.vocab_size)
    assert config.compile == "auto" and machine.compiled == {(shape, choice.rows)}  # what the training will compile
    assert dial_of(machine, 1e8, 1, "--compile", "on").choice().compiles
    assert not dial_of(machine, 1e8, 60, "--compile", "off").choice().compiles
