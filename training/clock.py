"""The clock of a run: time in total, time spent training, and the time its end will take."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Iterator

from common.errors import ConfigError
from common.output import duration, log
from training.evaluate import EVALUATION_SPEEDUP, evaluated_windows
from training.run import Run

SUMMARY_TOKENS = 65_000  # a summary scores about this many tokens of held-out passages
MAX_SUMMARY_SHARE = 0.01  # share of --minutes
MAX_GUESSED_EVALUATION_SHARE = 0.2  # share of --minutes, until an evaluation is measured
WRITE_BYTES_PER_SECOND = 200e6  # until the first checkpoint is written
TICK_SECONDS = 1.0
MIN_PACE_SECONDS = 2.0
MIN_STANDSTILL_SECONDS = 5.0
MAX_STANDSTILL_CPU = 0.1  # CPU time / time; a process that is only starved by others gets more


class Standstill:
    """Measures how long this process stood still: stopped by Ctrl-Z, or on a machine that slept.

    A thread looks at the clock once a second. If it is late and the process used hardly any CPU, nothing has run.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.looked_at, self.cpu = time.monotonic(), time.process_time()
        self.lock = threading.Lock()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            self.look()

    def look(self) -> None:
        with self.lock:
            now, cpu = time.monotonic(), time.process_time()
            late = now - self.looked_at - TICK_SECONDS
            if late > MIN_STANDSTILL_SECONDS and cpu - self.cpu < MAX_STANDSTILL_CPU * late:
                self.total += late
                log.info(f"This process stood still for {duration(late)}, which does not count as training time.")
            self.looked_at, self.cpu = now, cpu

    @property
    def seconds(self) -> float:
        self.look()  # the thread may not have woken up yet
        return self.total


@functools.cache
def standstill() -> Standstill:
    """Return this process's `Standstill`, and start it at the first call."""
    return Standstill()


class Clock:
    """Measures a run. Evaluating and saving count towards its time, not its speed."""

    def __init__(self, run: Run, started: float):
        """`started`: the time.perf_counter() at which this session began."""
        self.run = run
        self.earlier_seconds = run.state.elapsed_seconds
        self.run_started = started - self.earlier_seconds  # the start of one unbroken session
        self.standstill = standstill()
        self.stood_still = self.standstill.seconds  # before this session
        self.paused_seconds = self.paused_cpu = 0.0
        self.pauses: dict[str, list[float]] = {"starting": [], "evaluating": [], "saving": []}  # seconds of each
        self.write_seconds: float | None = None  # the last checkpoint folder
        self.steps = 0  # steps of this session
        self.first_done = self.first_paused = 0.0  # training_seconds and paused_seconds after the first step
        self.step_seconds: float | None = None  # mean without the first step, which starts kernels and allocates memory
        self.pace = 0.0  # as `step_seconds`, with the pauses; 0 until MIN_PACE_SECONDS are measured

    @property
    def elapsed(self) -> float:
        """Seconds of the run, over all its sessions, without those in which the process stood still."""
        return time.perf_counter() - self.run_started - (self.standstill.seconds - self.stood_still)

    @property
    def session_seconds(self) -> float:
        return self.elapsed - self.earlier_seconds

    @property
    def training_seconds(self) -> float:
        """Seconds of the run without the pauses of this session."""
        return self.elapsed - self.paused_seconds

    @property
    def training_cpu(self) -> float:
        """CPU seconds of this thread without the pauses."""
        return time.thread_time() - self.paused_cpu

    def require_time(self) -> None:
        """Raise ConfigError if `minutes` are over before the first step."""
        run = self.run
        if run.took_last_step and run.state.step == 0:
            raise ConfigError(
                f"--minutes {run.config.minutes:g} ran out before the first step: starting took "
                f"{duration(run.state.elapsed_seconds)}. Increase --minutes."
            )

    def find_deadline(self, least_seconds: float = 0.0) -> float:
        """Return the time.monotonic() at which `minutes` are over, but at least their share for the summary and
        `least_seconds` from now; infinity without `minutes`."""
        minutes = self.run.config.minutes
        left = max(60 * minutes - self.elapsed, MAX_SUMMARY_SHARE * 60 * minutes, least_seconds)
        return time.monotonic() + left if minutes else math.inf

    @property
    def compute_units(self) -> float | None:
        """Compute units spent so far; None if the machine's rate is not known."""
        rate = self.run.hardware.units_per_hour(self.run.config)
        return self.elapsed / 3600 * rate if rate else None

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Count what happens inside as one of `pauses`, not as training. Do not nest: it would be subtracted twice."""
        self.run.hardware.synchronize()
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.paused_cpu += time.thread_time() - cpu
            self.pauses[what].append(time.perf_counter() - began)
            self.paused_seconds += self.pauses[what][-1]

    def count_step(self) -> None:
        """Count a step, and update `step_seconds` and `pace`."""
        self.steps += 1
        if self.steps == 1:
            self.first_done, self.first_paused = self.training_seconds, self.paused_seconds
        else:
            seconds, pauses = self.training_seconds - self.first_done, self.paused_seconds - self.first_paused
            self.step_seconds = seconds / (self.steps - 1)
            if seconds >= MIN_PACE_SECONDS:
                self.pace = (seconds + pauses) / (self.steps - 1)

    @property
    def max_hours_message(self) -> str:
        """The reason if --max_hours ends the run here, and what to type; else empty."""
        hours = self.run.config.max_hours
        if hours and self.elapsed >= 3600 * hours:
            return f"--max_hours {hours:g} is reached. To continue, run the same command with a larger --max_hours."
        return ""

    @property
    def ending_seconds(self) -> float:
        """Estimated seconds for the last step, its evaluation, writing and copying its checkpoints, and the summary.
        Until a step is measured, the estimate of the session before."""
        run, step, write = self.run, self.step_seconds, self.write_seconds
        if step is None:
            return run.state.ending_seconds
        reading = step / run.tokens_per_step / EVALUATION_SPEEDUP  # seconds per token
        guess = evaluated_windows(run.data, run.config) * run.shape.max_seq_len * reading
        guess = min(guess, MAX_GUESSED_EVALUATION_SHARE * 60 * run.config.minutes)
        evaluation = [guess, *self.pauses["evaluating"]][-1]
        if write is None:
            write = run.checkpoint_bytes / WRITE_BYTES_PER_SECOND
        if run.mirror is not None:
            write += write if run.mirror.last_copy_seconds is None else run.mirror.last_copy_seconds
        summary = min(SUMMARY_TOKENS * reading, MAX_SUMMARY_SHARE * 60 * run.config.minutes)
        return step + (evaluation if run.config.eval_interval else 0.0) + write + summary
