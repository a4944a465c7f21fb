"""--minutes: from the measured speed, the step at which the learning rate begins to fall and the step that is the last.

Until the fall begins, nothing depends on the clock but when that is. Then `TrainState.cooldown` holds the plan. The
session that has made it moves the last step if the machine becomes slower or faster. A session that continues the fall
keeps the plan, so that it ends with the weights that the first one would have ended with.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from common.output import clock, log
from training.config import Config
from training.parallel import on_rank_0
from training.report import Timer
from training.run import Run
from training.schedule import decay_share, decay_start
from training.state import MOST_STEPS, Cooldown

CLOCK_CHECKS = 200  # looks at the clock, in all the minutes; each waits for the device
SAMPLES = 15  # of the speed: the last ones count
BLOCKS = 3  # of these samples
DECIDED_AFTER = 3  # of these samples, the first forecast, and the fall if half of its time is left
LEAST_FALL = 3  # steps
MARGIN = 0.01  # of the minutes: the run ends a little early rather than late
MOVED = 0.015  # of the minutes: a last step that is further from where it should be is moved
MOVED_OF_LEFT = 0.2  # of the time left, which must be passed too: noise averages out until then
EARLY = 0.03  # of the minutes: say so if the run will end earlier
LATE = 0.1  # of the minutes: warn once if the run will be later than this, because its plan is kept
WRITE_BYTES_PER_SECOND = 200e6  # of a checkpoint, where none was written yet


@dataclass(frozen=True)
class Costs:
    """Seconds of what a run consists of."""

    step: float  # with its share of saving
    evaluation: float = 0.0
    ending: float = 0.0  # after the last step: the checkpoint and its copies

    def of(self, steps: int, done: int, config: Config) -> float:
        """Seconds of the last `steps` of a run, after `done` steps, with evaluations and the ending."""
        evaluations = 0
        if interval := config.eval_interval:
            last = done + steps
            evaluations = last // interval - done // interval + bool(last % interval)
        return steps * self.step + evaluations * self.evaluation + self.ending

    def steps_within(self, seconds: float, done: int, most: int, config: Config) -> int:
        """How many of at most `most` steps are over within `seconds`, the run's end included."""
        possible = range(1, min(most, MOST_STEPS - done) + 1)
        return bisect.bisect_right(possible, seconds, key=lambda steps: self.of(steps, done, config))


def ending_seconds(run: Run) -> float:
    """Seconds to write, and to copy, what the last step leaves: as measured, or else by its size."""
    write = run.write_seconds
    if write is None:
        write = run.checkpoint_bytes / WRITE_BYTES_PER_SECOND
    if run.mirror is not None:
        write += write if run.mirror.copy_seconds is None else run.mirror.copy_seconds
    return write * (2 if run.trainer.config.eval_interval else 1)  # the best weights may be these


