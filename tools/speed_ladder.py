"""Time a training step on this machine from a plain loop up to this project's, one technique more on each rung.

    python tools/speed_ladder.py --config gpt2_small.json

Every rung runs the trainer's own step with the same weights and sequences. The lower rungs replace its parts by
simpler, slower ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, script
from common.flags import Parser, add_debug
from training.config import parse_config


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="tools/speed_ladder.py",
        usage="%(prog)s --config FILE [--rounds N] [--steps N] [--only RUNG ...] [--output_dir DIR] [--KEY VALUE ...]",
        description="Time a training step on this machine from a plain loop up to this project's, one technique more "
        "on each rung. Every flag of the trainer changes the configuration that is measured. On a CPU, and if memory "
        "is short, a step has fewer sequences than configured, unless --batch_size is given.",
        epilog="Example: python tools/speed_ladder.py --config gpt2_small.json",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each rung [3]")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of a measurement [1, on a GPU 20]")
    parser.add_argument("--only", nargs="+", metavar="RUNG", help='these, as in "baseline" "this trainer" [all]')
    parser.add_argument("--rung", type=int, help=argparse.SUPPRESS)  # measure this one, in this process
    add_debug(parser)
    flags, rest = parser.parse_known_args(argv)
    config = parse_config(rest)
    if flags.rounds < 1 or (flags.steps is not None and flags.steps < 1):
        raise ConfigError("--rounds and --steps are at least 1.")
    from benchmarks import ladder  # here, because --help must not import torch

    if flags.rung is not None:
        ladder.measure_rung(flags.rung, flags.steps, config)
    else:
        ladder.measure_ladder(config, flags.rounds, flags.steps, flags.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
