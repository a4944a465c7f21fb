"""Time generation on this machine, token by token: ours, Hugging Face transformers, and nanoGPT.

    python benchmarks/generation.py
    python benchmarks/generation.py --nanogpt ../nanoGPT --write cpu-2core-xeon
    python benchmarks/generation.py --checkpoint runs/gpt2_small

The model has GPT-2 small's shape and random weights, unless told otherwise. The contestants take turns, each in a
process of its own; what counts is the median time from one token to the next, without the prompt's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from model import ModelConfig, TransformerLanguageModel

    # prompts (B, held), new tokens, sampled or greedy -> when each new token was there, in seconds
    Generator = Callable[[torch.Tensor, int, bool], list[float]]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
OURS, HUGGING_FACE, NANOGPT = "ours", "Hugging Face", "nanoGPT"
SHAPE = {"vocab_size": 32000, "embed_dim": 768, "num_heads": 12, "num_layers": 12, "max_seq_len": 1024}
BATCH_HELD = 16  # tokens of context when batches are timed: short, for what a batch shares is the weights
NANOGPT_TOKENS = 3  # each takes as long as reading the prompt


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.measure import Measured, Spread, describe_machine, measure_in_turn, this_command, write_results
    from common.errors import ConfigError
    from common.flags import Parser, add_debug

    parser = Parser(prog="benchmarks/generation.py", description=__doc__.splitlines()[0])
    model = parser.add_argument_group("model")
    model.add_argument("--checkpoint", metavar="PATH", help="shape and our weights from a checkpoint or run folder")
    for name, default in SHAPE.items():
        model.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"[{default}]")
    what = parser.add_argument_group("what is timed")
    what.add_argument("--held", type=int, nargs="+", default=[16, 128, 512, 900], metavar="N", help="context lengths")
    what.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32], metavar="N", help="batch sizes")
    what.add_argument(
        "--new_tokens", type=int, default=24, metavar="N", help="tokens after each prompt, 2 or more [24]"
    )
    what.add_argument("--rounds", type=int, default=3, metavar="N", help="times each contestant runs [3]")
    what.add_argument("--nanogpt", metavar="PATH", help="a checkout of nanoGPT, to time it too")
    what.add_argument("--only", nargs="+", metavar="NAME", help='these contestants, as in "ours, fp32"')
    what.add_argument("--contestant", metavar="NAME", help="measure this one here, and print one line of JSON")
    what.add_argument("--write", metavar="NAME", help="write generation-NAME.json and .md in --output_dir")
    what.add_argument("--output_dir", metavar="DIR", default=str(RESULTS), help="[docs/benchmarks]")
    add_debug(parser)
    flags = parser.parse_args(argv)
    config = model_config(flags)
    longest = max([*flags.held, BATCH_HELD]) + flags.new_tokens
    if longest > config.max_seq_len or flags.new_tokens < 2:
        raise ConfigError(f"{longest} tokens must fit in max_seq_len {config.max_seq_len}, 2 or more of them new.")
    if flags.contestant:
        print(json.dumps(measure(flags.contestant, flags, config)))
        return 0

    names = flags.only or contestants(flags.nanogpt)
    arguments = sys.argv[1:] if argv is None else argv
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--contestant"]

    def page(results: Measured) -> str:
        """In Markdown, and written to files if they were asked for."""
        spreads = {
            name: {case: Spread.of([one[case] for one in rounds]) for case in rounds[0]}
            for name, rounds in results.items()
        }
        text = as_markdown(spreads, flags)
        if flags.write:
            numbers = {
                name: {case: dataclasses.asdict(spread) for case, spread in cases.items()}
                for name, cases in spreads.items()
            }
            stem = Path(flags.output_dir) / f"generation-{flags.write}"
            values = {"machine": machine, "model": config.to_dict(), "ms_per_step": numbers}
            write_results(stem, "Generation", this_command(), values, text)
        return text

    machine = describe_machine()
    commands = {name: [*command, name] for name in names}
    print(page(measure_in_turn(commands, flags.rounds, so_far=page)))
    return 0


def model_config(flags: Namespace) -> ModelConfig:
    from common.checkpoint import open_checkpoint
    from model import ModelConfig

    if flags.checkpoint:
        return open_checkpoint(flags.checkpoint).model_config()
    return ModelConfig(**{name: getattr(flags, name) for name in SHAPE})


def contestants(nanogpt: str | None) -> list[str]:
    """On a CPU fp32 against fp32, and bf16 against bf16 where the CPU has it; on a GPU bf16."""
    import torch

    from common.machine import cpu_bf16_flag

    precisions = ["bf16"] if torch.cuda.is_available() else ["fp32", "bf16"] if cpu_bf16_flag() else ["fp32"]
    names = [f"{who}, {precision}" for precision in precisions for who in (OURS, HUGGING_FACE)]
    return names + ([f"{NANOGPT}, {precisions[0]}"] if nanogpt else [])


def measure(name: str, flags: Namespace, config: ModelConfig) -> dict[str, float]:
    """Milliseconds from one token (of each row) to the next, by case."""
    import torch

    from common.errors import ConfigError
    from common.machine import pick_device

    who, _, precision = name.partition(", ")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    device = pick_device("auto")
    torch.manual_seed(0)
    if who not in (OURS, HUGGING_FACE, NANOGPT):
        raise ConfigError(f"There is no contestant {name}.")
    if who == NANOGPT:
        run, tokens = nanogpt(config, flags.nanogpt, device, dtype), NANOGPT_TOKENS
        cases = [(held, 1, False) for held in flags.held]
    else:
        run = (ours if who == OURS else hugging_face)(config, flags.checkpoint, device, dtype)
        tokens = flags.new_tokens
        cases = [(held, 1, False) for held in flags.held] + [(BATCH_HELD, batch, True) for batch in flags.batches]
    results = {}
    with torch.inference_mode():
        run(torch.zeros((1, BATCH_HELD), dtype=torch.long), 2, False)  # what is only done once is not counted
        for held, batch, sampled in cases:
            prompts = torch.randint(config.vocab_size, (batch, held))
            times = run(prompts, tokens, sampled)
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            results[case_name(held, batch, sampled)] = 1000 * statistics.median(gaps)
    return results


def case_name(held: int, batch: int, sampled: bool) -> str:
    return f"{held} held, batch {batch}, {'sampled' if sampled else 'greedy'}"


def ours(config: ModelConfig, checkpoint: str | None, device: torch.device, dtype: torch.dtype) -> Generator:
    import torch

    from generate import load_model
    from generation.decoding import continuations
    from generation.sampling import Sampling
    from model import TransformerLanguageModel

    model: TransformerLanguageModel = load_model(checkpoint)[0] if checkpoint else TransformerLanguageModel(config)
    if not checkpoint:
        with torch.no_grad():
            model.head.weight.mul_(8)  # scores as far apart as a trained model's: top_p cuts off most of them
    model.to(device, dtype).eval()

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        sampling = Sampling(new_tokens, temperature=0.8 if sampled else 0.0, top_p=0.9)
        uniforms = torch.rand(len(prompts), new_tokens, dtype=torch.float64).to(device)
        return [time.perf_counter() for _ in continuations(model, prompts.tolist(), [], uniforms, sampling)]

    return run


def hugging_face(config: ModelConfig, checkpoint: str | None, device: torch.device, dtype: torch.dtype) -> Generator:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(  # typed too narrowly: `to` and the streamer below are fine with it
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_seq_len,
            n_embd=config.embed_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            bos_token_id=0,
            eos_token_id=None,  # nothing ends a text before its time
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.to(device, dtype).eval()

    class Stamps(list[float]):
        """A streamer: `generate` puts the prompt, then each token, on the host."""

        def put(self, tokens: torch.Tensor) -> None:
            self.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        how = {"temperature": 0.8, "top_p": 0.9, "top_k": 0} if sampled else {}
        stamps, prompts = Stamps(), prompts.to(device)
        mask = torch.ones_like(prompts)
        model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=sampled,
            pad_token_id=0,
            streamer=stamps,
            **how,
        )
        return stamps[1:]

    return run


def nanogpt(config: ModelConfig, checkout: str, device: torch.device, dtype: torch.dtype) -> Generator:
    import contextlib

    from benchmarks.measure import load_nanogpt

    module = load_nanogpt(checkout)
    shape = module.GPTConfig(
        block_size=config.max_seq_len,
        vocab_size=config.vocab_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_embd=config.embed_dim,
        dropout=0.0,
        bias=config.bias,
    )
    with contextlib.redirect_stdout(sys.stderr):
        model = module.GPT(shape).to(device, dtype).eval()

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        times, tokens = [], prompts.to(device)
        for _ in range(new_tokens):
            tokens = model.generate(tokens, 1)
            tokens.tolist()
            times.append(time.perf_counter())
        return times

    return run


def as_markdown(spreads: dict[str, dict[str, Any]], flags: Namespace) -> str:
    from benchmarks.measure import markdown_table

    def cells(cases: dict[str, Any], keys: list[str]) -> list[str]:
        return [str(cases[key]) if key in cases else "" for key in keys]

    lengths = [case_name(held, 1, False) for held in flags.held]
    rows = [[name, *cells(cases, lengths)] for name, cases in spreads.items()]
    parts = [
        f"Milliseconds a token, batch 1, greedy, by the tokens of context held; median (lowest to highest) of "
        f"{flags.rounds} rounds.",
        markdown_table(["", *map(str, flags.held)], rows),
    ]
    for name, cases in spreads.items():
        if not name.startswith(OURS):
            continue
        others = {other: values for other, values in spreads.items() if not other.startswith(OURS)}
        ratios = [
            [other, *(f"{values[key].median / cases[key].median:.2f}" for key in lengths)]
            for other, values in others.items()
        ]
        if ratios:
            parts += [
                f"How many times as long as {name}:",
                markdown_table(["", *map(str, flags.held)], ratios),
            ]
    batches = [case_name(BATCH_HELD, batch, True) for batch in flags.batches]
    rows = [
        [name, *(f"{1000 * batch / cases[key].median:.0f}" for batch, key in zip(flags.batches, batches, strict=True))]
        for name, cases in spreads.items()
        if batches[0] in cases
    ]
    parts += [
        f"Tokens per second by the batch size, sampled (temperature 0.8, top_p 0.9), {BATCH_HELD} tokens of context.",
        markdown_table(["", *map(str, flags.batches)], rows),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from common.errors import script

    sys.exit(script(main)())
