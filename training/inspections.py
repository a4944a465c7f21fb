"""--dry_run forecasts the time, memory and disk space of a run. --profile lists the longest operations of a step."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from common.checkpoint import find_problems
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write, free_space, nearest_existing
from common.lora import lora_of
from common.machine import available_ram
from common.output import byte_size, duration, plural, si
from common.script import is_main_process
from training.clock import Clock
from training.compilation import prepare
from training.evaluate import evaluated_windows, validation_loss
from training.hardware import Hardware
from training.memory import count_held_bytes, estimate_memory
from training.mirror import MAX_COPIES, Mirror
from training.parallel import max_over_processes
from training.records import read_metrics
from training.run import Run
from training.schedule import decay_share, decay_start, epoch_sequences, steps_left
from training.step import accumulate, read_batch, train_step, update
from training.store import Store, dry_run_path

DRY_RUN_STEPS, MIN_TIMED_SECONDS = 2, 2.0  # a dry run with shorter steps takes more of them
FIRST_LOSS_MARGIN = 0.5  # nats around ln(vocabulary), the loss of an untrained model
PROBE_BYTES = 1 << 20
MAX_DRY_RUN_STEPS = 50
PROFILED_STEPS, LISTED_OPERATIONS = 3, 15


@contextlib.contextmanager
def temporary_folder(run: Run) -> Iterator[None]:
    """Give the run an empty folder inside, which is deleted at the end. If the process is killed before, the next
    session of the run deletes it."""
    run.dir = dry_run_path(run.dir)
    if not is_main_process():
        yield
        return
    with Store(run.dir).locked():
        shutil.rmtree(run.dir, ignore_errors=True)
        run.dir.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(run.dir, ignore_errors=True)


def time_step(run: Run, clock: Clock, first_step: int) -> float:
    """Return the mean seconds of the steps since `first_step`, or of some more if these were short. Raises ConfigError
    if none was taken."""
    if run.state.step == first_step:
        raise ConfigError(f"No step can be taken: {clock.max_hours_message}")
    seconds = clock.step_seconds or MIN_TIMED_SECONDS
    (needed,) = max_over_processes(MIN_TIMED_SECONDS / seconds)  # the same number in every process
    more = min(MAX_DRY_RUN_STEPS, int(needed))
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
    left, tokens = run.total_steps - run.state.step, run.tokens_per_step
    estimate = estimate_memory(config, run.model, hardware, run.rows_at_once) + count_held_bytes(run.data, hardware)
    total = f" of {byte_size(hardware.memory_bytes)}" if hardware.memory_bytes else ""
    several = f" in each of {hardware.processes} processes" if hardware.processes > 1 else ""
    need, free = run.disk_bytes, free_space(config.run_dir)
    count, in_all = f"{left:,} {'left ' if run.state.step else ''}", f", {left * tokens / 1e6:,.1f}M tokens in all"
    if config.minutes:  # the forecast has their number
        count = in_all = ""
    print(
        f"Steps      {count}of {tokens:,} tokens ({config.sequences_per_step} sequences, {run.rows_at_once} at "
        f"once{several}){in_all}\n"
        f"Memory     about {byte_size(estimate)}{total} (an estimate){_describe_free_memory(hardware)}; plus "
        f"{byte_size(run.checkpoint_bytes)} of RAM while a checkpoint is written\n"
        f"Disk       about {byte_size(need)} of {byte_size(free)} free in {config.run_dir} (two checkpoints, the best "
        f"and the one being written){_warn_of_space(need, free)}"
    )
    if mirror is not None:
        _require_usable_mirror(mirror)
        need, free = MAX_COPIES * run.checkpoint_bytes, free_space(mirror.dir)
        print(
            f"Mirror     {mirror.root} can be written and read; about {byte_size(need)} of {byte_size(free)} free "
            f"needed{_warn_of_space(need, free)}"
        )


def print_forecast(run: Run, clock: Clock, first_step: int, seconds: float) -> None:
    """Print the speed of the run, and the time for the steps from `first_step` on. `seconds`: per step."""
    config, hardware, saving = run.config, run.hardware, clock.write_seconds or 0.0
    evaluating = _time_evaluation(run)
    steps = run.total_steps - first_step
    if config.minutes:
        steps = _steps_in_time(run, seconds, evaluating, saving)
    evaluations = math.ceil(steps / config.eval_interval) if config.eval_interval else 0
    total = seconds * steps + evaluating * evaluations
    speed = run.tokens_per_step / seconds
    mfu = f", MFU {speed * run.model.flops_per_token() / hardware.peak_flops:.0%}" if hardware.peak_flops else ""
    print(
        f"Speed      {seconds:.3g} s a step, {si(speed)} tokens/s{mfu}\n"
        f"Saving     {saving:.1f} s per checkpoint, while the training goes on; this one was verified\n"
        f"Evaluating about {duration(evaluating)} for {plural(evaluated_windows(run.data, config), 'window')}, "
        f"{plural(evaluations, 'time')}{', without the answers to prompts' if config.eval_prompts else ''}\n"
        f"Time       about {duration(total)} for {steps:,} steps with their evaluations"
    )
    if units := hardware.units_per_hour(config):
        print(f"Cost       about {total / 3600 * units:.1f} compute units at {units:g} an hour")
    if hardware.is_cuda and (peak := hardware.peak_memory()):
        print(f"Peak       {peak / 1e9:.2f} GB of GPU memory in these steps")
    print("Dry run: no run was written. Leave --dry_run out to train.")


def _steps_in_time(run: Run, seconds: float, evaluating: float, saving: float) -> int:
    """Print the forecast for `minutes`, and return the number of steps that fit, without compiling. Takes the seconds
    of a step, an evaluation and a save."""
    config = run.config
    ending = replace(run.state, ending_seconds=seconds + evaluating + saving)
    step_seconds = seconds + (evaluating / config.eval_interval if config.eval_interval else 0.0)
    steps = steps_left(ending, run.data.windows, config, step_seconds)
    remaining_steps = run.total_steps - run.state.step
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


def _describe_free_memory(hardware: Hardware) -> str:
    free = torch.cuda.mem_get_info()[0] if hardware.is_cuda else available_ram()
    return f", {byte_size(free)} free now" if free is not None else ""


def _warn_of_space(need: int, free: int) -> str:
    return ". Warning: not enough space" if need > free else ""


def _require_usable_mirror(mirror: Mirror) -> None:
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


def check_results(run: Run, first_step: int) -> None:
    """Verify the checkpoint of a dry run, and print the first loss of a new run. Raises CheckpointError if the
    checkpoint is damaged."""
    if not is_main_process():
        return
    newest = Store(run.dir).steps()[0]
    if problems := find_problems(newest):
        raise CheckpointError(f"A checkpoint written to {run.dir} is damaged: {'; '.join(problems)}.")
    if first_step == 0 and run.state.initialized_from is None:
        _check_first_loss(run, read_metrics(run.dir)[0]["train_loss"])


def _check_first_loss(run: Run, loss: float) -> None:
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


def _time_evaluation(run: Run) -> float:
    """Estimate the seconds of an evaluation from one batch, after a warm-up batch."""
    if not run.config.eval_interval:
        return 0.0
    windows = evaluated_windows(run.data, run.config)
    some = min(run.rows_at_once * run.hardware.processes, windows)
    validation_loss(run, some)
    run.hardware.synchronize()
    began = time.perf_counter()
    validation_loss(run, some)
    run.hardware.synchronize()
    return (time.perf_counter() - began) * windows / some


def profile(run: Run) -> None:
    """Profile real steps, print the longest operations and what takes most of a step. Writes no run."""
    hardware, parts = run.hardware, dict.fromkeys(("reading data", "the model", "the update"), 0.0)
    prepare(run)
    train_step(run)  # warm-up
    with torch.profiler.profile() as trace:
        for _ in range(PROFILED_STEPS):
            times = [time.perf_counter()]
            batch = read_batch(run)
            hardware.synchronize()
            times.append(time.perf_counter())
            loss = accumulate(run, batch)
            hardware.synchronize()
            times.append(time.perf_counter())
            update(run, loss, run.learning_rate)
            hardware.synchronize()
            times.append(time.perf_counter())
            run.advance()
            for part, (began, ended) in zip(parts, itertools.pairwise(times), strict=True):
                parts[part] += ended - began
    column = "self_device_time_total" if hardware.is_cuda else "self_cpu_time_total"
    print(trace.key_averages().table(sort_by=column, row_limit=LISTED_OPERATIONS, max_name_column_width=40))
    total, largest = sum(parts.values()), max(parts, key=lambda part: parts[part])
    print(
        f"Profile    {largest} takes {parts[largest] / total:.0%} of a step of {total / PROFILED_STEPS:.4f} s (longer "
        "than in training, because of the profiler). This was a profile: no run was written."
    )
