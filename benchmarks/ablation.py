"""What each piece of the modern recipe is worth: short runs on equally many tokens, each without one piece.

    python benchmarks/ablation.py --data_dir datasets_cache

The trainer runs each in its own folder in runs/ablation; a finished run is not repeated. Results, in bits per byte of
the validation split, go to docs/benchmarks/.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure

from benchmarks.measure import (
    add_result_flags,
    describe_machine,
    markdown_table,
    require_known,
    train,
    write_results,
)
from common.errors import script
from common.flags import Parser

STEPS = 300
SHAPE = {
    "num_layers": 4, "embed_dim": 256, "max_seq_len": 256, "batch_size": 16, "min_lr": 0, "eval_batches": 64,
    "log_interval": 50, "checkpoint_minutes": 0,
}  # fmt: skip
GPT2 = {"num_heads": 4, "warmup_steps": 15}
MODERN_SHAPE = {
    "num_heads": 2, "position": "rope", "qk_norm": "true", "norm": "rmsnorm", "embed_norm": "true",
    "activation": "relu2", "bias": "false", "zero_init": "true", "logit_softcap": 15,
}  # fmt: skip
MUON = {
    "optimizer": "muon", "learning_rate": 4e-3, "muon_learning_rate": 0.02, "use_lr_scheduler": "linear",
    "grad_clip": 0, "warmup_steps": 0,
}  # fmt: skip
MODERN = {**MODERN_SHAPE, **MUON}
SWIGLU = {"activation": "swiglu"}
LARGER = {"num_layers": 6, "embed_dim": 384, "num_heads": 3}

# name of the run -> (what it is, its flags beside SHAPE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_1e-3": ("GPT-2 form, AdamW 1e-3, cosine", {**GPT2, "learning_rate": 1e-3}),
    "adamw_no_bias": ("GPT-2 form, AdamW 1e-3, no biases", {**GPT2, "learning_rate": 1e-3, "bias": "false"}),
    "adamw_3e-3": ("GPT-2 form, AdamW 3e-3, cosine", {**GPT2, "learning_rate": 3e-3}),
    "muon": ("GPT-2 form, Muon", {**GPT2, **MUON}),
    "modern_adamw": (
        "modern form, AdamW 3e-3, linear",
        {**MODERN_SHAPE, "learning_rate": 3e-3, "use_lr_scheduler": "linear", "warmup_steps": 15},
    ),
    "modern": ("modern: all pieces", MODERN),
    "adamw_4x": ("GPT-2 form, AdamW 2e-3, cosine, 4 times the tokens", {**GPT2, "learning_rate": 2e-3, "times": 4}),
    "modern_2x": ("modern, 2 times the tokens", {**MODERN, "times": 2}),
    "no_rope": ("- RoPE (learned positions)", {**MODERN, "position": "learned"}),
    "no_qknorm": ("- QK-norm", {**MODERN, "qk_norm": "false"}),
    "layernorm": ("- RMSNorm (LayerNorm)", {**MODERN, "norm": "layernorm"}),
    "no_relu2": ("- ReLU squared (GELU)", {**MODERN, "activation": "gelu"}),
    "swiglu": ("- ReLU squared (SwiGLU)", {**MODERN, **SWIGLU}),
    "swiglu_time": ("- ReLU squared (SwiGLU), 288 steps: the same time", {**MODERN, **SWIGLU, "times": 0.96}),
    "modern_6x384": ("modern, 6 x 384", {**MODERN, **LARGER}),
    "swiglu_6x384": ("modern, 6 x 384, SwiGLU", {**MODERN, **LARGER, **SWIGLU}),
    "swiglu_6x384_time": (
        "modern, 6 x 384, SwiGLU, 285 steps: the same time",
        {**MODERN, **LARGER, **SWIGLU, "times": 0.95},
    ),
    "bias": ("- no biases", {**MODERN, "bias": "true"}),
    "no_zero": ("- zero initialisation", {**MODERN, "zero_init": "false"}),
    "no_embednorm": ("- norm after the embedding", {**MODERN, "embed_norm": "false"}),
    "no_softcap": ("- logit softcap", {**MODERN, "logit_softcap": 0}),
    "heads4": ("- heads of 128 (of 64)", {**MODERN, "num_heads": 4}),
    "cosine": ("- linear decay (cosine)", {**MODERN, "use_lr_scheduler": "cosine"}),
    "cool": ("decay over the last 60% only", {**MODERN, "cooldown": 0.6}),
    "mlr.01": ("Muon's rate 0.01", {**MODERN, "muon_learning_rate": 0.01}),
    "mlr.04": ("Muon's rate 0.04", {**MODERN, "muon_learning_rate": 0.04}),
    "lr8e-3": ("AdamW's rate 8e-3", {**MODERN, "learning_rate": 8e-3}),
}


def flags_of(name: str) -> dict[str, Any]:
    """The trainer's flags for a variant: evaluated once, at its end."""
    changes = dict(VARIANTS[name][1])
    steps = round(STEPS * changes.pop("times", 1))
    return {**SHAPE, "max_steps": steps, "eval_interval": steps, **changes}


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a run's metrics: bits per byte at the end, tokens, and the training loss along the way."""
    last = rows[-1]
    return {
        "bits_per_byte": last["val_bits_per_byte"],
        "val_loss": last["val_loss"],
        "tokens": last["tokens"],
        "curve": [(row["tokens"], row["train_loss"]) for row in rows if "train_loss" in row],
    }


Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by variant and seed


