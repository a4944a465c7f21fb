"""How the best learning rate, model size and number of epochs depend on the size of a text.

    python benchmarks/choosing.py --input books.txt.gz
    python benchmarks/choosing.py --input books.txt.gz --cases configs

The first trains small models of one form, the second unchanged configs on texts of the sizes that README recommends for
them. The trainer runs each in its own folder in runs/choosing; a finished run is not repeated. Results, in bits per
byte of one validation text, go to docs/benchmarks/ after each run.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure

from benchmarks.measure import add_result_flags, describe_machine, markdown_table, train, write_results
from common.errors import DataError, script
from common.flags import Parser
from tokenization.corpus import find_sources, read_pieces
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import tokenize
from training.config import parse_config

LAYERS = 4
BATCH = 16
CONTEXT = 128
EVALUATIONS = 16  # in each run
PASSAGE = 5_000  # characters, up to the end of a paragraph
VALIDATION_MB = 0.1
HIGHEST = 3.0  # bits per byte in the figure


class Case(NamedTuple):
    """A run: megabytes of text, width of the model, learning rate (of Adam's part), epochs. Shape, batch and schedule
    are the same in all runs, except those of an `UNCHANGED` config."""

    megabytes: float
    width: int
    rate: float
    epochs: int
    dropout: float = 0.0
    config: str = "gpt2_small"
    seed: int = 1337
    vocabulary: int = 1024

    @property
    def name(self) -> str:
        return "_".join(f"{key}-{value}" for key, value in self._asdict().items())

    @property
    def parameters(self) -> int:
        """In the matrices of the blocks: without embeddings, head, biases and norms."""
        return 12 * UNCHANGED.get(self.config, LAYERS) * self.width**2

    @property
    def changes(self) -> list[str]:
        """How this run differs from most."""
        words = {
            "config": self.config,
            "dropout": f"dropout {self.dropout:g}",
            "seed": f"seed {self.seed}",
            "vocabulary": f"vocabulary {self.vocabulary:,}",
        }
        return [text for key, text in words.items() if getattr(self, key) != self._field_defaults[key]]


MODERN = "gpt2_small_modern"
UNCHANGED = {"small": 4, "small_modern": 4, "medium": 6, "medium_modern": 6}  # configs, with their layers
# 64 epochs of the smallest text, 16 of the next, 4 and 1 of the others are the same number of tokens.
RECIPES = [
    *(Case(1, 64, rate, 4) for rate in (1e-3, 3e-3, 1e-2)),
    *(Case(1, 128, rate, 4) for rate in (1e-3, 3e-3)),
    *(Case(1, 256, rate, 4) for rate in (1e-3, 3e-3)),
    *(Case(0.25, width, 3e-3, 16) for width in (128, 64)),
    *(Case(4, width, 3e-3, 1) for width in (128, 64)),
    Case(0.0625, 128, 3e-3, 64),
    Case(0.25, 128, 4e-3, 16, config=MODERN),
    *(Case(0.25, width, 4e-3, 4, config=MODERN) for width in (64, 128, 256)),
    Case(0.25, 128, 4e-3, 8, dropout=0.2, config=MODERN),
]
CONFIGS = [
    *(Case(3, 256, 1e-3, epochs, config="small", vocabulary=4096) for epochs in (8, 4)),
    Case(3, 256, 1e-3, 8, config="small", vocabulary=32_000),
    Case(3, 256, 4e-3, 4, config=MODERN, vocabulary=4096),
    *(Case(3, 256, 4e-3, 4, config="small_modern", vocabulary=vocabulary) for vocabulary in (4096, 32_000)),
    Case(3, 256, 1e-3, 8, vocabulary=4096),
    Case(10, 256, 4e-3, 4, config="small_modern", vocabulary=4096),
    Case(10, 384, 4e-3, 4, config="medium_modern", vocabulary=4096),
    Case(10, 384, 1e-3, 4, config="medium", vocabulary=4096),
]
CASES = {"recipes": (RECIPES, "choosing"), "configs": (CONFIGS, "choosing-configs")}  # with the name of the results


def flags_of(case: Case, train_tokens: int) -> dict[str, Any]:
    """The trainer's flags: the config at the size of the case, or unchanged, with evaluations on the way."""
    is_unchanged = case.config in UNCHANGED
    tokens_per_step = parse_config(["--config", case.config]).tokens_per_step if is_unchanged else BATCH * CONTEXT
    steps = math.ceil(case.epochs * train_tokens / tokens_per_step)
    form: dict[str, Any] = {
        "num_layers": LAYERS, "embed_dim": case.width, "num_heads": max(2, case.width // 64), "max_seq_len": CONTEXT,
        "batch_size": BATCH, "gradient_accumulation_steps": 1, "min_lr": 0,
        "warmup_steps": 0 if case.config == MODERN else steps // 20,
    }  # fmt: skip
    return {
        "config": case.config, **({} if is_unchanged else form), "dropout": case.dropout, "learning_rate": case.rate,
        "epochs": case.epochs, "eval_interval": max(1, steps // EVALUATIONS), "eval_batches": 0, "log_interval": 5,
        "checkpoint_minutes": 0, "seed": case.seed,
    }  # fmt: skip


def passages(inputs: Sequence[str]) -> list[str]:
    """The corpus as passages, shuffled with a fixed seed: the first ones are a fair sample of the whole."""
    found = [passage for piece in read_pieces(find_sources(inputs)) for passage in cut(piece.text)]
    random.Random(0).shuffle(found)
    return found


def cut(text: str) -> Iterator[str]:
    passage = ""
    for paragraph in text.split("\n\n"):
        passage += f"{paragraph}\n\n"
        if len(passage) >= PASSAGE:
            yield passage
            passage = ""


def tokenized(
    inputs: Sequence[str], cases: Sequence[Case], validation_mb: float, folder: Path
) -> dict[tuple[float, int], TokenMetadata]:
    """Make a token folder for each size of text and vocabulary, and return their metadata. All have one validation
    text, and each text is a part of the next larger one.

    Raises DataError if the corpus is smaller than the largest text.
    """
    found, sizes = iter(passages(inputs)), sorted({case.megabytes for case in cases})

    def take(text: str, megabytes: float) -> str:
        parts, size = [text], len(text.encode())
        while size < megabytes * 1e6:
            if (passage := next(found, None)) is None:
                raise DataError(f"--input is smaller than the {max(sizes) + validation_mb} MB that the texts need.")
            parts.append(passage)
            size += len(passage.encode())
        return "".join(parts)

    folder.mkdir(parents=True, exist_ok=True)
    validation, text, made = folder / "validation.txt", "", {}
    write(validation, take("", validation_mb))
    for size in sizes:
        train = folder / f"{size}mb.txt"
        text = take(text, size)
        write(train, text)
        share = train.stat().st_size / (train.stat().st_size + validation.stat().st_size)
        # Each file is one document, and the split is moved to the end of a document.
        files = [str(train), str(validation)]
        for vocabulary in sorted({case.vocabulary for case in cases if case.megabytes == size}):
            data_dir = folder / f"{size}mb_{vocabulary}"
            path = tokenize(files, data_dir, vocab_size=vocabulary, train_split=share, quiet=True)
            made[size, vocabulary] = TokenMetadata.read(path)
    return made


def write(path: Path, text: str) -> None:
    """Do not rewrite the same text: a newer file would be tokenized again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8", newline="\n")


def summarize(rows: Sequence[Mapping[str, Any]], metadata: TokenMetadata) -> dict[str, Any]:
    """Of a run's metrics, in bits per byte: the validation curve, its best point, and the training loss at the end."""
    assert metadata.train_bytes
    per_nat = metadata.train_tokens / metadata.train_bytes / math.log(2)
    curve = [(row["epoch"], row["val_bits_per_byte"]) for row in rows if "val_loss" in row]
    best_epoch, best = min(curve, key=lambda point: point[1])
    last = [row["train_loss"] for row in rows if "train_loss" in row][-10:]
    return {
        "tokens": rows[-1]["tokens"],
        "best": best,
        "best_epoch": best_epoch,
        "end": curve[-1][1],
        "train_end": sum(last) / len(last) * per_nat,
        "curve": curve,
    }


Results = Mapping[Case, Mapping[str, Any]]


def table(results: Results) -> str:
    columns = ["text", "model", "rate", "epochs", "also", "tokens", "best", "at epoch", "end", "training, end"]
    rows = [
        [
            f"{case.megabytes:g} MB",
            f"{case.parameters / 1e6:.2f}M",
            f"{case.rate:g}",
            f"{case.epochs}",
            ", ".join(case.changes),
            f"{result['tokens'] / 1e6:.2f}M",
            f"{result['best']:.3f}",
            f"{result['best_epoch']:.1f}",
            f"{result['end']:.3f}",
            f"{result['train_end']:.3f}",
        ]
        for case, result in sorted(results.items())
    ]
    return markdown_table(columns, rows)


def draw(results: Results, path: Path) -> None:
    """One panel for each text: the validation curves."""
    sizes = sorted({case.megabytes for case in results})
    figure = Figure(figsize=(6 * min(2, len(sizes)), 4 * math.ceil(len(sizes) / 2)), layout="constrained")
    panels = figure.subplots(math.ceil(len(sizes) / 2), min(2, len(sizes)), sharey=True, squeeze=False)
    for axes, size in zip(panels.flat, sizes, strict=False):
        for case, result in results.items():
            if case.megabytes == size:
                label = ", ".join(
                    [f"{case.parameters / 1e6:.2f}M", f"{case.rate:g}", f"{case.epochs} epochs", *case.changes]
                )
                axes.plot(*zip(*result["curve"], strict=True), ".-", markersize=4, linewidth=1, label=label)
        axes.set(title=f"{size:g} MB", xlabel="epoch")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
        axes.set_ylabel("bits per byte of the validation text")
    lowest = min(result["best"] for result in results.values())
    panels[0, 0].set_ylim(lowest - 0.05, max(HIGHEST, lowest + 0.1))
    figure.savefig(path, dpi=110)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/choosing.py", description=__doc__.split("\n")[0])
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="a corpus larger than the texts")
    parser.add_argument(
        "--cases", choices=CASES, default="recipes", help="small models, or unchanged configs [recipes]"
    )
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/choosing", help="[runs/choosing]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)

    cases, name = CASES[flags.cases]
    folder, stem = Path(flags.runs_dir), Path(flags.output_dir) / name
    texts = tokenized(flags.input, cases, VALIDATION_MB, folder / "texts")
    results: dict[Case, dict[str, Any]] = {}
    for case in cases:
        metadata = texts[case.megabytes, case.vocabulary]
        values = {**flags_of(case, metadata.train_tokens), "device": flags.device, "data_dir": metadata.path.parent}
        results[case] = summarize(train(folder / case.name, values), metadata)
        print(f"  {results[case]['best']:.4f} bits per byte after {results[case]['best_epoch']:.1f} epochs", flush=True)
        body = (
            f"{LAYERS} layers, context {CONTEXT}, {BATCH * CONTEXT:,} tokens a step and vocabulary 1,024 unless "
            f"another is named; `{'` and `'.join(UNCHANGED)}` have the shape and batch of those configs. A text "
            f"consists of passages of about {PASSAGE:,} characters from the whole corpus. Each text is a part of the "
            f"next larger one, and {VALIDATION_MB:g} MB of other passages validate them all. Models are named by the "
            "number of parameters in the matrices of their blocks. Losses are bits per byte: the lowest validation "
            "loss and its epoch, the last one, and the training loss over the last 50 steps.\n\n"
            f"{table(results)}\n\n![validation curves]({name}.png)"
        )
        runs = [{**case._asdict(), **result} for case, result in results.items()]
        values = {"machine": describe_machine(flags.device), "runs": runs}
        write_results(stem, "Learning rate, size and epochs for a text", values, body)
        draw(results, stem.with_suffix(".png"))
    print(f"\n{table(results)}\n\nFiles      {stem}.md, .json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
