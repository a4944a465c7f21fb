"""Generate text with a trained model.

    python generate.py --prompt "What is the capital of France?"
    python generate.py --checkpoint runs/gpt2_small --prompt "Once upon a time" --num_samples 3 --temperature 1.0
    python generate.py --interactive
    python generate.py --prompt "The moon" --compare runs/a/checkpoints/step_00001000 runs/a/checkpoints/step_00002000
    python generate.py --score my_text.txt

Importable: `load_model`, `generate_text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.flags import Parser, add_debug
from common.script import end, script
from generation.settings import FLAGS, Request, Sampling, parse_settings

if TYPE_CHECKING:
    from generation.loading import generate_text, generation_dtype, load_checkpoint, load_model

__all__ = ("generate_text", "generation_dtype", "load_checkpoint", "load_model", "main")


@script
def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_arguments(argv)
    request = settings[0]
    if request.score and not request.json:
        print(f"Scoring    {', '.join(request.score)} ...", flush=True)
    from generation.command import run  # imported here: torch takes seconds, and --help should not wait

    run(*settings)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> tuple[Request, Sampling]:
    """Parse the command line. Raises ConfigError listing unknown flags, invalid values and contradictions."""
    parser = Parser(
        prog="generate.py",
        usage="%(prog)s [--prompt TEXT] [--FLAG VALUE ...]",
        description="Generate text with a trained model. The same command gives the same text; change --seed for "
        "another. --score measures how well the model predicts a text.",
    )
    parser.add_options(FLAGS)
    add_debug(parser)
    problems: list[str] = []
    settings = parse_settings(parser.read(argv, problems), problems)
    parser.require_none(problems)
    return settings


def __getattr__(name: str) -> Any:
    """Import torch only for `from generate import load_model` and the like."""
    if name in __all__:
        from generation import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    end(main)
