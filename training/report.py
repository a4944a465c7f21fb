"""What a run tells: a progress line, metrics.jsonl, samples.md, loss_curve.png, summary.md."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.files import atomic_write
from common.formatting import cell, clock, si, table_row
from model import TransformerLanguageModel
from training.config import TrainConfig
from training.data import TokenData
from training.evaluate import Answer, accuracy
from training.hardware import Hardware

LONG_SECONDS = 20.0  # of silence that a user should not have to wonder about
LOG_LINE_SECONDS = 10.0  # between progress lines where the output is a file


class Report:
    """Writes the files of a run folder and the progress line; keeps the clock of the run."""

    def __init__(
        self,
        run_dir: Path,
        hardware: Hardware,
        step: int,
        max_steps: int,
        elapsed: float,
        units_per_hour: float | None,
    ):
        self.run_dir = run_dir
        self.hardware = hardware
        self.max_steps = max_steps
        self.units_per_hour = units_per_hour
        self.interactive = sys.stderr.isatty()
        self.started = time.perf_counter() - elapsed
        self.interval_started = time.perf_counter()
        self.interval_steps = 0
        self.interval_tokens = 0
        self.next_line = 0.0
        self.training_seconds = 0.0
        self.training_tokens = 0
        # Some terminals, Colab's for one, do not tell their size; tqdm alone would then draw nothing.
        size = shutil.get_terminal_size((100, 24))
        self.bar = tqdm(
            total=max_steps,
            initial=step,
            ncols=min(size.columns, 120),
            nrows=size.lines,
            disable=not self.interactive,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
        )

    @property
    def elapsed(self) -> float:
        """Seconds this run has taken, over all the sessions it was resumed in."""
        return time.perf_counter() - self.started

    def step_done(self, tokens: int) -> None:
        self.interval_steps += 1
        self.interval_tokens += tokens
        self.bar.update()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside (evaluating, saving) out of the training speed."""
        self.hardware.synchronize()
        began = time.perf_counter()
        yield
        self.interval_started += time.perf_counter() - began

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
        self.interval_started, self.interval_steps, self.interval_tokens = now, 0, 0
        row["elapsed_seconds"] = self.elapsed
        if self.units_per_hour:
            row["compute_units"] = self.elapsed / 3600 * self.units_per_hour
        return row

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl; a field that was not measured is left out."""
        rounded = {
            key: float(f"{value:.6g}") if isinstance(value, float) else value
            for key, value in row.items()
            if value is not None and math.isfinite(value)  # JSON has no infinity
        }
        self.append(self.run_dir / "metrics.jsonl", json.dumps(rounded) + "\n")

    def append(self, path: Path, text: str) -> None:
        """A log that cannot be written is no reason to lose the training."""
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            self.say(f"{path.name} was not written: {problem}")

    def progress(self, row: dict[str, Any]) -> None:
        """Refresh the progress line; in a log file, where it cannot be redrawn, write one now and then."""
        parts = [f"loss {row['train_loss']:.3f}", f"{si(row['tokens_per_second'])} tok/s"]
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.0%}")
        parts.append(f"lr {row['lr']:.2g}")
        left = (self.max_steps - row["step"]) * row["ms_per_step"] / 1000
        if "compute_units" in row:
            forecast = row["compute_units"] + left / 3600 * self.units_per_hour
            parts.append(f"{row['compute_units']:.1f} of about {forecast:.1f} units")
        if self.interactive:
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
        elif time.perf_counter() >= self.next_line or row["step"] == self.max_steps:
            self.next_line = time.perf_counter() + LOG_LINE_SECONDS
            self.say(f"step {row['step']:,}/{self.max_steps:,}, {', '.join(parts)}, {clock(left)} left")

    def say(self, text: str) -> None:
        """Print a line that stays, above the progress line if there is one."""
        if self.interactive:
            tqdm.write(text, file=sys.stderr)
        else:
            print(text, flush=True)

    def announce_evaluation(self, tokens: int) -> None:
        """Say so if an evaluation will take long, at about three times the speed of training."""
        if self.training_seconds:
            seconds = tokens / (3 * self.training_tokens / self.training_seconds)
            if seconds > LONG_SECONDS:
                self.say(f"Evaluating on {tokens:,} validation tokens, about {clock(seconds)} ...")

    def evaluation(self, row: dict[str, Any], answers: list[Answer]) -> None:
        """Tell how an evaluation went, and keep its answers."""
        parts = [f"step {row['step']:,}: validation loss {row['val_loss']:.4f}"]
        parts.append(f"perplexity {perplexity(row['val_loss']):.2f}")
        if row["val_bits_per_byte"] is not None:
            parts.append(f"{row['val_bits_per_byte']:.3f} bits per byte")
        right, judged = accuracy(answers)
        if judged:
            parts.append(f"{right} of {judged} answers exactly right")
        self.say(", ".join(parts))
        if answers:
            self.samples(row["step"], answers)

    def samples(self, step: int, answers: list[Answer]) -> None:
        """Append a row to samples.md: one column a prompt, one row an evaluation."""
        path = self.run_dir / "samples.md"
        right, judged = accuracy(answers)
        lines = []
        if not path.exists():
            columns = ["step", "exactly right", *(cell(answer.prompt.text) for answer in answers)]
            lines = [table_row(columns), table_row(["---"] * len(columns))]
            known = [cell(answer.prompt.expected or "") for answer in answers]
            if judged:
                lines.append(table_row(["expected", "", *known]))
        score = f"{right} of {judged}" if judged else ""
        lines.append(table_row([str(step), score, *(cell(answer.text) for answer in answers)]))
        self.append(path, "".join(line + "\n" for line in lines))

    def rewind(self, step: int) -> None:
        """Forget rows after `step`: the steps a killed session took beyond its last checkpoint are taken again."""
        for name, row_step in (("metrics.jsonl", metrics_step), ("samples.md", samples_step)):
            path = self.run_dir / name
            if not path.exists():
                continue
            lines = path.read_bytes().splitlines(keepends=True)  # bytes: the last may end inside a character
            kept = [line for line in lines if line.endswith(b"\n") and row_step(line.decode(errors="replace")) <= step]
            if kept != lines:
                with atomic_write(path) as file:
                    file.write(b"".join(kept))

    def curve(self) -> None:
        """Redraw loss_curve.png from metrics.jsonl. A plot that fails is no reason to stop a training."""
        try:
            draw_curve(read_metrics(self.run_dir), self.run_dir / "loss_curve.png")
        except Exception as problem:
            self.say(f"loss_curve.png was not drawn: {problem}")

    def close(self) -> None:
        self.bar.close()

    def summary(
        self,
        config: TrainConfig,
        hardware: Hardware,
        data: TokenData,
        model: TransformerLanguageModel,
        answers: list[Answer],
    ) -> None:
        """Write summary.md and print what matters of it: what was run, on what, how fast, how well."""
        rows = read_metrics(self.run_dir)
        facts = {
            "Model": f"{model.num_parameters():,} parameters",
            "Data": f"{data.metadata.train_tokens:,} training tokens, vocabulary {data.vocab_size:,}",
            "Machine": f"{hardware.name}, {hardware.precision}, torch {torch.__version__}",
            "Training": f"{self.max_steps:,} steps of {config.tokens_per_step:,} tokens in {clock(self.elapsed)}",
        }
        if self.training_seconds:
            facts["Speed"] = f"{si(self.training_tokens / self.training_seconds)} tokens/s while training"
        if peak := hardware.peak_memory():
            facts["Peak memory"] = f"{peak / 1e9:.2f} GB"
        if self.units_per_hour:
            facts["Compute units"] = f"{self.elapsed / 3600 * self.units_per_hour:.2f}"
        if evaluated := [row for row in rows if "val_loss" in row]:
            best, last = min(evaluated, key=lambda row: row["val_loss"]), evaluated[-1]
            per_byte = f", {last['val_bits_per_byte']:.3f} bits per byte" if "val_bits_per_byte" in last else ""
            told = f"{last['val_loss']:.4f} (perplexity {perplexity(last['val_loss']):.2f}{per_byte})"
            facts["Validation loss"] = told
            facts["Best"] = f"{best['val_loss']:.4f} at step {best['step']:,}"
        right, judged = accuracy(answers)
        if judged:
            facts["Answers"] = f"{right} of {judged} exactly right ({right / judged:.0%})"

        lines = [f"# {config.name}", "", "| | |", "|---|---|"]
        lines += [table_row([key, cell(value)]) for key, value in facts.items()]
        if answers:
            lines += ["", "## Answers", "", *answer_table(answers)]
        lines += ["", "## Configuration", "", "What differs from the defaults, and where it came from:", ""]
        lines += [table_row(["key", "value", "source"]), table_row(["---"] * 3)]
        given = [(key, value) for key, value in config.values().items() if config.sources.get(key) != "default"]
        lines += [table_row([key, cell(str(value)), config.sources.get(key, "")]) for key, value in given]
        with atomic_write(self.run_dir / "summary.md") as file:
            file.write(("\n".join(lines) + "\n").encode())

        print()
        for line in answer_table(answers) if answers else []:
            print(line)
        for key, value in facts.items():
            print(f"{key:<16} {value}")
        print(f"{'Files':<16} {self.run_dir}: summary.md, loss_curve.png, metrics.jsonl, checkpoints/, best/")
        print('\nTalk to it: python generate.py --prompt "..." or --interactive')


def metrics_step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf  # cut short when the machine went away


def samples_step(line: str) -> float:
    first = line.split("|")[1].strip() if line.count("|") > 1 else ""
    return int(first) if first.isdigit() else -math.inf  # the header stays


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def draw_curve(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("train_loss", "training", {"alpha": 0.6}), ("val_loss", "validation", {"marker": "o"})):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def answer_table(answers: list[Answer]) -> list[str]:
    """A Markdown table of prompts and answers, wrong ones with what was expected."""
    lines = [table_row(["prompt", "answer", "exactly right"]), table_row(["---"] * 3)]
    for answer in answers:
        verdict = {None: "", True: "yes", False: f"no: {cell(answer.prompt.expected or '')}"}[answer.right]
        lines.append(table_row([cell(answer.prompt.text), cell(answer.text), verdict]))
    return lines


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
