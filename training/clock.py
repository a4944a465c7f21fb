"""The time of a run: what of it is training, and what its end will take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from training.evaluate import SPEEDUP, evaluated_windows
from training.run import Run

SUMMARY_TOKENS = 65_000  # a summary reads about as many, of held-out passages
MAX_SUMMARY_SHARE = 0.01  # share of --minutes
MAX_GUESSED_SHARE = 0.2  # share of --minutes that an evaluation is expected to take at most until one is measured
WRITE_BYTES_PER_SECOND = 200e6  # assumed until a checkpoint was written


class Clock:
    """Measures a run: evaluating and saving count in its time, not in its speed."""

    def __init__(self, run: Run, started: float):
        """`started`: the time.perf_counter() at which this session began."""
        self.run = run
        self.earlier = run.state.elapsed_seconds  # of the sessions before
        self.run_started = started - self.earlier  # had there been one session only
        self.paused_seconds = self.paused_cpu = self.saving_seconds = 0.0
        self.evaluation_seconds: float | None = None  # of the last evaluation
        self.write_seconds: float | None = None  # of the last checkpoint folder
        self.steps = 0  # steps of this session
        self.first_done = 0.0  # training_seconds after the first
        self.step_seconds: float | None = None  # mean of the others: the first starts kernels and allocates memory

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, over all its sessions."""
        return time.perf_counter() - self.run_started

    @property
    def session_seconds(self) -> float:
        return self.elapsed - self.earlier

    @property
    def training_seconds(self) -> float:
        """Seconds of the run, without what was `paused` in this session."""
        return self.elapsed - self.paused_seconds

    @property
    def training_cpu(self) -> float:
        """Seconds that this thread has computed, without what was `paused`."""
        return time.thread_time() - self.paused_cpu

    @property
    def compute_units(self) -> float | None:
        """Spent so far; None where the machine's rate is not known."""
        rate = self.run.hardware.units_per_hour(self.run.config)
        return self.elapsed / 3600 * rate if rate else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the training's speed. Not to be nested: it would count twice."""
        self.run.hardware.synchronize()
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.paused_cpu += time.thread_time() - cpu
            self.paused_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Pause, and take the length of the pause as that of an evaluation."""
        before = self.paused_seconds
        with self.paused():
            yield
        self.evaluation_seconds = self.paused_seconds - before

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Pause while the training waits for a save."""
        before = self.paused_seconds
        with self.paused():
            yield
        self.saving_seconds += self.paused_seconds - before

    def count_step(self) -> None:
        """Count a step in the `step_seconds`."""
        self.steps += 1
        if self.steps == 1:
            self.first_done = self.training_seconds
        else:
            self.step_seconds = (self.training_seconds - self.first_done) / (self.steps - 1)

    @property
    def limit_reached(self) -> str:
        """Why the run stops here, if it does, and what to do: the end of a sentence."""
        hours = self.run.config.max_hours
        if hours and self.elapsed >= 3600 * hours:
            return f"--max_hours {hours:g} is reached. The same command with more of it continues."
        return ""

    @property
    def ending_seconds(self) -> float:
        """Estimate the last step, its evaluation, writing and copying its checkpoints, and the summary; in seconds. The
        estimate of an earlier session holds until a step is measured."""
        run, step, evaluation, write = self.run, self.step_seconds, self.evaluation_seconds, self.write_seconds
        if step is None:
            return run.state.ending_seconds
        reading = step / run.tokens_per_step / SPEEDUP  # seconds to read a token
        if evaluation is None:  # not measured yet
            evaluation = evaluated_windows(run.data, run.config) * run.shape.max_seq_len * reading
            evaluation = min(evaluation, MAX_GUESSED_SHARE * 60 * run.config.minutes)
        if write is None:
            write = run.checkpoint_bytes / WRITE_BYTES_PER_SECOND
        if run.mirror is not None:
            write += write if run.mirror.copy_seconds is None else run.mirror.copy_seconds
        summary = min(SUMMARY_TOKENS * reading, MAX_SUMMARY_SHARE * 60 * run.config.minutes)
        if run.config.eval_interval:
            return step + evaluation + 2 * write + summary  # the best weights may be these
        return step + write + summary
