"""Train a run, from its configuration to its last step."""

from __future__ import annotations

import contextlib
import math

from common.errors import INTERRUPTED, ConfigError
from common.files import free_space
from common.output import byte_size, duration, log
from common.script import is_rank_0
from training.clock import Clock
from training.compilation import prepare, retry_smaller
from training.config import Config
from training.evaluate import Answer, Evaluation, evaluate, evaluated_windows, validation_loss
from training.hardware import freeze_garbage
from training.memory import memory_advice
from training.parallel import max_over_ranks, process_group
from training.plan import make_run
from training.records import rewind
from training.report import Report
from training.resume import start_or_resume
from training.run import Run
from training.saver import Saver, write_config
from training.state import MAX_STEPS, Start
from training.step import apply_update, diverged, forward_backward, require_stable
from training.stop import Stop
from training.summary import finished_message, summarize


def fit(config: Config, started: float, ends_process: bool) -> int:
    """Train the run of `config` until it is finished or stopped. Return the exit code.

    `started`: the time.perf_counter() at which the command began; `ends_process`: the process ends after this call.
    """
    with process_group(config), contextlib.ExitStack() as stack:
        run, previous = make_run(config, stack)
        with memory_advice(config, run.shape, run.hardware, lambda: run.rows_at_once):
            has_summary = start_or_resume(run, previous)
            clock = Clock(run, started)
            with Stop(ends_process) as stop, Saver(run, clock, stop) as saver:
                if has_summary:
                    print(finished_message(run))  # the saver still updates the mirror
                else:
                    print_plan(run, clock)
                    report, answers = take_steps(run, clock, stop, saver)
                    if run.is_done:
                        saver.wait()
                        summarize(run, report, answers)
                        has_summary = True
    if has_summary:
        return INTERRUPTED if stop.requested and not ends_process else 0
    return print_stop(run, clock)


def take_steps(
    run: Run, clock: Clock, stop: Stop, saver: Saver, max_steps: int = MAX_STEPS
) -> tuple[Report, list[Answer]]:
    """Train to the last step, or until a signal, a limit or `max_steps`. Return the report and the answers of the last
    evaluation. Raises StopRequested if a signal abandons a long step."""
    answers: list[Answer] = []
    if not run.is_done:
        with clock.paused(), stop.abandonable():
            retry_smaller(run, prepare)
        evaluate_before_steps(run, clock, stop)
    run.state.elapsed_seconds, _ = agree(clock, stop, saver)
    require_time(run)
    with Report(run, clock) as report, freeze_garbage():
        while not (run.is_done or stop.agreed or run.state.step >= max_steps):
            if run.evaluation_due:  # the last session may have stopped during it
                report.announce_evaluation()
                with clock.evaluating(), stop.abandonable(is_long=True):
                    evaluation = evaluate(run)
                saver.best_due |= record_evaluation(run, evaluation, *max_over_ranks(clock.elapsed))
                report.add_evaluation(evaluation)
                answers = evaluation.answers
            else:
                with stop.abandonable():  # safe to abandon: only gradients change
                    loss = retry_smaller(run, forward_backward)
                result = apply_update(run, loss)
                clock.count_step()
                run.advance(*agree(clock, stop, saver))
                if run.hardware.device.type == "cpu" or run.due(run.config.log_interval):
                    require_stable(run)  # synchronizes with the GPU, so only when a report does
                report.add_step(result)
            if not run.evaluation_due:  # a checkpoint includes the evaluation of its step
                saver.save_if_due()
    return report, answers


def agree(clock: Clock, stop: Stop, saver: Saver) -> list[float]:
    """Agree with the other processes, once a step, whether to stop and to save. Return the elapsed and the ending
    seconds, the largest of all processes."""
    wants_to_stop = stop.requested or bool(clock.limit_reached) or saver.is_overtaken
    wants_to_save = saver.checkpoint_due or saver.minutes_passed
    stops, saves, *seconds = max_over_ranks(wants_to_stop, wants_to_save, clock.elapsed, clock.ending_seconds)
    stop.agreed, saver.checkpoint_due = bool(stops), bool(saves)
    return seconds


