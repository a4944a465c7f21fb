"""Compare training speed with a plain PyTorch loop and nanoGPT, with the same shapes and batch.

    python benchmarks/peers.py --nanogpt PATH_OF_A_CHECKOUT

The contestants take turns, each measurement in a new process. Results go to docs/benchmarks/, one file per kind of
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.measure import (
    Measurements,
    Spread,
    add_result_flags,
    describe_machine,
    flag_words,
    machine_slug,
    markdown_table,
    measure_in_turn,
    require_known_names,
    write_random_tokens,
    write_results,
)
from benchmarks.workload import TimedRun, time_steps
from common.errors import ConfigError
from common.flags import Parser
from common.machine import has_fast_bf16, pick_device
from common.script import script
from model import TransformerLanguageModel
from model_config import ModelConfig
from training.hardware import Hardware

TOKENS = 2_000_000


@dataclasses.dataclass(frozen=True)
class Case:
    """A model shape and batch size. Our trainer chooses its settings for a run of `max_steps`."""

    num_layers: int
    embed_dim: int
    num_heads: int
    max_seq_len: int
    vocab_size: int
    batch_size: int
    max_steps: int

    @property
    def shape(self) -> ModelConfig:
        sizes = self.vocab_size, self.embed_dim, self.num_heads, self.num_layers
        return ModelConfig(*sizes, max_seq_len=self.max_seq_len)


def choose_cases(is_cuda: bool) -> dict[str, Case]:
    return {
        "shakespeare_char": Case(4, 128, 4, 64, 65, 12, max_steps=2_000),
        "4x256": Case(4, 256, 4, 256, 65, 32, max_steps=5_000),
        "gpt2_small": Case(12, 768, 12, 512, 32_000, 64 if is_cuda else 4, max_steps=20_000),
        "toy": Case(1, 32, 2, 16, 65, 4, max_steps=100),
    }


class Contestant(NamedTuple):
    """A model ready to train: `step()` is one update."""

    step: Callable[[], object]
    parameters: int
    about: Mapping[str, Any] = {}


class Workload(NamedTuple):
    """The case, data and device of a measurement."""

    case: Case
    folder: str
    device: torch.device
    nanogpt_path: str

    def batches(self) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function that draws inputs and targets, each (B, T) int64, row by row from a memory map, as most
        code does."""
        tokens = np.memmap(Path(self.folder) / "tokens.bin", "<u2", mode="r")
        T = self.case.max_seq_len

        def rows(starts: Sequence[int]) -> torch.Tensor:
            batch = torch.stack([torch.from_numpy(tokens[start : start + T].astype(np.int64)) for start in starts])
            return batch.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else batch

        def draw() -> tuple[torch.Tensor, torch.Tensor]:
            starts = torch.randint(len(tokens) - T, (self.case.batch_size,)).tolist()
            return rows(starts), rows([start + 1 for start in starts])

        return draw


def build_ours(work: Workload) -> Contestant:
    """Build the trainer's own step with its automatic choices."""
    values = {"data_dir": work.folder, **dataclasses.asdict(work.case)}
    del values["vocab_size"]  # the trainer takes it from the tokens
    run = TimedRun.open([*flag_words(values), "--device", work.device.type])
    about = {"precision": run.hardware.precision, "compiled": run.hardware.compiles}
    return Contestant(run.step, run.model.num_parameters(), about)


def build_plain_pytorch(work: Workload) -> Contestant:
    """Build our model in a plain loop: fp32, eager, unfused AdamW, rows stacked one by one."""
    model = TransformerLanguageModel(work.case.shape).to(work.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=False)
    draw = work.batches()

    def step() -> None:
        inputs, targets = draw()
        optimizer.zero_grad(set_to_none=True)
        model(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Contestant(step, model.num_parameters())


def build_nanogpt(work: Workload) -> Contestant:
    """Build nanoGPT's model and optimizer as its train.py uses them.

    CPU: fp32, eager, unfused AdamW. CUDA: compiled, bf16 (or fp16 if the GPU lacks it), TF32, fused AdamW. Its head is
    always tied, so it updates fewer parameters.
    """
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(work.nanogpt_path) / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up in sys.modules
    spec.loader.exec_module(module)
    case = work.case
    shape = module.GPTConfig(
        block_size=case.max_seq_len, vocab_size=case.vocab_size, n_layer=case.num_layers, n_head=case.num_heads,
        n_embd=case.embed_dim, dropout=0.0, bias=True,
    )  # fmt: skip
    model = module.GPT(shape).to(work.device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), work.device.type)
    precision, step_model = torch.float32, model
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if work.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        precision = torch.bfloat16 if has_fast_bf16(work.device) else torch.float16
        autocast = lambda: torch.amp.autocast("cuda", precision)  # noqa: E731
        step_model = torch.compile(model)
    scaler = torch.amp.GradScaler(work.device.type, enabled=precision == torch.float16)
    draw = work.batches()
    batch = draw()

    def step() -> None:
        nonlocal batch
        with autocast():
            _, loss = step_model(*batch)
        batch = draw()  # while the GPU computes
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Contestant(step, parameters)


