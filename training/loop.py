"""The training, from its configuration to its last step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from common.errors import INTERRUPTED, is_out_of_memory
from common.files import FolderLock
from common.formatting import clock
from common.progress import log
from common.script import is_rank_0
from training.checkpoints.interruption import Interruption, StopRequested
from training.checkpoints.mirror import Mirror
from training.checkpoints.run import Run
from training.checkpoints.run_folder import being_trained, require_ours, write_config
from training.checkpoints.start import look, shard_trainer, start_or_resume
from training.checkpoints.state import Start
from training.config import Config
from training.machine.hardware import frozen_garbage
from training.machine.processes import on_rank_0, process_group
from training.numbers.evaluate import Answer, Evaluation, answer_prompts, evaluate, evaluated_windows, validation_loss
from training.numbers.schedule import has_stopped_early, learning_rate
from training.numbers.step import Stability, StepResult, accumulate, apply_gradients, diverged, read_batch
from training.plan import build, make_plan
from training.planning.deadline import Deadline
from training.planning.inspections import dry_run, profile
from training.planning.memory import compile_step_model, halve_micro_batch, memory_advice
from training.reports.records import SUMMARY, require_tensorboard, rewind
from training.reports.report import Report, Timer
from training.reports.summary import finished_message, write_summary

Made = TypeVar("Made")
INSPECTIONS = {"dry_run": dry_run, "profile": profile}  # flags that inspect a run instead of training it


def train(config: Config, started: float, ends_process: bool) -> int:
    """Train, or inspect, the run of `config`. Returns the exit code.

    `started` is the time.perf_counter() at which the command began; `ends_process`: the process ends after this call.
    """
    with process_group(config), FolderLock(being_trained) as lock:
        on_rank_0(lambda: require_ours(config.run_dir, "--output_dir"))
        on_rank_0(lambda: require_tensorboard(config))
        inspect = next((inspect for key, inspect in INSPECTIONS.items() if getattr(config, key)), None)
        if inspect is None:
            on_rank_0(lambda: lock.take(config.run_dir))
        mirror = Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir and is_rank_0() else None
        old = on_rank_0(lambda: look(config, mirror, takes_over=inspect is None))
        trainer = build(make_plan(config, old))
        run = Run(trainer, mirror)
        with memory_advice(config, trainer.shape, trainer.hardware, trainer.rows_at_once):
            if inspect is not None:
                if config.is_sharded:
                    shard_trainer(trainer)
                inspect(run, old)
                return 0
            start_or_resume(run, old)
            on_rank_0(lambda: lock.take(run.dir))  # again: the folder may be new
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
        rewind(run.dir, state.step if state.unevaluated is None else state.step - 1)
    timer = Timer(trainer.hardware, state.elapsed_seconds, trainer.hardware.units_per_hour(config))
    deadline = Deadline(run, timer)
    most = "at most " if config.minutes and state.cooldown is None else ""
    steps = f"steps {state.step:,} to {most}{state.max_steps:,} of {trainer.tokens_per_step:,} tokens"
    print(f"Training   {steps}, in {run.dir}")
    if config.minutes:
        print(f"Minutes    {config.minutes:g}, and {clock(timer.elapsed)} of them are used")
    if config.warmup_steps >= state.max_steps:
        shorter = f"--warmup_steps {state.max_steps // 10}, or more --epochs"
        print(f"Note       the warmup of {config.warmup_steps:,} steps takes the whole run: {shorter}")
    report = Report(run.dir, timer, state.step, state.max_steps, config.tensorboard)
    interruption = Interruption(ends_process)
    with interruption.awaited(), run.saving(interruption):
        with contextlib.closing(report):
            answers = Loop(run, report, timer, deadline, interruption, started).run_to_end()
        interruption.answer = "Stopping once what is under way is saved and copied"
        run.saver.finish()
        is_done = state.finished and state.unevaluated is None
        if is_done:  # no answers: evaluation is off, or the last session ended before its summary
            answers = answers or answer_prompts(trainer)
            on_rank_0(lambda: write_summary(run, timer, answers))
    if not is_done:
        if deadline.reached:
            print(
                f"Stopped after step {state.step:,}: {deadline.reached}. The same command with more of them continues."
            )
        elif limit := timer.limit_reached(config):
            print(f"Stopped after step {state.step:,}: {limit} is reached. The same command with more of it continues.")
        else:
            print(f"Interrupted after step {state.step:,}. The same command continues from there.")
        return INTERRUPTED
    return 0


class Loop:
    """The steps of one session. All that changes is in `run.state` and `run.trainer`."""

    def __init__(
        self,
        run: Run,
        report: Report,
        timer: Timer,
        deadline: Deadline,
        interruption: Interruption,
        started: float,
    ):
        self.run, self.trainer, self.state = run, run.trainer, run.state
        self.report, self.timer, self.deadline = report, timer, deadline
        self.interruption, self.started = interruption, started
        is_scaled = self.trainer.scaler.is_enabled()
        self.stability = Stability(self.trainer.data.device, is_scaled, self.state.skipped_updates)
        self.first_step = self.state.step
        self.flops_per_token = self.trainer.model.flops_per_token()
        self.answers: list[Answer] = []  # of the last evaluation

    def run_to_end(self) -> list[Answer]:
        """Train to the last step, or until somebody asks to stop. Returns the answers of the last evaluation."""
        with contextlib.suppress(StopRequested):
            self.take_steps()
        self.interruption.step_over()
        if self.state.step > self.run.saved_step:  # the loop was stopped
            self.save()
        return self.answers

    def take_steps(self) -> None:
        """The loop. Raises StopRequested if somebody asks to stop during something long."""
        run, state = self.run, self.state
        with self.timer.paused():
            self.fitting(self.compile)
            self.fitting(self.evaluate_before)
        self.deadline.begin()
        with frozen_garbage():
            while not self.interruption.agreed(self.limit_reached()):
                if state.unevaluated is None:  # else an evaluation was interrupted, or ran out of memory
                    if state.finished:
                        break
                    self.step()
                if state.unevaluated is not None:
                    self.fitting(self.evaluate, state.unevaluated)
                if run.save_is_due():
                    self.save_if_sound()
                run.saver.check()
                if state.step >= self.deadline.next_look and not state.finished:
                    self.look_at_clock()

    def limit_reached(self) -> object:
        """Why the run stops here, or None."""
        return self.timer.limit_reached(self.trainer.config) or self.run.taken_over or self.deadline.reached or None

    def look_at_clock(self) -> None:
        """With `minutes`: measure the speed, and begin the fall of the learning rate if it is time."""
        if self.deadline.look():
            if self.trainer.config.eval_interval and self.deadline.evaluation_seconds is None:
                log.info("Evaluating once, to know how long it takes ...")
                with self.timer.paused():
                    self.fitting(evaluate, self.trainer, self.interruption.check)
                self.deadline.evaluation_seconds = self.timer.last_pause
            self.deadline.fix()
        self.report.plan(self.deadline.last_step)

    def step(self) -> None:
        """One update of the weights, and its report if one is due."""
        trainer, state, config = self.trainer, self.state, self.trainer.config
        first = state.cooldown.first if state.cooldown else None
        lr = learning_rate(state.step, state.max_steps, config, first)
        self.interruption.begin("data")
        batch = read_batch(trainer, state.sequences_seen, config.sequences_per_step)
        self.interruption.begin("gradients")
        loss = self.fitting(accumulate, trainer, batch, state.step, config.sequences_per_step)
        self.interruption.begin("update")
        result = apply_gradients(trainer, loss, lr)
        self.interruption.step_done()
        self.stability.step_done(result.skipped)
        state.advance(config.sequences_per_step, trainer.tokens_per_step)
        self.report.step_done(trainer.tokens_per_step)
        reporting = state.due(config.log_interval)
        if state.step == self.first_step + 1:
            reporting = bool(config.log_interval)  # soon, also where steps take minutes
            trainer.hardware.synchronize()
            log.info(f"First step {time.perf_counter() - self.started:.1f} s after the start")
        if reporting or not trainer.hardware.is_cuda or state.step % 100 == 0:
            self.stability.require_stable(state.step, self.run.saved_step)
        row: dict[str, Any] = {"step": state.step, "epoch": self.run.epoch, "tokens": state.tokens}
        row["elapsed_seconds"] = self.timer.elapsed
        if reporting:
            row |= self.reported(result, row, lr)
        if state.due(config.eval_interval):
            state.begin_evaluation(row)
        elif reporting:
            self.report.write(row)

    def fitting(self, work: Callable[..., Made], *arguments: Any) -> Made:
        """What `work` returns. If memory runs out, it is done again with smaller micro-batches: it is a function of the
        step, and has changed nothing. Raises MemoryExhausted if one sequence at a time does not fit."""
        while True:
            try:
                return work(*arguments)
            except Exception as error:
                if is_out_of_memory(error):
                    self.save_unevaluated()
                told = halve_micro_batch(self.trainer, error)
            log.info(f"{told} Kept for this run; another: --micro_batch_size {self.trainer.rows_at_once}")
            self.keep_config()
            if work != self.compile:
                self.fitting(self.compile)

    def reported(self, result: StepResult, row: dict[str, Any], lr: float) -> dict[str, Any]:
        """Report a step. Returns its row of metrics. Only here the host waits for the device."""
        row = row | self.timer.training_row(result.loss, result.grad_norm, lr, self.flops_per_token)
        row |= self.stability.row()
        self.report.progress(row, self.run.mirror.status() if self.run.mirror else "")
        for line in self.stability.warnings(self.state.step, row["train_loss"]):
            log.info(line)
        return row

    def evaluate(self, row: dict[str, Any]) -> None:
        """Evaluate, and write the row of metrics of this step."""
        trainer, state = self.trainer, self.state
        self.report.announce_evaluation(evaluated_windows(trainer.data, trainer.config) * trainer.shape.max_seq_len)
        with self.timer.paused():
            result = self.finite(evaluate(trainer, self.interruption.check), "the validation loss")
        self.deadline.evaluation_seconds = self.timer.last_pause
        self.run.best_is_new |= state.evaluated(result.val_loss, result.windows)
        if has_stopped_early(state.worse, trainer.config):
            state.plan(state.step)
        row = row | {"val_loss": result.val_loss, "val_bits_per_byte": result.bits_per_byte}
        self.answers = result.answers
        self.report.evaluation(row, result.answers)
        self.report.write(row)

    def evaluate_before(self) -> None:
        """Evaluations before the first step of this session: of the trained weights that a new run starts from, and of
        the best weights so far if their loss is over other validation windows."""
        trainer, state, check = self.trainer, self.state, self.interruption.check
        if not trainer.config.eval_interval:
            return
        if state.initialized_from and state.step == 0 and state.base is None:
            result = self.finite(evaluate(trainer, check), "the validation loss of the weights that it starts from")
            prompts = [answer.prompt.text for answer in result.answers]
            state.start_evaluated(Start(result.val_loss, prompts, [answer.text for answer in result.answers]))
        windows = evaluated_windows(trainer.data, trainer.config)
        if state.best_val_loss is not None and state.best_windows != windows:
            before = "other" if state.best_windows is None else f"{state.best_windows:,}"
            named = (
                f"the best weights so far (step {state.best_step:,}, {state.best_val_loss:.4f} over {before} windows)"
            )
            log.info(f"Evaluating {named} over the {windows:,} validation windows of now ...")
            with self.best_weights():
                loss = validation_loss(trainer, windows, check)
            state.best_evaluated_again(loss, windows)
            log.info(f"step {state.best_step:,}, the best so far: validation loss {loss:.4f}")

    def finite(self, result: Evaluation, what: str) -> Evaluation:
        """Raises ConfigError if the training diverged: more steps would only waste time."""
        if not math.isfinite(result.val_loss):
            raise diverged(self.state.step, self.run.saved_step, f"{what} is not finite")
        return result

    @contextlib.contextmanager
    def best_weights(self) -> Iterator[None]:
        """Inside, the model has the weights in best/."""
        model = self.trainer.model
        current = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            self.run.load_best()
            yield
        finally:
            model.load_state_dict(current)

    def compile(self) -> None:
        trainer, size = self.trainer, self.trainer.micro_batch_size
        with self.interruption.compiling():
            compile_step_model(trainer, self.state.sequences_seen)
        if trainer.micro_batch_size != size:
            self.keep_config()

    def save_if_sound(self) -> None:
        """Save what is due. After a skipped update, wait for a step that shows the weights to be sound. The best
        weights were just evaluated, so they are sound."""
        self.stability.require_stable(self.state.step, self.run.saved_step)
        if self.run.best_is_new or self.state.finished or not self.stability.in_doubt:
            self.save(best_only=not self.run.is_due)

    def save(self, best_only: bool = False) -> None:
        with self.timer.paused():
            self.state.measured(self.timer.elapsed, self.stability.skipped)
            self.run.save(best_only)
        self.deadline.saving_seconds += self.timer.last_pause

    def save_unevaluated(self) -> None:
        """Out of memory in an evaluation: save this step first, because a retry may fail, too."""
        is_new = self.state.unevaluated is not None and self.state.step > self.run.saved_step
        if is_new and not self.trainer.config.is_sharded:  # sharded: saving needs memory on all ranks
            self.save()

    def keep_config(self) -> None:
        """Write the configuration again: the micro-batch has changed."""
        if is_rank_0():
            with contextlib.suppress(OSError):  # the next save reports a full disk
                write_config(self.trainer)
