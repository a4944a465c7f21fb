"""What a run says while it trains: a progress line, a line per evaluation, and the records in its folder."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from common.output import LOG_LINE_SECONDS, duration, is_interactive, log, progress_bar, si
from common.script import is_rank_0
from training.clock import Clock
from training.evaluate import SPEEDUP, Answer, Evaluation, accuracy, evaluated_windows, perplexity
from training.records import (
    CURVE,
    METRICS,
    SAMPLES,
    SAMPLES_TABLE,
    Sample,
    draw_curve,
    drawn,
    metrics_line,
    read_metrics,
    sample_line,
    unwritable,
)
from training.run import Run
from training.step import StepResult
from training.tracker import Tracker

ANNOUNCED_SECONDS = 20.0  # longer silences are announced
CURVE_SECONDS = 10.0  # between two drawings of the curve; each takes a tenth of a second
HALF, MEASURED_STEPS = 0.5, 10  # of a CPU's time; a session says after so many steps that others take it
SPIKE_LOSSES = range(20, 101)  # how many of the last reported losses make a mean
SPIKE_SIGMAS = 6.0  # above it is a jump


class Moment(NamedTuple):
    """Of the training: pauses do not count."""

    step: int
    seconds: float
    cpu: float  # seconds that it has computed


class Report:
    """Prints and records. A record that cannot be written must not stop the training."""

    def __init__(self, run: Run, clock: Clock):
        self.run, self.clock = run, clock
        self.interactive = is_interactive()
        self.next_line = 0.0
        self.next_curve = time.perf_counter() + CURVE_SECONDS
        self.has_new_point = False  # that the curve does not show yet
        self.is_rank_0 = is_rank_0()  # of several processes one writes
        self.warned: set[str] = set()  # files that cannot be written: one warning each, not one per row
        self.spikes = Spikes()
        self.has_warned = False  # of other programs
        self.reported_skips = run.state.skipped_updates
        self.first = self.last = self.now()  # at the begin of the session, and at the last report
        self.bar = progress_bar(
            total=run.last_step,
            initial=run.state.step,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
        )
        tracked = run.config if self.is_rank_0 else replace(run.config, tracker=None)
        self.tracker = Tracker(tracked, run.dir, run.state.run_id, run.state.step)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.has_new_point:
            self.curve()
        self.tracker.close()

    def now(self) -> Moment:
        return Moment(self.run.state.step, self.clock.training_seconds, self.clock.training_cpu)

    @property
    def tokens_per_second(self) -> float | None:
        """Of this session while it trained, up to the last report; None before the first."""
        seconds = self.last.seconds - self.first.seconds
        return (self.last.step - self.first.step) * self.run.tokens_per_step / seconds if seconds else None

    @property
    def cpu_share(self) -> float:
        """Of the time that the training took on a CPU, that it was computing: other programs had the rest."""
        seconds = self.last.seconds - self.first.seconds
        is_known = self.run.hardware.device.type == "cpu" and seconds
        return (self.last.cpu - self.first.cpu) / seconds if is_known else 1.0

    def step(self, result: StepResult) -> None:
        """Report the step that was just taken, if a report is due: only then the host waits for the device."""
        run, interval = self.run, self.run.config.log_interval
        self.bar.update()
        is_due = run.due(interval)
        if run.state.step == self.first.step + 1:
            is_due = bool(interval)  # soon, also where steps take minutes
            run.hardware.synchronize()
            log.info(f"First step {self.clock.session_seconds:.1f} s after the start")
        if is_due:
            row = self.measured(result)
            self.progress(row)
            self.warn_of_other_programs()
            self.warn_of_skips()
            if warning := self.spikes.warning(run.state.step, row["train_loss"]):
                log.info(warning)
            self.write(row)

    def row(self) -> dict[str, Any]:
        """Return the fields that every row of metrics.jsonl has."""
        state, units = self.run.state, self.clock.compute_units
        row = {"step": state.step, "epoch": self.run.epoch, "tokens": state.tokens}
        return row | {"elapsed_seconds": self.clock.elapsed} | ({} if units is None else {"compute_units": units})

    def measured(self, result: StepResult) -> dict[str, Any]:
        """Return what a reporting step measures. Reading the loss waits for the device."""
        run, hardware = self.run, self.run.hardware
        row = {"train_loss": result.loss.item(), "lr": result.lr, "grad_norm": result.grad_norm.item()}
        before, self.last = self.last, self.now()
        seconds, steps = self.last.seconds - before.seconds, self.last.step - before.step
        speed = steps * run.tokens_per_step / seconds
        row |= {"ms_per_step": 1000 * seconds / steps, "tokens_per_second": speed}
        if hardware.peak_flops:
            row["mfu"] = speed * run.model.flops_per_token() / hardware.peak_flops
        if peak := hardware.peak_memory():
            row["peak_memory_gb"] = peak / 1e9
        if skipped := int(run.skips[0]):
            row["skipped_updates"] = skipped
        return self.row() | row

    def progress(self, row: dict[str, Any]) -> None:
        """Refresh the progress line; in a log file, where it cannot be redrawn, write one now and then."""
        run, step_seconds = self.run, row["ms_per_step"] / 1000
        last_step = row["step"] + run.steps_left(step_seconds)
        parts = [f"loss {row['train_loss']:.3f}", f"{si(row['tokens_per_second'])} tok/s"]
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.0%}")
        parts.append(f"lr {row['lr']:.2g}")
        left = (last_step - row["step"]) * step_seconds
        if "compute_units" in row:
            forecast = row["compute_units"] * (1 + left / row["elapsed_seconds"])
            parts.append(f"{row['compute_units']:.1f} of about {forecast:.1f} units")
        if run.mirror is not None:
            parts.append(run.mirror.status())
        if self.interactive:
            self.bar.total = last_step
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
        elif time.perf_counter() >= self.next_line or row["step"] == last_step:
            self.next_line = time.perf_counter() + LOG_LINE_SECONDS
            log.info(f"step {row['step']:,}/{last_step:,}, {', '.join(parts)}, {duration(left)} left")

    def warn_of_other_programs(self) -> None:
        """Say once, after ten steps, that other programs have taken more than half of a CPU's time."""
        steps, share = self.last.step - self.first.step, self.cpu_share
        if self.has_warned or steps < MEASURED_STEPS or share >= HALF:
            return
        self.has_warned = True
        step_seconds = (self.last.seconds - self.first.seconds) / steps
        left = self.run.steps_left(step_seconds) * step_seconds
        log.info(
            f"Other programs use this CPU, and the training computes for {share:.0%} of the time: the rest takes about "
            f"{duration(left)} like this, {duration(share * left)} if they stop. --threads 1 may be faster beside them."
        )

    def warn_of_skips(self) -> None:
        """Warn if updates were skipped since the last report."""
        skips = int(self.run.skips[0])
        if skips > self.reported_skips:
            normal = " A few are normal in fp16." if self.run.scaler.is_enabled() else ""
            log.info(
                f"Warning: updates skipped up to step {self.run.state.step:,}, because the loss or its gradient was "
                f"not finite: {skips - self.reported_skips} ({skips} in this run).{normal}"
            )
            self.reported_skips = skips

    def announce_evaluation(self) -> None:
        """Say so if an evaluation will take long."""
        tokens = evaluated_windows(self.run.data, self.run.config) * self.run.shape.max_seq_len
        seconds = tokens / (SPEEDUP * (self.tokens_per_second or math.inf))
        if seconds > ANNOUNCED_SECONDS:
            log.info(f"Evaluating on {tokens:,} validation tokens, about {duration(seconds)} ...")

    def evaluation(self, result: Evaluation) -> None:
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
            self.samples(result.answers)
        self.write(self.row() | {"val_loss": result.val_loss, "val_bits_per_byte": result.bits_per_byte})

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl. Redraw the curve now and then, if there is a new validation loss."""
        self.append(self.run.dir / METRICS, metrics_line(row))
        self.tracker.log(row)
        self.has_new_point |= "val_loss" in row and self.is_rank_0
        if self.has_new_point and time.perf_counter() >= self.next_curve:
            self.curve()

    def samples(self, answers: list[Answer]) -> None:
        """Append the answers of this step to samples.jsonl, and their table to samples.md."""
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
        self.append(self.run.dir / SAMPLES, sample_line(sample))
        self.append(self.run.dir / SAMPLES_TABLE, drawn([sample]))
        self.tracker.samples(sample)

    def append(self, path: Path, text: str) -> None:
        if not self.is_rank_0:
            return
        try:
            with open(path, "a", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError as problem:
            self.warn(path, problem)

    def curve(self) -> None:
        """Redraw loss_curve.png from metrics.jsonl."""
        path = self.run.dir / CURVE
        try:
            if rows := read_metrics(self.run.dir):
                draw_curve(rows, path)
        except Exception as problem:  # of fonts, of the file, of torn rows
            self.warn(path, problem)
        self.has_new_point = False
        self.next_curve = time.perf_counter() + CURVE_SECONDS

    def warn(self, path: Path, problem: Exception) -> None:
        if path.name not in self.warned:
            self.warned.add(path.name)
            log.info(unwritable(path, problem))


class Spikes:
    """Notices jumps of the loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=SPIKE_LOSSES.stop - 1)

    def warning(self, step: int, loss: float) -> str:
        """Return a warning if `loss`, the newest, is far above those before; else empty."""
        warning = ""
        if len(self.losses) >= SPIKE_LOSSES.start:
            mean, sigma = fmean(self.losses), stdev(self.losses)
            if loss > mean + SPIKE_SIGMAS * sigma:
                warning = (
                    f"Warning: the loss jumped to {loss:.3f} at step {step:,}; before it was {mean:.3f} on average "
                    f"(+- {sigma:.3f}). If it stays high, try a lower --learning_rate or more --warmup_steps."
                )
        if math.isfinite(loss):
            self.losses.append(loss)
        return warning