def bits_per_byte(measured: Mapping[int, Mapping[str, Any]]) -> list[float]:
    return [result["bits_per_byte"] for result in measured.values()]


def table(results: Results) -> str:
    """One row for each variant: bits per byte with each seed, their mean, and how far that is from the modern one's."""
    base = fmean(bits_per_byte(results["modern"])) if "modern" in results else None
    rows = []
    for name, measured in results.items():
        mean = fmean(bits_per_byte(measured))
        seeds = ", ".join(f"{value:.4f}" for value in bits_per_byte(measured))
        tokens = next(iter(measured.values()))["tokens"]
        worse = f"{mean - base:+.4f}" if base is not None and name != "modern" else ""
        rows.append([VARIANTS[name][0], f"{tokens / 1e6:.2f}M", seeds, f"{mean:.4f}", worse])
    return markdown_table(["what", "tokens", "bits per byte, by seed", "mean", "against modern"], rows)


def draw(results: Results, path: Path) -> None:
    """One point for each run: what it costs to leave a piece out."""
    figure = Figure(figsize=(9, 0.36 * len(results) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, (name, measured) in enumerate(results.items()):
        color = "tab:orange" if name == "modern" else "tab:blue"
        axes.plot(bits_per_byte(measured), [place] * len(measured), "o", color=color)
    if "modern" in results:
        axes.axvline(fmean(bits_per_byte(results["modern"])), color="tab:orange", linewidth=0.8)
    axes.set_yticks(range(len(results)), [VARIANTS[name][0] for name in results])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(xlabel="bits per byte of the validation split (left is better)")
    figure.savefig(path, dpi=120)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/ablation.py", description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", default="datasets_cache", metavar="DIR", help="token folder [datasets_cache]")
    parser.add_argument("--variants", nargs="+", metavar="NAME", default=list(VARIANTS), help="some of them [all]")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", default=[1337], help="[1337]")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/ablation", help="[runs/ablation]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    require_known("--variants", flags.variants, VARIANTS)

    results: dict[str, dict[int, dict[str, Any]]] = {}
    for seed in flags.seeds:
        for name in flags.variants:
            values = {**flags_of(name), "seed": seed, "device": flags.device, "data_dir": flags.data_dir}
            metrics = train(Path(flags.runs_dir) / f"{name}_{seed}", values)
            results.setdefault(name, {})[seed] = summarize(metrics)
    print(table(results))
    stem = Path(flags.output_dir) / "ablation"
    body = (
        f"{SHAPE['num_layers']} layers x {SHAPE['embed_dim']}, context {SHAPE['max_seq_len']}, "
        f"{SHAPE['batch_size'] * SHAPE['max_seq_len']:,} tokens a step. A minus names the piece of the modern recipe "
        f"that is removed (its replacement in parentheses).\n\n{table(results)}\n\n![bits per byte](ablation.png)"
    )
    values = {"machine": describe_machine(flags.device), "runs": results}
    write_results(stem, "Ablation of the modern recipe", values, body)
    draw(results, stem.with_suffix(".png"))
    print(f"Files      {stem}.md, .json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
