"""`tools/speed_ladder.py`: chooses data and batch, measures the rungs in turn, and writes the results."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.measure import (
    ROOT,
    Measured,
    Spread,
    describe_machine,
    machine_kind,
    markdown_table,
    measure_in_turn,
    require_known,
    write_results,
)
from benchmarks.random_tokens import write_random_tokens
from benchmarks.rungs import BLOG_SECONDS, BLOG_STEP, BLOG_VOCABULARY, NAMES, Rung, climb, left_out
from common.errors import UserError
from common.formatting import si
from model import TransformerLanguageModel
from tokenization.metadata import TokenMetadata, metadata_files
from tokenization.token_folder import DEFAULT_FOLDER
from training.config import SCHEMA, TrainConfig
from training.machine.hardware import Hardware, detect_hardware
from training.numbers.data import locate
from training.planning.estimate import estimate_memory
from training.planning.memory import MEMORY_SHARE
from training.prepare import tokenize_input, use_builtin_files

SCRIPT = ROOT / "tools" / "speed_ladder.py"
STEP_SECONDS = 6.0  # the longest step of the baseline on a CPU
SYNTHETIC_TOKENS = 100_000_000  # 200 MB, far beyond a CPU's caches


# The data, the batch, the processes


def find_tokens(config: TrainConfig, scratch: Path) -> tuple[TrainConfig, str]:
    """The configuration with its tokens, or with random ones in `scratch` if there are none; and which, in words."""
    config = use_builtin_files(config)
    if config.input:
        config = tokenize_input(config)
    if config.bin_file or config.data_dir or metadata_files(Path(DEFAULT_FOLDER)):
        return config, f"the tokens of {config.bin_file or config.data_dir or DEFAULT_FOLDER}"
    folder = scratch / "tokens"
    write_random_tokens(folder, SYNTHETIC_TOKENS, config.vocab_size)
    words = f"{SYNTHETIC_TOKENS:,} random tokens, vocabulary {config.vocab_size:,}: {DEFAULT_FOLDER}/ has none"
    return dataclasses.replace(config, data_dir=str(folder)), words


def of_rows(config: TrainConfig, rows: int) -> TrainConfig:
    """The configuration with steps of `rows` sequences, in one micro-batch."""
    return dataclasses.replace(config, batch_size=rows, gradient_accumulation_steps=1, micro_batch_size=None)


def baseline_memory(config: TrainConfig, vocab_size: int, hardware: Hardware) -> int:
    """Estimated peak bytes of the baseline: training in fp32, and the attention scores. Each layer keeps one matrix of
    scores for its backward pass, which makes three more for one layer at a time."""
    model = shape_only(config, vocab_size)
    scores = 4 * config.rows_at_once * config.num_heads * config.max_seq_len**2
    plain = dataclasses.replace(hardware, precision="fp32", compiles=False)
    return estimate_memory(config, model, plain) + scores * (config.num_layers + 3)


def fit_memory(config: TrainConfig, vocab_size: int, hardware: Hardware) -> TrainConfig:
    """Halve the sequences of a step until the baseline, the rung that needs most memory, should fit."""
    if hardware.memory_bytes is None:
        return config
    fitted, limit = config, MEMORY_SHARE * hardware.memory_bytes
    while fitted.rows_at_once > 1 and baseline_memory(fitted, vocab_size, hardware) > limit:
        fitted = of_rows(config, fitted.rows_at_once // 2)
    return fitted


def rung_command(rung: Rung, steps: int, config: TrainConfig, scratch: Path) -> list[str]:
    """The command that measures one rung in a process of its own."""
    # The tokens are there by now, and the shape stands in its own keys.
    done = ["input", "tokenizer", "vocab_size", "model_size", "eval_prompts"]
    done += ["optimizer", "muon_learning_rate", "muon_momentum"]  # AdamW on every rung: they show speed alone
    done += ["epochs"] if config.max_steps else []  # max_steps overrides it, and both are an error
    values = {key: value for key, value in config.values().items() if value != SCHEMA[key].default and key not in done}
    path = scratch / f"{config.sequences_per_step}_sequences.json"
    path.write_text(json.dumps({**values, "output_dir": str(scratch)}))
    return [sys.executable, str(SCRIPT), f"--rung={rung.value}", f"--steps={steps}", f"--config={path}"]


def choose_batch(config: TrainConfig, vocab_size: int, hardware: Hardware, scratch: Path) -> tuple[TrainConfig, str]:
    """A step that fits in memory and, on a CPU, in STEP_SECONDS; and the reason for its size.

    Raises UserError if the baseline cannot be measured.
    """
    if config.sources["batch_size"] == "flag":
        return config, "as given"
    configured = config.sequences_per_step
    fitted = fit_memory(config, vocab_size, hardware)
    rows = fitted.sequences_per_step
    reason = "as configured"
    if rows < configured:
        reason = f"the baseline does not fit in memory with the configured {configured}"
    if hardware.is_cuda or rows == 1:
        return fitted, reason
    probe = rung_command(Rung.BASELINE, 1, of_rows(config, 2), scratch)

    def fail(name: str, problem: str) -> None:
        raise UserError(f"{name} failed: {problem}")

    (timed,) = measure_in_turn({"The baseline": probe}, 1, fail)["The baseline"]
    per_sequence = timed["seconds"] / 2
    if per_sequence * rows <= STEP_SECONDS:
        return fitted, reason
    rows = max(1, int(STEP_SECONDS / per_sequence))
    return of_rows(config, rows), (
        f"instead of {configured}, because the baseline needs about {per_sequence:.1f} s for each on this CPU and its "
        f"step should take at most {STEP_SECONDS:.0f} s"
    )


# The results


def is_the_blogs(config: TrainConfig, vocab_size: int, hardware: Hardware) -> bool:
    """Whether the blog has times for this step: its shape, on a GPU."""
    same = all(getattr(config, key) == value for key, value in BLOG_STEP.items())
    return hardware.is_cuda and same and vocab_size == BLOG_VOCABULARY


def summarize(
    measured: Mapping[str, list[dict[str, Any]]],
    missing: Mapping[str, str],
    floor_seconds: float | None,
    beside_blog: bool = False,
) -> list[dict[str, Any]]:
    """One entry for each rung. `missing`: why some have no measurement. `floor_seconds`: of a step at the device's peak
    FLOP/s, if known. `beside_blog`: with the blog's seconds for the same rung."""
    rows: list[dict[str, Any]] = []
    baseline = None
    for rung, name in NAMES.items():
        row: dict[str, Any] = {"name": name}
        if results := measured.get(name):
            seconds = Spread.of_key(results, "seconds")
            baseline = seconds.median if rung == Rung.BASELINE else baseline
            row |= {
                "seconds": dataclasses.asdict(seconds),
                "speed_up": baseline / seconds.median if baseline else None,
                "peak_memory": max(result["peak_memory"] or 0 for result in results) or None,
                "share_of_peak": floor_seconds / seconds.median if floor_seconds else None,
                # The longest is the first: later rounds find the code in a cache.
                "compile_seconds": max(result["compile_seconds"] or 0 for result in results) or None,
                **{key: results[0][key] for key in ("precision", "compiled", "tokens", "losses")},
            }
        else:
            row["missing"] = missing.get(name, "")
        rows.append(row | {"blog_seconds": BLOG_SECONDS.get(rung)} if beside_blog else row)
    return rows


