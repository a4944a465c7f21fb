"""--dry_run tests a run before it costs anything, and forecasts its time, memory and disk space. --profile lists the
longest operations of a step."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from common.checkpoint import find_problems
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write, free_space, nearest_existing
from common.lora import lora_of
from common.machine import available_ram
from common.output import byte_size, duration, si
from common.script import is_rank_0, world
from training.clock import Clock
from training.compilation import retry_smaller
from training.config import Config
from training.evaluate import evaluated_windows, validation_loss
from training.fit import take_steps
from training.hardware import Hardware
from training.memory import count_held_bytes, estimate_memory, memory_advice
from training.mirror import MAX_COPIES, Mirror
from training.parallel import max_over_ranks, process_group
from training.plan import make_run
from training.records import read_metrics
from training.resume import start_or_resume
from training.run import Run
from training.saver import Saver
from training.schedule import decay_share, decay_start, epoch_sequences, steps_left
from training.state import Previous
from training.step import accumulate, apply_update, forward_backward, read_batch, train_step
from training.stop import Stop, signals_interrupt
from training.store import Store, dry_run_path
from training.summary import finished_message

DRY_RUN_STEPS, MIN_TIMED_SECONDS = 2, 2.0  # a dry run with shorter steps takes more of them
FIRST_LOSS_MARGIN = 0.5  # nats around ln(vocabulary), the loss of an untrained model
PROBE_BYTES = 1 << 20
MAX_TIMED_STEPS = 50
PROFILED_STEPS, LISTED_OPERATIONS = 3, 15


def inspect(config: Config, started: float) -> int:
    """Dry-run or profile the run of `config`. `started`: the time.perf_counter() at which the command began. Return the
    exit code."""
    with process_group(config), signals_interrupt():
        run, previous = make_run(config)
        with memory_advice(config, run.shape, run.hardware, lambda: run.rows_at_once):
            if config.profile:
                profile(run)
            else:
                dry_run(run, previous, started)
    return 0


def dry_run(run: Run, previous: Previous, started: float) -> None:
    """Print what the run needs, take its next two steps and save in a temporary folder, and print a forecast. Writes no
    run. Raises what would prevent the run."""
    mirror = run.mirror
    with temporary_run(run.dir) as folder:
        run.dir, run.mirror = folder, None
        start_or_resume(run, previous)
        run.config = replace(run.config, log_interval=1, tracker=None)
        first = run.state.step
        if run.took_last_step:
            print(f"Resume     {finished_message(run)}\nDry run: no run was written.")
            return
        print_needs(run, mirror)
        clock = Clock(run, started)
        stop = Stop()
        with Saver(run, clock, stop) as saver:
            take_steps(run, clock, stop, saver, max_steps=first + DRY_RUN_STEPS)
            if run.state.step == first:
                raise ConfigError(f"No step can be taken: {clock.limit_reached}")
            seconds = time_step(run, clock)
            saver.checkpoint_due, saver.logged_at = True, math.inf  # do not print the temporary folder
            saver.save()
        if is_rank_0():
            if problems := find_problems(saver.store.steps()[0]):
                raise CheckpointError(f"A checkpoint written to {folder} is damaged: {'; '.join(problems)}.")
            if first == 0 and run.state.initialized_from is None:
                check_first_loss(run, read_metrics(run.dir)[0]["train_loss"])
    evaluating = time_evaluation(run)
    if is_rank_0():
        print_forecast(run, clock, run.last_step - first, seconds, evaluating)
    print("Dry run: no run was written. Leave --dry_run out to train.")


@contextlib.contextmanager
def temporary_run(run_dir: Path) -> Iterator[Path]:
    """Return a context with an empty run folder, which is deleted at its end. If the process is killed before, the next
    session of the run deletes it."""
    path = dry_run_path(run_dir)
    if not is_rank_0():
        yield path
        return
    with Store(path).locked():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def time_step(run: Run, clock: Clock) -> float:
    """Return the mean seconds of the steps taken, or of some more if these were short."""
    seconds = clock.step_seconds or MIN_TIMED_SECONDS
    more = min(MAX_TIMED_STEPS, int(max_over_ranks(MIN_TIMED_SECONDS / seconds)[0]))  # the same number in every process
    if not more:
        return seconds
    run.hardware.synchronize()
    began = time.perf_counter()
    for _ in range(more):
        train_step(run)
        run.advance(clock.elapsed, clock.ending_seconds)
    run.hardware.synchronize()
    return (time.perf_counter() - began) / more


def print_needs(run: Run, mirror: Mirror | None) -> None:
    """Print the steps, memory and disk space that the run needs. Raises CheckpointError if the mirror cannot be
    used."""
    config, hardware = run.config, run.hardware
    left, tokens = run.last_step - run.state.step, run.tokens_per_step
    estimate = estimate_memory(config, run.model, hardware, run.rows_at_once) + count_held_bytes(run.data, hardware)
    total = f" of {byte_size(hardware.memory_bytes)}" if hardware.memory_bytes else ""
    several = f" in each of {world().size} processes" if world().size > 1 else ""
    need, free = run.disk_bytes, free_space(config.run_dir)
    print(
        f"Steps      {'at most ' if config.minutes else ''}{left:,} {'left ' if run.state.step else ''}of {tokens:,} "
        f"tokens ({config.sequences_per_step} sequences, {run.rows_at_once} at once{several}), "
        f"{left * tokens / 1e6:,.1f}M tokens in all\n"
        f"Memory     about {byte_size(estimate)}{total} (an estimate){describe_free_memory(hardware)}; plus "
        f"{byte_size(run.checkpoint_bytes)} of RAM while a checkpoint is written\n"
        f"Disk       about {byte_size(need)} of {byte_size(free)} free in {config.run_dir} (two checkpoints, the best "
        f"and the one being written){warn_of_space(need, free)}"
    )
    if mirror is not None:
        require_usable_mirror(mirror)
        need, free = MAX_COPIES * run.checkpoint_bytes, free_space(mirror.dir)
        print(
            f"Mirror     {mirror.root} can be written and read; about {byte_size(need)} of {byte_size(free)} free "
            f"needed{warn_of_space(need, free)}"
        )


def print_forecast(run: Run, clock: Clock, steps: int, seconds: float, evaluating: float) -> None:
    """Print the speed of the run, and the time for `steps`. `seconds`: per step; `evaluating`: per evaluation."""
    config, hardware, saving = run.config, run.hardware, clock.write_seconds or 0.0
    if config.minutes:
        steps = steps_in_time(run, seconds, evaluating, saving)
    evaluations = math.ceil(steps / config.eval_interval) if config.eval_interval else 0
    total = seconds * steps + evaluating * evaluations
    speed = run.tokens_per_step / seconds
    mfu = f", MFU {speed * run.model.flops_per_token() / hardware.peak_flops:.0%}" if hardware.peak_flops else ""
    print(
        f"Speed      {seconds:.3g} s a step, {si(speed)} tokens/s{mfu}\n"
        f"Saving     {saving:.1f} s per checkpoint, while the training goes on; this one was verified\n"
        f"Evaluating about {duration(evaluating)} for {evaluated_windows(run.data, config):,} windows, {evaluations} "
        f"times{', without the answers to prompts' if config.eval_prompts else ''}\n"
        f"Time       about {duration(total)} for {steps:,} steps with their evaluations"
    )
    if at_risk := seconds_between_checkpoints(run, seconds):
        print(f"At risk    at most {duration(min(at_risk, total))} of training, if the machine dies between two saves")
    if units := hardware.units_per_hour(config):
        print(f"Cost       about {total / 3600 * units:.1f} compute units at {units:g} an hour")
    if hardware.is_cuda and (peak := hardware.peak_memory()):
        print(f"Peak       {peak / 1e9:.2f} GB of GPU memory in these steps")


def steps_in_time(run: Run, seconds: float, evaluating: float, saving: float) -> int:
    """Print the forecast for `minutes`, and return the number of steps that fit, without compiling. Takes the seconds
    of a step, an evaluation and a save."""
    config = run.config
    ending = replace(run.state, ending_seconds=seconds + evaluating + 2 * saving)
    step_seconds = seconds + (evaluating / config.eval_interval if config.eval_interval else 0.0)
    steps = steps_left(ending, run.data.windows, config, step_seconds)
    remaining_steps = run.last_step - run.state.step
    epochs = steps * config.sequences_per_step / epoch_sequences(run.data.windows, config)
    if not steps:
        fits = "Warning: too few for a step. Increase --minutes"
    elif steps == remaining_steps:
        count = f"time for all {config.epochs} epochs" if config.epochs > 1 else "time for the whole epoch"
        fits = f"{count}, so the run ends before the minutes are over. To use them, raise --epochs"
    else:
        fits = f"time for about {steps:,} steps ({epochs:.2g} epochs)"
    first = min(decay_start(remaining_steps, config), round((1 - decay_share(config)) * steps))
    print(f"Minutes    {config.minutes:g}: {fits}. The learning rate decays from about step {first:,}")
    return steps


def describe_free_memory(hardware: Hardware) -> str:
    if hardware.is_cuda:
        return f", {byte_size(torch.cuda.mem_get_info()[0])} free now"
    free = available_ram()
    return f", {byte_size(free)} free now" if free is not None else ""


def warn_of_space(need: int, free: int) -> str:
    return ". Warning: not enough space" if need > free else ""


def require_usable_mirror(mirror: Mirror) -> None:
    """Write a file next to the mirror and read it back. Raises CheckpointError if that fails."""
    path, content = nearest_existing(mirror.dir) / f".probe-{os.getpid()}.tmp", os.urandom(PROBE_BYTES)
    try:
        with atomic_write(path) as file:
            file.write(content)
        is_same = path.read_bytes() == content
        path.unlink()
        if not is_same:
            raise OSError("the bytes read differ from the bytes written")
    except OSError as problem:
        raise CheckpointError(
            f"A file in --checkpoint_dir {mirror.root} could not be written and read back "
            f"({problem.strerror or problem}). Fix that, or choose another folder."
        ) from None


def check_first_loss(run: Run, loss: float) -> None:
    """Print the first loss, and warn if it is not that of an untrained model, which finds all tokens about equally
    likely. The base of adapters is trained, so there is nothing to compare."""
    if lora_of(run.model) is not None:
        print(f"First loss {loss:.2f} (the base's)")
        return
    expected = math.log(run.data.vocab_size)
    print(f"First loss {loss:.2f}; an untrained model has ln({run.data.vocab_size:,}) = {expected:.2f}")
    if not abs(loss - expected) < FIRST_LOSS_MARGIN:
        print(
            "Warning: these should be close. Check that the tokenizer belongs to these tokens, and any change to the "
            "model's initialisation."
        )


def time_evaluation(run: Run) -> float:
    """Estimate the seconds of an evaluation from one batch, after a warm-up batch."""
    if not run.config.eval_interval:
        return 0.0
    windows = evaluated_windows(run.data, run.config)
    some = min(run.rows_at_once * world().size, windows)
    validation_loss(run, some)
    run.hardware.synchronize()
    began = time.perf_counter()
    validation_loss(run, some)
    run.hardware.synchronize()
    return (time.perf_counter() - began) * windows / some


def seconds_between_checkpoints(run: Run, seconds: float) -> float | None:
    """Return the longest time between checkpoints if a step takes `seconds`; None if only the last step is saved."""
    config = run.config
    steps_an_epoch = epoch_sequences(run.data.windows, config) / config.sequences_per_step
    by_epochs = seconds * steps_an_epoch * config.checkpoint_interval
    times = [60 * config.checkpoint_minutes, seconds * config.checkpoint_steps, by_epochs]
    return min((seconds_between for seconds_between in times if seconds_between), default=None)


def profile(run: Run) -> None:
    """Profile real steps, print the longest operations and what takes most of a step. Writes no run."""
    hardware, parts = run.hardware, dict.fromkeys(("reading data", "the model", "the update"), 0.0)
    apply_update(run, retry_smaller(run, forward_backward))  # warm-up
    with torch.profiler.profile() as trace:
        for _ in range(PROFILED_STEPS):
            times = [time.perf_counter()]
            batch = read_batch(run)
            hardware.synchronize()
            times.append(time.perf_counter())
            loss = accumulate(run, batch)
            hardware.synchronize()
            times.append(time.perf_counter())
            apply_update(run, loss)
            hardware.synchronize()
            times.append(time.perf_counter())
            run.advance()
            for part, (began, ended) in zip(parts, itertools.pairwise(times), strict=True):
                parts[part] += ended - began
    own = "self_device_time_total" if hardware.is_cuda else "self_cpu_time_total"
    print(trace.key_averages().table(sort_by=own, row_limit=LISTED_OPERATIONS, max_name_column_width=40))
    total, largest = sum(parts.values()), max(parts, key=lambda part: parts[part])
    print(
        f"Profile    {largest} takes {parts[largest] / total:.0%} of a step of {total / PROFILED_STEPS:.4f} s (longer "
        "than in training, because of the profiler). This was a profile: no run was written."
    )