class Deadline:
    """Looks at the clock now and then. Without `minutes` it never does.

    Of several processes rank 0 decides. `Loop` calls `begin` before the first step, and
    once a step has reached `next_look`: `look`, then `plan` if that says so.
    """

    def __init__(self, run: Run, timer: Timer):
        self.run, self.timer = run, timer
        self.seconds = 60 * run.trainer.config.minutes
        self.next_look = math.inf  # steps
        self.samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # steps, and the seconds that they took
        self.has_started = False  # the first sample of a session is dropped once there is another
        self.evaluation_seconds: float | None = None  # of the last evaluation
        self.saving_seconds = 0.0  # that saving has held the training, in this session
        self.reached = ""  # why the run stops before its learning rate has fallen, if it does
        self.has_forecast = self.has_planned = self.has_moved = False
        self.has_warned = False  # that the fall takes too long
        self.first_step = run.state.step
        self.seen_step, self.seen_seconds = 0, 0.0

    @property
    def left(self) -> float:
        return self.seconds - self.timer.elapsed

    @property
    def step_seconds(self) -> float:
        """The median of the means of a few blocks: a single interruption does not count, slow steps now and then do."""
        samples = list(self.samples)
        size = max(1, len(samples) // BLOCKS)
        blocks = [samples[i : i + size] for i in range(0, len(samples), size)]
        return median(sum(seconds for _, seconds in block) / sum(steps for steps, _ in block) for block in blocks)

    @property
    def costs(self) -> Costs:
        saving = self.saving_seconds / (self.run.state.step - self.first_step)
        return Costs(self.step_seconds + saving, self.evaluation_seconds or 0.0, ending_seconds(self.run))

    def begin(self) -> None:
        """Steps begin, perhaps again: nothing is known of their speed."""
        state = self.run.state
        if not self.seconds or state.finished:
            return
        self.samples.clear()
        self.has_started = False
        self.mark()
        self.next_look = state.step + 1
        if state.cooldown is None and on_rank_0(lambda: self.left <= 0):
            self.give_up()

    def mark(self) -> None:
        self.seen_step, self.seen_seconds = self.run.state.step, self.timer.elapsed - self.timer.paused_seconds

    def give_up(self) -> None:
        minutes = self.run.trainer.config.minutes
        self.reached = f"--minutes {minutes:g} leaves no time for the learning rate to fall"

    def look(self) -> bool:
        """Measure the speed. Returns whether the fall has to begin, or its last step to move."""
        run, state = self.run, self.run.state
        run.trainer.hardware.synchronize()
        before, seconds = self.seen_step, self.seen_seconds
        self.mark()
        if self.samples and not self.has_started:  # the first step allocates memory and starts kernels
            self.samples.clear()
            self.has_started = True
        self.samples.append((state.step - before, self.seen_seconds - seconds))
        plans, self.next_look = on_rank_0(self.begins if state.cooldown is None else self.moves)
        return plans

    def step_after(self, seconds: float) -> int:
        return self.run.state.step + max(1, int(seconds / max(self.step_seconds, 1e-6)))

    def begins(self) -> tuple[bool, int]:
        """Whether the fall begins now, and the next step to look at the clock."""
        state, config = self.run.state, self.run.trainer.config
        fall = decay_share(config) * self.seconds
        before_fall = self.left - max(fall, self.costs.of(LEAST_FALL, state.step, config) + MARGIN * self.seconds)
        by_text = decay_start(state.max_steps, config)
        if len(self.samples) < DECIDED_AFTER and self.left > fall / 2 and state.step < by_text:
            return False, state.step + 1
        if before_fall <= 0 or state.step >= by_text:
            return True, state.step + 1
        following = min(self.step_after(min(self.seconds / CLOCK_CHECKS, before_fall)), max(state.step + 1, by_text))
        if not self.has_forecast:
            self.has_forecast = True
            log.info(self.forecast())
        return False, following

    def moves(self) -> tuple[bool, int]:
        """Whether the last step moves, and the next step to look at the clock."""
        state, following = self.run.state, self.step_after(self.seconds / CLOCK_CHECKS)
        if len(self.samples) < DECIDED_AFTER or state.cooldown is None:
            return False, following
        late = self.costs.of(state.max_steps - state.step, state.step, self.run.trainer.config) - self.left
        if not self.has_planned:
            self.warn_of_delay(late)
            return False, following
        moved = late + MARGIN * self.seconds
        may_move = moved > 0 or state.max_steps < state.cooldown.most
        return may_move and abs(moved) > max(MOVED * self.seconds, MOVED_OF_LEFT * self.left), following

    def steps_left(self) -> int:
        """Steps that can still be taken in time."""
        state = self.run.state
        in_time = self.left - MARGIN * self.seconds
        most = state.max_steps if state.cooldown is None else state.cooldown.most
        return self.costs.steps_within(in_time, state.step, most - state.step, self.run.trainer.config)

    @property
    def last_step(self) -> int:
        """The last step of the run, or what the forecast is."""
        state = self.run.state
        return state.step + max(1, self.steps_left()) if state.cooldown is None else state.max_steps

    def plan(self) -> Cooldown | None:
        """The fall of the learning rate, which begins now, or has another last step from now on; None, and the run
        stops, if no step is left for it."""
        state, config = self.run.state, self.run.trainer.config
        steps = on_rank_0(self.steps_left)
        self.has_planned = True
        if state.cooldown is not None:
            last = state.step + max(1, steps)
            if not self.has_moved:  # it may come and go
                log.info(f"Step {state.step:,}: the machine's speed has changed; step {last:,} is the last.")
            self.has_moved = True
            return state.cooldown.moved_to(last, state.step)
        if not steps:
            self.give_up()
            return None
        cut = f" The warmup of {config.warmup_steps:,} steps was not over." if state.step < config.warmup_steps else ""
        end = self.end(steps, state.max_steps)
        log.info(f"Step {state.step:,}: the learning rate falls from here on; {end}{cut}")
        return Cooldown(config.minutes, state.step, state.step + steps, state.max_steps)

    def end(self, steps: int, most: int) -> str:
        """The rest of a sentence, about the last step if `steps` are left; `most`: steps of all epochs."""
        state, config = self.run.state, self.run.trainer.config
        last, early = state.step + steps, self.left - self.costs.of(steps, state.step, config)
        if last < most or early <= EARLY * self.seconds:
            return f"step {last:,} is the last, when the {config.minutes:g} minutes are over."
        return (
            f"step {last:,} is the last, and the run ends early: the text is then read --epochs {config.epochs} times, "
            f"about {clock(early)} before the {config.minutes:g} minutes are over."
        )

    def forecast(self) -> str:
        state, config = self.run.state, self.run.trainer.config
        by_clock = self.step_after(self.left - decay_share(config) * self.seconds)
        first = min(by_clock, decay_start(state.max_steps, config))
        end = self.end(self.steps_left(), state.max_steps)
        return f"Forecast   the learning rate falls from about step {first:,} on; about {end}"

    def warn_of_delay(self, late: float) -> None:
        """The first time that the machine is too slow for the plan."""
        if self.has_warned or late <= LATE * self.seconds:
            return
        self.has_warned = True
        log.info(
            f"Warning: the machine has become slower. Keeping the planned schedule; the run will finish late: step "
            f"{self.run.state.max_steps:,} is the last, about {clock(late)} after the "
            f"{self.run.trainer.config.minutes:g} minutes. --max_hours stops a run at its time, saved."
        )
