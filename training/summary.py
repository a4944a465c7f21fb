"""Summarize a finished run: write summary.md, print it, and judge the losses."""

from __future__ import annotations

import contextlib
import shlex
import time
from statistics import fmean
from typing import Any

import torch

from common.checkpoint import BASE, open_checkpoint
from common.errors import CheckpointError, DataError
from common.files import atomic_write
from common.output import cell, duration, log, plural, printable, si, table_row
from common.script import is_main_process
from generation.loading import load_checkpoint
from generation.passages import (
    Difference,
    Passage,
    add_scores,
    compare_scores,
    find_in_training,
    find_training_tokens,
    pick_evenly,
    read_held_out,
    score_next_sentences,
    score_pair,
)
from generation.trace import TracedText, describe_share
from tokenizer_bpe import TokenizerError
from training.choice import CHOSEN
from training.config import Forecast
from training.evaluate import Answer, accuracy, answer_prompts, evaluated_windows, perplexity, write_samples
from training.memory import suppress_out_of_memory
from training.records import (
    CURVE,
    METRICS,
    SAMPLES_TABLE,
    SUMMARY,
    describe_unwritable,
    read_metrics,
    read_samples,
    render_answers,
)
from training.report import Report
from training.run import Run
from training.schedule import has_stopped_early, time_progress

MIN_EVALUATIONS = 3  # fewer give no verdict
RISEN_RATIO = 1.005  # relative to the lowest validation loss; two seeds differ by less
FALLEN_RATIO = 0.998  # relative to the loss a few evaluations before
MEMORISING = "memorising"
ASCII_BYTES_PER_CHARACTER = 1.05  # below, bits per character would be the same as bits per byte
MIN_JUDGED_STEPS = 10  # a shorter run says nothing about the forecast
MISSED_SPEED_RATIO = 1.2  # a machine slower or faster by this factor explains a missed forecast
REPORTED_CPU_SHARE = 0.8  # CPU time / time; below, other programs are reported
MAX_TRACED_BYTES = 2e7  # samples are not searched for in larger texts, which are hardly learned by heart
NOTICEABLE_BITS = 0.01  # bits per byte
MIN_SAMPLE_SECONDS = 3.0  # for samples, also when --minutes are over
NOT_MORE = "another pass would not help"
MAX_PRINTED_ANSWERS = 20
MAX_PRINTED_CHARACTERS = 80  # a model that has learned little repeats itself for hundreds


def summarize(run: Run, report: Report, answers: list[Answer]) -> None:
    """Write and print the summary. `answers`: those of the last evaluation, if it was in this session."""
    answers = answers or answer_prompts(run)
    deadline = report.clock.find_deadline(least_seconds=MIN_SAMPLE_SECONDS)
    samples = write_samples(run, deadline) if run.config.eval_interval and not answers else []
    if samples and not any(kept.step == run.state.step for kept in read_samples(run.dir)):
        report.add_samples(samples)
    if is_main_process():
        _write_summary(run, report, answers, samples)


