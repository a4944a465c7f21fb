"""The output of a run while it trains: a progress line, a line per evaluation, the records in its folder; and the timer
that measures it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.output import LOG_LINE_SECONDS, clock, is_interactive, log, progress_bar, si
from common.script import is_rank_0
from training.config import Config
from training.evaluate import Answer, accuracy, perplexity
from training.hardware import Hardware
from training.records import (
    CURVE,
    METRICS,
    SAMPLES,
    SAMPLES_TABLE,
    Sample,
    draw_curve,
    drawn,
    metrics_line,
    open_events,
    read_metrics,
    sample_line,
    unwritable,
    write_event,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ANNOUNCED_SECONDS = 20.0  # longer silences are announced
CURVE_SECONDS = 10.0  # between two drawings of the curve; each takes a tenth of a second


class Report:
    """Prints and records. A record that cannot be written must not stop the training."""

    def __init__(self, run_dir: Path, timer: Timer, step: int, max_steps: int, tensorboard: bool = False):
        self.run_dir = run_dir
        self.timer = timer
        self.max_steps = max_steps
        self.interactive = is_interactive()
        self.next_line = 0.0
        self.next_curve = time.perf_counter() + CURVE_SECONDS
        self.has_new_point = False  # that the curve does not show yet
        self.is_rank_0 = is_rank_0()  # of several processes one writes
        self.warned: set[str] = set()  # files that cannot be written: one warning each, not one per row
        self.bar = progress_bar(
            total=max_steps,
            initial=step,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
        )
        self.events: SummaryWriter | None = None
        if tensorboard and self.is_rank_0:
            with self.events_aside():
                self.events = open_events(run_dir)

    def step_done(self, tokens: int) -> None:
        self.timer.step_done(tokens)
        self.bar.update()

    def plan(self, max_steps: int) -> None:
        """The run takes this many steps, or about this many if the clock decides."""
        self.max_steps = self.bar.total = max_steps

    def progress(self, row: dict[str, Any], copied: str = "") -> None:
        """Refresh the progress line; in a log file, where it cannot be redrawn, write one now and then. `copied` is
        the state of the mirror."""
        parts = [f"loss {row['train_loss']:.3f}", f"{si(row['tokens_per_second'])} tok/s"]
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.0%}")
        parts.append(f"lr {row['lr']:.2g}")
        left = (self.max_steps - row["step"]) * row["ms_per_step"] / 1000
        if rate := self.timer.units_per_hour:
            forecast = row["compute_units"] + left / 3600 * rate
            parts.append(f"{row['compute_units']:.1f} of about {forecast:.1f} units")
        if copied:
            parts.append(copied)
        if self.interactive:
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
        elif time.perf_counter() >= self.next_line or row["step"] == self.max_steps:
            self.next_line = time.perf_counter() + LOG_LINE_SECONDS
            log.info(f"step {row['step']:,}/{self.max_steps:,}, {', '.join(parts)}, {clock(left)} left")

    def announce_evaluation(self, tokens: int) -> None:
        """Say so if an evaluation will take long, at about three times the speed of training."""
        if speed := self.timer.tokens_per_second:
            seconds = tokens / (3 * speed)
            if seconds > ANNOUNCED_SECONDS:
                log.info(f"Evaluating on {tokens:,} validation tokens, about {clock(seconds)} ...")

    def evaluation(self, row: dict[str, Any], answers: list[Answer]) -> None:
        """Print the result of an evaluation, and record its answers."""
        parts = [f"step {row['step']:,}: validation loss {row['val_loss']:.4f}"]
        parts.append(f"perplexity {perplexity(row['val_loss']):.2f}")
        if row["val_bits_per_byte"] is not None:
            parts.append(f"{row['val_bits_per_byte']:.3f} bits per byte")
        right, judged = accuracy(answers)
        if judged:
            parts.append(f"{right} of {judged} answers exactly right")
        log.info(", ".join(parts))
        if answers:
            self.samples(row["step"], answers)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl. Redraw the curve now and then, if there is a new validation loss."""
        self.append(self.run_dir / METRICS, metrics_line(row))
        if self.events is not None:
            with self.events_aside():
                write_event(self.events, row)
        self.has_new_point |= "val_loss" in row and self.is_rank_0
        if self.has_new_point and time.perf_counter() >= self.next_curve:
            self.curve()

    def samples(self, step: int, answers: list[Answer]) -> None:
        """Append an evaluation to samples.jsonl, and its table to samples.md."""
        right, judged = accuracy(answers)
        asked = [answer.prompt for answer in answers]
        sample = Sample(
            step=step,
            right=right,
            judged=judged,
            prompts=[prompt.text for prompt in asked],
            expected=[prompt.expected for prompt in asked],
            answers=[answer.text for answer in answers],
        )
        self.append(self.run_dir / SAMPLES, sample_line(sample))
        self.append(self.run_dir / SAMPLES_TABLE, drawn([sample]))

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
        path = self.run_dir / CURVE
        try:
            if rows := read_metrics(self.run_dir):
                draw_curve(rows, path)
        except Exception as problem:  # of fonts, of the file, of torn rows
            self.warn(path, problem)
        self.has_new_point = False
        self.next_curve = time.perf_counter() + CURVE_SECONDS

    def warn(self, path: Path, problem: Exception) -> None:
        if path.name not in self.warned:
            self.warned.add(path.name)
            log.info(unwritable(path, problem))

    def close(self) -> None:
        self.bar.close()
        if self.has_new_point:
            self.curve()
        if self.events is not None:
            with self.events_aside():
                self.events.close()

    @contextlib.contextmanager
    def events_aside(self) -> Iterator[None]:
        """An error with TensorBoard's events inside is one warning, and the training goes on without them."""
        try:
            yield
        except Exception as problem:  # a full disk, say, or another version of the package
            self.events = None
            log.info(f"Warning: TensorBoard's events cannot be written ({problem}); the training goes on without them.")


