"""Train a GPT-2 class language model on a token file.

    python train_colab_mmap.py --input my_text.txt --minutes 60   # chooses a model for the text and the machine
    python train_colab_mmap.py --config quickstart.json      # a model that answers questions, in minutes on a CPU
    python train_colab_mmap.py --config gpt2_small.json      # 134M parameters on datasets_cache/, on a GPU
    python train_colab_mmap.py --config gpt2_small.json --dry_run

Every key of the config is a flag. Running the same command again continues the run.
"""

from __future__ import annotations

import os
import time

from common.script import check_flags, end, is_main_process, world, writing_script
from training.config import BUILTIN_CONVERSATIONS, Config, parse_config

if __name__ == "__main__":
    STARTED = time.perf_counter()  # --minutes include importing torch
    check_flags(parse_config)  # before importing torch, which takes seconds: --help should not wait
    # A waiting thread spins this often before it sleeps. With libgomp's default of 300,000, a step
    # takes up to five times as long beside another busy program; with fewer, a quiet machine is
    # slower (docs/benchmarks/what_was_tried.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from common.checkpoint import Checkpoint
from common.errors import INTERRUPTED, CheckpointError
from common.lora import add_adapters
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.corpus import require_existing
from tokenization.metadata import TokenMetadata, find_metadata
from tokenization.token_folder import REPORT
from tokenize_local_bpe import tokenize_text
from training import companion, dial, inspections, plan
from training.choice import CHOSEN, read_choice
from training.clock import Clock
from training.compilation import prepare
from training.data import TokenData
from training.evaluate import Answer, check_prompts, evaluate, evaluate_before_steps, record_evaluation
from training.growth import find_growth
from training.hardware import configure_device, freeze_garbage, set_attention_backend
from training.memory import (
    Attempt,
    build_on_meta,
    fit_micro_batch,
    halve_rows,
    memory_advice,
    return_freed_memory,
    smallest_rows,
)
from training.mirror import Mirror
from training.parallel import max_over_processes, on_main_process, process_group
from training.report import Report, print_start, print_stop
from training.resume import find_previous, prepare_run_folder, recover_run, start_or_resume
from training.run import Prompt, Run
from training.saver import Saver
from training.state import MAX_STEPS, Fitted, Previous
from training.step import forward_backward, require_stable, update
from training.stop import Abandoned, Stop, signals_interrupt
from training.store import Store
from training.summary import finished_message, summarize
from training.tracker import require_tracker

T = TypeVar("T")


@writing_script(CheckpointError)
def main(argv: Sequence[str] | None = None) -> int:
    started = STARTED if __name__ == "__main__" else time.perf_counter()
    config = parse_config(argv)
    print(f"Run        {config.run_dir}{f' on {config.input}' if config.input else ''}", flush=True)
    require_existing([text for text in (config.input, config.companion) if text and text != BUILTIN_CONVERSATIONS])

    if config.needs_dial:
        config = choose_model(argv, config, started)
    if config.profile:
        profile(config)
    elif config.dry_run:
        with process_group(config), signals_interrupt():
            until_it_fits(dry_run, Attempt(config, started))
    else:
        with process_group(config):
            return until_it_fits(partial(train, ends_process=argv is None), Attempt(config, started))
    return 0


def choose_model(argv: Sequence[str] | None, requested: Config, started: float) -> Config:
    """Choose the model for the text and this machine, or read what an earlier session chose. If the text has changed
    since, continue from the best weights on the text as it is now."""
    chosen = read_choice(requested)
    resume = requested.resume
    if chosen is not None and companion.was_added_or_left_out(chosen, requested):
        chosen, resume = None, "never"
    if chosen is None:
        choose = companion.choose if requested.companion else dial.choose
        return replace(choose(argv, requested, started), resume=resume)
    config = replace(parse_config(argv, chosen.settings, CHOSEN), forecast=chosen.forecast)
    if "companion" in chosen.settings:  # the minutes were too short for one
        config = companion.without(config)
    growth = find_growth(config) if world().size == 1 else None  # a changed text is refused later
    if growth is None:
        return config
    init = Previous(init=Checkpoint(growth.weights))
    data_dir, _ = tokenize_input(replace(config, init_from=str(growth.weights)), init)
    if not growth.has_changed(data_dir):  # only its tokens were gone
        return config
    if config.companion:
        return companion.choose(argv, config, started, growth)
    return dial.choose_continuation(argv, config, growth, str(data_dir), started)


def until_it_fits(session: Callable[[Attempt], T | Attempt], attempt: Attempt) -> T:
    """Return what `session` returns. If memory ran out, that is how to begin again, as after a kill."""
    while isinstance(result := session(attempt), Attempt):
        attempt = result
        return_freed_memory()  # all that the session has held
    return result


