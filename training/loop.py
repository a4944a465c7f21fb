"""The training, from its configuration to its last step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from common.errors import INTERRUPTED, MemoryExhausted
from common.files import FolderLock
from common.output import byte_size, clock, log
from common.script import is_rank_0, world
from training.config import Config
from training.deadline import Deadline
from training.evaluate import (
    Answer,
    Evaluation,
    answer_prompts,
    evaluate,
    evaluated_windows,
    sample,
    validation_loss,
)
from training.hardware import frozen_garbage
from training.inspections import disk_space, dry_run, profile
from training.memory import fitting, memory_advice
from training.mirror import Mirror
from training.parallel import on_rank_0, process_group
from training.plan import build, make_plan
from training.records import SUMMARY, read_samples, require_tensorboard, rewind
from training.report import Report, Timer
from training.resume import look, start_or_resume
from training.run import Run
from training.run_folder import require_ours, take, write_config
from training.schedule import has_stopped_early, learning_rate
from training.signals import Interruption, StopRequested
from training.state import Start
from training.step import Stability, StepResult, accumulate, apply_gradients, diverged, read_batch
from training.summary import finished_message, write_summary

Made = TypeVar("Made")
INSPECTIONS = {"dry_run": dry_run, "profile": profile}  # flags that inspect a run instead of training it


def train(config: Config, started: float, ends_process: bool) -> int:
    """Train, or inspect, the run of `config`. Returns the exit code.

    `started` is the time.perf_counter() at which the command began; `ends_process`: the process ends after this call.
    """
    with process_group(config), FolderLock() as lock:
        on_rank_0(lambda: require_ours(config.run_dir, "--output_dir"))
        on_rank_0(lambda: require_tensorboard(config))
        inspect = next((inspect for key, inspect in INSPECTIONS.items() if getattr(config, key)), None)
        if inspect is None:
            on_rank_0(lambda: take(lock, config.run_dir))
        mirror = Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir and is_rank_0() else None
        old = on_rank_0(lambda: look(config, mirror, will_train=inspect is None))
        trainer = build(make_plan(config, old))
        run = Run(trainer, mirror)
        with memory_advice(config, trainer.shape, trainer.hardware, trainer.rows_at_once):
            if inspect is not None:
                inspect(run, old)
                return 0
            start_or_resume(run, old)
            on_rank_0(lambda: take(lock, run.dir))  # again: the folder may be new
            return train_run(run, started, ends_process)


def train_run(run: Run, started: float, ends_process: bool) -> int:
    """Train until the run is finished or stopped. Returns the exit code."""
    trainer, state, config = run.trainer, run.state, run.trainer.config
    if on_rank_0(lambda: state.finished and (run.dir / SUMMARY).is_file()):
        with run.saving():
            pass  # only the mirror may need the newest files
        print(finished_message(run))
        return 0
    if is_rank_0():
        write_config(trainer)
        rewind(run.dir, state.step, state.evaluated_step)
        need, free = disk_space(run)
        if need > free and not state.step:
            log.info(f"Warning: the run takes about {byte_size(need)} in {run.dir}, and {byte_size(free)} are free.")
    most = "at most " if config.minutes and state.cooldown is None else ""
    steps = f"steps {state.step:,} to {most}{state.max_steps:,} of {trainer.tokens_per_step:,} tokens"
    print(f"Training   {steps}, in {run.dir}")
    if config.minutes:
        print(f"Minutes    {config.minutes:g}, and {clock(state.elapsed_seconds)} of them are used")
    if config.warmup_steps >= state.max_steps:
        shorter = f"--warmup_steps {state.max_steps // 10}, or more --epochs"
        print(f"Note       the warmup of {config.warmup_steps:,} steps takes the whole run: {shorter}")
    interruption = Interruption(ends_process)
    with interruption.awaited(), run.saving(interruption):
        loop = Loop(run, interruption, started)
        with contextlib.closing(loop.report):
            loop.run_to_end()
        interruption.answer = "Stopping once what is under way is saved and copied"
        run.wait_for_save()
        if loop.is_done:  # no answers: evaluation is off, or the last session ended before its summary
            answers = loop.answers or answer_prompts(trainer)
            samples = sample(trainer) if config.eval_interval and not answers else []
            if samples and not any(kept.step == state.step for kept in read_samples(run.dir)):
                loop.report.samples(state.step, samples)
            on_rank_0(lambda: write_summary(run, loop.timer, answers, samples))
    if loop.is_done:
        return 0
    after = f"after step {state.step:,}"
    if loop.deadline.reached:
        print(f"Stopped {after}: {loop.deadline.reached}. The same command with more of them continues.")
    elif limit := loop.timer.limit_reached(config):
        print(f"Stopped {after}: {limit} is reached. The same command with more of it continues.")
    else:
        print(f"Interrupted {after}. The same command continues from there.")
    return INTERRUPTED


class Loop:
    """The steps of one session. What changes is in `run.state` and in `run.trainer`."""

    def __init__(self, run: Run, interruption: Interruption, started: float):
        self.run, self.trainer, self.state = run, run.trainer, run.state
        self.interruption, self.started = interruption, started
        config, hardware, state = self.trainer.config, self.trainer.hardware, self.state
        self.timer = Timer(hardware, started, state.elapsed_seconds, hardware.units_per_hour(config))
        self.deadline = Deadline(run, self.timer)
        self.report = Report(run.dir, self.timer, state.step, state.max_steps, config.tensorboard)
        self.stability = Stability(hardware.device, self.trainer.scaler.is_enabled(), state.skipped_updates)
        self.first_step = state.step
        self.answers: list[Answer] = []  # of the last evaluation

    @property
    def is_done(self) -> bool:
        return self.state.finished and not self.evaluation_due

    @property
    def evaluation_due(self) -> bool:
        return self.state.evaluation_due(self.trainer.config.eval_interval)

    def run_to_end(self) -> None:
        """Train to the last step, or until somebody asks to stop. Raises MemoryExhausted if one sequence at a time does
        not fit; what is finished is saved first."""
        try:
            self.take_steps()
        except StopRequested:
            pass
        except MemoryExhausted:  # nothing but gradients has changed since the last step
            if world().size == 1:
                self.save_unsaved()
            raise
        self.save_unsaved()

    def take_steps(self) -> None:
        """The loop. Raises StopRequested if somebody asks to stop during something long, or what `run_to_end` does."""
        trainer, state, config = self.trainer, self.state, self.trainer.config
        self.begin()
        with frozen_garbage():
            while not self.stops():
                if self.evaluation_due:
                    self.evaluate()
                else:
                    with self.interruption.abandonable():  # only gradients change here
                        batch = read_batch(trainer, state.sequences_seen, config.sequences_per_step)
                        loss = self.fitting(accumulate, trainer, batch, state.step, config.sequences_per_step)
                    lr = self.learning_rate()
                    result = apply_gradients(trainer, loss, lr)
                    state.step += 1
                    state.sequences_seen += config.sequences_per_step
                    state.tokens += trainer.tokens_per_step
                    self.report_step(result, lr)
                if not self.evaluation_due:
                    if self.run.save_is_due():
                        self.save_if_sound()
                    self.look_at_clock()

    def begin(self) -> None:
        """What comes before the first step: compiling, and evaluations of the weights that it starts from."""
        with self.timer.paused(), self.interruption.abandonable():
            self.fitting(lambda: None)
        self.state.compiled = None if self.trainer.hardware.is_cuda else self.trainer.hardware.compiles
        with self.timer.paused():
            self.evaluate_start()
            self.evaluate_best_again()
        self.deadline.begin()

    def stops(self) -> bool:
        """Whether all processes stop here: nothing is left to do, somebody asks for it, or a limit is reached."""
        limit = self.timer.limit_reached(self.trainer.config) or self.deadline.reached
        return self.interruption.agreed(self.is_done or bool(limit) or self.run.is_overtaken)

    def learning_rate(self) -> float:
        state = self.state
        fall = state.cooldown.at(state.step) if state.cooldown else None
        return learning_rate(state.step, state.max_steps, self.trainer.config, fall)

    def report_step(self, result: StepResult, lr: float) -> None:
        """Report the step that was taken, if a report is due. Raises ConfigError if the training diverged."""
        trainer, state, config = self.trainer, self.state, self.trainer.config
        self.stability.step_done(result.skipped)
        self.report.step_done(trainer.tokens_per_step)
        reporting = state.due(config.log_interval)
        if state.step == self.first_step + 1:
            reporting = bool(config.log_interval)  # soon, also where steps take minutes
            trainer.hardware.synchronize()
            log.info(f"First step {time.perf_counter() - self.started:.1f} s after the start")
        if reporting or not trainer.hardware.is_cuda:
            self.stability.require_stable(state.step, self.run.saved_step)
        if reporting:  # only here the host waits for the device
            row = self.row_of_step()
            row |= self.timer.training_row(result.loss, result.grad_norm, lr, trainer.model.flops_per_token())
            row |= self.stability.row()
            self.report.progress(row, self.run.mirror.status() if self.run.mirror else "")
            for line in self.stability.warnings(state.step, row["train_loss"]):
                log.info(line)
            self.report.write(row)

    def row_of_step(self) -> dict[str, Any]:
        """The fields that every row of metrics.jsonl has."""
        return {"step": self.state.step, "epoch": self.run.epoch, "tokens": self.state.tokens} | self.timer.row()

    def fitting(self, work: Callable[..., Made], *arguments: Any) -> Made:
        """What `work` returns, with micro-batches that fit; `fitting` of training/memory.py says how. Their
        size is kept for the next session."""
        size = self.trainer.micro_batch_size
        made = fitting(self.trainer, work, *arguments)
        if self.trainer.micro_batch_size != size and is_rank_0():
            with contextlib.suppress(OSError):  # the next save reports a full disk
                write_config(self.trainer)
        return made

    def evaluate(self) -> None:
        """Evaluate this step, and write its row of metrics."""
        trainer, state = self.trainer, self.state
        self.report.announce_evaluation(evaluated_windows(trainer.data, trainer.config) * trainer.shape.max_seq_len)
        with self.timer.paused():
            result = self.evaluation("the validation loss")
        self.deadline.evaluation_seconds = self.timer.last_pause
        state.evaluated_step = state.step
        if state.best_val_loss is None or result.val_loss < state.best_val_loss:
            state.best_val_loss, state.best_step, state.best_windows = result.val_loss, state.step, result.windows
            self.run.best_is_new = True
        is_lower = state.lowest_val_loss is None or result.val_loss < state.lowest_val_loss
        state.worse = 0 if is_lower else state.worse + 1
        if is_lower:
            state.lowest_val_loss = result.val_loss
        if has_stopped_early(state.worse, trainer.config):
            state.max_steps = state.step
        row = self.row_of_step() | {"val_loss": result.val_loss, "val_bits_per_byte": result.bits_per_byte}
        self.answers = result.answers
        self.report.evaluation(row, result.answers)
        self.report.write(row)

    def evaluation(self, what: str) -> Evaluation:
        """Raises ConfigError if the training diverged: more steps would only waste time."""
        with self.interruption.abandonable():
            result = evaluate(self.trainer)
        if not math.isfinite(result.val_loss):
            raise diverged(self.state.step, self.run.saved_step, f"{what} is not finite")
        return result

    def evaluate_start(self) -> None:
        """Evaluate the trained weights that a new run starts from."""
        state = self.state
        if self.trainer.config.eval_interval and state.initialized_from and state.step == 0 and state.base is None:
            result = self.evaluation("the validation loss of the weights that it starts from")
            prompts = [answer.prompt.text for answer in result.answers]
            state.base = Start(result.val_loss, prompts, [answer.text for answer in result.answers])

    def evaluate_best_again(self) -> None:
        """Evaluate the best weights so far if their loss is over other validation windows than those of now."""
        trainer, state = self.trainer, self.state
        windows = evaluated_windows(trainer.data, trainer.config)
        if not trainer.config.eval_interval or state.best_val_loss is None or state.best_windows == windows:
            return
        before = "other" if state.best_windows is None else f"{state.best_windows:,}"
        log.info(
            f"Evaluating the best weights so far (step {state.best_step:,}, {state.best_val_loss:.4f} over {before} "
            f"windows) over the {windows:,} validation windows of now ..."
        )
        with self.run.best_weights(), self.interruption.abandonable():
            loss = validation_loss(trainer)
        state.best_val_loss = state.lowest_val_loss = loss
        state.best_windows = windows
        log.info(f"step {state.best_step:,}, the best so far: validation loss {loss:.4f}")

    def look_at_clock(self) -> None:
        """With `minutes`: measure the speed, and begin the fall of the learning rate if it is time, or move its end."""
        state, deadline = self.state, self.deadline
        if state.step < deadline.next_look or state.finished:
            return
        if deadline.look():
            if self.trainer.config.eval_interval and deadline.evaluation_seconds is None:
                log.info("Evaluating once, to know how long it takes ...")
                with self.timer.paused(), self.interruption.abandonable():
                    evaluate(self.trainer)
                deadline.evaluation_seconds = self.timer.last_pause
            if cooldown := deadline.plan():
                state.cooldown, state.max_steps = cooldown, cooldown.last
                self.run.is_due = True  # a checkpoint of the plan
        self.report.plan(deadline.last_step)

    def save_if_sound(self) -> None:
        """Save what is due. After a skipped update, wait for a step that shows the weights to be sound. The best
        weights were just evaluated, so they are sound."""
        self.stability.require_stable(self.state.step, self.run.saved_step)
        if self.run.best_is_new or self.state.finished or not self.stability.in_doubt:
            self.save(best_only=not self.run.is_due)

    def save(self, best_only: bool = False) -> None:
        with self.timer.paused():
            self.state.elapsed_seconds, self.state.skipped_updates = self.timer.elapsed, self.stability.skipped
            self.run.save(best_only)
        self.deadline.saving_seconds += self.timer.last_pause

    def save_unsaved(self) -> None:
        """Save what the loop has not saved, when it was stopped."""
        if self.state.step > self.run.saved_step:
            self.save()
