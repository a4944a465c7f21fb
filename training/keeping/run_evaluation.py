"""The evaluations of a run, and what it makes of them: the best weights, and when to stop early."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from common.checkpoint import Checkpoint
from training.machine.hardware import Hardware
from training.machine.processes import on_first, share_tensors
from training.numbers.evaluate import Answer, Prompt, answer_prompts, bits_per_byte, evaluated_windows, validation_loss

if TYPE_CHECKING:
    from training.keeping.run import Run


def evaluate(
    run: Run,
    row: dict[str, Any],
    hardware: Hardware,
    step_model: Callable[..., torch.Tensor],
    prompts: list[Prompt],
    between: Callable[[], None],
) -> list[Answer]:
    """Complete a row of metrics by an evaluation; if these weights are the best, they are to be kept. Returns the
    answers to the prompts.

    `between` is called between two batches, and may raise to give the evaluation up.
    """
    val_loss = validation_loss(run.model, step_model, run.data, run.config, hardware, between)
    run.require_finite(val_loss, "the validation loss")
    answers = on_first(lambda: answer_prompts(run.model, run.data, prompts, between)) if prompts else []
    row |= {"val_loss": val_loss, "val_bits_per_byte": bits_per_byte(val_loss, run.data)}
    if run.best_val_loss is None or val_loss < run.best_val_loss:
        run.best_val_loss, run.best_step = val_loss, run.step
        run.best_windows = evaluated_windows(run.data, run.config)
        run.best_is_new = True
    is_lower = run.lowest_val_loss is None or val_loss < run.lowest_val_loss
    run.worse = 0 if is_lower else run.worse + 1
    run.lowest_val_loss = val_loss if is_lower else run.lowest_val_loss
    if run.has_stopped_early:
        run.max_steps = run.step
    return answers


def evaluate_before(
    run: Run,
    hardware: Hardware,
    step_model: Callable[..., torch.Tensor],
    prompts: list[Prompt],
    between: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """What has to be known before the next step: how good trained weights were that a new run starts from, and the
    best weights over the validation windows of now. `between` is that of `validation_loss`."""
    if not run.config.eval_interval:
        return
    while True:
        try:
            if run.initialized_from and run.step == 0:
                evaluate_base(run, hardware, step_model, prompts, between)
            if run.best_val_loss is not None and run.best_windows != evaluated_windows(run.data, run.config):
                evaluate_best(run, hardware, step_model, between, say)
            return
        except Exception as error:
            say(run.give_way(error, "evaluation", hardware))


def evaluate_base(
    run: Run,
    hardware: Hardware,
    step_model: Callable[..., torch.Tensor],
    prompts: list[Prompt],
    between: Callable[[], None],
) -> None:
    """Evaluate the weights that the run starts from. `between` is that of `validation_loss`."""
    loss = validation_loss(run.model, step_model, run.data, run.config, hardware, between)
    run.require_finite(loss, "the validation loss of the weights that it starts from")
    answers = on_first(lambda: answer_prompts(run.model, run.data, prompts, between)) if prompts else []
    asked = [answer.prompt.text for answer in answers]
    run.base = {"val_loss": loss, "prompts": asked, "answers": [answer.text for answer in answers]}


def evaluate_best(
    run: Run,
    hardware: Hardware,
    step_model: Callable[..., torch.Tensor],
    between: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Evaluate the best weights again, over the validation windows of now: the weights that are kept and the loss
    that is to be beaten belong together. `between` is that of `validation_loss`."""
    best = Checkpoint(run.dir / "best")  # verified when the run was restored
    windows = evaluated_windows(run.data, run.config)
    before = "other" if run.best_windows is None else f"{run.best_windows:,}"
    named = f"the best weights so far (step {run.best_step:,}, {run.best_val_loss:.4f} over {before} windows)"
    say(f"Evaluating {named} over the {windows:,} validation windows of now ...")
    current = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    try:
        on_first(lambda: best.load_weights(run.model))
        share_tensors(list(run.model.state_dict().values()))
        run.best_val_loss = validation_loss(run.model, step_model, run.data, run.config, hardware, between)
        run.best_windows = windows
        run.lowest_val_loss = run.best_val_loss
    finally:
        run.model.load_state_dict(current)
    say(f"step {run.best_step:,}, the best so far: validation loss {run.best_val_loss:.4f}")