def train(attempt: Attempt, ends_process: bool) -> int | Attempt:
    """Train a run until it is finished or stopped. Return the exit code or, if memory ran out, how to
    begin again. `ends_process`: the process ends after the training."""
    with contextlib.ExitStack() as lock:
        run, previous = make_run(attempt.config, attempt.rows, lock)
        with memory_advice(run):
            has_summary = start_or_resume(run, previous)
            if attempt.rows:
                run.state.fitted = Fitted(attempt.rows, run.hardware.name)
            clock = Clock(run, attempt.started)
            with Stop(ends_process) as stop, Saver(run, clock, stop) as saver:
                if has_summary:
                    print(finished_message(run))  # the saver still updates the mirror
                else:
                    prepare_run_folder(run)
                    print_start(run, clock)
                    with contextlib.suppress(Abandoned):
                        report, answers = take_steps(run, clock, stop, saver)
                        if run.is_done:
                            saver.wait()
                            summarize(run, report, answers)
                            has_summary = True
                    saver.save_unsaved_step()  # after a signal, a limit, or running out of memory
            if stop.begins_again:
                return halve_rows(run, replace(run.config, resume="auto"), clock.elapsed)
    if has_summary:
        return INTERRUPTED if stop.requested and not ends_process else 0
    return print_stop(run, clock)


def take_steps(
    run: Run, clock: Clock, stop: Stop, saver: Saver, max_steps: int = MAX_STEPS
) -> tuple[Report, list[Answer]]:
    """Train to the last step, or until a signal, a limit or `max_steps`. Return the report and the
    answers of the last evaluation. Raises Abandoned if a signal or a lack of memory ends a step."""
    state, answers = run.state, list[Answer]()
    if not run.is_done:
        with clock.paused("starting"), stop.abandonable():
            prepare(run)  # compiles
            evaluate_before_steps(run)
    state.elapsed_seconds, *_ = agree(clock, stop, saver)
    clock.require_time()
    with Report(run, clock) as report, freeze_garbage():
        while not (run.is_done or stop.agreed or state.step >= max_steps):
            if run.evaluation_due:  # the last session may have stopped during it
                report.announce_evaluation()
                with clock.paused("evaluating"), stop.abandonable(is_long=True):
                    evaluation = evaluate(run)
                elapsed, is_too_early = max_over_processes(clock.elapsed, saver.is_too_early)
                saver.best_due = record_evaluation(run, evaluation, elapsed, bool(is_too_early))
                report.add_evaluation(evaluation)
                answers = evaluation.answers
            else:
                lr = run.learning_rate
                with stop.abandonable():  # safe to abandon: only gradients change
                    loss = forward_backward(run)  # (), on the device, as all results
                grad_norm = update(run, loss, lr)  # skipped if the loss or the gradient is not finite
                clock.count_step()
                elapsed, ending, pace = agree(clock, stop, saver)
                run.advance(elapsed, ending)
                run.switch_if_due(pace)
                if run.hardware.device.type == "cpu" or report.is_due:
                    require_stable(run)  # synchronizes with a GPU, so only when a report does
                report.add_step(loss, grad_norm, lr)
            if not run.evaluation_due:  # a checkpoint includes the evaluation of its step
                saver.save_if_due()
    return report, answers


def agree(clock: Clock, stop: Stop, saver: Saver) -> tuple[float, float, float]:
    """Agree with the other processes, once a step, whether to stop (`stop.agreed`) and to save
    (`saver.checkpoint_due`): if any of them wants to. Return the elapsed seconds, the ending seconds and
    the pace, the largest of all processes."""
    wants_to_stop = stop.requested or bool(clock.max_hours_message) or saver.is_overtaken
    wants_to_save = saver.checkpoint_due or saver.minutes_passed
    stops, saves, *seconds = max_over_processes(
        wants_to_stop, wants_to_save, clock.elapsed, clock.ending_seconds, clock.pace
    )
    stop.agreed = bool(stops)
    saver.checkpoint_due = bool(saves)
    elapsed, ending, pace = seconds
    return elapsed, ending, pace


class Inputs(NamedTuple):
    """What the main process finds and makes for all processes."""

    previous: Previous
    shape: ModelConfig
    data_dir: str | None  # the token folder, if one was named or made
    companion_dir: str | None
    prompts: list[Prompt]
    base: Checkpoint | None  # the adapters' base


def prepare_inputs(config: Config, mirror: Mirror | None, lock: contextlib.ExitStack | None) -> Inputs:
    """Lock the run folder until `lock` is closed, find or restore the checkpoint to continue, and find
    or make the tokens. The main process does this."""
    if lock is None:
        previous = find_previous(config, mirror)
    else:
        lock.enter_context(Store(config.run_dir).locked())
        previous = recover_run(config, mirror)
    shape = plan.choose_shape(config, previous)
    configure_device(config, shape)  # reports what the machine lacks before a long text is tokenized
    prompts = plan.read_run_prompts(config)
    base = plan.find_adapter_base(config, previous)
    data_dir, companion_dir = tokenize_input(config, previous)
    if config.input:
        reports = " and ".join(str(Path(folder, REPORT)) for folder in (data_dir, companion_dir) if folder)
        print(f"Report     {reports}: what was read from each file, and what was left out")
    return Inputs(previous, shape, data_dir, companion_dir, prompts, base)


