"""The time of a run. With `minutes`: the step from which the learning rate falls, and the step that is the last.

Until the fall begins, nothing depends on the clock but when that is. Then `TrainState.cooldown` holds the plan. The
session that made it moves the last step if the machine becomes slower or faster. A session that continues the fall
keeps the plan, so that it ends with the weights that the first one would have ended with.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from common.output import clock as duration
from common.output import log
from training.evaluate import SPEEDUP, evaluated_windows
from training.parallel import on_rank_0
from training.run import Run
from training.schedule import decay_share, decay_start
from training.state import MAX_STEPS, Cooldown

CLOCK_CHECKS = 200  # in all the minutes; each waits for the device
SAMPLES = 15  # of the speed: the last ones count
BLOCKS = 3  # of these samples
DECIDED_AFTER = 3  # of these samples, the first forecast, and the fall if half of its time is left
SHORTEST_FALL = 3  # steps
SUSPENDED = 10.0  # times the expected seconds of some steps: the process stood still meanwhile
MARGIN = 0.01  # of the minutes: the run ends a little early rather than late
MOVED = 0.015  # of the minutes: a last step that is further from where it should be is moved
MOVED_OF_LEFT = 0.2  # of the time left, which must be passed too: noise averages out until then
MOST_MOVES = 25  # in all the minutes
EARLY = 0.03  # of the minutes: a run that ends earlier says so
LATE = 0.1  # of the minutes: a run that ends later, because its plan is kept, says so once
WRITE_BYTES_PER_SECOND = 200e6  # of a checkpoint, where none was written yet


class Costs(NamedTuple):
    """Seconds of the parts of a run."""

    step: float  # with its share of saving
    evaluation: float = 0.0
    ending: float = 0.0  # after the last step: the checkpoint and its copies

    def of(self, steps: int, done: int, eval_interval: int) -> float:
        """Return the seconds of the last `steps` steps of a run, after `done` steps, with evaluations and the
        ending."""
        evaluations = 0
        if eval_interval:
            last = done + steps
            evaluations = last // eval_interval - done // eval_interval + bool(last % eval_interval)
        return steps * self.step + evaluations * self.evaluation + self.ending

    def steps_within(self, seconds: float, done: int, limit: int, eval_interval: int) -> int:
        """Return how many of at most `limit` steps are over within `seconds`, the run's end included."""
        possible = range(1, min(limit, MAX_STEPS - done) + 1)
        return bisect.bisect_right(possible, seconds, key=lambda steps: self.of(steps, done, eval_interval))


