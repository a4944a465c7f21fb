"""The law behind `--input FILE --minutes N`: how the loss falls with the size of the model, the text and the passes.

    python benchmarks/law.py --books books.txt.gz

Every tenth book is held out; the texts to train on are passages of the others. Trains each of RUNS that law.json does
not hold yet, with one thread each, and then fits the law to all but every sixth of them, which judge it.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.learning import train
from benchmarks.measure import add_result_flags, describe_machine, markdown_table, write_results
from common.errors import DataError
from common.files import read_json
from common.flags import Parser
from common.script import script
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.corpus import find_sources, read_pieces
from tokenization.metadata import TokenMetadata, metadata_files
from tokenize_local_bpe import main as tokenize
from training.config import MODEL_KEYS
from training.dial import HEAD_WIDTH, LADDER, beta2_for, context_for, dropout_for, recipe, sequences_for
from training.planning.law import Law
from training.planning.text import vocabulary_for

LEAST_CHARACTERS = 20_000  # of a book
HELD_OUT_CHARACTERS = 500_000
EVALUATIONS = 3
FIT_STEPS = 3_000
FEWEST = 10  # runs, for seven constants
JUDGED = 6  # every sixth run, in order, is not fitted


class Run(NamedTuple):
    megabytes: float
    layers: int
    width: int
    passes: int


RUNS = [
    *(Run(0.1, 4, width, passes) for width, passes in ((64, 4), (64, 16), (128, 4), (128, 16), (128, 32), (192, 8))),
    *(Run(0.3, 4, width, passes) for width, passes in ((64, 4), (64, 16), (128, 2), (128, 4), (128, 16), (256, 4))),
    *(Run(1, 4, width, passes) for width, passes in ((64, 4), (128, 1), (128, 4), (128, 8), (192, 4))),
    *(Run(1, 4, 256, passes) for passes in (1, 4)),
    *(Run(3, 4, width, passes) for width, passes in ((64, 1), (64, 4), (128, 1), (128, 4), (256, 1))),
    Run(3, 6, 384, 1),
    *(Run(10, 4, width, 1) for width in (64, 128)),
]


def prepare(books: Sequence[str], megabytes: float, folder: Path) -> Path:
    """The token folder of that much text, made if it is not there: the training split is text of all books but every
    tenth, the validation split of those."""
    done = folder / f"books_{megabytes:g}"
    if metadata_files(done):
        return done
    train_on = passages([book for i, book in enumerate(books) if i % 10 != 5], round(megabytes * 1e6))
    held_out = passages(books[5::10], HELD_OUT_CHARACTERS)
    done.mkdir(parents=True, exist_ok=True)
    (done / "train.txt").write_text(train_on, encoding="utf-8")
    (done / "held_out.txt").write_text(held_out, encoding="utf-8")
    size = vocabulary_for(len(train_on.encode())).size
    tokenize(["--input", str(done / "train.txt"), "--vocab_size", str(size), "--output_dir", str(done / "train")])
    tokenizer = done / "train" / "bpe_tokenizer.json"
    words = ["--input", str(done / "held_out.txt"), "--tokenizer_file", str(tokenizer)]
    tokenize([*words, "--output_dir", str(done / "held_out")])
    train, held = (TokenMetadata.read(metadata_files(done / name)[0]) for name in ("train", "held_out"))
    tokens = b"".join(metadata.beside("bin_file").read_bytes() for metadata in (train, held))
    (done / "tokens_bpe.bin").write_bytes(tokens)
    (done / "bpe_tokenizer.json").write_bytes(tokenizer.read_bytes())
    both = replace(
        train,
        total_tokens=train.total_tokens + held.total_tokens,
        train_split_index=train.total_tokens,
        train_bytes=train.text_bytes,
        val_bytes=held.text_bytes,
        tokens_sha256=hashlib.sha256(tokens).hexdigest(),
        fingerprint=None,
    )
    both.write(done / train.path.name)
    return done


def passages(books: Sequence[str], size: int) -> str:
    """Text of `size` characters: as much of each book, from its first third on."""
    share = size // len(books)
    return "\n\n".join(book[len(book) // 3 :][:share] for book in books)


def documents(path: str) -> list[str]:
    """The text of each document of more than LEAST_CHARACTERS."""
    texts: list[str] = []
    parts: list[str] = []
    for piece in read_pieces(find_sources([path])):
        parts.append(piece.text)
        if piece.ends_document:
            texts.append("".join(parts))
            parts = []
    return [text for text in texts if len(text) > LEAST_CHARACTERS]


def flags_of(run: Run, data: Path, train_tokens: int) -> list[str]:
    """The trainer's flags of a run, which is not compiled: most are too short for it."""
    shape = next(shape for shape in LADDER if (shape.num_layers, shape.embed_dim) == (run.layers, run.width))
    length = context_for(shape, run.passes * train_tokens)
    sequences = sequences_for(run.passes * train_tokens, length)
    keys = recipe() | {
        "data_dir": data,
        "num_layers": run.layers,
        "embed_dim": run.width,
        "num_heads": run.width // HEAD_WIDTH,
        "max_seq_len": length,
        "batch_size": sequences,
        "beta2": beta2_for(sequences * length),
        "epochs": run.passes,
        "dropout": dropout_for(run.passes),
        "eval_interval": max(1, run.passes * train_tokens // (length * sequences) // EVALUATIONS),
        "eval_batches": 0,
        "compile": "off",
    }
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def block_parameters(run: Run) -> int:
    keys = recipe() | {"num_layers": run.layers, "embed_dim": run.width, "num_heads": run.width // HEAD_WIDTH}
    shape = ModelConfig(**{key: value for key, value in keys.items() if key in MODEL_KEYS} | {"vocab_size": 512})
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TransformerLanguageModel(shape).blocks.parameters())


def fit(runs: Sequence[Mapping[str, Any]]) -> Law:
    """The law nearest to the runs: Adam on Huber's loss, of the logarithms of its constants, from several starts."""
    of_runs = [torch.tensor([float(run[key]) for run in runs]) for key in ("parameters", "bytes", "passes")]
    measured = torch.tensor([run["lowest"] for run in runs])
    found: list[tuple[float, list[float]]] = []
    for floor, power in itertools.product((0.5, 0.9, 1.2), (0.2, 0.35)):
        logs = torch.tensor([floor, 6.0, power, 30.0, power, 4.0, 0.3]).log().requires_grad_()
        optimizer = torch.optim.Adam([logs], lr=0.01)
        for _ in range(FIT_STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.huber_loss(Law(*logs.exp()).loss(*of_runs), measured, delta=0.03)
            loss.backward()
            optimizer.step()
        found.append((loss.item(), logs.exp().tolist()))
    return Law(*min(found)[1])


def judged(runs: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """All that was measured, and a table: each run, with what the law says of it that was fitted to the others."""
    ordered = sorted(runs, key=lambda run: [run[key] for key in Run._fields])
    if len(ordered) < FEWEST:
        return {"machine": machine, "runs": ordered}, f"{len(ordered)} runs are too few for a law."
    unseen = ordered[JUDGED // 2 :: JUDGED]
    law = fit([run for run in ordered if run not in unseen])
    rows = []
    for run in ordered:
        said = law.loss(run["parameters"], run["bytes"], run["passes"])
        numbers = [f"{run['lowest']:.3f}", f"{said:.3f}", f"{said - run['lowest']:+.3f}"]
        shape = f"{run['layers']} x {run['width']}"
        unfitted = "not fitted" if run in unseen else ""
        rows.append([f"{run['megabytes']:g} MB", shape, str(run["passes"]), *numbers, unfitted])
    table = markdown_table(["text", "blocks", "passes", "lowest", "by the law", "apart", ""], rows)
    return {"machine": machine, "law": law._asdict(), "runs": ordered}, f"{table}\n\n{law}"


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/law.py", description=__doc__.split("\n")[0])
    parser.add_argument("--books", required=True, metavar="FILE", help="text of many books, a document each")
    parser.add_argument("--runs_dir", metavar="DIR", default="runs/law", help="[runs/law]")
    parser.add_argument("--at_once", type=int, metavar="N", default=2, help="runs beside each other [2]")
    add_result_flags(parser)
    flags = parser.parse_args(argv)
    path, folder = Path(flags.output_dir) / "law.json", Path(flags.runs_dir)
    done: list[dict[str, Any]] = read_json(path, DataError)["runs"] if path.exists() else []
    left = [run for run in RUNS if all(run != Run(*(each[key] for key in Run._fields)) for each in done)]
    books = documents(flags.books)
    data = {megabytes: prepare(books, megabytes, folder) for megabytes in {run.megabytes for run in left}}

    def result_of(run: Run) -> dict[str, Any]:
        metadata = TokenMetadata.read(metadata_files(data[run.megabytes])[0])
        words = flags_of(run, data[run.megabytes], metadata.train_tokens)
        result = train([*words, "--device", flags.device], folder / "_".join(map(str, run)), threads=1)
        sizes = {"bytes": metadata.train_bytes, "parameters": block_parameters(run)}
        return run._asdict() | sizes | {key: result[key] for key in ("lowest", "last", "at_epoch", "seconds")}

    with ThreadPoolExecutor(flags.at_once) as pool:
        for future in as_completed([pool.submit(result_of, run) for run in left]):
            done.append(future.result())
            print(done[-1], flush=True)
            write_results(path.with_suffix(""), "The law", *judged(done, describe_machine(flags.device)))
    print(judged(done, {})[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