def _write_summary(run: Run, report: Report, answers: list[Answer], samples: list[Answer]) -> None:
    """Write summary.md and print its facts. `samples`: texts of a run without prompts, in place of answers."""
    config, data, hardware, model, state = run.config, run.data, run.hardware, run.model, run.state
    clock = report.clock
    parameters, trained = model.num_parameters(), model.num_parameters(trained_only=True)
    facts = {
        "Model": f"{parameters:,} parameters" + (f", {trained:,} of them trained" if trained < parameters else ""),
        "Data": f"{data.metadata.train_tokens:,} training tokens, vocabulary {data.vocab_size:,}",
        "Machine": f"{hardware.name}, {hardware.precision}, torch {torch.__version__}",
        "Training": f"{state.step:,} steps of {run.tokens_per_step:,} tokens in {duration(clock.elapsed)}",
    }
    if early_end := _describe_early_end(run):
        facts["Training"] += f" of {config.minutes:g} minutes, ended by --epochs {config.epochs}: {early_end}"
    if report.tokens_per_second:
        facts["Speed"] = f"{si(report.tokens_per_second)} tokens/s while training"
        if report.cpu_share <= REPORTED_CPU_SHARE:
            facts["Speed"] += f"; other programs use this CPU, and the training got {report.cpu_share:.0%} of the time"
    if peak := hardware.peak_memory():
        facts["Peak memory"] = f"{peak / 1e9:.2f} GB"
    facts["Saving"] = f"took {sum(clock.pauses['saving']):.1f} s of this session's {duration(clock.session_seconds)}"
    if (units := clock.compute_units) is not None:
        facts["Compute units"] = f"{units:.2f}"
    rows = read_metrics(run.dir)
    evaluated = [row for row in rows if "val_loss" in row]
    last = evaluated[-1] if evaluated else {}
    bits = last.get("val_bits_per_byte")
    if last:
        per_byte = f", {bits:.3f} bits per byte" if bits else ""
        size, characters = data.metadata.val_bytes, data.metadata.val_characters
        if bits and size and characters and size > ASCII_BYTES_PER_CHARACTER * characters:
            per_byte += f" or {bits * size / characters:.3f} per character"
        where = f"on {evaluated_windows(data, config):,} of {plural(data.val_windows, 'held-out window')}"
        if data.layout.has_mask:
            where += ", answers only"
        in_words = f"perplexity {perplexity(last['val_loss']):.2f}{per_byte}"
        facts["Validation loss"] = f"{last['val_loss']:.4f} ({in_words}), {where}"
    if state.best_val_loss is not None:  # the loss of best/; rows may be over other windows
        facts["Best"] = f"{state.best_val_loss:.4f} at step {state.best_step:,}"
        if state.start and state.best_val_loss >= state.start.val_loss:
            facts["Best"] += f", no better than the {state.start.val_loss:.4f} of the initial weights"
    facts |= judge_losses(rows, evaluated, run.passes, bool(config.companion), early_end == NOT_MORE)
    forecast = config.forecast
    if forecast and bits and forecast.minutes == config.minutes:
        facts["Expected"] = compare_with_forecast(forecast, bits, report.tokens_per_second, state.step)
    elif forecast and bits and config.minutes:
        facts["Expected"] = f"{forecast.bits_per_byte:.2f} bits per byte in {forecast.minutes:g} min, got {bits:.2f}"
    if data.companion is not None:
        facts["Companion"] = _describe_companion(run, bits, report.tokens_per_second)
    if state.start:
        in_bits = f" ({state.start.val_loss * bits / last['val_loss']:.3f} bits per byte)" if bits else ""
        facts["Before this run"] = f"validation loss {state.start.val_loss:.4f}{in_bits} of the initial weights"
    with suppress_out_of_memory():
        facts |= _score_on_passages(run, clock.find_deadline())
    if samples and config.input and data.metadata.text_bytes <= MAX_TRACED_BYTES:
        with contextlib.suppress(DataError):  # the text may have been moved
            max_companion = MAX_TRACED_BYTES - data.metadata.text_bytes
            training_text = TracedText.read(config.values(), data.fingerprint, max_companion)
            written = [each.text for each in samples]
            share = describe_share([span for text in written for span in training_text.find_spans(text)], written)
            facts["Copied"] = "; ".join([share, *training_text.notes])
    stopped_early = has_stopped_early(state, config)
    if stopped_early:
        facts["Stopped"] = f"early: the last {state.worse} evaluations were no better"
    prompts = [answer.prompt for answer in answers]
    columns = [each.text for each in prompts], [each.text for each in answers], [each.expected for each in prompts]
    before = state.start.answers if state.start and state.start.prompts == columns[0] else []
    right, judged = accuracy(answers)
    if judged:
        facts["Answers"] = f"{right} of {judged} exactly right ({right / judged:.0%})"

    lines = [f"# {run.dir.name}", "", "| | |", "|---|---|"]
    lines += [table_row([key, cell(value)]) for key, value in facts.items()]
    if answers:
        lines += ["", "## Answers", "", *render_answers(*columns, before)]
    for each in samples:
        lines += ["", "## Sample", "", *(f"> {line}" for line in _format_text(each).splitlines())]
    lines += ["", "## Configuration", "", "Settings that differ from the defaults, and their source:", ""]
    lines += [table_row(["key", "value", "source"]), table_row(["---"] * 3)]
    changed = [(key, value) for key, value in config.values().items() if config.sources.get(key) != "default"]
    lines += [table_row([key, cell(str(value)), config.sources.get(key, "")]) for key, value in changed]
    try:
        with atomic_write(run.dir / SUMMARY) as file:
            file.write(("\n".join(lines) + "\n").encode(errors="replace"))  # file names may hold any bytes
    except OSError as problem:
        print(describe_unwritable(run.dir / SUMMARY, problem))

    print()
    if answers:
        head, rule, *answered = render_answers(*columns, before, MAX_PRINTED_CHARACTERS)
        answered.sort(key=lambda row: "| no: " not in row)  # wrong ones first
        print(head, rule, *answered[:MAX_PRINTED_ANSWERS], sep="\n")
        if more := len(answered[MAX_PRINTED_ANSWERS:]):
            print(f"... and {more} more in {run.dir / SUMMARY}")
    if samples:
        print("Samples, each after [the beginning of a held-out passage]:\n")
    for each in samples:
        print(f"{_format_text(each)}\n")
    for key, value in facts.items():
        print(f"{key:<16} {value}")
    existing = [name for name in (SUMMARY, CURVE, METRICS, SAMPLES_TABLE) if (run.dir / name).exists()]
    existing += [f"{name}/" for name in ("checkpoints", "best", BASE) if (run.dir / name).exists()]
    print(f"{'Files':<16} {run.dir}: {', '.join(existing)}")
    is_past_best = stopped_early or facts.get("Verdict", "").startswith(MEMORISING)
    checkpoint = shlex.quote(str(run.dir / "best" if is_past_best else run.dir))
    print(f'\nTalk to it: python generate.py --checkpoint {checkpoint} --prompt "..." or --interactive')