def describe(row: Mapping[str, Any]) -> str:
    """The name of a rung, with the trainer's choices where it made them."""
    compiled = "compiled" if row["compiled"] else "not compiled"
    if row["name"] == NAMES[Rung.OURS]:
        place = {"gpu": "GPU memory", "ram": "RAM", "mmap": "a memory map"}[row["tokens"]]
        return f"{row['name']}: {row['precision']}, {compiled}, tokens in {place}, fused AdamW"
    notes = [row["precision"]] if row["name"] == NAMES[Rung.MIXED] else []
    if row["name"] in (NAMES[Rung.MIXED], NAMES[Rung.FLASH]) and not row["compiled"]:
        notes.append(compiled)  # the rung that compiles has failed
    return f"{row['name']} ({', '.join(notes)})" if notes else row["name"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ["what", "s/step (lowest to highest)", "speed-up", "peak memory", "of peak FLOP/s", "compiling"]
    cells = []
    for row in rows:
        if "missing" in row:
            cells.append([row["name"], row["missing"].replace("|", "\\|"), *"----"])
            continue
        cells.append(
            [
                describe(row),
                Spread(**row["seconds"]).text(),
                f"{row['speed_up']:.2f}x" if row["speed_up"] else "-",
                f"{row['peak_memory'] / 1e9:.2f} GB" if row["peak_memory"] else "-",
                f"{row['share_of_peak']:.0%}" if row["share_of_peak"] else "-",
                f"{row['compile_seconds']:.0f} s" if row["compile_seconds"] else "-",
            ]
        )
    if any("blog_seconds" in row for row in rows):
        columns.append("the blog's A100, s/step")
        cells = [[*line, f"{row['blog_seconds'] or ''}"] for line, row in zip(cells, rows, strict=True)]
    return markdown_table(columns, cells)


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """One bar for each rung, its length the median of s/step, with the spread as a line."""
    timed = [row for row in rows if "seconds" in row]
    spreads = [Spread(**row["seconds"]) for row in timed]
    errors = [[spread.median - spread.low for spread in spreads], [spread.high - spread.median for spread in spreads]]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:orange" if row["name"] == NAMES[Rung.OURS] else "tab:blue" for row in timed]
    medians = [spread.median for spread in spreads]
    bars = axes.barh([row["name"] for row in timed], medians, xerr=errors, capsize=3, color=colors)
    speed_ups = [f", {row['speed_up']:.2f}x" if row["speed_up"] else "" for row in timed]
    labels = [f"{median:.3g} s{speed_up}" for median, speed_up in zip(medians, speed_ups, strict=True)]
    axes.bar_label(bars, labels, padding=6)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(spread.high for spread in spreads))
    axes.set(xlabel="seconds a step", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def floor_seconds(config: TrainConfig, vocab_size: int, hardware: Hardware) -> float | None:
    """Seconds of a step at the device's peak FLOP/s; None if that is not known."""
    if not hardware.peak_flops:
        return None
    return shape_only(config, vocab_size).flops_per_token() * config.tokens_per_step / hardware.peak_flops


def shape_only(config: TrainConfig, vocab_size: int) -> TransformerLanguageModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return TransformerLanguageModel(config.model_config(vocab_size))


# The whole ladder


def measure_rung(rung: int, steps: int, config: TrainConfig) -> None:
    """Measure one rung in this process, and print one line of JSON."""
    print(json.dumps(climb(Rung(rung), steps, config)))


def measure_ladder(config: TrainConfig, rounds: int, steps: int | None, only: Sequence[str] | None) -> None:
    """Measure the rungs named in `only` (default: all) in turn, and write and draw the results.

    Raises ConfigError for an unknown rung, UserError if the baseline cannot be measured, and what reading tokens
    raises.
    """
    only = only or list(NAMES.values())
    require_known("--only", only, NAMES.values())
    hardware = detect_hardware(config)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        print(f"Device     {hardware.name}")
        config, tokens = find_tokens(config, scratch)
        print(f"Data       {tokens}")
        vocab_size = TokenMetadata.read(locate(config)[2]).vocab_size
        configured = config.sequences_per_step
        config, reason = choose_batch(config, vocab_size, hardware, scratch)
        batch = f"{config.sequences_per_step} x {config.max_seq_len} tokens"
        print(f"Step       {batch}, {reason}")
        steps = steps or (20 if hardware.is_cuda else 1)
        missing = dict.fromkeys(set(NAMES.values()) - set(only), "not asked for")
        missing |= {name: f"left out: {reason}" for name, reason in left_out(hardware.device).items() if name in only}
        rungs = {name: rung for rung, name in NAMES.items() if name not in missing}
        for name in set(missing) & set(only):
            print(f"Rung       {name} is {missing[name]}")
        print(f"Measuring  {len(rungs)} rungs in turn, {rounds} rounds of {steps} steps ...", flush=True)
        commands = {name: rung_command(rung, steps, config, scratch) for name, rung in rungs.items()}

        def note_failure(name: str, problem: str) -> None:
            missing[name] = f"failed: {problem}"

        machine = describe_machine(hardware.device.type)
        stem = Path(config.output_dir or "runs/speed_ladder") / f"speed_ladder-{machine_kind(machine)}"
        floor, beside_blog = floor_seconds(config, vocab_size, hardware), is_the_blogs(config, vocab_size, hardware)
        shape = f"{config.num_layers} layers x {config.embed_dim}, context {config.max_seq_len}"
        about = {
            "machine": machine,
            "config": config.name,
            "shape": shape,
            "sequences_per_step": config.sequences_per_step,
            "tokens_per_step": config.tokens_per_step,
            "batch": reason,
            "data": tokens,
            "rounds": rounds,
            "steps": steps,
        }

        def write(measured: Measured) -> list[dict[str, Any]]:
            """Write the rungs and return them. Called after each measurement, so that an interruption loses none."""
            rows = summarize(measured, missing, floor, beside_blog)
            notes = ""
            if config.sequences_per_step < configured:
                notes += " With fewer sequences, work done once per step, mainly the optimizer's update, weighs more."
            for row in rows:
                if row["name"] == NAMES[Rung.OURS] and "seconds" in row:
                    notes += f" This trainer: {si(config.tokens_per_step / row['seconds']['median'])} tokens/s."
            if beside_blog:
                notes += (
                    " The blog's seconds are its author's, not measured here. Each is beside the technique at the same "
                    "place in the blog's order."
                )
            body = (
                f"{config.name}: {shape}, vocabulary {vocab_size:,}. A step is {batch} ({reason}). Data: {tokens}. "
                f"Each rung runs in its own process, {rounds} rounds in turn, {steps} step{'s' * (steps > 1)} of each "
                f"after two that do not count; a step does not include compiling.{notes}\n\n{table(rows)}"
                f"\n\n![seconds a step]({stem.name}.png)"
            )
            results = {**about, "rungs": rows}
            write_results(stem, f"Speed ladder: {config.name}", results, body)
            return rows

        rows = write(measure_in_turn(commands, rounds, note_failure, write))

    print(f"\n{table(rows)}\n")
    if any("seconds" in row for row in rows):
        draw(rows, f"{config.name}, a step of {batch}\n{hardware.name}", stem.with_suffix(".png"))
    print(f"Files      {stem}.md, .json and .png")