CONTESTANTS = {"ours": build_ours, "plain PyTorch": build_plain_pytorch, "nanoGPT": build_nanogpt}


def measure(name: str, work: Workload, seconds: float) -> dict[str, Any]:
    """Measure one contestant in this process."""
    torch.manual_seed(0)
    contestant = CONTESTANTS[name](work)
    # `detect_hardware` would change settings of the process, which only our trainer should get.
    hardware = Hardware(work.device, "", "fp32", "", False, "", peak_flops=None, memory_bytes=None)
    contestant.step()
    hardware.synchronize()
    step_seconds, steps = time_steps(contestant.step, hardware.synchronize, seconds)
    peak = hardware.peak_memory()
    return {
        **contestant.about,
        "parameters": contestant.parameters,
        "tokens_per_second": work.case.batch_size * work.case.max_seq_len / step_seconds,
        "ms_per_step": 1000 * step_seconds,
        "steps": steps,
        "peak_memory_gb": peak and peak / 1e9,
    }


def format_table(measured: Measurements) -> str:
    def speedup(name: str) -> str:
        """Compare round by round, so that a drift in the machine's speed cancels out."""
        pairs = zip(measured["ours"], measured[name], strict=False)
        return Spread.from_values([a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]).format(".2f")

    rows = [
        [
            name,
            f"{rows[0]['parameters']:,}",
            Spread.from_rows(rows, "tokens_per_second").format(",.0f"),
            Spread.from_rows(rows, "ms_per_step").format(",.1f"),
            "" if name == "ours" else speedup(name),
            f"{max(row['peak_memory_gb'] or 0 for row in rows):.2f}",
        ]
        for name, rows in measured.items()
    ]
    columns = ["", "parameters", "tokens/s", "ms per step", "speedup of ours", "peak GB"]
    return markdown_table(columns, rows)


def format_page(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    parts = [
        "Median (lowest to highest) of the rounds. Speedups are computed round by round. Memory is allocated memory on "
        "a GPU, resident memory on a CPU.\n"
    ]
    for name, result in results["cases"].items():
        chose, case = result["measured"]["ours"][0], Case(**result["case"])
        parts.append(
            f"## {name}: {case.num_layers} x {case.embed_dim}, context {case.max_seq_len}, batch {case.batch_size}, "
            f"vocabulary {case.vocab_size:,}\n\n{format_table(result['measured'])}\n\n"
            f"Ours chose {chose['precision']}{', compiled' if chose['compiled'] else ''}, for a run of "
            f"{case.max_steps:,} steps.\n"
        )
    return "\n".join(parts)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/peers.py", description=__doc__.split("\n")[0])
    names = list(choose_cases(False))
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", default=names[:-1], help=f"any of {', '.join(names)} [all]"
    )
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, which is then measured, too")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help='contestants besides ours, like "plain PyTorch" [all]'
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements per contestant [3]")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per measurement; at least one step [4]")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # measure this one in this process
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    device = pick_device(flags.device)
    if flags.worker:
        name, case, folder = json.loads(flags.worker)
        work = Workload(choose_cases(device.type == "cuda")[case], folder, device, flags.nanogpt)
        print(json.dumps(measure(name, work, flags.seconds)))
        return 0
    require_known_names("--cases", flags.cases, names)
    only = ["ours", *(flags.only or [name for name in CONTESTANTS if name != "nanoGPT" or flags.nanogpt])]
    require_known_names("--only", only, CONTESTANTS)
    if flags.rounds < 1 or flags.seconds <= 0:
        raise ConfigError("--rounds must be at least 1, --seconds more than 0.")
    if flags.nanogpt and not (Path(flags.nanogpt) / "model.py").is_file():
        raise ConfigError(f"--nanogpt {flags.nanogpt} has no model.py. Name a checkout of nanoGPT.")
    machine = describe_machine(device.type)
    results: dict[str, Any] = {"machine": machine, "rounds": flags.rounds, "seconds": flags.seconds, "cases": {}}
    words = ["--seconds", str(flags.seconds), "--device", device.type, "--nanogpt", flags.nanogpt or ""]
    for name in flags.cases:
        case = choose_cases(device.type == "cuda")[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_random_tokens(Path(temporary) / "tokens", TOKENS, case.vocab_size)
            workers = {each: json.dumps([each, name, str(folder)]) for each in only}
            commands = {
                each: [sys.executable, __file__, *words, "--worker", worker] for each, worker in workers.items()
            }
            measured, _ = measure_in_turn(commands, flags.rounds)
        results["cases"][name] = {"case": dataclasses.asdict(case), "measured": measured}
        stem = Path(flags.output_dir) / f"training-{machine_slug(machine)}"
        write_results(stem, "Training speed compared with peers", results, format_page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