def _format_text(sample: Answer) -> str:
    """Return a prompt in brackets, and the text that the model wrote after it."""
    return printable(f"[{sample.prompt.text}]{sample.text}")


def _describe_companion(run: Run, bits_per_byte: float | None, tokens_per_second: float | None) -> str:
    """Describe the companion: its share of the tokens, and whether it seems to have helped."""
    config, forecast = run.config, run.config.forecast
    share = 1 - run.passes * run.data.layout.windows / run.state.sequences_seen
    text = f"{config.companion}: {share:.0%} of all tokens read"
    if forecast is None or not forecast.alone or not bits_per_byte:
        return text
    gain = forecast.alone - bits_per_byte
    verdict = f"it seems to have helped by {gain:.2f}"
    if gain <= 0 and forecast.tokens_per_second > MISSED_SPEED_RATIO * (tokens_per_second or 0):
        verdict = "training was slower than timed: only a run without it tells whether it helped"
    elif gain <= 0:
        verdict = "it seems not to have helped (compare with a run without it)"
    return f"{text}. Forecast without it: {forecast.alone:.2f} bits per byte; {verdict}"


def _describe_early_end(run: Run) -> str:
    """Describe why the run ended before its `minutes` were over; empty if it did not."""
    config, state = run.config, run.state
    if not config.minutes or has_stopped_early(state, config) or time_progress(state, config) >= 1 or config.companion:
        return ""
    return NOT_MORE if config.sources.get("epochs") == CHOSEN else "more epochs would use the rest"


def compare_with_forecast(forecast: Forecast, bits: float, tokens_per_second: float | None, steps: int) -> str:
    """Compare the loss with the dial's forecast, and explain the difference."""
    outcome = f"{forecast.bits_per_byte:.2f} bits per byte, got {bits:.2f}"
    if abs(bits - forecast.bits_per_byte) <= forecast.error:
        return f"{outcome}: within the forecast's +- {forecast.error:.2f}"
    if steps < MIN_JUDGED_STEPS:
        return f"{outcome}: the run took only {plural(steps, 'step')}; more --minutes tell more"
    slower = forecast.tokens_per_second / (tokens_per_second or forecast.tokens_per_second)
    if slower > MISSED_SPEED_RATIO and bits > forecast.bits_per_byte:
        return f"{outcome}: training was {slower:.2g} times slower than timed"
    if slower < 1 / MISSED_SPEED_RATIO and bits < forecast.bits_per_byte:
        return f"{outcome}: training was {1 / slower:.2g} times faster than timed"
    if bits > forecast.bits_per_byte:
        return f"{outcome}: outside the forecast's +- {forecast.error:.2f}, this text is harder than it looked"
    return (
        f"{outcome}: better than the forecast's +- {forecast.error:.2f}; held-out passages are from the same books or "
        "files"
    )


