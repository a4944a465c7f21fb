"""--dry_run tries what can go wrong before it costs anything, and forecasts time, memory and disk. --profile tells how
long each part of a step takes, what to do about it, and the longest operations."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from common.checkpoint import Checkpoint, problems_of, write_checkpoint
from common.errors import CheckpointError
from common.files import atomic_write, free_space, nearest_existing
from common.lora import lora_of
from common.machine import available_ram
from common.output import byte_size, clock, si
from common.script import world
from training.config import Config
from training.evaluate import evaluated_windows, validation_loss
from training.hardware import Hardware
from training.loop import retry_smaller
from training.memory import estimate_memory, held_memory, memory_advice
from training.mirror import COPIES, Mirror
from training.parallel import on_rank_0, process_group
from training.plan import make_run
from training.resume import require_the_same, require_tokenizer
from training.run import Run
from training.saver import snapshot_of
from training.schedule import decay_share, decay_start, epoch_sequences, steps_left
from training.step import accumulate, apply_update, read_batch, train_step
from training.summary import BUSY, finished_message

TIMED_SECONDS = 8.0  # a longer step is timed on a part of its sequences
GPU_TIMED_SECONDS = 0.5  # of steps
FIRST_LOSS_MARGIN = 0.5  # nats around ln(vocabulary), the loss of an untrained model
PROBE_BYTES = 1 << 20
PARTS = ("data", "gradients", "update")
NOTICEABLE = 0.15  # of a step: below this share, a part other than the computation is not worth a change
PROFILE_SECONDS = 10.0
MAX_STEPS = 50
OPERATIONS = 10  # that are listed


def inspect(config: Config) -> int:
    """Make the run of `config`, and look at it as `dry_run` or `profile` asks for, instead of training. Returns the
    exit code."""
    with process_group(config):
        run = make_run(config)
        with memory_advice(config, run.shape, run.hardware, lambda: run.rows_at_once):
            (dry_run if config.dry_run else profile)(run)
    return 0


def dry_run(run: Run) -> None:
    """Print what is known before the first step; time steps, a save and an evaluation; print a forecast. Writes no run.

    Raises what would prevent the run: CheckpointError, ConfigError, and whatever a step raises.
    """
    config, model, data, hardware, state = run.config, run.model, run.data, run.hardware, run.state
    previous = run.previous
    if previous.saved is not None:
        on_rank_0(lambda: require_the_same(run))
        run.state = state = previous.saved.state
    elif (init := previous.init) is not None:
        on_rank_0(lambda: require_tokenizer(init, run))
    max_steps = run.last_step - state.step
    if run.finished:
        print(f"Resume     {finished_message(run)}\nDry run: no run was written.")
        return
    rest = "left " if state.step else ""
    estimate = estimate_memory(config, model, hardware, run.rows_at_once) + held_memory(data, hardware)
    of_memory = f" of {byte_size(hardware.memory_bytes)}" if hardware.memory_bytes else ""
    several = f" in each of {world().size} processes" if world().size > 1 else ""
    at_most = "at most " if config.minutes else ""
    need, free = run.disk_bytes, free_space(run.dir)
    print(
        f"Steps      {at_most}{max_steps:,} {rest}of {run.tokens_per_step:,} tokens ({config.sequences_per_step} "
        f"sequences, {run.rows_at_once} at once{several}), {max_steps * run.tokens_per_step / 1e6:,.1f}M "
        f"tokens in all\n"
        f"Memory     about {byte_size(estimate)}{of_memory} (an estimate){free_memory(hardware)}; beside it "
        f"{byte_size(run.checkpoint_bytes)} of RAM while a checkpoint is written\n"
        f"Disk       about {byte_size(need)} in {config.run_dir} (two checkpoints, the best and the one being "
        f"written), of {byte_size(free)} that are free{too_little(need, free)}"
    )
    if run.mirror is not None:
        probe(run.mirror)
        need, free = COPIES * run.checkpoint_bytes, free_space(run.mirror.dir)
        print(
            f"Mirror     {run.mirror.root} can be written and read; about {byte_size(need)} there, of "
            f"{byte_size(free)} that are free{too_little(need, free)}"
        )
    retry_smaller(run, check_first_loss)
    seconds, rows = retry_smaller(run, time_step)
    saving = on_rank_0(lambda: time_save(run))
    evaluating = time_evaluation(run)
    whole = config.sequences_per_step
    part = "" if rows == whole else f" (timed on {rows} of its {whole} sequences)"
    speed = run.tokens_per_step / seconds
    mfu = f", MFU {speed * model.flops_per_token() / hardware.peak_flops:.0%}" if hardware.peak_flops else ""
    if config.minutes:
        max_steps = steps_in_time(run, seconds, evaluating, saving)
    evaluations = math.ceil(max_steps / config.eval_interval) if config.eval_interval else 0
    total = seconds * max_steps + evaluating * evaluations
    print(
        f"Speed      {seconds:.3g} s a step{part}, {si(speed)} tokens/s{mfu}\n"
        f"Saving     a checkpoint was written, verified and loaded in {saving:.1f} s, beside the training\n"
        f"Evaluating about {clock(evaluating)} for {evaluated_windows(data, config):,} windows, {evaluations} times"
        f"{', answers to prompts aside' if config.eval_prompts else ''}\n"
        f"Time       about {clock(total)} for {max_steps:,} steps and their evaluations"
    )
    if at_risk := between_checkpoints(run, seconds):
        print(f"At risk    at most {clock(min(at_risk, total))} of training, if the machine is lost between two saves")
    if units := hardware.units_per_hour(config):
        print(f"Cost       about {total / 3600 * units:.1f} compute units at {units:g} an hour")
    if hardware.is_cuda and (peak := hardware.peak_memory()):
        print(f"Peak       {peak / 1e9:.2f} GB of GPU memory in the timed step")
    if previous.checkpoint is not None:
        print(f"Resume     {previous.checkpoint.path} is whole and fits; training would continue from it")
    print("Dry run: no run was written. Leave --dry_run out to train.")


def steps_in_time(run: Run, seconds: float, evaluating: float, saving: float) -> int:
    """Print the forecast of `minutes`, and return how many steps fit, compiling aside. Takes the seconds of a step, of
    an evaluation and of a save."""
    config = run.config
    ending = replace(run.state, ending_seconds=seconds + evaluating + 2 * saving)
    step_seconds = seconds + (evaluating / config.eval_interval if config.eval_interval else 0.0)
    steps = steps_left(ending, run.data.windows, config, step_seconds)
    limit = run.last_step - run.state.step
    epochs = steps * config.sequences_per_step / epoch_sequences(run.data.windows, config)
    if not steps:
        fits = "Warning: no step fits; give more"
    elif steps == limit:
        count = f"all {config.epochs} epochs fit" if config.epochs > 1 else "the epoch fits"
        fits = f"{count}, and the run ends early; --epochs asks for more"
    else:
        fits = f"about {steps:,} steps, {epochs:.2g} epochs, fit"
    first = min(decay_start(limit, config), round((1 - decay_share(config)) * steps))
    print(f"Minutes    {config.minutes:g}: {fits}. The learning rate falls from about step {first:,} on")
    return steps


def free_memory(hardware: Hardware) -> str:
    if hardware.is_cuda:
        return f", {byte_size(torch.cuda.mem_get_info()[0])} of it free now"
    free = available_ram()
    return f", {byte_size(free)} of it free now" if free is not None else ""


def too_little(need: int, free: int) -> str:
    return ". Warning: too little" if need > free else ""


def probe(mirror: Mirror) -> None:
    """Write a file where the mirror will be, and read it back. Raises CheckpointError if that fails."""
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
            f"--checkpoint_dir {mirror.root} cannot be written and read back ({problem.strerror or problem}). Fix "
            "that, or choose another folder."
        ) from None


def check_first_loss(run: Run) -> None:
    """Warn if the first loss is not that of an untrained model, to which all tokens are about equally likely. With
    adapters the base is trained, so there is nothing to compare."""
    run.model.eval()
    with torch.no_grad(), run.hardware.autocast():
        loss = float(run.step_model(*run.data.batch(0, run.rows_at_once)))
    run.model.train()
    if lora_of(run.model) is not None:
        print(f"First loss {loss:.2f}, that of the base")
        return
    expected = math.log(run.data.vocab_size)
    print(f"First loss {loss:.2f}; an untrained model has ln({run.data.vocab_size:,}) = {expected:.2f}")
    if not abs(loss - expected) < FIRST_LOSS_MARGIN:
        print(
            "Warning: these two should be close. Does the vocabulary belong to these tokens? Did you change the "
            "model's initialisation?"
        )


def time_save(run: Run) -> float:
    """Time writing, verifying and loading a checkpoint on the run's disk, in seconds. Deletes it afterwards."""
    parent = nearest_existing(run.dir.parent)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".dry_run-", dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_checkpoint(folder / "step", snapshot_of(run, copy=False))
        if problems := problems_of(folder / "step"):
            raise CheckpointError(f"A checkpoint written below {parent} is damaged: {'; '.join(problems)}.")
        checkpoint = Checkpoint(folder / "step")
        checkpoint.load_weights(run.model)
        checkpoint.load_optimizer(run.optimizer)
    return time.perf_counter() - began


