"""Time generation on this machine, token by token: ours, Hugging Face transformers, and nanoGPT.

    python benchmarks/generation.py
    python benchmarks/generation.py --nanogpt ../nanoGPT

The model has GPT-2 small's shape and random weights. The contestants take turns, each in its own process. The result is
the median time from one token to the next, without the time for the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.contestants import gpt2_config, nanogpt_model
from benchmarks.measure import (
    Measured,
    Spread,
    add_result_flags,
    describe_machine,
    machine_kind,
    markdown_table,
    measure_in_turn,
    write_results,
)
from common.errors import ConfigError
from common.flags import Parser
from common.machine import cpu_bf16_flag, pick_device
from common.script import script
from generation.sampling import Sampling
from generation.stream import stream
from model import TransformerLanguageModel
from model_config import ModelConfig

# prompts (B, held), new tokens, sampled or greedy -> when each new token was ready, in seconds
Generator = Callable[[torch.Tensor, int, bool], list[float]]

SHAPE = ModelConfig(32_000, 768, 12, 12, max_seq_len=1024)
TOY = ModelConfig(80, 64, 2, 2, max_seq_len=32)
BATCH_HELD = 16  # tokens of context when batches are timed: few, because the texts of a batch share only the weights
NANOGPT_TOKENS = 3  # each takes as long as reading the prompt


def ours(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Generator:
    model = TransformerLanguageModel(config)
    with torch.no_grad():
        model.head.weight.mul_(8)  # as far apart as a trained model's logits, so that top_p cuts off most tokens
    model.to(device, dtype).eval()

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        sampling = Sampling(new_tokens, temperature=0.8 if sampled else 0.0, top_p=0.9)
        bias = torch.zeros(config.vocab_size, device=device)
        return [time.perf_counter() for _ in stream(model, prompts.tolist(), sampling, bias)]

    return run


def hugging_face(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Generator:
    from transformers import GPT2LMHeadModel

    # Any: the declared types allow neither this `to` nor the streamer below.
    model: Any = GPT2LMHeadModel(gpt2_config(config, eos_token_id=None))  # nothing ends a text early
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.to(device, dtype).eval()

    class Stamps(list[float]):
        """A streamer: `generate` passes it the prompt, then each token, on the host."""

        def put(self, tokens: torch.Tensor) -> None:
            self.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 0} if sampled else {}
        stamps, prompts = Stamps(), prompts.to(device)
        how |= {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0, "streamer": stamps}
        model.generate(prompts, max_new_tokens=new_tokens, do_sample=sampled, **how)
        return stamps[1:]

    return run


def nanogpt(checkout: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Generator:
    with contextlib.redirect_stdout(sys.stderr):
        model = nanogpt_model(checkout, config).to(device, dtype).eval()

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        times, tokens = [], prompts.to(device)
        for _ in range(min(new_tokens, NANOGPT_TOKENS)):
            tokens = model.generate(tokens, 1)
            tokens.tolist()
            times.append(time.perf_counter())
        return times

    return run


def measure(name: str, config: ModelConfig, flags: argparse.Namespace) -> dict[str, float]:
    """Milliseconds from one token (of each row) to the next: by context at batch 1, greedy; by batch, sampled."""
    who, _, precision = name.partition(", ")
    device, dtype = pick_device(flags.device), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    torch.manual_seed(0)
    build = {"ours": ours, "Hugging Face": hugging_face}.get(who)
    run = build(config, device, dtype) if build else nanogpt(flags.nanogpt, config, device, dtype)
    cases = {f"{held} held": (held, 1, False) for held in flags.held}
    if build:
        cases |= {f"batch {batch}": (BATCH_HELD, batch, True) for batch in flags.batches}
    results = {}
    with torch.inference_mode():
        run(torch.zeros((1, BATCH_HELD), dtype=torch.long), 2, False)  # one-time work does not count
        for case, (held, batch, sampled) in cases.items():
            times = run(torch.randint(config.vocab_size, (batch, held)), flags.new_tokens, sampled)
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            results[case] = 1000 * statistics.median(gaps)
    return results


def page(measured: Measured, flags: argparse.Namespace) -> str:
    spreads = {name: {case: Spread.of_key(rows, case) for case in rows[0]} for name, rows in measured.items()}
    lengths, batches = [f"{n} held" for n in flags.held], [f"batch {n}" for n in flags.batches]
    times = [[name, *(cases[case].text() for case in lengths)] for name, cases in spreads.items()]
    speeds = [
        [name, *(f"{1000 * n / cases[f'batch {n}'].median:.0f}" for n in flags.batches)]
        for name, cases in spreads.items()
        if set(batches) <= set(cases)
    ]
    return (
        f"Milliseconds per token, batch 1, greedy, by the tokens of context; median (lowest to highest) of "
        f"{flags.rounds} rounds.\n\n{markdown_table(['', *map(str, flags.held)], times)}\n\n"
        f"Tokens per second by batch size, sampled (temperature 0.8, top_p 0.9), {BATCH_HELD} tokens of context.\n\n"
        f"{markdown_table(['', *map(str, flags.batches)], speeds)}"
    )


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/generation.py", description=__doc__.splitlines()[0])
    parser.add_argument("--held", type=int, nargs="+", default=[16, 128, 512, 900], metavar="N", help="context lengths")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32], metavar="N", help="batch sizes")
    parser.add_argument("--new_tokens", type=int, default=24, metavar="N", help="tokens after each prompt [24]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times each contestant runs [3]")
    parser.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to time it too")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # measure this one, in this process
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    config = TOY if flags.toy else SHAPE
    longest = max([*flags.held, BATCH_HELD]) + flags.new_tokens
    if longest > config.max_seq_len or flags.new_tokens < 2:
        raise ConfigError(f"{longest} tokens must fit in max_seq_len {config.max_seq_len}, and 2 or more must be new.")
    if flags.contestant:
        print(json.dumps(measure(flags.contestant, config, flags)))
        return 0
    is_cuda = pick_device(flags.device).type == "cuda"
    precisions = ["bf16"] if is_cuda else ["fp32", *["bf16"] * bool(cpu_bf16_flag())]
    names = [f"{who}, {precision}" for precision in precisions for who in ("ours", "Hugging Face")]
    names += [f"nanoGPT, {precisions[0]}"] if flags.nanogpt else []
    command = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
    measured = measure_in_turn({name: [*command, "--contestant", name] for name in names}, flags.rounds)
    machine = describe_machine(flags.device)
    stem = Path(flags.output_dir) / f"generation-{machine_kind(machine)}"
    text = page(measured, flags)
    write_results(stem, "Generation", {"machine": machine, "model": config.to_dict(), "ms_per_step": measured}, text)
    print(f"{text}\n\nFiles      {stem}.md and .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