def judge_losses(
    rows: list[dict[str, Any]],
    evaluated: list[dict[str, Any]],
    epochs: float,
    has_companion: bool = False,
    has_read_all: bool = False,
) -> dict[str, str]:
    """Judge the losses: the gap between training and validation, and whether more steps would help. `has_read_all`:
    more passes would not."""
    trained = [row["train_loss"] for row in rows if "train_loss" in row][-max(1, len(rows) // 20) :]
    if len(evaluated) < MIN_EVALUATIONS or not trained:
        return {}
    last, lowest = evaluated[-1], min(evaluated, key=lambda row: row["val_loss"])
    gap = last["val_loss"] - fmean(trained)
    apart = f"{fmean(trained):.4f}, {abs(gap):.3f} {'below' if gap > 0 else 'above'} the validation loss"
    before = evaluated[-1 - max(1, len(evaluated) // 4)]
    if last["val_loss"] > RISEN_RATIO * lowest["val_loss"]:
        meaning = f"{MEMORISING} since epoch {lowest.get('epoch', 0):.2g}; use best/"
    elif has_companion:
        meaning = "more --minutes or a larger companion would help"
    elif last["val_loss"] < FALLEN_RATIO * before["val_loss"]:
        meaning = f"still falling at the end: {'more' if has_read_all else 'more time or more'} text would help"
    else:
        meaning = "level at the end: more time alone would not help much; more text or a larger model might"
    return {"Training loss": f"{apart}; the text was read {epochs:.2g} times", "Verdict": meaning}


def finished_message(run: Run) -> str:
    """Return the message for a run that is already finished."""
    config, state = run.config, run.state
    if has_stopped_early(state, config):
        more = f"--stop_after_worse {2 * config.stop_after_worse}"
    elif time_progress(state, config) >= 1:
        more = f"--minutes {2 * config.minutes:g}"
    elif config.max_steps:
        more = f"--max_steps {state.step * 2}"
    else:
        more = f"--epochs {2 * max(config.epochs, int(run.epoch))}"
    go_on = f"To continue: {more}."
    if state.switch is not None and state.sequences_seen >= state.switch.end:
        go_on = "Your text was read as often as is useful beside a companion."
    return (
        f"This run is finished at step {state.step:,}; see {config.run_dir / SUMMARY}. {go_on} To start over: --resume "
        "never, which renames the old run."
    )


# Held-out passages


def _score_on_passages(run: Run, deadline: float) -> dict[str, str]:
    """Score a finished run on held-out passages, as many as are scored until `deadline`, a time.monotonic(): how often
    it picks the right next sentence and, if it started from weights trained on another text, what it has learned and
    forgotten. Return {name: fact}; {} if the token folder is gone."""
    try:
        passages = read_held_out(run.data.metadata)
        facts = {}
        if run.data.metadata.chat_template is None:
            log.info("Scoring    next sentences of held-out passages ...")
            texts = [passage.text for passage in pick_evenly(passages)]
            guessed = score_next_sentences(run.model, run.data.tokenizer, texts, deadline)
            facts = {"Next sentence": str(guessed)} if guessed.total else {}
        return facts | (_compare_with_start(run, passages, deadline) if run.config.init_from else {})
    except (DataError, TokenizerError, CheckpointError):
        return {}


def _compare_with_start(run: Run, passages: list[Passage], deadline: float) -> dict[str, str]:
    """Compare the weights with the initial ones, on held-out passages of the text those were trained on, and of the new
    text. Raises CheckpointError if the initial weights or their tokens are gone."""
    base = open_checkpoint(str(run.config.init_from))
    if base.weights_sha256() != run.state.initialized_from:  # trained further since
        return {}
    then, now = find_training_tokens(base), run.data.metadata
    if then is None or then.tokens_sha256 == now.tokens_sha256 or then.tokenizer_sha256 != now.tokenizer_sha256:
        return {}
    held_out = {passage.text for passage in read_held_out(then)}
    old = pick_evenly([passage for passage in passages if passage.text in held_out])
    new = pick_evenly([passage for passage in passages if passage.text not in held_out])
    known = find_in_training(then, new)
    parts = {"Old text": old, "New text": [passage for passage in new if passage.text not in known]}
    before, tokenizer = load_checkpoint(base, run.model.device.type, torch.float32)
    facts: dict[str, str] = {}
    change: dict[str, Difference] = {}
    for name, chosen in parts.items():
        if not chosen:
            facts[name] = "no passage is held out from both runs"
            continue
        count = plural(len(chosen), "held-out passage")
        log.info(f"Scoring    {count} of the {name.lower()}, with new and initial weights ...")
        until = deadline if change else (time.monotonic() + deadline) / 2  # each text gets half of the time
        pair = score_pair((run.model, before), tokenizer, chosen, until)
        change[name] = compare_scores(*pair)
        after, was = (add_scores(scores).bits_per_byte for scores in pair)
        scored = plural(len(pair[0]), "held-out passage")
        facts[name] = f"{was:.3f} -> {after:.3f} bits per byte, on all tokens of {scored}"
    if len(change) == 2:
        facts["Learned"] = _describe_learning(change["Old text"], change["New text"])
    return facts


def _describe_learning(old: Difference, new: Difference) -> str:
    """Describe two differences (after minus before, bits per byte) in a sentence."""
    gain = "learned the new text" if new.is_clear and new.mean < 0 else "learned little of the new text"
    if old.mean > max(NOTICEABLE_BITS, old.error):
        return f"it {gain} and forgot some of the old"
    return f"it {gain} and {'also improved on the old' if old.is_clear and old.mean < 0 else 'kept the old'}"
