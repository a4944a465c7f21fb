"""What a run says: a progress line, a line per evaluation, the records in its folder, and at the end summary.md."""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

from common.files import atomic_write
from common.output import LOG_LINE_SECONDS, cell, is_interactive, log, printable, progress_bar, si, table_row
from common.output import clock as duration
from common.script import is_rank_0
from training.clock import Clock
from training.config import Forecast
from training.evaluate import SPEEDUP, Answer, Evaluation, accuracy, evaluated_windows, perplexity
from training.growth import on_passages
from training.memory import attempt
from training.records import (
    CURVE,
    METRICS,
    SAMPLES,
    SAMPLES_TABLE,
    SUMMARY,
    Sample,
    answer_table,
    draw_curve,
    drawn,
    metrics_line,
    read_metrics,
    sample_line,
    unwritable,
)
from training.run import Run
from training.schedule import has_stopped_early, time_progress
from training.step import StepResult, require_stable
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
        """Report the step that was just taken, if a report is due: only then the host waits for the device.

        Raises ConfigError if the training diverged.
        """
        run, interval = self.run, self.run.config.log_interval
        self.bar.update()
        is_due = run.due(interval)
        if run.state.step == self.first.step + 1:
            is_due = bool(interval)  # soon, also where steps take minutes
            run.hardware.synchronize()
            log.info(f"First step {self.clock.session_seconds:.1f} s after the start")
        if is_due or run.hardware.device.type == "cpu":
            require_stable(run)
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


LEAST_EVALUATIONS = 3  # for a verdict
RISEN = 1.005  # times the lowest validation loss: more than two seeds differ
FALLEN = 0.998  # times the loss of a few evaluations before
MEMORISING = "memorising"
ONE_BYTE_EACH = 1.05  # bytes of a character, up to which bits per character would say the same
SLOWER = 1.2  # times, at least, to be the reason why a forecast was missed
BUSY = 0.8  # of the time on a CPU: what is below was taken by other programs
LONGEST_PRINTED = 80  # characters of an answer; a model that has learned little repeats itself for hundreds


def write_summary(run: Run, report: Report, answers: list[Answer], samples: list[Answer]) -> None:
    """Write summary.md and print what matters of it. `samples` are texts that nobody asked for, in place of answers."""
    config, data, hardware, model, state = run.config, run.data, run.hardware, run.model, run.state
    clock = report.clock
    parameters, trained = model.num_parameters(), model.num_parameters(trained_only=True)
    facts = {
        "Model": f"{parameters:,} parameters" + (f", {trained:,} of them trained" if trained < parameters else ""),
        "Data": f"{data.metadata.train_tokens:,} training tokens, vocabulary {data.vocab_size:,}",
        "Machine": f"{hardware.name}, {hardware.precision}, torch {torch.__version__}",
        "Training": f"{state.step:,} steps of {run.tokens_per_step:,} tokens in {duration(clock.elapsed)}{early(run)}",
    }
    if report.tokens_per_second:
        facts["Speed"] = f"{si(report.tokens_per_second)} tokens/s while training{busy(report.cpu_share)}"
    if peak := hardware.peak_memory():
        facts["Peak memory"] = f"{peak / 1e9:.2f} GB"
    facts["Saving"] = f"held this session for {clock.saving_seconds:.1f} s of its {duration(clock.session_seconds)}"
    if (units := clock.compute_units) is not None:
        facts["Compute units"] = f"{units:.2f}"
    rows = read_metrics(run.dir)
    evaluated = [row for row in rows if "val_loss" in row]
    if evaluated:
        last = evaluated[-1]
        per_byte = f", {last['val_bits_per_byte']:.3f} bits per byte" if "val_bits_per_byte" in last else ""
        size, characters = data.metadata.val_bytes, data.metadata.val_characters
        if per_byte and size and characters and size > ONE_BYTE_EACH * characters:
            per_byte += f" or {last['val_bits_per_byte'] * size / characters:.3f} per character"
        facts["Validation loss"] = f"{last['val_loss']:.4f} (perplexity {perplexity(last['val_loss']):.2f}{per_byte})"
    if state.best_val_loss is not None:  # which is of best/; rows may be over other windows
        facts["Best"] = f"{state.best_val_loss:.4f} at step {state.best_step:,}"
    facts |= verdict(rows, evaluated, run.epoch)
    if config.forecast and evaluated and "val_bits_per_byte" in evaluated[-1]:
        facts["Expected"] = compared(config.forecast, evaluated[-1]["val_bits_per_byte"], report.tokens_per_second)
    if state.base:
        facts["Before"] = f"validation loss {state.base.val_loss:.4f}, of the weights that it started from"
    with attempt(run.hardware.device):
        facts |= on_passages(run)
    stopped_early = has_stopped_early(state, config)
    if stopped_early:
        facts["Stopped"] = f"early: the last {state.worse} evaluations were no better"
    prompts = [answer.prompt for answer in answers]
    columns = [each.text for each in prompts], [each.text for each in answers], [each.expected for each in prompts]
    before = state.base.answers if state.base and state.base.prompts == columns[0] else []
    right, judged = accuracy(answers)
    if judged:
        facts["Answers"] = f"{right} of {judged} exactly right ({right / judged:.0%})"

    lines = [f"# {run.dir.name}", "", "| | |", "|---|---|"]
    lines += [table_row([key, cell(value)]) for key, value in facts.items()]
    if answers:
        lines += ["", "## Answers", "", *answer_table(*columns, before)]
    for each in samples:
        lines += ["", "## Sample", "", *(f"> {line}" for line in printable(each.prompt.text + each.text).splitlines())]
    lines += ["", "## Configuration", "", "What differs from the defaults, and where it came from:", ""]
    lines += [table_row(["key", "value", "source"]), table_row(["---"] * 3)]
    changed = [(key, value) for key, value in config.values().items() if config.sources.get(key) != "default"]
    lines += [table_row([key, cell(str(value)), config.sources.get(key, "")]) for key, value in changed]
    try:
        with atomic_write(run.dir / SUMMARY) as file:
            file.write(("\n".join(lines) + "\n").encode(errors="replace"))  # a file name can be any bytes
    except OSError as problem:
        print(unwritable(run.dir / SUMMARY, problem))

    print()
    for line in answer_table(*columns, before, LONGEST_PRINTED) if answers else []:
        print(line)
    for each in samples:
        print(f"Sample: {printable(each.prompt.text)} ...{printable(each.text)}\n")
    for key, value in facts.items():
        print(f"{key:<16} {value}")
    there = [name for name in (SUMMARY, CURVE, METRICS, SAMPLES_TABLE) if (run.dir / name).exists()]
    there += [f"{name}/" for name in ("checkpoints", "best") if (run.dir / name).exists()]
    print(f"{'Files':<16} {run.dir}: {', '.join(there)}")
    is_past_best = stopped_early or facts.get("Verdict", "").startswith(MEMORISING)
    checkpoint = shlex.quote(str(run.dir / "best" if is_past_best else run.dir))
    print(f'\nTalk to it: python generate.py --checkpoint {checkpoint} --prompt "..." or --interactive')