def record_evaluation(run: Run, evaluation: Evaluation, elapsed_seconds: float) -> bool:
    """Record an evaluation in the state. Return whether these weights are the best so far.

    Raises ConfigError if the training diverged, because more steps would only waste time.
    """
    state, loss = run.state, evaluation.val_loss
    if not math.isfinite(loss):
        raise diverged(run, "the validation loss is not finite")
    state.elapsed_seconds, state.evaluated_step = elapsed_seconds, state.step
    is_lower = state.lowest_val_loss is None or loss < state.lowest_val_loss
    state.worse = 0 if is_lower else state.worse + 1
    if is_lower:
        state.lowest_val_loss = loss
    is_best = state.best_val_loss is None or loss < state.best_val_loss
    if is_best:
        state.best_val_loss, state.best_step, state.best_windows = loss, state.step, evaluation.windows
    return is_best


def evaluate_before_steps(run: Run, clock: Clock, stop: Stop) -> None:
    """Evaluate the weights that a new run starts from. Evaluate the best weights again, if the validation windows have
    changed."""
    state, windows = run.state, evaluated_windows(run.data, run.config)
    if not run.config.eval_interval:
        return
    if state.initialized_from and state.step == 0 and state.base is None:
        with clock.paused(), stop.abandonable():
            result = evaluate(run)
        if not math.isfinite(result.val_loss):
            raise diverged(run, "the validation loss of the initial weights is not finite")
        prompts = [answer.prompt.text for answer in result.answers]
        state.base = Start(result.val_loss, prompts, [answer.text for answer in result.answers])
    if state.best_val_loss is not None and state.best_windows != windows:
        before = "others" if state.best_windows is None else f"{state.best_windows:,}"
        log.info(
            f"Evaluating the best weights (step {state.best_step:,}, {state.best_val_loss:.4f}) again, because the "
            f"validation windows have changed from {before} to {windows:,} ..."
        )
        with clock.paused(), run.best_weights(), stop.abandonable():
            loss = validation_loss(run)
        state.best_val_loss = state.lowest_val_loss = loss
        state.best_windows = windows
        log.info(f"step {state.best_step:,}, the best so far: validation loss {loss:.4f}")


def print_plan(run: Run, clock: Clock) -> None:
    """Print what will be trained. Write config.json, and rewind the records to the step that the run continues from."""
    config, state = run.config, run.state
    if is_rank_0():
        write_config(run, run.dir)
        rewind(run.dir, state.step, state.evaluated_step)
        need, free = run.disk_bytes, free_space(run.dir)
        if need > free and not state.step:
            log.info(
                f"Warning: the run needs about {byte_size(need)} in {run.dir}, and only {byte_size(free)} are free."
            )
    at_most = "at most " if config.minutes else ""
    steps = f"steps {state.step:,} to {at_most}{run.last_step:,} of {run.tokens_per_step:,} tokens"
    print(f"Training   {steps}, in {run.dir}")
    if config.minutes:
        print(f"Minutes    {config.minutes:g}, of which {duration(clock.elapsed)} are used")
    if config.warmup_steps >= run.last_step:
        shorter = f"--warmup_steps {run.last_step // 10}, or more --epochs"
        print(f"Note       the warmup of {config.warmup_steps:,} steps lasts the whole run: try {shorter}")


def require_time(run: Run) -> None:
    """Raise ConfigError if `minutes` are over before the first step."""
    if run.took_last_step and run.state.step == 0:
        raise ConfigError(
            f"--minutes {run.config.minutes:g} ran out before the first step: starting took "
            f"{duration(run.state.elapsed_seconds)}. Increase --minutes."
        )


def print_stop(run: Run, clock: Clock) -> int:
    """Print why the run ends before its last step. Return the exit code."""
    after = f"after step {run.state.step:,}"
    if limit := clock.limit_reached:
        print(f"Stopped {after}: {limit}")
    else:
        print(f"Interrupted {after}. The same command continues from there.")
    return INTERRUPTED
