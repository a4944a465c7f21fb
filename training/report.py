"""Report a run while it trains: a progress line, a line per evaluation, and the records in its folder."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.errors import INTERRUPTED
from common.output import LOG_INTERVAL_SECONDS, duration, is_interactive, log, progress_bar, si
from common.script import is_main_process
from training.clock import Clock
from training.evaluate import EVALUATION_SPEEDUP, Answer, Evaluation, accuracy, evaluated_windows, perplexity
from training.records import (
    CURVE,
    METRICS,
    SAMPLES,
    SAMPLES_TABLE,
    Sample,
    describe_unwritable,
    draw_curve,
    format_metrics,
    format_sample,
    read_metrics,
    render_samples,
)
from training.run import Run
from training.tracker import Tracker

REPORT_STEPS, REPORT_SECONDS = 10, 0.2  # between reports
ANNOUNCED_EVALUATION_SECONDS = 20.0  # longer evaluations are announced
CURVE_INTERVAL_SECONDS = 10.0  # drawing the curve takes a tenth of a second
BUSY_CPU_SHARE, BUSY_CPU_STEPS = 0.5, 10  # CPU time / time of a session, judged after this many steps


class TrainingTime(NamedTuple):
    """Training time at a step, without pauses."""

    step: int
    seconds: float
    cpu: float  # CPU seconds


class Report:
    """Prints progress and writes records. A record that cannot be written does not stop the training."""

    def __init__(self, run: Run, clock: Clock):
        self.run, self.clock = run, clock
        self.interactive = is_interactive()
        self.next_line = 0.0
        self.next_curve = time.perf_counter() + CURVE_INTERVAL_SECONDS
        self.has_new_point = False  # the curve lacks a validation loss
        self.is_main_process = is_main_process()  # the others do not write
        self.warned: set[str] = set()  # files with a warning that they cannot be written
        self.has_warned_of_programs = False
        self.reported_skips = run.state.skipped_updates
        self.first = self.last = self.now()  # at the start of the session, and at the last report
        self.bar = progress_bar(
            total=run.total_steps,
            initial=run.state.step,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
        )
        tracked = run.config if self.is_main_process else replace(run.config, tracker=None)
        self.tracker = Tracker(tracked, run.dir, run.state.run_id, run.state.step)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.has_new_point:
            self.update_curve()
        self.tracker.close()

    def now(self) -> TrainingTime:
        return TrainingTime(self.run.state.step, self.clock.training_seconds, self.clock.training_cpu)

    @property
    def tokens_per_second(self) -> float | None:
        """Training speed in this session up to the last report; None before the first."""
        seconds = self.last.seconds - self.first.seconds
        return (self.last.step - self.first.step) * self.run.tokens_per_step / seconds if seconds else None

    @property
    def cpu_share(self) -> float:
        """CPU time / time of training on a CPU; other programs took the rest. 1 on a GPU."""
        seconds = self.last.seconds - self.first.seconds
        is_known = self.run.hardware.device.type == "cpu" and seconds
        return (self.last.cpu - self.first.cpu) / seconds if is_known else 1.0

    @property
    def is_due(self) -> bool:
        """Whether to report the last step. For that the host waits for a GPU, which would cost short steps up to a
        twentieth of their time. Several GPUs wait at the same steps."""
        run, interval = self.run, self.run.config.log_interval
        if interval is not None:
            return run.due(interval)
        waits = run.hardware.is_cuda and run.hardware.processes == 1 and not run.took_last_step
        return run.due(REPORT_STEPS) and not (waits and self.now().seconds - self.last.seconds < REPORT_SECONDS)

    def add_step(self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Report the last step if a report is due. Only then does the host wait for the device. `loss`: mean over the
        whole effective batch, (); `grad_norm`: before clipping, (); `lr`: AdamW's."""
        run, is_due = self.run, self.is_due
        self.bar.update()
        if run.state.step == self.first.step + 1:
            is_due = run.config.log_interval != 0  # steps may take minutes
            run.hardware.synchronize()
            log.info(f"First step {self.clock.session_seconds:.1f} s after the start")
        if is_due:
            row = self.measure(loss, grad_norm, lr)
            self.update_progress(row)
            self.warn_of_other_programs()
            self.warn_of_skips()
            self.write(row)

    def base_row(self) -> dict[str, Any]:
        """Return the fields of every row of metrics.jsonl."""
        state, units = self.run.state, self.clock.compute_units
        row = {"step": state.step, "epoch": self.run.epoch, "tokens": state.tokens}
        return row | {"elapsed_seconds": self.clock.elapsed} | ({} if units is None else {"compute_units": units})

    def measure(self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> dict[str, Any]:
        """Return a row with the loss, speed and memory of the steps since the last report. Waits for the device."""
        run, hardware = self.run, self.run.hardware
        results = {"train_loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
        before, self.last = self.last, self.now()
        seconds, steps = self.last.seconds - before.seconds, self.last.step - before.step
        speed = steps * run.tokens_per_step / seconds
        row = self.base_row() | results
        row |= {"ms_per_step": 1000 * seconds / steps, "tokens_per_second": speed}
        if hardware.peak_flops:
            row["mfu"] = speed * run.model.flops_per_token() / hardware.peak_flops
        if peak := hardware.peak_memory():
            row["peak_memory_gb"] = peak / 1e9
        if skipped := int(run.skips[0]):
            row["skipped_updates"] = skipped
        return row

    def update_progress(self, row: dict[str, Any]) -> None:
        """Update the progress bar; in a log file, write a line now and then instead."""
        run, step_seconds = self.run, row["ms_per_step"] / 1000
        total_steps = row["step"] + run.steps_left(step_seconds)
        parts = [f"loss {row['train_loss']:.3f}", f"{si(row['tokens_per_second'])} tok/s"]
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.0%}")
        parts.append(f"lr {row['lr']:.2g}")
        left = (total_steps - row["step"]) * step_seconds
        if "compute_units" in row:
            forecast = row["compute_units"] * (1 + left / row["elapsed_seconds"])
            parts.append(f"{row['compute_units']:.1f} of about {forecast:.1f} units")
        if run.mirror is not None:
            parts.append(run.mirror.status())
        if self.interactive:
            self.bar.total = total_steps
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
        elif time.perf_counter() >= self.next_line or row["step"] == total_steps:
            self.next_line = time.perf_counter() + LOG_INTERVAL_SECONDS
            of_steps = f"/{total_steps:,}"
            if run.config.minutes and left:  # follows from the speed, of which the first step says little
                of_steps = "" if row["step"] == self.first.step + 1 else f"/~{total_steps:,}"
            if run.config.dry_run:
                log.info(f"step {row['step']:,}, {', '.join(parts)}")
            else:
                log.info(f"step {row['step']:,}{of_steps}, {', '.join(parts)}, {duration(left)} left")

    def warn_of_other_programs(self) -> None:
        """Print once that other programs take more than half of the CPU's time."""
        steps, share = self.last.step - self.first.step, self.cpu_share
        if self.has_warned_of_programs or steps < BUSY_CPU_STEPS or share >= BUSY_CPU_SHARE:
            return
        self.has_warned_of_programs = True
        step_seconds = (self.last.seconds - self.first.seconds) / steps
        left = self.run.steps_left(step_seconds) * step_seconds
        advice = " --threads 1 may be faster meanwhile." if torch.get_num_threads() > 1 else ""
        log.info(
            f"Other programs leave {share:.0%} of the CPU to training: about {duration(left)} left, or "
            f"{duration(share * left)} if they stop.{advice}"
        )

    def warn_of_skips(self) -> None:
        """Print a warning if updates were skipped since the last report."""
        skips = int(self.run.skips[0])
        if skips > self.reported_skips:
            normal = " A few are normal in fp16." if self.run.scaler.is_enabled() else ""
            log.info(
                f"Warning: {skips - self.reported_skips} updates skipped before step {self.run.state.step:,}, because "
                f"the loss or its gradient was not finite ({skips} in this run).{normal}"
            )
            self.reported_skips = skips

    def announce_evaluation(self) -> None:
        """Print how long an evaluation will take, if it is long."""
        tokens = evaluated_windows(self.run.data, self.run.config) * self.run.shape.max_seq_len
        seconds = tokens / (EVALUATION_SPEEDUP * (self.tokens_per_second or math.inf))
        if seconds > ANNOUNCED_EVALUATION_SECONDS:
            log.info(f"Evaluating on {tokens:,} validation tokens, about {duration(seconds)} ...")

    def add_evaluation(self, result: Evaluation) -> None:
        """Print and record the evaluation of this step."""
        step = self.run.state.step
        parts = [f"step {step:,}: validation loss {result.val_loss:.4f}"]
        parts.append(f"perplexity {perplexity(result.val_loss):.2f}")
        if result.bits_per_byte is not None:
            parts.append(f"{result.bits_per_byte:.3f} bits per byte")
        right, judged = accuracy(result.answers)
        if judged:
            parts.append(f"{right} of {judged} answers exactly right")
        log.info(", ".join(parts))
        if result.answers:
            self.add_samples(result.answers)
        self.write(self.base_row() | {"val_loss": result.val_loss, "val_bits_per_byte": result.bits_per_byte})

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl. Redraw the curve now and then if there is a new validation loss."""
        self.append(self.run.dir / METRICS, format_metrics(row))
        self.tracker.log(row)
        self.has_new_point |= "val_loss" in row and self.is_main_process
        if self.has_new_point and time.perf_counter() >= self.next_curve:
            self.update_curve()

    def add_samples(self, answers: list[Answer]) -> None:
        """Append the answers of this step to samples.jsonl and samples.md."""
        right, judged = accuracy(answers)
        prompts = [answer.prompt for answer in answers]
        sample = Sample(
            step=self.run.state.step,
            right=right,
            judged=judged,
            prompts=[prompt.text for prompt in prompts],
            expected=[prompt.expected for prompt in prompts],
            answers=[answer.text for answer in answers],
        )
        self.append(self.run.dir / SAMPLES, format_sample(sample))
        self.append(self.run.dir / SAMPLES_TABLE, render_samples([sample]))
        self.tracker.log_samples(sample)

    def append(self, path: Path, text: str) -> None:
        if not self.is_main_process:
            return
        try:
            with open(path, "a", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError as problem:
            self.warn_once(path, problem)

    def update_curve(self) -> None:
        """Redraw loss_curve.png from metrics.jsonl."""
        path = self.run.dir / CURVE
        try:
            if rows := read_metrics(self.run.dir):
                draw_curve(rows, path)
        except Exception as problem:  # fonts, the file or torn rows may fail
            self.warn_once(path, problem)
        self.has_new_point = False
        self.next_curve = time.perf_counter() + CURVE_INTERVAL_SECONDS

    def warn_once(self, path: Path, problem: Exception) -> None:
        if path.name not in self.warned:
            self.warned.add(path.name)
            log.info(describe_unwritable(path, problem))


def print_start(run: Run, clock: Clock) -> None:
    """Print what will be trained."""
    config, state = run.config, run.state
    at_most = "at most " if config.minutes else ""
    steps = f"steps {state.step:,} to {at_most}{run.total_steps:,} of {run.tokens_per_step:,} tokens"
    print(f"Training   {steps}, in {run.dir}")
    if config.minutes:
        print(f"Minutes    {config.minutes:g}, of which {duration(clock.elapsed)} are used")
    if config.warmup_steps >= run.total_steps:
        shorter = f"--warmup_steps {run.total_steps // 10}, or more --epochs"
        print(f"Note       the warmup of {config.warmup_steps:,} steps lasts the whole run: try {shorter}")


def print_stop(run: Run, clock: Clock) -> int:
    """Print why the run ends before its last step. Return the exit code."""
    after = f"after step {run.state.step:,}"
    if limit := clock.max_hours_message:
        print(f"Stopped {after}: {limit}")
    else:
        print(f"Interrupted {after}. The same command continues from there.")
    return INTERRUPTED
