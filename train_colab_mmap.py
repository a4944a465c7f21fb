"""Train a GPT-2 class language model on a token file.

    python train_colab_mmap.py --config quickstart.json      # a model that answers questions, in minutes on a CPU
    python train_colab_mmap.py --config gpt2_small.json      # 134M parameters on datasets_cache/, on a GPU
    python train_colab_mmap.py --config gpt2_small.json --dry_run

Every key of the config is a flag. Running the same command again continues the run where it was cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import INTERRUPTED, CheckpointError, full_disk_told, is_out_of_memory, script
from common.launch import end, is_first, one_voice
from common.lock import FolderLock
from common.output import unbreakable_output
from tokenization.token_folder import DEFAULT_FOLDER, folder_of_text
from training.config import TrainConfig, parse_config

# torch takes seconds to import, and --help should not wait for it: functions import what needs it when they run.
if TYPE_CHECKING:
    import torch

    from model import TransformerLanguageModel
    from training.keeping.interruption import Interruption
    from training.keeping.run import Run
    from training.machine.hardware import Hardware
    from training.numbers.data import TokenData
    from training.numbers.evaluate import Answer, Prompt
    from training.numbers.optimizer import Optimizer
    from training.telling.report import Report


@script
def main(argv: Sequence[str] | None = None) -> int:
    with unbreakable_output(), one_voice():  # no training is lost because nobody listens any more
        config = parse_config(argv)
        with full_disk_told(CheckpointError, config.run_dir):
            return train(config, ends_process=argv is None)


def train(config: TrainConfig, ends_process: bool) -> int:
    started = time.perf_counter()
    from training.keeping.resume import with_given_shape
    from training.keeping.run import Run
    from training.keeping.run_folder import being_trained, require_ours
    from training.machine.processes import on_first, together
    from training.planning.memory import memory_advice
    from training.planning.preflight import dry_run
    from training.planning.profile import profile
    from training.planning.tuning import tune, use_tuning
    from training.telling.events import require_tensorboard

    with together(config), FolderLock(being_trained) as lock:
        on_first(lambda: require_ours(config.run_dir, "--output_dir"))
        on_first(lambda: require_tensorboard(config))
        parts = prepare(on_first(lambda: use_tuning(use_builtin_files(with_given_shape(config)))))
        looks = {"dry_run": dry_run, "profile": profile, "tune": tune}
        if look := next((look for key, look in looks.items() if getattr(config, key)), None):
            run = Run(parts.config, parts.model, parts.optimizer, parts.scaler, parts.data)
            with memory_advice(parts.config, parts.model, parts.hardware):
                look(parts.config, run, parts.hardware)
            return 0
        return train_run(parts, lock, ends_process, started)


def train_run(parts: Parts, lock: FolderLock, ends_process: bool, started: float) -> int:
    """Start or continue the run in its folder, and take it to its end. Returns the exit code."""
    from training.file_names import SUMMARY
    from training.keeping.interruption import Interruption
    from training.keeping.run import Run
    from training.keeping.run_folder import write_config
    from training.machine.processes import on_first
    from training.numbers.evaluate import answer_prompts
    from training.planning.memory import memory_advice
    from training.telling.records import rewind
    from training.telling.report import Report
    from training.telling.summary import write_summary
    from training.telling.timer import Timer

    config, hardware, model, data = parts.config, parts.hardware, parts.model, parts.data
    on_first(lambda: lock.take(config.run_dir))
    run = Run.start_or_resume(config, model, parts.optimizer, parts.scaler, data)
    on_first(lambda: lock.take(run.dir))  # which may have been made just now
    if on_first(lambda: run.finished and (run.dir / SUMMARY).is_file()):
        with run.saving(print, lambda: False):
            pass  # but for the mirror, if that could not be brought up to date before
        print(run.is_finished_message())
        return 0
    if is_first():
        write_config(config, hardware.name)
        rewind(run.dir, run.step if run.unevaluated is None else run.step - 1)
    print(f"Training   steps {run.step:,} to {run.max_steps:,} of {config.tokens_per_step:,} tokens, in {run.dir}")
    if config.warmup_steps >= run.max_steps:
        shorter = f"--warmup_steps {run.max_steps // 10}, or more --epochs"
        print(f"Note       the warmup of {config.warmup_steps:,} steps takes the whole run: {shorter}")
    timer = Timer(hardware, run.elapsed, hardware.units_per_hour(config))
    report = Report(run.dir, timer, run.step, run.max_steps, config.tensorboard)
    interruption = Interruption(ends_process)
    advice = memory_advice(config, model, hardware)
    with advice, interruption.awaited(), run.saving(report.say, lambda: interruption.requested):
        with contextlib.closing(report):
            answers = take_steps(run, report, hardware, parts.prompts, interruption, started)
        interruption.answer = "Stopping once what is under way is saved and copied"
        run.finish_saving(report.say)
        is_done = run.finished and run.unevaluated is None
        if is_done and is_first():
            if parts.prompts and not answers:  # evaluation is off, or the machine went away after the last step
                answers = answer_prompts(model, data, parts.prompts)
            write_summary(run, hardware, timer, answers)
    if not is_done:
        if limit := timer.limit_reached(config):
            print(f"Stopped after step {run.step:,}: {limit} is reached. The same command with more of it continues.")
        else:
            print(f"Interrupted after step {run.step:,}. The same command continues from there.")
        return INTERRUPTED
    return 0


@dataclass(frozen=True)
class Parts:
    """What a training is made of, checked and in place; whether it starts or continues is not known yet."""

    config: TrainConfig
    hardware: Hardware
    data: TokenData
    prompts: list[Prompt]
    model: TransformerLanguageModel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler


def prepare(config: TrainConfig) -> Parts:
    """Find out what the machine can do, check the data, build the model: each told in a line of its own."""
    import torch

    from model import TransformerLanguageModel
    from training.keeping.adapters import adapt
    from training.machine.hardware import detect_hardware
    from training.machine.processes import on_first
    from training.numbers.data import TokenData
    from training.numbers.evaluate import check_prompts, read_prompts
    from training.numbers.optimizer import build_optimizer
    from training.numbers.schedule import repetition
    from training.planning.memory import memory_advice
    from training.planning.tuning import choose_micro_batch

    hardware = detect_hardware(config)
    print(hardware.describe())
    config = on_first(lambda: tokenize_input(config))
    prompts = on_first(lambda: read_prompts(config.eval_prompts) if config.eval_prompts else [])
    data = TokenData.open(config, hardware)
    print(data.describe() + repetition(data.windows, config))
    check_prompts(prompts, data)

    torch.manual_seed(config.seed)
    with memory_advice(config, None, hardware):
        model = TransformerLanguageModel(config.model_config(data.vocab_size)).to(hardware.device)
    print(
        f"Model      {model.num_parameters():,} parameters: {config.num_layers} layers x {config.embed_dim}, "
        f"{config.num_heads} heads, context {config.max_seq_len}"
    )
    model.activation_checkpointing = config.activation_checkpointing
    with memory_advice(config, model, hardware):
        adapt(model, config)
        config = on_first(lambda: choose_micro_batch(config, model, data, hardware))
        optimizer = build_optimizer(model, config)
    return Parts(config, hardware, data, prompts, model, optimizer, hardware.grad_scaler())


def take_steps(
    run: Run, report: Report, hardware: Hardware, prompts: list[Prompt], interruption: Interruption, started: float
) -> list[Answer]:
    """Train to the last step, or until it is asked to stop. Returns the answers of the last evaluation. `started`: the
    time.perf_counter() at which the command began."""
    from training.keeping.interruption import StopRequested
    from training.keeping.run_evaluation import evaluate, evaluate_before
    from training.machine.compilation import compile_for_run
    from training.machine.hardware import frozen_garbage
    from training.numbers.evaluate import evaluated_windows
    from training.numbers.schedule import learning_rate
    from training.numbers.step import train_step

    config, model, data, timer = run.config, run.model, run.data, report.timer
    answers: list[Answer] = []
    first_step, flops_per_token = run.step, model.flops_per_token()

    with contextlib.suppress(StopRequested), contextlib.ExitStack() as training:
        with timer.paused():
            with interruption.compiling():
                step_model = compile_for_run(run, hardware, report.say)
            training.enter_context(frozen_garbage())
            evaluate_before(run, hardware, step_model, prompts, interruption.check, report.say)
        while not interruption.agreed(timer.limit_reached(config) or run.taken_over):
            row: dict[str, Any]
            if run.unevaluated is not None:  # what the last session was stopped in
                row, reporting, evaluating = run.unevaluated, False, True
            elif run.finished:
                break
            else:
                lr = learning_rate(run.step, run.max_steps, config)
                place = run.step, run.sequences_seen, lr
                try:
                    result = train_step(
                        step_model, run.optimizer, run.scaler, data, *place, run.config, hardware, interruption.begin
                    )
                except Exception as error:
                    report.say(run.give_way(error, interruption.step_over(), hardware))
                    continue
                interruption.step_done()
                run.advance(result.skipped)
                report.step_done(config.tokens_per_step)
                row = {"step": run.step, "epoch": run.epoch, "tokens": run.tokens, "elapsed_seconds": timer.elapsed}
                reporting, evaluating = run.due(config.log_interval), run.due(config.eval_interval)
                if run.step == first_step + 1:
                    reporting = bool(config.log_interval)  # on a slow machine a sign of life should not take hours
                    hardware.synchronize()
                    report.say(f"First step {time.perf_counter() - started:.1f} s after the start")

            if reporting or not hardware.is_cuda or run.step % 100 == 0:
                run.stability.require_stable(run.step, run.saved_step)
            if reporting:  # nothing waits for the device on the other steps
                row |= timer.training_row(result.loss, result.grad_norm, lr, flops_per_token)
                row |= run.stability.row()
                report.progress(row, run.mirror.status() if run.mirror else "")
                for line in run.stability.warnings(run.step, row["train_loss"]):
                    report.say(line)
            if evaluating:
                run.unevaluated = row
                report.announce_evaluation(evaluated_windows(data, config) * config.max_seq_len)
                try:
                    with timer.paused():
                        answers = evaluate(run, row, hardware, step_model, prompts, interruption.check)
                except Exception as error:
                    if is_out_of_memory(error) and not config.is_sharded:  # else no process has all of it to save
                        with timer.paused():
                            run.save(timer.elapsed)  # the evaluation is made up for
                    report.say(run.give_way(error, "evaluation", hardware))
                    continue
                run.unevaluated = None
                report.evaluation(row, answers)
            if reporting or evaluating:
                report.write(row)
            if run.save_is_due():
                with timer.paused():
                    run.save_if_sound(timer.elapsed)
            for line in run.news():
                report.say(line)
    interruption.step_over()
    if run.step > run.saved_step:  # asked to stop, or out of time
        with timer.paused():
            run.save(timer.elapsed)
    return answers


def use_builtin_files(config: TrainConfig) -> TrainConfig:
    """Replace `builtin:conversations` by the files of the example corpus, written on first use."""
    if "builtin:conversations" not in (config.input, config.eval_prompts):
        return config
    from examples import conversations

    files: dict[str, Any] = {}
    if config.input == "builtin:conversations":
        text = Path(DEFAULT_FOLDER) / "conversations" / "conversations.txt"
        if not text.exists():
            text.parent.mkdir(parents=True, exist_ok=True)
            conversations.write(text)
        files["input"] = str(text)
    if config.eval_prompts == "builtin:conversations":
        files["eval_prompts"] = str(conversations.HELD_OUT_FILE)
    return dataclasses.replace(config, **files)


def tokenize_input(config: TrainConfig) -> TrainConfig:
    """Tokenize `input`, if there is one, on first use, into a folder of its own unless `data_dir` names one. A run that
    is continued keeps its tokenizer.

    Raises DataError if `data_dir` holds other tokens than those of `input`: other runs may need them.
    """
    from tokenize_local_bpe import tokenize
    from training.keeping.resume import own_tokenizer

    if not config.input:
        return config
    folder = config.data_dir or folder_of_text(config.input, config.tokenizer, config.vocab_size)
    vocabulary = {key: getattr(config, key) for key in ("tokenizer", "vocab_size")}
    own, replaceable = own_tokenizer(config), not config.data_dir
    tokenize([config.input], folder, quiet=True, may_replace=replaceable, tokenizer_file=own, **vocabulary)
    return dataclasses.replace(config, data_dir=folder)


if __name__ == "__main__":
    end(main)
