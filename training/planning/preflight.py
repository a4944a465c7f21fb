"""--dry_run: everything that can go wrong is tried before it costs anything, and what the run will take is forecast."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import Checkpoint, problems_of, write_checkpoint
from common.errors import CheckpointError
from common.formatting import byte_size, clock, si
from common.lora import lora_of
from common.machine import available_ram
from training.config import TrainConfig
from training.keeping.mirror import COPIES, Mirror
from training.keeping.resume import Found
from training.keeping.run import Run
from training.machine.compilation import compile_model
from training.machine.hardware import Hardware
from training.machine.processes import on_first, slowest
from training.numbers.evaluate import evaluated_windows, validation_loss
from training.numbers.optimizer import whole_state
from training.numbers.schedule import epoch_sequences
from training.numbers.step import part_of_step, smallest_part, train_step
from training.planning.memory import estimate_memory, held_memory, with_less_memory

TIMED_SECONDS = 8.0  # a step that takes longer than this is timed on a part of its sequences
FIRST_LOSS_MARGIN = 0.5  # nats around ln(vocabulary), which a model that knows nothing has
KEPT_ON_DISK = 4  # checkpoints at the peak: two, the best, and the one that is being written
PROBE_BYTES = 1 << 20


def dry_run(config: TrainConfig, run: Run, hardware: Hardware) -> None:
    """Print everything known before the first step, two timed steps, one save, one evaluation and a forecast. Writes no
    run.

    Raises what keeps the run from starting: CheckpointError, ConfigError, and whatever the parts raise.
    """
    found = on_first(lambda: look(run))
    model, data = run.model, run.data
    estimate = estimate_memory(config, model, hardware) + held_memory(data, hardware)
    there_is = f" of {byte_size(hardware.memory_bytes)}" if hardware.memory_bytes else ""
    several = f" in each of {config.processes} processes" if config.processes > 1 else ""
    need, free = KEPT_ON_DISK * run.checkpoint_bytes, free_space(config.run_dir)
    print(
        f"Steps      {run.max_steps:,} of {config.tokens_per_step:,} tokens ({config.sequences_per_step} sequences, "
        f"{config.rows_at_once} at once{several}), {run.max_steps * config.tokens_per_step / 1e6:,.1f}M tokens in all\n"
        f"Memory     about {byte_size(estimate)}{there_is} (an estimate){free_memory(hardware)}; beside it "
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
    while True:
        try:
            step_model = compile_model(model, hardware, lambda: data.batch(0, run.config.rows_at_once))
            check_first_loss(step_model, run, run.config, hardware)
            seconds, rows = time_step(step_model, run, run.config, hardware)
            break
        except Exception as error:  # as the training gives way, which this is not: nothing is kept
            run.config = with_less_memory(error, "", run.config, model, run.optimizer, hardware)
            print(f"Out of memory: the training will go on with {run.config.rows_at_once} sequences at once")
    config = run.config
    optimizer_state = whole_state(run.optimizer)
    saving = on_first(lambda: time_save(run, optimizer_state))
    evaluating = time_evaluation(step_model, run, config, hardware)
    whole = config.sequences_per_step
    part = "" if rows == whole else f" (timed on {rows} of its {whole} sequences)"
    speed = config.tokens_per_step / seconds
    mfu = ""
    if hardware.peak_flops:
        mfu = f", MFU {speed * model.flops_per_token() / hardware.peak_flops:.0%}"
    evaluations = math.ceil(run.max_steps / config.eval_interval) if config.eval_interval else 0
    total = seconds * run.max_steps + evaluating * evaluations
    print(
        f"Speed      {seconds:.3g} s a step{part}, {si(speed)} tokens/s{mfu}\n"
        f"Saving     a checkpoint was written, verified and loaded in {saving:.1f} s, beside the training\n"
        f"Evaluating about {clock(evaluating)} for {evaluated_windows(data, config):,} windows, {evaluations} times"
        f"{', answers to prompts aside' if config.eval_prompts else ''}\n"
        f"Time       about {clock(total)} for {run.max_steps:,} steps and their evaluations"
    )
    if at_risk := between_checkpoints(run, config, seconds):
        print(f"At risk    at most {clock(at_risk)} of training, if the machine goes away between two checkpoints")
    units = hardware.units_per_hour(config)
    if units:
        print(f"Cost       about {total / 3600 * units:.1f} compute units at {units:g} an hour")
    if hardware.is_cuda and (peak := hardware.peak_memory()):
        print(f"Peak       {peak / 1e9:.2f} GB of GPU memory in the timed step")
    if found is not None:
        print(f"Resume     {found.checkpoint.path} is whole and fits; training would continue from it")
    print("Dry run: no run was written. Leave --dry_run out to train.")


def look(run: Run) -> Found | None:
    run.require_own_folders()
    return run.find()


def free_memory(hardware: Hardware) -> str:
    if hardware.is_cuda:
        return f", {byte_size(torch.cuda.mem_get_info()[0])} of it free now"
    free = available_ram()
    return f", {byte_size(free)} of it free now" if free is not None else ""


def too_little(need: int, free: int) -> str:
    return ". Warning: too little" if need > free else ""


def free_space(folder: Path) -> int:
    """Bytes on the disk that a folder is on, or will be."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or what there is of the way to it."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def probe(mirror: Mirror) -> None:
    """Write into the mirror's place and read it back. Raises CheckpointError if that fails."""
    path = existing(mirror.dir) / f".probe-{os.getpid()}.tmp"
    content = os.urandom(PROBE_BYTES)
    try:
        try:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != content:
                raise OSError("other bytes come back than were written")
        finally:
            path.unlink(missing_ok=True)
    except OSError as problem:
        raise CheckpointError(
            f"--checkpoint_dir {mirror.root} cannot be written and read back ({problem.strerror or problem}). Put that "
            "right, or choose another."
        ) from None