class Clock:
    """Measures a run: evaluating and saving count in its time, not in its speed. With `minutes`, plans it: call
    `replan` after each step. Of several processes rank 0 decides."""

    def __init__(self, run: Run, started: float):
        """`started`: the time.perf_counter() at which this session began."""
        self.run = run
        self.earlier = run.state.elapsed_seconds  # of the sessions before
        self.started = started - self.earlier
        self.paused_seconds = self.paused_cpu = self.saving_seconds = 0.0
        self.evaluation_seconds: float | None = None  # of the last evaluation
        self.write_seconds: float | None = None  # of the last checkpoint folder
        self.seconds = 60 * run.config.minutes
        self.next_check = math.inf  # steps
        self.samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # steps, and the seconds that they took
        self.suspended_seconds = 0.0  # in this session, as far as it was noticed
        self.was_suspended = False  # before the last check
        self.is_warm = False  # the first sample of a session is dropped once there is another
        self.has_planned = False  # in this session
        self.logged: set[str] = set()  # what is logged once
        self.reached = ""  # why the run stops before its learning rate has fallen, if it does
        self.last_step = run.state.max_steps  # or what is expected
        self.first_step = self.sampled_step = run.state.step
        self.sampled_seconds = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, over all its sessions."""
        return time.perf_counter() - self.started

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

    def start(self) -> None:
        """Begin to measure the speed, before the first step of a session."""
        if not self.seconds or self.run.state.finished:
            return
        self.sampled_step, self.sampled_seconds = self.run.state.step, self.training_seconds
        self.next_check = self.run.state.step + 1
        if self.run.state.cooldown is None and self.left <= 0:
            self.reached = self.no_time()

    @property
    def limit_reached(self) -> str:
        """Why the run stops here, if it does, and what to do: the end of a sentence."""
        hours = self.run.config.max_hours
        if hours and self.elapsed >= 3600 * hours:
            return f"--max_hours {hours:g} is reached. The same command with more of it continues."
        return f"{self.reached}. The same command with more of them continues." if self.reached else ""

    def no_time(self) -> str:
        return f"--minutes {self.run.config.minutes:g} leaves no time for the learning rate to fall"

    # The plan of `minutes`

    def replan(self) -> None:
        """Measure the speed, if it is time to check; begin the fall of the learning rate, or move its end."""
        state = self.run.state
        if state.step < self.next_check or state.finished:
            return
        self.run.hardware.synchronize()
        if self.samples and not self.is_warm:  # the first step allocates memory and starts kernels
            self.samples.clear()
            self.is_warm = True
        steps, seconds = state.step - self.sampled_step, self.training_seconds - self.sampled_seconds
        expected = steps * self.step_seconds if self.samples else math.inf
        self.was_suspended = seconds > SUSPENDED * expected and not self.was_suspended
        if self.was_suspended:  # Ctrl-Z, or a laptop that slept: a slower machine stays slow
            self.suspended_seconds += seconds - expected
        else:
            self.samples.append((steps, seconds))
        self.sampled_step, self.sampled_seconds = state.step, self.training_seconds
        cooldown, self.next_check, self.reached = on_rank_0(self.decide)
        if cooldown is not None:
            state.cooldown, state.max_steps = cooldown, cooldown.last
        self.last_step = state.max_steps if state.cooldown else state.step + max(1, self.steps_left)

    def decide(self) -> tuple[Cooldown | None, int, str]:
        """Plan the end, if its time has come. Returns the plan, if it begins or moves now; the step of the next check;
        and why the run stops, if no step is left."""
        has_begun = self.run.state.cooldown is not None
        now, next_check = self.check_end() if has_begun else self.check_beginning()
        if not now:
            return None, next_check, ""
        self.has_planned = True
        steps = self.steps_left
        if not has_begun and not steps:
            return None, next_check, self.no_time()
        if has_begun:  # not again at once, for each move is saved
            next_check = self.step_after(self.seconds / MOST_MOVES)
        return (self.move_end if has_begun else self.begin_fall)(steps), next_check, ""

    def check_beginning(self) -> tuple[bool, int]:
        """Return whether the fall begins now, and the step of the next check."""
        state, config = self.run.state, self.run.config
        fall = decay_share(config) * self.seconds
        before_fall = self.left - max(fall, self.cost(SHORTEST_FALL) + MARGIN * self.seconds)
        by_text = decay_start(state.max_steps, config)
        if len(self.samples) < DECIDED_AFTER and self.left > fall / 2 and state.step < by_text:
            return False, state.step + 1
        if before_fall <= 0 or state.step >= by_text:
            return True, state.step + 1
        self.log_once("forecast", self.forecast())
        next_check = self.step_after(min(self.seconds / CLOCK_CHECKS, before_fall))
        return False, min(next_check, max(state.step + 1, by_text))

    def check_end(self) -> tuple[bool, int]:
        """Return whether the last step moves, and the step of the next check."""
        state, next_check = self.run.state, self.step_after(self.seconds / CLOCK_CHECKS)
        assert state.cooldown is not None
        if len(self.samples) < DECIDED_AFTER:
            return False, next_check
        late = self.cost(state.max_steps - state.step) - self.left
        if not self.has_planned:  # an earlier session has
            if late > LATE * self.seconds:
                self.log_once("late", self.warning_of_delay(late))
            return False, next_check
        off = late + MARGIN * self.seconds
        may_move = off > 0 or state.max_steps < state.cooldown.limit
        return may_move and abs(off) > max(MOVED * self.seconds, MOVED_OF_LEFT * self.left), next_check

    def begin_fall(self, steps: int) -> Cooldown:
        state, config = self.run.state, self.run.config
        cut = f" The warmup of {config.warmup_steps:,} steps was not over." if state.step < config.warmup_steps else ""
        log.info(f"Step {state.step:,}: the learning rate falls from here on; {self.describe_end(steps)}{cut}")
        return Cooldown(config.minutes, state.step, state.step + steps, state.max_steps)

    def move_end(self, steps: int) -> Cooldown:
        state = self.run.state
        assert state.cooldown is not None
        last = state.step + max(1, steps)
        message = f"Step {state.step:,}: the machine's speed has changed; step {last:,} is the last."
        self.log_once("moved", message)  # it may come and go
        return state.cooldown.moved_to(last, state.step)

    @property
    def left(self) -> float:
        return self.seconds - self.elapsed

    @property
    def step_seconds(self) -> float:
        """The median of the means of a few blocks: a single interruption does not count, slow steps now and then do."""
        samples = list(self.samples)
        size = max(1, len(samples) // BLOCKS)
        blocks = [samples[i : i + size] for i in range(0, len(samples), size)]
        return median(sum(seconds for _, seconds in block) / sum(steps for steps, _ in block) for block in blocks)

    @property
    def costs(self) -> Costs:
        run, evaluation = self.run, self.evaluation_seconds
        if evaluation is None:  # not measured yet
            tokens = evaluated_windows(run.data, run.config) * run.shape.max_seq_len
            evaluation = tokens / run.tokens_per_step * self.step_seconds / SPEEDUP
        saving = self.saving_seconds / (run.state.step - self.first_step)
        return Costs(self.step_seconds + saving, evaluation, self.ending_seconds)

    @property
    def ending_seconds(self) -> float:
        """Seconds to write, and to copy, what the last step leaves: as measured, or else by its size."""
        write, mirror = self.write_seconds, self.run.mirror
        if write is None:
            write = self.run.checkpoint_bytes / WRITE_BYTES_PER_SECOND
        if mirror is not None:
            write += write if mirror.copy_seconds is None else mirror.copy_seconds
        return write * (2 if self.run.config.eval_interval else 1)  # the best weights may be these

    def cost(self, steps: int) -> float:
        """Return the seconds of the next `steps` steps, if they are the last."""
        return self.costs.of(steps, self.run.state.step, self.run.config.eval_interval)

    def step_after(self, seconds: float) -> int:
        return self.run.state.step + max(1, int(seconds / max(self.step_seconds, 1e-6)))

    @property
    def steps_left(self) -> int:
        """Steps that can still be taken in time."""
        state, interval = self.run.state, self.run.config.eval_interval
        limit = state.max_steps if state.cooldown is None else state.cooldown.limit
        return self.costs.steps_within(self.left - MARGIN * self.seconds, state.step, limit - state.step, interval)

    def log_once(self, name: str, message: str) -> None:
        if name not in self.logged:
            self.logged.add(name)
            log.info(message)

    def forecast(self) -> str:
        state, config = self.run.state, self.run.config
        by_clock = self.step_after(self.left - decay_share(config) * self.seconds)
        first = min(by_clock, decay_start(state.max_steps, config))
        end = self.describe_end(self.steps_left)
        return f"Forecast   the learning rate falls from about step {first:,} on; about {end}"

    def describe_end(self, steps: int) -> str:
        """Return the rest of a sentence about the last step, which comes after `steps` more."""
        state, config = self.run.state, self.run.config
        last, early = state.step + steps, self.left - self.cost(steps)
        if last < state.max_steps or early <= EARLY * self.seconds:
            return f"step {last:,} is the last, when the {config.minutes:g} minutes are over."
        return (
            f"step {last:,} is the last, and the run ends early: the text is then read --epochs {config.epochs} times, "
            f"about {duration(early)} before the {config.minutes:g} minutes are over."
        )

    def warning_of_delay(self, late: float) -> str:
        return (
            f"Warning: the machine has become slower. Keeping the planned schedule; the run will finish late: step "
            f"{self.run.state.max_steps:,} is the last, about {duration(late)} after the "
            f"{self.run.config.minutes:g} minutes. --max_hours stops a run at its time, saved."
        )
