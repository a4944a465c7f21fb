"""Run by test_sharding.py in several processes, and in one: a few steps of several configurations, as numbers.

python sharded_steps.py RESULTS.json BASE_CHECKPOINT FLAG...
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch._dynamo.utils import counters

from training.checkpoints.resume import find_old, shard_trainer
from training.config import parse_config
from training.machine.compilation import compile_model
from training.machine.processes import count, process_group, rank
from training.machine.sharding import local
from training.numbers import optimizer as optimizers
from training.numbers.evaluate import answer_prompts, validation_loss
from training.numbers.optimizer import gradient_norm, whole_state
from training.numbers.step import Trainer, not_finite, train_step
from training.plan import build, make_plan

STEPS = 4
MODERN = shlex.split("--norm rmsnorm --position rope --qk_norm true --embed_norm true --activation swiglu")
VARIANTS = {
    "adamw": [],
    "tied, checkpointed": ["--tie_embeddings", "true", "--activation_checkpointing", "--norm", "layernorm"],
    "muon": [*MODERN, "--optimizer", "muon"],
    "lora": ["--lora_rank", "3", "--init_from"],  # the base follows
    "compiled": [*MODERN, "--compile", "on"],
    "scaled": [],
}


def step_of(trainer: Trainer, step: int) -> list[float]:
    """Loss, gradient norm, and whether the update was skipped."""
    result = train_step(trainer, step, step * trainer.config.sequences_per_step, 0.01)
    return [float(number) for number in result]


def overflow(trainer: Trainer) -> list[float]:
    """Gradients that are infinite in the rows of the last process: whether all skip, and the scale that follows."""
    loss = trainer.step_model(*trainer.data.batch(0, 1))
    trainer.scaler.scale(loss).backward()
    if rank() == count() - 1:
        local(trainer.model.blocks[0].attention.qkv.weight.grad).fill_(torch.inf)
    trainer.scaler.unscale_(trainer.optimizer)
    skipped = not_finite(loss, gradient_norm(trainer.optimizer))
    trainer.scaler.update()
    return [float(skipped), trainer.scaler.get_scale()]


def results_of(flags: list[str], name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    config = parse_config(flags)
    trainer = build(make_plan(config, find_old(config, None)))
    if name == "scaled":
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    whole = trainer.model.num_parameters()
    if config.is_sharded:
        shard_trainer(trainer)
    example = trainer.data.batch(0, trainer.rows_at_once)
    trainer.step_model, _ = compile_model(trainer.model, trainer.hardware, example, evaluates=True)
    steps = [step_of(trainer, step) for step in range(STEPS)]
    evaluated, answers = validation_loss(trainer), [answer.text for answer in answer_prompts(trainer)]
    state = whole_state(trainer.optimizer)
    kept = [sum(local(each).numel() for each in trainer.model.parameters())]
    kept += [sum(local(each).numel() for held in trainer.optimizer.state.values() for each in held.values())]
    return {
        "steps": steps,
        "validation loss": evaluated,
        "answers": answers,
        "state": {name: float(each.norm()) for name, each in state.items()},
        "kept": [whole, *kept],
        "graphs": counters["stats"]["unique_graphs"],
        "overflow": overflow(trainer) if name == "scaled" else None,
    }  # fmt: skip


def main(results: str, base: str, *flags: str) -> None:
    optimizers.newton_schulz_dtype = lambda device: torch.float32  # bf16 enlarges differences in rounding
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    numbers = {}
    with process_group(parse_config(flags)):
        for name, more in VARIANTS.items():
            numbers[name] = results_of([*flags, *more, *([base] if name == "lora" else [])], name)
    Path(results).write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
