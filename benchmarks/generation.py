"""Time generation on this machine, token by token: ours, Hugging Face transformers and nanoGPT.

    python benchmarks/generation.py
    python benchmarks/generation.py --nanogpt ../nanoGPT --write cpu-2core-xeon

The model has GPT-2 small's shape and random weights, unless flags say otherwise. The contestants take turns, each in
its own process. The result is the median time from one token to the next, without the time for the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import (
    BATCH_HELD,
    OURS,
    RESULTS,
    Measured,
    Spread,
    describe_machine,
    generation_case,
    markdown_table,
    measure_in_turn,
    write_results,
)
from common.errors import ConfigError, script
from common.flags import Parser, add_debug

SHAPE = {"vocab_size": 32000, "embed_dim": 768, "num_heads": 12, "num_layers": 12, "max_seq_len": 1024}


@script
def main(argv: Sequence[str] | None = None) -> int:
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
    from benchmarks import generators  # here, because --help must not import torch

    config = generators.model_config(flags.checkpoint, {name: getattr(flags, name) for name in SHAPE})
    longest = max([*flags.held, BATCH_HELD]) + flags.new_tokens
    if longest > config.max_seq_len or flags.new_tokens < 2:
        raise ConfigError(f"{longest} tokens must fit in max_seq_len {config.max_seq_len}, and 2 or more must be new.")
    if flags.contestant:
        print(json.dumps(generators.measure(flags.contestant, flags, config)))
        return 0

    names = flags.only or generators.contestants(flags.nanogpt)
    arguments = sys.argv[1:] if argv is None else argv
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--contestant"]

    def page(results: Measured) -> str:
        """The results in Markdown, also written to files with --write."""
        spreads = {name: {case: Spread.of_key(rows, case) for case in rows[0]} for name, rows in results.items()}
        text = as_markdown(spreads, flags)
        if flags.write:
            numbers = {
                name: {case: dataclasses.asdict(spread) for case, spread in cases.items()}
                for name, cases in spreads.items()
            }
            stem = Path(flags.output_dir) / f"generation-{flags.write}"
            write_results(
                stem, "Generation", {"machine": machine, "model": config.to_dict(), "ms_per_step": numbers}, text
            )
        return text

    machine = describe_machine()
    commands = {name: [*command, name] for name in names}
    print(page(measure_in_turn(commands, flags.rounds, so_far=page)))
    return 0


def as_markdown(spreads: dict[str, dict[str, Spread]], flags: Namespace) -> str:
    lengths = [generation_case(held, 1, False) for held in flags.held]
    columns = ["", *map(str, flags.held)]
    rows = [[name, *(cases[key].text() for key in lengths)] for name, cases in spreads.items()]
    parts = [
        "Milliseconds per token, batch 1, greedy, by the tokens of context; median (lowest to highest) of "
        f"{flags.rounds} rounds.",
        markdown_table(columns, rows),
    ]
    for name, cases in spreads.items():
        ratios = [
            [other, *(f"{values[key].median / cases[key].median:.2f}" for key in lengths)]
            for other, values in spreads.items()
            if name.startswith(OURS) and not other.startswith(OURS)
        ]
        if ratios:
            parts += [f"How many times as long as {name}:", markdown_table(columns, ratios)]
    batches = {batch: generation_case(BATCH_HELD, batch, True) for batch in flags.batches}
    rows = [
        [name, *(f"{1000 * batch / cases[key].median:.0f}" for batch, key in batches.items())]
        for name, cases in spreads.items()
        if set(batches.values()) <= set(cases)
    ]
    parts += [
        f"Tokens per second by batch size, sampled (temperature 0.8, top_p 0.9), {BATCH_HELD} tokens of context.",
        markdown_table(["", *map(str, flags.batches)], rows),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
