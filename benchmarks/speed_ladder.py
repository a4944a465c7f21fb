"""Time a training step on this machine, from a plain PyTorch loop up to this trainer's, one technique more per rung.

    python benchmarks/speed_ladder.py --config small.json

Each rung keeps the techniques of those below, in a process of its own. Other flags are the trainer's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from benchmarks.measure import (
    Spread,
    add_result_flags,
    describe_machine,
    machine_slug,
    markdown_table,
    measure_in_turn,
    write_random_tokens,
    write_results,
)
from benchmarks.workload import TimedRun, time_steps
from common.flags import Parser
from common.machine import has_fast_bf16, pick_device
from common.script import script
from model import TransformerLanguageModel
from training.config import Config, parse_config

TOKENS = 20_000_000  # 40 MB, more than a CPU's caches hold
RUNGS = ("plain loop", "vectorized batches", "bf16", "compile", "flash attention", "this trainer")


def materialized_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Causal attention with all scores in memory, as textbooks write it. q, k, v: (B, H, T, D) -> (B, H, T, D)."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5  # (B, H, T, T)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def build_step(techniques: Sequence[str], config: Config, folder: str, device: torch.device) -> Callable[[], object]:
    """Return a training step with these techniques; all have fp32 weights, AdamW, and gradients clipped at 1."""
    if "flash attention" not in techniques:
        F.scaled_dot_product_attention = cast(Any, materialized_attention)
    model = TransformerLanguageModel(config.shape(config.vocab_size)).to(device)
    step_model = torch.compile(model) if "compile" in techniques else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False)
    mapped, T = np.memmap(Path(folder) / "tokens.bin", "<u2", mode="r"), config.max_seq_len
    tokens = torch.from_numpy(mapped.astype(np.int32)).to(device)

    def draw_batch() -> torch.Tensor:
        """Return random windows, (rows, T + 1), int64."""
        starts = torch.randint(len(tokens) - T, (config.sequences_per_step,))
        if "vectorized batches" in techniques:
            return tokens.unfold(0, T + 1, 1)[starts.to(device)].long()
        return torch.stack([torch.tensor(mapped[start : start + T + 1].tolist()) for start in starts]).to(device)

    def take_step() -> None:
        windows = draw_batch()
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in techniques and has_fast_bf16(device)):
            loss = step_model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # as a loop that prints every loss does

    return take_step


def draw_ladder(medians: dict[str, float], title: str, path: Path) -> None:
    figure, values = Figure(figsize=(8, 3.2), layout="constrained"), list(medians.values())
    axes = figure.subplots()
    bars = axes.barh(list(medians), values)
    axes.bar_label(bars, [f"{value:.3g} s, {values[0] / value:.1f}x" for value in values], padding=4)
    axes.set(xlabel="seconds per training step", title=title, xlim=(0, 1.25 * max(values)))
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/speed_ladder.py", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measurements of each rung [1]")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of a measurement; 1 step or more [5]")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # a rung and its tokens, in this process
    add_result_flags(parser)
    flags, rest = parser.parse_known_args(argv)
    device, machine = pick_device(flags.device), describe_machine(flags.device)
    words = [*rest, "--device", device.type, "--optimizer", "adamw"]  # the same on every rung
    config = parse_config(words)
    if flags.worker:
        rung, folder = flags.worker
        ours = TimedRun.open([*words, "--data_dir", folder]).step if rung == RUNGS[-1] else None
        take_step = ours or build_step(RUNGS[: RUNGS.index(rung) + 1], config, folder, device)
        take_step()  # compiles
        seconds, _ = time_steps(take_step, torch.cuda.synchronize if device.type == "cuda" else int, flags.seconds)
        print(json.dumps({"seconds": seconds}))
        return 0
    rungs = [rung for rung in RUNGS if rung != "bf16" or has_fast_bf16(device)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = str(write_random_tokens(Path(scratch) / "tokens", TOKENS, config.vocab_size))
        words = [sys.executable, __file__, *words, "--seconds", str(flags.seconds), "--worker"]
        commands = {rung: [*words, rung, folder] for rung in rungs}
        measured, _ = measure_in_turn(commands, flags.rounds)
    spreads = {rung: Spread.from_rows(runs, "seconds") for rung, runs in measured.items()}
    rows = [[rung, each.format(), f"{spreads[RUNGS[0]].median / each.median:.2f}x"] for rung, each in spreads.items()]
    title = f"{config.name}, {config.sequences_per_step} x {config.max_seq_len} tokens a step, {machine['device']}"
    body = markdown_table(["each with those above", "s a step (lowest to highest)", "speed-up"], rows)
    stem = Path(flags.output_dir) / f"speed_ladder-{machine_slug(machine)}"
    write_results(stem, f"Speed ladder: {title}", {"machine": machine, "rungs": measured}, body)
    draw_ladder({rung: spread.median for rung, spread in spreads.items()}, title, stem.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