def time_evaluation(run: Run) -> float:
    """Estimate the seconds of an evaluation from one batch, after one that does not count."""
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


def between_checkpoints(run: Run, seconds: float) -> float | None:
    """Return the longest time between checkpoints, if a step takes `seconds`; None if only the last step is saved."""
    config = run.config
    steps_an_epoch = epoch_sequences(run.data.windows, config) / config.sequences_per_step
    by_epochs = seconds * steps_an_epoch * config.checkpoint_interval
    times = [60 * config.checkpoint_minutes, seconds * config.checkpoint_steps, by_epochs]
    return min((seconds_between for seconds_between in times if seconds_between), default=None)


def smallest_part(run: Run) -> int:
    """Return the fewest sequences to time a step on: a compiled model takes one shape only, and a GPU is slow on
    less."""
    at_once = run.rows_at_once if run.hardware.is_cuda or run.hardware.compiles else 1
    return min(at_once * world().size, run.config.sequences_per_step)


def time_step(run: Run) -> tuple[float, int]:
    """Time a training step. Returns its seconds, and the number of sequences that were timed (the seconds are scaled to
    a step)."""
    config, hardware = run.config, run.hardware

    def timed(rows: int) -> float:
        hardware.synchronize()
        started = time.perf_counter()
        train_step(run, rows)
        hardware.synchronize()
        return time.perf_counter() - started

    whole = config.sequences_per_step
    unit = smallest_part(run)
    timed(unit)  # first use of every kernel
    seconds = timed(unit)
    rows = unit
    if hardware.is_cuda or seconds * whole <= TIMED_SECONDS * unit:
        rows = whole
    elif not hardware.compiles:
        rows = min(run.rows_at_once * world().size, max(unit, int(TIMED_SECONDS / seconds)))
    if rows > unit:
        timed(rows)  # later steps reuse the memory that this one allocates
        seconds = timed(rows)
    if hardware.is_cuda:  # whose clocks rise with the work
        more = on_rank_0(lambda: int(GPU_TIMED_SECONDS / seconds))
        seconds = median([seconds, *(timed(rows) for _ in range(more))])
    return seconds * whole / rows, rows


