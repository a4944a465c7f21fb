"""The end of a run: summary.md, and what it means."""

from __future__ import annotations

import contextlib
import shlex
from statistics import fmean
from typing import Any

import torch

from common.checkpoint import open_checkpoint
from common.errors import CheckpointError, DataError
from common.files import atomic_write
from common.output import cell, duration, log, printable, si, table_row
from common.script import is_rank_0
from generation.loading import load_checkpoint
from generation.passages import (
    Difference,
    Passage,
    difference,
    found_in_training,
    held_out_passages,
    learned_text,
    next_sentences,
    score_passages,
    spread,
    total,
)
from generation.trace import TracedText, describe_share, read_training_text
from tokenizer_base import TokenizerError
from training.config import Forecast
from training.evaluate import Answer, accuracy, answer_prompts, perplexity, sample
from training.memory import attempt
from training.records import (
    CURVE,
    METRICS,
    SAMPLES_TABLE,
    SUMMARY,
    answer_table,
    read_metrics,
    read_samples,
    unwritable,
)
from training.report import Report
from training.run import Run
from training.schedule import has_stopped_early, time_progress
from training.state import read_state

LEAST_EVALUATIONS = 3  # for a verdict
RISEN = 1.005  # times the lowest validation loss: more than two seeds differ
FALLEN = 0.998  # times the loss of a few evaluations before
MEMORISING = "memorising"
ONE_BYTE_EACH = 1.05  # bytes of a character, up to which bits per character would say the same
SLOWER = 1.2  # times, at least, to be the reason why a forecast was missed
BUSY = 0.8  # of the time on a CPU: what is below was taken by other programs
MAX_TRACED_BYTES = 2e7  # of a text that samples are looked up in; a larger one is hardly learned by heart
NOTICED = 0.01  # bits per byte
LONGEST_PRINTED = 80  # characters of an answer; a model that has learned little repeats itself for hundreds


def summarize(run: Run, report: Report, answers: list[Answer]) -> None:
    """Write and print the summary. `answers`: of the last evaluation, if this session made it."""
    answers = answers or answer_prompts(run)
    samples = sample(run) if run.config.eval_interval and not answers else []
    if samples and not any(kept.step == run.state.step for kept in read_samples(run.dir)):
        report.samples(samples)
    if is_rank_0():
        write_summary(run, report, answers, samples)


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
    last = evaluated[-1] if evaluated else {}
    bits = last.get("val_bits_per_byte")
    if last:
        per_byte = f", {bits:.3f} bits per byte" if bits else ""
        size, characters = data.metadata.val_bytes, data.metadata.val_characters
        if bits and size and characters and size > ONE_BYTE_EACH * characters:
            per_byte += f" or {bits * size / characters:.3f} per character"
        facts["Validation loss"] = f"{last['val_loss']:.4f} (perplexity {perplexity(last['val_loss']):.2f}{per_byte})"
    if state.best_val_loss is not None:  # which is of best/; rows may be over other windows
        facts["Best"] = f"{state.best_val_loss:.4f} at step {state.best_step:,}"
    facts |= verdict(rows, evaluated, run.epoch, bool(config.companion))
    if config.forecast and bits and config.forecast.minutes in (None, config.minutes):
        facts["Expected"] = compared(config.forecast, bits, report.tokens_per_second)
    if config.companion and config.init_from:
        facts["Companion"] = describe_companion(run, bits)
    if state.base:
        in_bits = f" ({state.base.val_loss * bits / last['val_loss']:.3f} bits per byte)" if bits else ""
        facts["Before"] = f"validation loss {state.base.val_loss:.4f}{in_bits}, of the weights that it started from"
    with attempt(run.hardware.device):
        facts |= on_passages(run)
    if samples and config.input and data.metadata.text_bytes <= MAX_TRACED_BYTES:
        with contextlib.suppress(DataError):  # the text has been moved
            training_text = TracedText(read_training_text(config.values()))
            written = [each.text for each in samples]
            facts["Copied"] = describe_share([span for text in written for span in training_text.spans(text)], written)
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


