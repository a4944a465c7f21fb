"""Time generation on this machine, per token and without the prompt.

    python benchmarks/generation.py

The model is GPT-2 small with random weights. The result is the median time between two tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import add_result_flags, describe_machine, machine_slug, markdown_table, write_results
from common.flags import Parser
from common.machine import cpu_bf16_flag, pick_device
from common.script import script
from generation.sampling import Sampling
from generation.stream import stream
from model import TransformerLanguageModel
from model_config import ModelConfig

SHAPE, TOY = ModelConfig(32_000, 768, 12, 12, max_seq_len=1024), ModelConfig(80, 64, 2, 2, max_seq_len=1024)
CASES = [(1, 16), (1, 128), (1, 512), (1, 900), (4, 16), (16, 16), (32, 16)]  # (texts at once, tokens in each prompt)
NEW_TOKENS = 24


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/generation.py", description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a tiny model, to check that the script works")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    torch.manual_seed(0)
    config, device = TOY if flags.toy else SHAPE, pick_device(flags.device)
    model = TransformerLanguageModel(config)
    with torch.no_grad():
        model.head.weight.mul_(8)  # spread like a trained model's logits, so that top_p removes most tokens
    bias, measured = torch.zeros(config.vocab_size, device=device), {}
    for dtype in (
        [torch.bfloat16] if device.type == "cuda" else [torch.float32, *[torch.bfloat16] * bool(cpu_bf16_flag())]
    ):
        model.to(device, dtype).eval()
        for rows, held in [CASES[0], *CASES]:  # the first warms up
            prompts = torch.randint(config.vocab_size, (rows, held)).tolist()
            sampling = Sampling(NEW_TOKENS, temperature=0.8, top_p=0.9)
            times = [time.perf_counter() for _ in stream(model, prompts, sampling, bias)]
            gap = statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
            measured[f"{rows} x {held}, {str(dtype).removeprefix('torch.')}"] = gap
    cells = [[case, f"{1000 * gap:.2f}", f"{int(case.split()[0]) / gap:,.0f}"] for case, gap in measured.items()]
    machine = describe_machine(flags.device)
    body = markdown_table(["texts x tokens held", "ms a step", "tokens/s"], cells)
    write_results(
        Path(flags.output_dir) / f"generation-{machine_slug(machine)}",
        "Generation",
        {"machine": machine, "seconds": measured},
        body,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
