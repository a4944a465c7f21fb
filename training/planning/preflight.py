"""--dry_run: tries what can go wrong before it costs anything, and forecasts time, memory and disk."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from common.checkpoint import Checkpoint, problems_of, write_checkpoint
from common.errors import CheckpointError
from common.formatting import byte_size, clock, si
from common.lora import lora_of
from common.machine import available_ram
from training.checkpoints.mirror import COPIES, Mirror
from training.checkpoints.resume import Old, require_the_same
from training.checkpoints.run import Run
from training.checkpoints.start import planned_steps
from training.machine.hardware import Hardware
from training.machine.processes import max_over_ranks, on_rank_0
from training.machine.sharding import is_sharded, unsharded_copy
from training.numbers.evaluate import evaluated_windows, validation_loss
from training.numbers.schedule import decay_share, decay_start, epoch_sequences
from training.numbers.step import Trainer, smallest_part, train_step
from training.planning.deadline import MARGIN, Costs
from training.planning.estimate import estimate_memory, held_memory
from training.planning.memory import compile_step_model, halve_micro_batch

TIMED_SECONDS = 8.0  # a longer step is timed on a part of its sequences
FIRST_LOSS_MARGIN = 0.5  # nats around ln(vocabulary), the loss of an untrained model
KEPT_ON_DISK = 4  # checkpoints at the peak: two, the best, and the one being written
PROBE_BYTES = 1 << 20


def dry_run(run: Run, old: Old) -> None:
    """Print what is known before the first step; time steps, a save and an evaluation; print a forecast. Writes no run.

    Raises what would prevent the run: CheckpointError, ConfigError, and whatever the trainer raise.
    """
    trainer, config = run.trainer, run.trainer.config
    model, data, hardware, state = trainer.model, trainer.data, trainer.hardware, run.state
    checkpoint, saved = old.checkpoint, old.saved
    if checkpoint is not None and saved is not None:
        on_rank_0(lambda: require_the_same(checkpoint, saved, trainer))
        state = saved.state
    max_steps = planned_steps(trainer, state) - state.step
    if max_steps <= 0:
        print(f"Resume     the run is finished after {state.step:,} steps; more --epochs continue it")
        print("Dry run: no run was written.")
        return
    rest = "left " if state.step else ""
    estimate = estimate_memory(config, model, hardware, trainer.rows_at_once) + held_memory(data, hardware)
    there_is = f" of {byte_size(hardware.memory_bytes)}" if hardware.memory_bytes else ""
    several = f" in each of {config.processes} processes" if config.processes > 1 else ""
    at_most = "at most " if config.minutes else ""
    need, free = KEPT_ON_DISK * run.checkpoint_bytes, free_space(config.run_dir)
    print(
        f"Steps      {at_most}{max_steps:,} {rest}of {trainer.tokens_per_step:,} tokens ({config.sequences_per_step} "
        f"sequences, {trainer.rows_at_once} at once{several}), {max_steps * trainer.tokens_per_step / 1e6:,.1f}M "
        f"tokens in all\n"
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
    seconds, rows = try_steps(trainer)
    weights, optimizer = run.gathered()
    saving = on_rank_0(lambda: time_save(run, weights, optimizer))
    evaluating = time_evaluation(trainer)
    whole = config.sequences_per_step
    part = "" if rows == whole else f" (timed on {rows} of its {whole} sequences)"
    speed = trainer.tokens_per_step / seconds
    mfu = f", MFU {speed * model.flops_per_token() / hardware.peak_flops:.0%}" if hardware.peak_flops else ""
    if config.minutes:
        max_steps = steps_in_time(trainer, Costs(seconds, evaluating, saving), max_steps, state.elapsed_seconds)
    evaluations = math.ceil(max_steps / config.eval_interval) if config.eval_interval else 0
    total = seconds * max_steps + evaluating * evaluations
    print(
        f"Speed      {seconds:.3g} s a step{part}, {si(speed)} tokens/s{mfu}\n"
        f"Saving     a checkpoint was written, verified and loaded in {saving:.1f} s, beside the training\n"
        f"Evaluating about {clock(evaluating)} for {evaluated_windows(data, config):,} windows, {evaluations} times"
        f"{', answers to prompts aside' if config.eval_prompts else ''}\n"
        f"Time       about {clock(total)} for {max_steps:,} steps and their evaluations"
    )
    if at_risk := between_checkpoints(trainer, seconds):
        print(f"At risk    at most {clock(at_risk)} of training, if the machine is lost between two checkpoints")
    if units := hardware.units_per_hour(config):
        print(f"Cost       about {total / 3600 * units:.1f} compute units at {units:g} an hour")
    if hardware.is_cuda and (peak := hardware.peak_memory()):
        print(f"Peak       {peak / 1e9:.2f} GB of GPU memory in the timed step")
    if old.checkpoint is not None:
        print(f"Resume     {old.checkpoint.path} is whole and fits; training would continue from it")
    print("Dry run: no run was written. Leave --dry_run out to train.")


def steps_in_time(trainer: Trainer, costs: Costs, most: int, elapsed: float) -> int:
    """The forecast of `minutes`, printed: how many of at most `most` steps fit, compiling aside."""
    config = trainer.config
    seconds = 60 * config.minutes * (1 - MARGIN) - elapsed
    steps = costs.steps_within(seconds, 0, most, config)
    epochs = steps * config.sequences_per_step / epoch_sequences(trainer.data.windows, config)
    if not steps:
        told = "Warning: no step fits; give more"
    elif steps == most:
        told = f"all {config.epochs} epochs fit, and the run ends early; --epochs asks for more"
    else:
        told = f"about {steps:,} steps, {epochs:.2g} epochs, fit"
    first = min(decay_start(most, config), round((1 - decay_share(config)) * steps))
    print(f"Minutes    {config.minutes:g}: {told}. The learning rate falls from about step {first:,} on")
    return steps


def try_steps(trainer: Trainer) -> tuple[float, int]:
    """Compile, check the first loss, and time a step, with as many sequences at once as fit. Returns what `time_step`
    does."""
    while True:
        try:
            compile_step_model(trainer)
            check_first_loss(trainer)
            return time_step(trainer)
        except Exception as error:
            told = halve_micro_batch(trainer, error)
        print(told)


def free_memory(hardware: Hardware) -> str:
    if hardware.is_cuda:
        return f", {byte_size(torch.cuda.mem_get_info()[0])} of it free now"
    free = available_ram()
    return f", {byte_size(free)} of it free now" if free is not None else ""


def too_little(need: int, free: int) -> str:
    return ". Warning: too little" if need > free else ""


def free_space(folder: Path) -> int:
    """Free bytes on the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def probe(mirror: Mirror) -> None:
    """Write a file where the mirror will be, and read it back. Raises CheckpointError if that fails."""
    path = existing(mirror.dir) / f".probe-{os.getpid()}.tmp"
    content = os.urandom(PROBE_BYTES)
    try:
        try:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != content:
                raise OSError("the bytes read differ from the bytes written")
        finally:
            path.unlink(missing_ok=True)
    except OSError as problem:
        raise CheckpointError(
            f"--checkpoint_dir {mirror.root} cannot be written and read back ({problem.strerror or problem}). Fix "
            "that, or choose another folder."
        ) from None


