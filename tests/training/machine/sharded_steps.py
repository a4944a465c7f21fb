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

from training.config import parse_config
from training.keeping.start import shard_parts
from training.machine.compilation import compile_model
from training.machine.processes import count, process_group, rank
from training.machine.sharding import local
from training.numbers import optimizer as optimizers
from training.numbers.evaluate import answer_prompts, validation_loss
from training.numbers.optimizer import gradient_norm, whole_state
from training.numbers.stability import not_finite
from training.numbers.step import train_step
from training.parts import Parts
from training.prepare import prepare

STEPS = 4
MODERN = shlex.split("--norm rmsnorm --position rope --qk_norm true --embed_norm true --activation relu2")
VARIANTS = {
    "adamw": [],
    "tied, checkpointed": ["--tie_embeddings", "true", "--activation_checkpointing", "--norm", "layernorm"],
    "muon": [*MODERN, "--optimizer", "muon"],
    "lora": ["--lora_rank", "3", "--init_from"],  # the base follows
    "compiled": [*MODERN, "--compile", "on"],
    "scaled": [],
}


def step_of(parts: Parts, step: int) -> list[float]:
    """Loss, gradient norm, and whether the update was skipped."""
    result = train_step(parts, step, step * parts.config.sequences_per_step, 0.01)
    return [float(number) for number in result]


def overflow(parts: Parts) -> list[float]:
    """Gradients that are infinite in the rows of the last process: whether all skip, and the scale that follows."""
    loss = parts.step_model(*parts.data.batch(0, 1))
    parts.scaler.scale(loss).backward()
    if rank() == count() - 1:
        local(parts.model.blocks[0].attention.qkv.weight.grad).fill_(torch.inf)
    parts.scaler.unscale_(parts.optimizer)
    skipped = not_finite(loss, gradient_norm(parts.optimizer))
    parts.scaler.update()
    return [float(skipped), parts.scaler.get_scale()]


def results_of(flags: list[str], name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    config = parse_config(flags)
    parts = prepare(config)
    if name == "scaled":
        parts.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    whole = parts.model.num_parameters()
    if config.is_sharded:
        shard_parts(parts)
    example = lambda: parts.data.batch(0, parts.config.rows_at_once)  # noqa: E731
    parts.step_model = compile_model(parts.model, parts.hardware, example, evaluates=True)
    steps = [step_of(parts, step) for step in range(STEPS)]
    evaluated, answers = validation_loss(parts), [answer.text for answer in answer_prompts(parts)]
    state = whole_state(parts.optimizer)
    kept = [sum(local(each).numel() for each in parts.model.parameters())]
    kept += [sum(local(each).numel() for held in parts.optimizer.state.values() for each in held.values())]
    return {
        "steps": steps,
        "validation loss": evaluated,
        "answers": answers,
        "state": {name: float(each.norm()) for name, each in state.items()},
        "kept": [whole, *kept],
        "graphs": counters["stats"]["unique_graphs"],
        "overflow": overflow(parts) if name == "scaled" else None,
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
