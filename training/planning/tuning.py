"""--tune and --micro_batch_size auto: times settings that change a run's speed but not its result on this machine, and
keeps the best for later runs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError, UserError, is_out_of_memory
from common.files import read_json, write_json
from common.flags import convert
from common.formatting import clock, table_row
from common.machine import device_name, pick_device
from model import TransformerLanguageModel
from tokenization.metadata import TokenMetadata
from tokenization.token_folder import folder_of_text
from training.config import COMPILE_MODES, MEASURED, NOT_GIVEN, SCHEMA, TrainConfig
from training.keeping.run import Run
from training.machine.compilation import compile_model
from training.machine.hardware import (
    DEFAULT_THREADS,
    Hardware,
    can_autotune,
    choose_compile,
    clear_frames,
    detect_hardware,
    has_cudnn_attention,
    return_freed_memory,
)
from training.numbers.data import TokenData, locate
from training.parts import Parts
from training.planning.estimate import estimate_memory, with_rows
from training.planning.memory import MEMORY_SHARE, fit_micro_batch, found_before

FOLDER = Path("runs") / "tuned"
SETTINGS = ("cpu_threads", "compile", "attention", "compile_mode", "micro_batch_size")  # in the order they are tried
TRIAL_SECONDS = 2.0
SIZES_SECONDS = 45.0  # --micro_batch_size auto ends within this time
AS_FAST = 1.02  # a smaller speed-up than this is not worth a change, or more memory


def tuning_file(config: TrainConfig) -> Path:
    """The file with the settings found for a run on this machine. Its name depends on shape, vocabulary, batch,
    optimizer and adapters, and on device, cores and PyTorch's version."""
    device = pick_device(config.device if config.use_gpu else "cpu")
    keys = ("batch_size", "gradient_accumulation_steps", "activation_checkpointing", "precision", "optimizer")
    adapters = ("lora_rank", "lora_targets") if config.lora_rank else ()
    run = [{key: getattr(config, key) for key in (*keys, *adapters)}, config.model_config(vocab_size=1).to_dict()]
    of = [device_name(device), os.cpu_count(), torch.__version__, vocabulary_of(config), *run]
    of += [config.processes] if config.processes > 1 else []
    return FOLDER / f"{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]}.json"


def vocabulary_of(config: TrainConfig) -> int:
    """The vocabulary size of the run's tokens; if they do not exist yet, the requested one."""
    folder = config.data_dir
    if config.input and not folder:
        folder = folder_of_text(config.input, config.tokenizer, config.vocab_size)
    with contextlib.suppress(UserError, OSError):  # reported when the run opens its data
        return TokenMetadata.read(locate(dataclasses.replace(config, data_dir=folder))[2]).vocab_size
    return config.vocab_size


def use_tuning(config: TrainConfig) -> TrainConfig:
    """The configuration with the settings that --tune found fastest on this machine. If a given setting differs from
    them, none is used, because they were measured together."""
    path, found = tuning_file(config), kept_settings(config)
    if config.tune or not found:
        return config
    given = {key: getattr(config, key) for key in found if not is_open(config, key)}
    if other := {key: value for key, value in given.items() if value != found[key]}:
        print(
            f"Tuned      {path} is not used, because {flags_of(other)} was given; --tune finds settings that go with it"
        )
        return config
    changed = {key: value for key, value in found.items() if value != SCHEMA[key].default}
    print(f"Tuned      {flags_of(changed)}: {path}")
    return with_settings(config, {key: value for key, value in found.items() if key not in given})