def profile(run: Run) -> None:
    """Time the parts of real steps for a few seconds; print them and what limits the run. Writes no run."""
    data, hardware, config = run.data, run.hardware, run.config
    whole_seconds, rows = retry_smaller(run, time_step)
    whole = config.sequences_per_step
    steps = min(MAX_STEPS, max(1, int(PROFILE_SECONDS * whole / (whole_seconds * rows))))
    spent = dict.fromkeys(PARTS, 0.0)
    began, cpu = time.perf_counter(), time.thread_time()
    for number in range(steps):  # with other data each time, as in training
        run.state.sequences_seen = number * rows
        for part, took in zip(PARTS, timed_parts(run, rows), strict=True):
            spent[part] += took
    cpu_share = (time.thread_time() - cpu) / (time.perf_counter() - began) if hardware.device.type == "cpu" else 1.0
    # The update takes as long for any batch; the other parts are those of a whole step.
    scale = {name: 1.0 if name == "update" else whole / rows for name in PARTS}
    seconds = {name: spent[name] / steps * scale[name] for name in PARTS}
    total = sum(seconds.values())
    speed = run.tokens_per_step / total
    mfu = f", MFU {speed * run.model.flops_per_token() / hardware.peak_flops:.0%}" if hardware.peak_flops else ""
    on_part = "" if rows == whole else f", each timed on {rows} of its {whole} sequences"
    print(f"Profile    {steps} step{'s' * (steps > 1)} of {run.tokens_per_step:,} tokens{on_part}; seconds a step:")
    for name in PARTS:
        print(f"  {name:<10}{seconds[name]:>9.4f}{seconds[name] / total:>6.0%}")
    print(f"  {'in all':<10}{total:>9.4f}  {si(speed)} tokens/s{mfu}")
    if cpu_share <= BUSY:
        print(
            f"Limit      Other programs: these steps computed for {cpu_share:.0%} of their time. Threads that wait for "
            "each other lose most: --threads 1 can be several times as fast."
        )
    else:
        print(f"Limit      {limit(seconds, hardware, data.placement)}")
    with torch.profiler.profile() as trace:
        train_step(run, rows)
        hardware.synchronize()
    own = "self_device_time_total" if hardware.is_cuda else "self_cpu_time_total"
    print(trace.key_averages().table(sort_by=own, row_limit=OPERATIONS, max_name_column_width=40))
    print("Profile: no run was written. Leave --profile out to train.")