def describe_companion(run: Run, bits_per_byte: float | None) -> str:
    """Say how much of what the run read was its companion, and whether that has helped."""
    config, said = run.config, str(run.config.companion)
    with contextlib.suppress(CheckpointError):  # the base is gone
        base = read_state(open_checkpoint(str(config.init_from))).state
        share = base.tokens / (base.tokens + run.state.tokens)
        said += f": {share:.0%} of all tokens read, in {duration(base.elapsed_seconds)} before this run"
    alone = config.forecast.alone if config.forecast else None
    if alone and bits_per_byte:
        helped = "to have helped" if bits_per_byte < alone else "not to have helped: compare with a run without it"
        said += f". Without it {alone:.2f} bits per byte are expected: it seems {helped}"
    return said


def early(run: Run) -> str:
    """Say what ended the run before its `minutes` were over."""
    config, state = run.config, run.state
    if not config.minutes or has_stopped_early(state, config) or time_progress(state, config) >= 1 or config.companion:
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


def verdict(
    rows: list[dict[str, Any]], evaluated: list[dict[str, Any]], epochs: float, has_companion: bool = False
) -> dict[str, str]:
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
    elif has_companion:
        meaning = "level at the end: more --minutes make its base better, and so would a larger companion"
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
    go_on = f"To go on, ask for more: {more}."
    if config.companion:
        go_on = "With more --minutes its base is trained on, and then this run starts again from it."
    return (
        f"This run is finished: step {state.step:,}, results in {config.run_dir / SUMMARY}. {go_on} To start over: "
        "--resume never (the old run is kept aside)."
    )


# On passages that were held out


def on_passages(run: Run) -> dict[str, str]:
    """Return how well a finished run does on passages that were held out: how often it knows the next sentence; and, if
    it started from weights that had learned another text, what it has learned and forgotten. By the name of each fact;
    {} without the token folder, or without memory for it."""
    try:
        passages = held_out_passages(run.data.metadata)
        facts = {}
        if run.data.metadata.chat_template is None:
            log.info("Scoring    next sentences of held-out passages ...")
            guessed = next_sentences(run.model, run.data.tokenizer, [each.text for each in spread(passages)])
            facts = {"Next sentence": str(guessed)} if guessed.of else {}
        return facts | (learned(run, passages) if run.config.init_from else {})
    except (DataError, TokenizerError, CheckpointError):
        return {}


def learned(run: Run, passages: list[Passage]) -> dict[str, str]:
    """Compare the weights with those that the run started from, on the held-out passages of the text that these had
    learned, and on those that they had not. Raises CheckpointError if they, or what they had learned, are gone."""
    base = open_checkpoint(str(run.config.init_from))
    if base.weights_sha256() != run.state.initialized_from:  # it was trained further
        return {}
    then, now = learned_text(base), run.data.metadata
    if then is None or then.tokens_sha256 == now.tokens_sha256 or then.tokenizer_sha256 != now.tokenizer_sha256:
        return {}
    held_out = {passage.text for passage in held_out_passages(then)}
    old = spread([passage for passage in passages if passage.text in held_out])
    new = spread([passage for passage in passages if passage.text not in held_out])
    known = found_in_training(then, new)
    parts = {"Old text": old, "New text": [passage for passage in new if passage.text not in known]}
    before, tokenizer = load_checkpoint(base, run.model.device.type, torch.float32)
    facts, change = {}, {}
    for name, chosen in parts.items():
        if not chosen:
            if not run.config.companion:
                facts[name] = "no passage of it is held out from both"
            continue
        log.info(f"Scoring    the {name.lower()}: {len(chosen)} held-out passages, now and before ...")
        pair = [score_passages(model, tokenizer, chosen) for model in (run.model, before)]
        change[name] = difference(*pair)
        after, was = (total(scores).bits_per_byte for scores in pair)
        facts[name] = f"{was:.3f} -> {after:.3f} bits per byte, on {len(chosen)} held-out passages"
    if len(change) == 2:
        facts["Learned"] = describe_learning(change["Old text"], change["New text"])
    return facts


def describe_learning(old: Difference, new: Difference) -> str:
    """Say what two differences mean: after less before, in bits per byte."""
    gain = "has learned the new text" if new.is_clear and new.mean < 0 else "has learned little of the new text"
    if old.mean > max(NOTICED, old.error):
        return f"it {gain}, and forgotten some of the old: more --minutes read both again"
    return f"it {gain}, and {'reads the old one better too' if old.is_clear and old.mean < 0 else 'kept the old'}"