def kept_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings in the tuning file; empty if there is no usable file."""
    path = tuning_file(config)
    try:
        if not path.exists():
            return {}
        kept = read_json(path, ConfigError)["settings"]
        return {key: convert(kept[key], SCHEMA[key], from_flag=False) for key in SETTINGS if key in kept}
    except (ConfigError, OSError, KeyError, TypeError, ValueError) as problem:
        print(f"Tuned      {path} cannot be used ({problem}); --tune writes a new one")
        return {}


def keep(config: TrainConfig, settings: dict[str, Any], **about: Any) -> str:
    """Write the tuning file. Returns a phrase: where it is, or why it could not be written."""
    path = tuning_file(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"config": config.name, "settings": settings, **about})
    except OSError as problem:
        return f"not kept for later runs ({problem})"
    return f"kept in {path}"


def is_open(config: TrainConfig, key: str) -> bool:
    """Whether the user left this setting open."""
    measured = key == "micro_batch_size" and config.micro_batch_size == MEASURED
    return measured or config.sources.get(key, "default") in NOT_GIVEN


def with_settings(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    return dataclasses.replace(config, **settings, sources={**config.sources, **dict.fromkeys(settings, "tuned")})


def flags_of(settings: dict[str, Any]) -> str:
    return " ".join(f"--{key} {value}" for key, value in settings.items()) or "no change"


def choose_micro_batch(
    config: TrainConfig, model: TransformerLanguageModel, data: TokenData, hardware: Hardware
) -> TrainConfig:
    """As `fit_micro_batch`; with --micro_batch_size auto, measure instead: in less than a minute, so uncompiled."""
    if config.micro_batch_size != MEASURED:
        return fit_micro_batch(config, model, hardware)
    config = dataclasses.replace(config, micro_batch_size=None)
    if found_before(config, hardware) is not None:
        return fit_micro_batch(config, model, hardware)
    uncompiled = dataclasses.replace(hardware, compiles=False)
    began, fastest, best, seconds = time.perf_counter(), math.inf, None, 0.0
    for rows in sizes(config):
        takes = max(TRIAL_SECONDS, 2 * rows * seconds)  # estimated from the size before
        is_late = time.perf_counter() - began + takes > SIZES_SECONDS
        if is_late or not fits(with_rows(config, rows), model, uncompiled):
            break
        failure = None
        try:
            seconds = seconds_per_sequence(model, model, data, rows, hardware)
        except Exception as error:
            failure = error
            clear_frames(error)  # they hold the activations
        if failure is not None:
            if not is_out_of_memory(failure):
                raise failure
            return_freed_memory(hardware.device)
            break
        if seconds * AS_FAST < fastest:
            fastest, best = seconds, rows
    if best is None:
        return fit_micro_batch(config, model, hardware)
    kept = keep(config, {**kept_settings(config), "micro_batch_size": best})
    print(f"Memory     micro_batch_size {best} is the fastest of those that fit uncompiled; {kept}")
    return with_settings(config, {"micro_batch_size": best})


def sizes(config: TrainConfig) -> list[int]:
    """Micro-batch sizes to try: about the powers of two, adjusted so that a step is cut into equal slices."""
    whole = config.sequences_per_step
    powers = [2**exponent for exponent in range(whole.bit_length())]
    return sorted({with_rows(config, rows).rows_at_once for rows in [*powers, config.batch_size]})


def fits(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> bool:
    memory = hardware.memory_bytes
    return memory is None or estimate_memory(config, model, hardware) <= MEMORY_SHARE * memory


def seconds_per_sequence(
    step_model: Callable[..., torch.Tensor],
    model: TransformerLanguageModel,
    data: TokenData,
    rows: int,
    hardware: Hardware,
) -> float:
    """Forward and backward passes with `rows` sequences at once: the fastest of those done in TRIAL_SECONDS."""
    batch = data.batch(0, rows)

    def once() -> float:
        hardware.synchronize()
        began = time.perf_counter()
        with hardware.autocast():
            loss = step_model(*batch)
        loss.backward()
        hardware.synchronize()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    try:
        once()  # first use of every kernel
        times = [once()]
        while sum(times) < TRIAL_SECONDS:
            times.append(once())
    finally:
        model.zero_grad(set_to_none=True)
    return min(times) / rows


@dataclasses.dataclass(frozen=True)
class Trial:
    settings: dict[str, Any]
    seconds: float = math.inf  # per sequence, forward and backward
    startup: float = 0.0
    peak: int | None = None  # bytes of GPU memory
    problem: str = ""


def tune(run: Run) -> None:
    """Try one setting after the other, each on top of the best so far; print the times and keep the best. Writes no
    run."""
    parts, config, max_steps = run.parts, run.parts.config, run.state.max_steps
    sequences = max_steps * config.sequences_per_step

    def forecast(trial: Trial) -> float:
        return trial.startup + trial.seconds * sequences

    print(table_row(["settings", "ms a sequence", "start", "this run", "GB, update aside"]))
    print(table_row(["---"] * 5))
    best = attempt(parts, {})
    tell(best, forecast(best))
    for key in SETTINGS:
        if not is_open(config, key):
            continue
        base = best.settings
        for value in candidates(key, with_settings(config, base), parts.hardware):
            trial = attempt(parts, {**base, key: value})
            tell(trial, forecast(trial))
            if forecast(trial) * AS_FAST < forecast(best):
                best = trial
    if best.problem:
        raise ConfigError(f"Nothing that was tried works: {best.problem}.")
    tuned = with_settings(config, best.settings)
    settings = {key: getattr(tuned, key) for key in SETTINGS} | {"micro_batch_size": tuned.rows_at_once}
    kept = keep(config, settings, seconds_per_sequence=best.seconds, of_steps=max_steps)
    print(
        f"Fastest    {flags_of(best.settings)}, {kept}. Runs of this config on this machine use these settings, unless "
        f"flags differ. They are for {max_steps:,} steps; for many more or fewer, tune again."
    )


def candidates(key: str, config: TrainConfig, hardware: Hardware) -> list[Any]:
    """Values of a setting to try, beside the one that the configuration leads to."""
    if key == "cpu_threads":
        taken, cores = DEFAULT_THREADS, os.cpu_count() or 1
        return [] if hardware.is_cuda else sorted({taken // 2, cores // 2, cores} - {0, taken})
    compiles, _ = choose_compile(config, hardware.device, hardware.peak_flops)
    if key == "compile":
        return ["off" if compiles else "on"]
    if key == "attention":
        works = hardware.is_cuda and has_cudnn_attention(hardware.device, hardware.precision)
        return ["flash", "cudnn"] if works else []  # without cuDNN's, "flash" is what "auto" takes
    if key == "compile_mode":
        modes = COMPILE_MODES[1:] if hardware.is_cuda and compiles else ()
        return [mode for mode in modes if mode != "max_autotune" or can_autotune(hardware.device)]
    now = config.rows_at_once
    return [rows for rows in reversed(sizes(config)) if rows != now and now // 4 <= rows <= 2 * now]


def attempt(parts: Parts, settings: dict[str, Any]) -> Trial:
    """Time the model with some settings. A failure, out of memory too, is reported in the trial and not raised."""
    changed = with_settings(parts.config, settings)
    model, data = parts.model, parts.data
    began = time.perf_counter()
    try:
        hardware = detect_hardware(changed)
        if hardware.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        if "micro_batch_size" in settings and not fits(changed, model, hardware):
            return Trial(settings, problem="would not fit in memory")
        rows = changed.rows_at_once
        with contextlib.redirect_stdout(io.StringIO()):
            step_model = compile_model(model, hardware, lambda: data.batch(0, rows))
        if hardware.compiles and step_model is model:
            return Trial(settings, problem="does not compile")
        startup = time.perf_counter() - began
        seconds = seconds_per_sequence(step_model, model, data, rows, hardware)
        return Trial(settings, seconds, startup, hardware.peak_memory() if hardware.is_cuda else None)
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Trial(settings, problem=first_line[:100])
    finally:
        model.zero_grad(set_to_none=True)
        return_freed_memory(model.device)


def tell(trial: Trial, seconds: float) -> None:
    if trial.problem:
        figures = [f"failed: {trial.problem}", "", "", ""]
    else:
        peak = f"{trial.peak / 1e9:.2f}" if trial.peak else ""
        figures = [f"{1000 * trial.seconds:.3g}", f"{trial.startup:.1f} s", clock(seconds), peak]
    print(table_row([flags_of(trial.settings), *figures]), flush=True)
