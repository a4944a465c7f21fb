"""Time a training step on this machine from a plain loop up to this project's, one technique more on each rung.

    python benchmarks/speed_ladder.py --config gpt2_small.json --batch_size 4

Every rung runs the trainer's own step with the same weights and sequences. The lower rungs replace its parts by
simpler, slower ones. All flags but --rounds, --steps and --only are the trainer's; --output_dir is for the results.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F

import training.hardware
from benchmarks.measure import (
    RESULTS,
    Measured,
    Spread,
    describe_machine,
    machine_kind,
    markdown_table,
    measure_in_turn,
    require_known,
    write_random_tokens,
    write_results,
)
from common.errors import UserError
from common.flags import Parser, add_debug
from common.machine import has_fast_bf16, pick_device
from common.script import script
from model import TransformerLanguageModel
from training.command_line import parse_config
from training.compilation import compile_model
from training.config import Config
from training.data import TokenData
from training.hardware import detect_hardware
from training.run import Run
from training.step import train_step

WARM_UP_STEPS = 2  # the first loads every kernel, the second allocates all memory
TOKENS = 100_000_000  # random ones, 200 MB: far beyond a CPU's caches


class Rung(enum.IntEnum):
    """Each adds one technique to the one before."""

    BASELINE = 0  # memory map, a Python loop over rows, fp32, eager, the score matrix in memory, AdamW by the parameter
    RAM = 1
    VECTORIZED = 2
    COMPILE = 3
    MIXED = 4
    FLASH = 5
    OURS = 6  # the unchanged trainer


NAMES = {
    Rung.BASELINE: "baseline",
    Rung.RAM: "+ tokens in RAM",
    Rung.VECTORIZED: "+ vectorized batches",
    Rung.COMPILE: "+ torch.compile",
    Rung.MIXED: "+ mixed precision",
    Rung.FLASH: "+ flash attention",
    Rung.OURS: "this trainer",
}


def materialized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as in textbooks, with every score in memory. q, k, v: (B, H, T, D) -> (B, H, T, D)."""
    assert is_causal and attn_mask is None and not enable_gqa, "the configs need nothing else"
    T = q.size(-2)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, T)
    return F.dropout(scores.masked_fill(future, -math.inf).softmax(dim=-1), dropout_p) @ v


def gather_row_by_row(data: TokenData, starts: np.ndarray) -> torch.Tensor:
    """`TokenData.gather` with a Python loop: one read for each row. (rows, T + 1), in the stored dtype."""
    return torch.stack([data.tokens[start : start + data.seq_len + 1] for start in starts.tolist()])


def climb(rung: Rung, steps: int, config: Config) -> dict[str, Any]:
    """Measure one rung in this process: mean seconds of `steps` steps after two that do not count."""
    if rung < Rung.OURS:
        training.hardware.keep_freed_memory = lambda: None  # only in this process, like the attention below
    hardware = detect_hardware(config, config)
    if rung < Rung.OURS:
        precision = mixed_precision(hardware.device) if rung >= Rung.MIXED else "fp32"
        hardware = dataclasses.replace(hardware, precision=precision, compiles=rung >= Rung.COMPILE)
        config = dataclasses.replace(config, placement="ram" if rung >= Rung.RAM else "mmap")
    if rung < Rung.FLASH:
        F.scaled_dot_product_attention = cast(Any, materialized_attention)
    data = TokenData.open(config, config.data_dir, config.max_seq_len, hardware)
    if rung < Rung.OURS:
        data.reader = None  # nothing is read ahead
    if rung < Rung.VECTORIZED:
        cast(Any, data).gather = functools.partial(gather_row_by_row, data)
    torch.manual_seed(config.seed)
    model = TransformerLanguageModel(config.shape(data.vocab_size)).to(hardware.device)
    rows = config.micro_batch_size or config.batch_size
    run = Run(config, hardware, data, [], model, rows, "default")
    if rung < Rung.OURS:
        for group in run.optimizer.param_groups:
            group["fused"] = False
    output, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(output):
        step_model, failure = compile_model(model, hardware, data.batch(0, run.rows_at_once))
    hardware.synchronize()
    is_compiled = hardware.compiles and not failure and not torch._dynamo.config.disable
    compile_seconds = time.perf_counter() - began if is_compiled else None
    if rung == Rung.COMPILE and not is_compiled:
        raise UserError(output.getvalue().strip() if failure else "torch.compile is switched off (TORCHDYNAMO_DISABLE)")
    run.step_model = step_model
    losses = []
    for step in range(WARM_UP_STEPS + steps):
        result = train_step(run)
        run.advance()
        losses.append(result.loss if rung == Rung.OURS else result.loss.item())
        if step == WARM_UP_STEPS - 1:
            hardware.synchronize()
            began = time.perf_counter()
    hardware.synchronize()
    return {
        "seconds": (time.perf_counter() - began) / steps,
        "compile_seconds": compile_seconds,
        "peak_memory": hardware.peak_memory(),
        "losses": [float(losses[0]), float(losses[-1])],
        "precision": hardware.precision,
        "compiled": is_compiled,
    }