def check_first_loss(trainer: Trainer) -> None:
    """Warn if the first loss is not that of an untrained model, to which all tokens are about equally likely. With
    adapters the base is trained, so there is nothing to compare."""
    trainer.model.eval()
    with torch.no_grad(), trainer.hardware.autocast():
        loss = float(trainer.step_model(*trainer.data.batch(0, trainer.rows_at_once)))
    trainer.model.train()
    if lora_of(trainer.model) is not None:
        print(f"First loss {loss:.2f}, that of the base")
        return
    expected = math.log(trainer.data.vocab_size)
    print(f"First loss {loss:.2f}; an untrained model has ln({trainer.data.vocab_size:,}) = {expected:.2f}")
    if not abs(loss - expected) < FIRST_LOSS_MARGIN:
        print(
            "Warning: these two should be close. Does the vocabulary belong to these tokens? Did you change the "
            "model's initialisation?"
        )


def time_save(run: Run, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]) -> float:
    """Seconds to write, verify and load a checkpoint on the run's disk. Deletes it afterwards."""
    parent = existing(run.dir.parent)
    for left in parent.glob(".dry_run-*"):  # of a dry run that was killed
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".dry_run-", dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_checkpoint(folder / "best", run.snapshot(weights, optimizer, copy=False))
        if problems := problems_of(folder / "best"):
            raise CheckpointError(f"A checkpoint written below {parent} is damaged: {'; '.join(problems)}.")
        checkpoint = Checkpoint(folder / "best")
        model = run.trainer.model
        checkpoint.load_weights(unsharded_copy(model, torch.device("cpu")) if is_sharded(model) else model)
        checkpoint.load_optimizer(run.trainer.optimizer)
    return time.perf_counter() - began


def time_evaluation(trainer: Trainer) -> float:
    """Seconds of an evaluation, estimated from one batch, after one that does not count."""
    if not trainer.config.eval_interval:
        return 0.0
    windows = evaluated_windows(trainer.data, trainer.config)
    some = min(trainer.rows_at_once * trainer.config.processes, windows)
    validation_loss(trainer, some)
    trainer.hardware.synchronize()
    began = time.perf_counter()
    validation_loss(trainer, some)
    trainer.hardware.synchronize()
    return (time.perf_counter() - began) * windows / some


def between_checkpoints(trainer: Trainer, seconds: float) -> float | None:
    """Longest time between checkpoints, if a step takes `seconds`; None if only the last step is saved."""
    config = trainer.config
    steps_an_epoch = epoch_sequences(trainer.data.windows, config) / config.sequences_per_step
    times = [
        60 * config.checkpoint_minutes,
        seconds * config.checkpoint_steps,
        seconds * steps_an_epoch * config.checkpoint_interval,
    ]
    return min((each for each in times if each), default=None)


def time_step(trainer: Trainer) -> tuple[float, int]:
    """Seconds of a training step, and the number of sequences it was timed on (the seconds are scaled to a step)."""
    config, hardware = trainer.config, trainer.hardware

    def timed(rows: int) -> float:
        hardware.synchronize()
        started = time.perf_counter()
        train_step(trainer, 0, 0, 0.0, rows)
        hardware.synchronize()
        return max_over_ranks(time.perf_counter() - started)

    whole = config.sequences_per_step
    unit = smallest_part(trainer)
    timed(unit)  # first use of every kernel
    seconds = timed(unit)
    rows = unit
    if hardware.is_cuda or seconds * whole <= TIMED_SECONDS * unit:
        rows = whole
    elif not hardware.compiles:
        rows = min(trainer.rows_at_once * config.processes, max(unit, int(TIMED_SECONDS / seconds)))
    if rows > unit:
        timed(rows)  # later steps reuse the memory that this one allocates
        seconds = timed(rows)
    return seconds * whole / rows, rows