def tokenize_input(config: Config, previous: Previous) -> tuple[str | None, str | None]:
    """Tokenize `companion` and `input`, unless that was done. Return the token folder, or None if none is
    named, and that of the companion.

    Raises DataError if `data_dir` holds the tokens of another text, because other runs may need them.
    """
    if not config.input:
        return config.data_dir, None
    companion_dir = tokenizer_file = None
    if config.companion:
        if config.forecast is None and previous.saved is None:  # else it was checked before
            companion.require_suitable(config)
        other = plan.text_settings(replace(config, input=config.companion), previous, own_text=config.input)
        tokenize_text(other, quiet=True)
        companion_dir = other.output_dir
        (tokens,) = find_metadata(Path(companion_dir))
        tokenizer_file = str(TokenMetadata.read(tokens).path_beside("tokenizer_file"))
    settings = plan.text_settings(config, previous, tokenizer_file)
    tokenize_text(settings, quiet=True, may_replace=not config.data_dir)
    return settings.output_dir, companion_dir


def make_run(config: Config, rows: int | None = None, lock: contextlib.ExitStack | None = None) -> tuple[Run, Previous]:
    """Build the run with initial weights. Nothing of the run folder is loaded yet. `rows`: the
    micro-batch, if memory ran out with a larger one; `lock`: lock the folder until this stack is
    closed; None for a dry run.

    Raises ConfigError, DataError or CheckpointError for what cannot be done, MemoryExhausted if one
    sequence does not fit.
    """
    require_tracker(config)
    mirror = Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir and is_main_process() else None
    inputs = on_main_process(lambda: prepare_inputs(config, mirror, lock))
    previous, shape, data_dir, companion_dir, prompts, base = inputs
    was_compiled = previous.saved.state.compiled if previous.saved else None
    steps = plan.estimate_steps(config, companion_dir or data_dir, shape.max_seq_len)
    hardware = configure_device(config, shape, was_compiled, steps)
    print(hardware.describe())
    if hardware.is_cuda:  # garbage of an earlier run in this process (a notebook) holds memory
        return_freed_memory()

    data = TokenData.open(config, data_dir, shape.max_seq_len, hardware, companion_dir)
    set_attention_backend(data.layout.has_mask)
    print(data.describe() + plan.describe_repetition(data.windows, config))
    check_prompts(prompts, data)

    shape = replace(shape, vocab_size=data.vocab_size)
    sizes = build_on_meta(config, shape)
    print(plan.describe_model(config, sizes, base))
    if rows is None:
        fitted = previous.saved.state.fitted if previous.saved else None
        rows = smallest_rows(fit_micro_batch(config, sizes, hardware, data.gpu_bytes, fitted))
    torch.manual_seed(config.seed)
    model = TransformerLanguageModel(shape).to(hardware.device)
    model.activation_checkpointing = config.activation_checkpointing
    if base is not None:
        base.load_weights(model)
        add_adapters(model, config.lora(str(base.path), base.weights_sha256()))
    if hardware.is_cuda:  # the dial, or an earlier run in this process, may have had a higher peak
        torch.cuda.reset_peak_memory_stats()
    return Run(config, hardware, data, prompts, model, rows, mirror), previous


def profile(config: Config) -> None:
    """--profile: print the longest operations of a step. Writes no run."""
    with process_group(config), signals_interrupt():
        run, _ = make_run(config)
        with memory_advice(run):
            inspections.profile(run)


def dry_run(attempt: Attempt) -> Attempt | None:
    """--dry_run: take the next two steps in a temporary folder, save there, and print what the whole
    run would take. Return how to begin again if memory ran out. Raises what would prevent the run."""
    run, previous = make_run(attempt.config, attempt.rows)
    with memory_advice(run):
        mirror, run.mirror = run.mirror, None
        with inspections.temporary_folder(run):
            start_or_resume(run, previous)
            if run.took_last_step:
                print(f"Resume     {finished_message(run)}\nDry run: no run was written.")
                return None
            inspections.print_needs(run, mirror)
            run.config = replace(run.config, log_interval=1, tracker=None)
            first_step = run.state.step
            clock = Clock(run, attempt.started)
            stop = Stop()
            with Saver(run, clock, stop) as saver:
                with contextlib.suppress(Abandoned):
                    take_steps(run, clock, stop, saver, max_steps=first_step + inspections.DRY_RUN_STEPS)
                if stop.out_of_memory:
                    return halve_rows(run, attempt.config, clock.elapsed)
                step_seconds = inspections.time_step(run, clock, first_step)
                saver.save_unsaved_step(is_logged=False)
            inspections.check_results(run, first_step)
        inspections.print_forecast(run, clock, first_step, step_seconds)
    return None


if __name__ == "__main__":
    end(main)