def mixed_precision(device: torch.device) -> str:
    """The precision that the machine has units for, even if the trainer would not choose it."""
    if has_fast_bf16(device):
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


def table(measured: Measured, missing: Mapping[str, str]) -> str:
    """One row for each rung, beside the baseline."""
    rows = []
    for name in NAMES.values():
        if not (runs := measured.get(name)):
            rows.append([name, missing.get(name, "").replace("|", "\\|"), *"----"])
            continue
        seconds, compiling = Spread.of_key(runs, "seconds"), max(run["compile_seconds"] or 0 for run in runs)
        baseline = measured.get(NAMES[Rung.BASELINE])
        rows.append(
            [
                name,
                seconds.text(),
                f"{Spread.of_key(baseline, 'seconds').median / seconds.median:.2f}x" if baseline else "-",
                f"{max(run['peak_memory'] or 0 for run in runs) / 1e9:.2f} GB",
                f"{compiling:.0f} s" if compiling else "-",
                f"{runs[0]['precision']}{', compiled' if runs[0]['compiled'] else ''}",
            ]
        )
    columns = ["what", "s/step (lowest to highest)", "speed-up", "peak memory", "compiling", "computed in"]
    return markdown_table(columns, rows)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/speed_ladder.py", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each rung [3]")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of a measurement [1, on a GPU 20]")
    parser.add_argument("--only", nargs="+", metavar="RUNG", help='these, as in "baseline" "this trainer" [all]')
    parser.add_argument("--output_dir", metavar="DIR", default=str(RESULTS), help="[docs/benchmarks]")
    parser.add_argument("--rung", type=int, help=argparse.SUPPRESS)  # measure this one, in this process
    add_debug(parser)
    flags, rest = parser.parse_known_args(argv)
    # AdamW on every rung: they show speed alone.
    config = dataclasses.replace(parse_config(rest), optimizer="adamw", input=None, eval_prompts=None)
    device = pick_device(config.device)
    if flags.rung is not None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # empty: compiling is timed
            print(json.dumps(climb(Rung(flags.rung), flags.steps, config)))
        return 0
    only = flags.only or list(NAMES.values())
    require_known("--only", only, NAMES.values())
    steps = flags.steps or (20 if device.type == "cuda" else 1)
    missing = {name: "not asked for" for name in NAMES.values() if name not in only}
    if mixed_precision(device) == "fp32":
        missing[NAMES[Rung.MIXED]] = "this CPU has no units for bf16, and without them a step in bf16 takes minutes"
    machine = describe_machine(device.type)
    stem = Path(flags.output_dir) / f"speed_ladder-{machine_kind(machine)}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = config.data_dir or str(write_random_tokens(Path(scratch) / "tokens", TOKENS, config.vocab_size))
        words = [*rest, *([] if config.data_dir else ["--data_dir", folder]), "--steps", str(steps)]
        commands = {
            name: [sys.executable, __file__, *words, "--rung", str(rung.value)]
            for rung, name in NAMES.items()
            if name not in missing
        }
        measured, failed = measure_in_turn(commands, flags.rounds)
    body = (
        f"{config.name}: {config.num_layers} x {config.embed_dim}, {config.sequences_per_step} x {config.max_seq_len} "
        f"tokens a step. Each rung runs in its own process, {flags.rounds} rounds in turn, {steps} steps of each after "
        f"two that do not count. A step does not include compiling.\n\n"
        + table(measured, missing | {name: f"failed: {why}" for name, why in failed.items()})
    )
    write_results(stem, f"Speed ladder: {config.name}", {"machine": machine, "rungs": measured}, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