def timed_parts(run: Run, sequences: int) -> list[float]:
    """Time the PARTS of a step of the next `sequences`, in seconds. On a GPU each part waits for the one before, so the
    sum is a little more than a step of the training, whose parts overlap."""

    def now() -> float:
        run.hardware.synchronize()
        return time.perf_counter()

    times = [now()]
    batch = read_batch(run, sequences)
    times.append(now())
    loss = accumulate(run, batch, sequences)
    times.append(now())
    apply_update(run, loss)
    times.append(now())
    return [after - before for before, after in itertools.pairwise(times)]


def limit(seconds: Mapping[str, float], hardware: Hardware, placement: str) -> str:
    """Say in one sentence what limits the run, and what to do about it. `seconds`: of a step by part; `placement`:
    where the tokens are."""
    share = {part: seconds[part] / sum(seconds.values()) for part in PARTS}
    if share["update"] >= max(NOTICEABLE, share["data"]):
        return (
            f"The optimizer takes {share['update']:.0%} of a step, as long for any batch: a larger --batch_size or "
            "--gradient_accumulation_steps spreads its time over more tokens."
        )
    if share["data"] >= NOTICEABLE:
        advice = "a larger model makes it less"
        if placement == "mmap":
            advice = "the tokens are on a disk, so copy them to a local one, or try --placement ram if they fit"
        elif placement == "ram" and hardware.is_cuda:
            advice = "the tokens come from the host's memory, so try --placement gpu"
        return f"Reading data takes {share['data']:.0%} of a step: {advice}."
    advice = "a smaller model, a shorter --max_seq_len or another machine shortens it"
    if hardware.is_cuda and hardware.precision == "fp32":
        advice = "leave --precision on auto"
    elif hardware.is_cuda and not hardware.compiles:
        advice = "--compile on fuses its smaller operations"
    return f"The computation is the limit, as it should be: {advice}."
