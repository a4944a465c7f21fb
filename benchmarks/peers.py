"""Time a training step from a plain PyTorch loop up to this trainer's, one technique more per rung, and nanoGPT's.

Or time generation, or the pre-tokenizer:

    python benchmarks/peers.py --config small.json --nanogpt PATH_OF_A_CHECKOUT
    python benchmarks/peers.py --generation
    python benchmarks/peers.py --tokenizing my_text.txt

Each rung keeps the techniques of those before it. The steps are taken in turn, each measurement in a new process. Other
flags are the trainer's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import (
    ROOT,
    add_result_flags,
    describe_machine,
    machine_slug,
    markdown_table,
    measure_in_turn,
    write_random_tokens,
    write_results,
)
from benchmarks.workload import TimedRun, spread_logits, time_steps, time_tokens
from common.flags import Parser
from common.machine import cpu_bf16_flag, has_fast_bf16, pick_device
from common.script import script
from generation.loading import convert, generation_dtype
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.corpus import find_sources, read_blocks
from tokenization.documents import read_pieces
from tokenization.encoding import encode_in_order, read_chunks
from tokenization.metadata import choose_dtype
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer
from training.config import Config, parse_config

TOKENS = 20_000_000  # 40 MB, more than a CPU's caches hold
MEGABYTE = 1_000_000
RUNGS = ("plain loop", "vectorized batches", "bf16", "compile", "flash attention", "nanoGPT", "this trainer")
GENERATION_CASES = [(1, 16), (1, 128), (1, 512), (1, 900), (4, 16), (16, 16), (32, 16)]  # texts, tokens of each prompt
NEW_TOKENS = 24


def _materialized_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Causal attention with all scores in memory, as textbooks write it. q, k, v: (B, H, T, D) -> (B, H, T, D)."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5  # (B, H, T, T)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def _build_step(
    techniques: Sequence[str], config: Config, vocab_size: int, folder: str, device: torch.device
) -> Callable[[], object]:
    """Return a training step with these techniques; all have fp32 weights, AdamW, and gradients clipped at 1."""
    if "flash attention" not in techniques:
        F.scaled_dot_product_attention = cast(Any, _materialized_attention)
    model = TransformerLanguageModel(config.shape(vocab_size)).to(device)
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


def _build_nanogpt(
    path: str, config: Config, vocab_size: int, folder: str, device: torch.device
) -> Callable[[], object]:
    """Return a step of nanoGPT's model and optimizer as its train.py takes it, on batches stacked row by row.

    CPU: fp32, eager, unfused AdamW. CUDA: compiled, bf16 (or fp16 if the GPU lacks it), TF32, fused AdamW. Its head is
    always tied, so it updates fewer parameters.
    """
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up in sys.modules
    spec.loader.exec_module(module)
    shape = module.GPTConfig(
        block_size=config.max_seq_len, vocab_size=vocab_size, n_layer=config.num_layers, n_head=config.num_heads,
        n_embd=config.embed_dim, dropout=0.0, bias=True,
    )  # fmt: skip
    model = module.GPT(shape).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    precision, step_model = torch.float32, model
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        precision = torch.bfloat16 if has_fast_bf16(device) else torch.float16
        autocast = lambda: torch.amp.autocast("cuda", precision)  # noqa: E731
        step_model = torch.compile(model)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    tokens, T = np.memmap(Path(folder) / "tokens.bin", "<u2", mode="r"), config.max_seq_len

    def draw() -> list[torch.Tensor]:
        """Return inputs and targets, each (B, T) int64."""
        starts = torch.randint(len(tokens) - T, (config.batch_size,)).tolist()
        windows = torch.stack([torch.from_numpy(tokens[start : start + T + 1].astype(np.int64)) for start in starts])
        parts = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if device.type == "cpu":
            return list(parts)
        return [part.pin_memory().to(device, non_blocking=True) for part in parts]

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

    return step


def _time_generation(device: torch.device, toy: bool) -> str:
    """Time GPT-2 small's generation per token, without the prompt, at several batch sizes and lengths."""
    torch.manual_seed(0)
    sizes = (80, 64, 2, 2) if toy else (32_000, 768, 12, 12)
    model = spread_logits(TransformerLanguageModel(ModelConfig(*sizes, max_seq_len=1024)))
    dtypes = [torch.float32, *[torch.bfloat16] * bool(cpu_bf16_flag())]
    rows = []
    for dtype in [generation_dtype(model.config, device)] if device.type == "cuda" else dtypes:
        convert(model.eval(), device, dtype)
        for texts, held in [GENERATION_CASES[0], *GENERATION_CASES]:  # the first warms up
            gap = statistics.median(time_tokens(model, texts, held, NEW_TOKENS))
            what = f"{texts} x {held}, {str(dtype).removeprefix('torch.')}"
            rows.append([what, f"{1000 * gap:.2f}", f"{texts / gap:,.0f}"])
    return markdown_table(["texts x tokens held", "ms a step", "tokens/s"], rows[1:])