def early(run: Run) -> str:
    """Say what ended the run before its `minutes` were over."""
    config, state = run.config, run.state
    if not config.minutes or has_stopped_early(state, config) or time_progress(state, config) >= 1:
        return ""
    return f" of {config.minutes:g} minutes: --epochs {config.epochs} ended it, more of them would use the rest"


def compared(forecast: Forecast, came: float, tokens_per_second: float | None) -> str:
    """Say what the dial expected beside what came, and why they differ."""
    outcome = f"{forecast.bits_per_byte:.2f} bits per byte, got {came:.2f}"
    if abs(came - forecast.bits_per_byte) <= forecast.error:
        return f"{outcome}: within {forecast.error:.2f}, as forecast"
    slower = forecast.tokens_per_second / (tokens_per_second or forecast.tokens_per_second)
    if slower > SLOWER and came > forecast.bits_per_byte:
        return f"{outcome}: the machine was {slower:.2g} times slower than when it was timed"
    if slower < 1 / SLOWER and came < forecast.bits_per_byte:
        return f"{outcome}: the machine was {1 / slower:.2g} times faster than when it was timed"
    if came > forecast.bits_per_byte:
        return f"{outcome}: this text is harder than most of its size"
    return f"{outcome}: easier than most text; what is held out comes from the same books or files"


def busy(cpu_share: float) -> str:
    if cpu_share > BUSY:
        return ""
    return f"; other programs use this CPU, and the training computed for {cpu_share:.0%} of its time"


def verdict(rows: list[dict[str, Any]], evaluated: list[dict[str, Any]], epochs: float) -> dict[str, str]:
    """Say what the losses mean: how far training and validation are apart, and whether more steps would help."""
    trained = [row["train_loss"] for row in rows if "train_loss" in row][-max(1, len(rows) // 20) :]
    if len(evaluated) < LEAST_EVALUATIONS or not trained:
        return {}
    last, lowest = evaluated[-1], min(evaluated, key=lambda row: row["val_loss"])
    gap = last["val_loss"] - fmean(trained)
    apart = f"{fmean(trained):.4f}, {abs(gap):.3f} {'below' if gap > 0 else 'above'} the validation loss"
    before = evaluated[-1 - max(1, len(evaluated) // 4)]
    if last["val_loss"] > RISEN * lowest["val_loss"]:
        meaning = f"{MEMORISING} since epoch {lowest.get('epoch', 0):.2g}: use best/"
    elif last["val_loss"] < FALLEN * before["val_loss"]:
        meaning = "still falling at the end: more time, or more text, helps"
    else:
        meaning = "level at the end: more time alone brings little; more text, or a larger model, may help"
    return {"Training loss": f"{apart}; the text was read {epochs:.2g} times", "Verdict": meaning}


def finished_message(run: Run) -> str:
    """Return the message of a command that finds nothing left to train."""
    config, state = run.config, run.state
    if has_stopped_early(state, config):
        more = f"--stop_after_worse {2 * config.stop_after_worse}"
    elif time_progress(state, config) >= 1:
        more = f"--minutes {2 * config.minutes:g}"
    elif config.max_steps:
        more = f"--max_steps {state.step * 2}"
    else:
        more = f"--epochs {2 * max(config.epochs, int(run.epoch))}"
    return (
        f"This run is finished: step {state.step:,}, results in {config.run_dir / SUMMARY}. "
        f"To go on, ask for more: {more}. To start over: --resume never (the old run is kept aside)."
    )