def check_first_loss(
    step_model: Callable[..., torch.Tensor], run: Run, config: TrainConfig, hardware: Hardware
) -> None:
    """A model that has learned nothing finds all tokens about equally likely: tell if this one does not. The base of
    adapters has learned something."""
    with torch.no_grad(), hardware.autocast():
        loss = float(step_model(*run.data.batch(0, config.rows_at_once)))
    if lora_of(run.model) is not None:
        print(f"First loss {loss:.2f}, that of the base")
        return
    expected = math.log(run.data.vocab_size)
    print(f"First loss {loss:.2f}; ln({run.data.vocab_size:,}) = {expected:.2f} is that of a model that knows nothing")
    if not abs(loss - expected) < FIRST_LOSS_MARGIN:
        print(
            "Warning: these two should be close. Is the vocabulary that of the tokens? Was the initialisation of the "
            "model changed?"
        )


def time_save(run: Run, optimizer_state: dict[str, Any]) -> float:
    """Seconds of writing a checkpoint where the run's will be, verifying and loading it. It is deleted again."""
    parent = existing(run.dir.parent)
    for left in parent.glob(".dry_run-*"):  # by one that was killed
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    began = time.perf_counter()
    with discarded(Path(tempfile.mkdtemp(prefix=".dry_run-", dir=parent))) as folder:
        write_checkpoint(folder / "best", run.snapshot(0.0, optimizer_state, copy=False))
        if problems := problems_of(folder / "best"):
            raise CheckpointError(f"A checkpoint that was written below {parent} is damaged: {'; '.join(problems)}.")
        checkpoint = Checkpoint(folder / "best")
        checkpoint.load_weights(run.model)
        checkpoint.load_optimizer(run.optimizer)
    return time.perf_counter() - began


@contextlib.contextmanager
def discarded(folder: Path) -> Iterator[Path]:
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def time_evaluation(
    step_model: Callable[..., torch.Tensor], run: Run, config: TrainConfig, hardware: Hardware
) -> float:
    """Seconds of an evaluation, by one batch of it."""
    if not config.eval_interval:
        return 0.0
    windows = evaluated_windows(run.data, config)
    one = dataclasses.replace(part_of_step(config, config.rows_at_once * config.processes), eval_batches=1)
    began = time.perf_counter()
    validation_loss(run.model, step_model, run.data, one, hardware)
    hardware.synchronize()
    return (time.perf_counter() - began) * windows / evaluated_windows(run.data, one)


def between_checkpoints(run: Run, config: TrainConfig, seconds: float) -> float | None:
    """The longest time from one checkpoint to the next, by the steps' `seconds`; None if only the end is saved."""
    steps_an_epoch = epoch_sequences(run.data.windows, config) / config.sequences_per_step
    times = [
        60 * config.checkpoint_minutes,
        seconds * config.checkpoint_steps,
        seconds * steps_an_epoch * config.checkpoint_interval,
    ]
    return min((each for each in times if each), default=None)


def time_step(
    step_model: Callable[..., torch.Tensor], run: Run, config: TrainConfig, hardware: Hardware
) -> tuple[float, int]:
    """Seconds of a training step, and the number of sequences that was measured on (then scaled to the step)."""

    def timed(rows: int) -> float:
        part = part_of_step(config, rows)
        hardware.synchronize()
        started = time.perf_counter()
        train_step(step_model, run.optimizer, run.scaler, run.data, 0, 0, 0.0, part, hardware)
        hardware.synchronize()
        return slowest(time.perf_counter() - started)

    whole = config.sequences_per_step
    unit = smallest_part(config, hardware)
    timed(unit)  # first use of every kernel
    seconds = timed(unit)
    rows = unit
    if hardware.is_cuda or seconds * whole <= TIMED_SECONDS * unit:
        rows = whole
    elif not hardware.compiles:
        rows = min(config.rows_at_once * config.processes, max(unit, int(TIMED_SECONDS / seconds)))
    if rows > unit:
        timed(rows)  # takes the memory that the steps after it find there
        seconds = timed(rows)
    return seconds * whole / rows, rows