def _time_tokenizing(text: str, toy: bool) -> str:
    """Time the pre-tokenizer: the whole command, training the vocabulary alone, encoding alone."""
    vocab_size, sources = 400 if toy else 32_000, find_sources([text])
    megabytes = sum(len(block) for source in sources for block in read_blocks(source)) / MEGABYTE
    rows = []

    def add_row(what: str, began: float) -> None:
        seconds = time.perf_counter() - began
        rows.append([what, f"{megabytes:.1f}", f"{seconds:.1f}", f"{megabytes / seconds:.1f}"])

    with tempfile.TemporaryDirectory() as folder:
        words = ["--input", text, "--output_dir", folder, "--vocab_size", str(vocab_size)]
        began = time.perf_counter()
        subprocess.run([sys.executable, str(ROOT / "tokenize_local_bpe.py"), *words], check=True, stdout=sys.stderr)
        add_row("the whole command", began)
        tokenizer = load_tokenizer(Path(folder) / "bpe_tokenizer.json")
    began = time.perf_counter()
    BPETokenizer.train((piece.text for piece in read_pieces(sources)), vocab_size)
    add_row("training the vocabulary", began)
    for workers in dict.fromkeys((os.cpu_count() or 1, 1)):
        began = time.perf_counter()
        chunks = read_chunks(lambda on_read: read_pieces(sources, on_read=on_read), 4 * MEGABYTE)
        for _ in encode_in_order(tokenizer, chunks, "error", choose_dtype(vocab_size), workers):
            pass
        add_row(f"encoding alone, threads: {workers}", began)
    return markdown_table(["what", "MB", "s", "MB/s"], rows)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/peers.py", description=__doc__.split("\n")[0])
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT: measured, too")
    parser.add_argument("--vocabulary", type=int, metavar="SIZE", help="tokens of the vocabulary [the config's]")
    parser.add_argument("--only", nargs="+", choices=RUNGS, metavar="RUNG", help=f"of {', '.join(RUNGS)} [all]")
    parser.add_argument("--generation", action="store_true", help="instead: time generation, per token")
    parser.add_argument("--tokenizing", metavar="FILE", help="instead: time the pre-tokenizer on this text")
    parser.add_argument("--toy", action="store_true", help="tiny sizes for generation and tokenizing")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each rung [1]")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per measurement; at least one step [5]")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # a rung and its tokens, in this process
    add_result_flags(parser)
    flags, rest = parser.parse_known_args(argv)
    device, machine = pick_device(flags.device), describe_machine(flags.device)
    stem = Path(flags.output_dir) / f"speed_ladder-{machine_slug(machine)}"
    if flags.generation or flags.tokenizing:
        kind = "tokenizing" if flags.tokenizing else "generation"
        table = (
            _time_tokenizing(flags.tokenizing, flags.toy) if flags.tokenizing else _time_generation(device, flags.toy)
        )
        stem = stem.with_name(stem.name.replace("speed_ladder", kind))
        write_results(stem, f"{kind.capitalize()} on this machine", {"machine": machine}, table)
        return 0
    words = [*rest, "--device", device.type, "--optimizer", "adamw"]  # the same on every rung
    config = parse_config(words)
    vocab_size = flags.vocabulary or config.vocab_size
    if flags.worker:
        rung, folder = flags.worker
        if rung == "this trainer":
            take_step: Callable[[], object] = TimedRun.open([*words, "--data_dir", folder]).step
        elif rung == "nanoGPT":
            take_step = _build_nanogpt(flags.nanogpt, config, vocab_size, folder, device)
        else:
            take_step = _build_step(RUNGS[: RUNGS.index(rung) + 1], config, vocab_size, folder, device)
        take_step()  # compiles
        print(time_steps(take_step, torch.cuda.synchronize if device.type == "cuda" else int, flags.seconds)[0])
        return 0
    missing = {"bf16": not has_fast_bf16(device), "nanoGPT": not flags.nanogpt}
    rungs = flags.only or [rung for rung in RUNGS if not missing.get(rung)]
    title = f"{config.name}, {config.sequences_per_step} x {config.max_seq_len} tokens a step, {machine['device']}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = str(write_random_tokens(Path(scratch) / "tokens", TOKENS, vocab_size))
        words = [sys.executable, __file__, *words, "--seconds", str(flags.seconds), "--nanogpt", flags.nanogpt or ""]
        words += ["--vocabulary", str(vocab_size)]
        commands = {rung: [*words, "--worker", rung, folder] for rung in rungs}
        tokens = config.sequences_per_step * config.max_seq_len
        measured, table = measure_in_turn(commands, flags.rounds, tokens)
    write_results(stem, f"Speed ladder: {title}", {"machine": machine, "rungs": measured}, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