class Timer:
    """Evaluating and saving count in the time of a run, not in its speed."""

    def __init__(self, hardware: Hardware, started: float, elapsed: float, units_per_hour: float | None):
        """`started`: the time.perf_counter() at which this session began; `elapsed`: seconds of those before it."""
        self.hardware = hardware
        self.units_per_hour = units_per_hour
        self.earlier = elapsed
        self.started = started - elapsed
        self.interval_started = time.perf_counter()
        self.interval_steps = 0
        self.interval_tokens = 0
        self.last_pause = 0.0  # seconds
        self.paused_seconds = 0.0
        self.training_seconds = 0.0
        self.training_tokens = 0
        self.interval_cpu = time.thread_time()
        self.cpu_seconds = 0.0  # of the thread that trains

    @property
    def elapsed(self) -> float:
        """Seconds this run has taken, over all the sessions it was resumed in."""
        return time.perf_counter() - self.started

    @property
    def session_seconds(self) -> float:
        return self.elapsed - self.earlier

    @property
    def compute_units(self) -> float | None:
        """Spent so far; None where the machine's rate is not known."""
        return self.elapsed / 3600 * self.units_per_hour if self.units_per_hour else None

    def limit_reached(self, config: Config) -> str | None:
        """The flag whose limit the run has reached, if it has."""
        if config.max_hours and self.elapsed >= 3600 * config.max_hours:
            return f"--max_hours {config.max_hours:g}"
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Of this session while it trained, up to the last reporting step; None before the first."""
        return self.training_tokens / self.training_seconds if self.training_seconds else None

    @property
    def cpu_share(self) -> float:
        """Of the time that the training took on a CPU, that it was computing: other programs had the rest."""
        is_known = self.hardware.device.type == "cpu" and self.training_seconds
        return self.cpu_seconds / self.training_seconds if is_known else 1.0

    def step_done(self, tokens: int) -> None:
        self.interval_steps += 1
        self.interval_tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside (evaluating, saving) out of the training speed. Not to be nested: it would count
        twice."""
        self.hardware.synchronize()
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.interval_cpu += time.thread_time() - cpu
            self.last_pause = time.perf_counter() - began
            self.paused_seconds += self.last_pause
            self.interval_started += self.last_pause

    def row(self) -> dict[str, float]:
        """What every row of metrics says of the time."""
        units = self.compute_units
        return {"elapsed_seconds": self.elapsed} | ({} if units is None else {"compute_units": units})

    def training_row(
        self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float, flops_per_token: int
    ) -> dict[str, Any]:
        """What is measured at a reporting step. Reading the loss waits for the device: the one sync of the loop."""
        row = {"train_loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
        now = time.perf_counter()
        seconds = now - self.interval_started
        speed = self.interval_tokens / seconds
        row |= {"ms_per_step": 1000 * seconds / self.interval_steps, "tokens_per_second": speed}
        if self.hardware.peak_flops:
            row["mfu"] = speed * flops_per_token / self.hardware.peak_flops
        if peak := self.hardware.peak_memory():
            row["peak_memory_gb"] = peak / 1e9
        self.training_seconds += seconds
        self.training_tokens += self.interval_tokens
        cpu = time.thread_time()
        self.cpu_seconds, self.interval_cpu = self.cpu_seconds + cpu - self.interval_cpu, cpu
        self.interval_started, self.interval_steps, self.interval_tokens = now, 0, 0
        return row | self.row()
