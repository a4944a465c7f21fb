"""Time the pre-tokenizer on this machine: learning the vocabulary, encoding alone, and the whole command.

python benchmarks/tokenizing.py --input my_text.txt
"""

from __future__ import annotations

import functools
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from benchmarks.measure import ROOT, markdown_table
from common.flags import Parser, add_debug
from common.script import script
from tokenization.corpus import Source, find_sources, read_pieces, unpacked_blocks
from tokenization.encoding import encode_in_order, read_chunks
from tokenization.metadata import token_dtype
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer

MEGABYTE = 1_000_000


class Row(NamedTuple):
    what: str
    megabytes: float
    seconds: float


def generated_text(megabytes: float) -> str:
    """Text whose words follow Zipf's law, like natural language, in documents of about 20 KB."""
    generator = random.Random(0)
    syllables = ["ka", "to", "mi", "re", "shu", "lon", "est", "ing", "a", "per", "tra", "ou"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 5))) for _ in range(30_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    document = 4000
    count = int(megabytes * MEGABYTE / 27_000) + 1
    texts = (" ".join(generator.choices(words, weights, k=document)) for _ in range(count))
    return "\n<|endoftext|>\n".join(texts)


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_memory_of_children() -> float | None:
    """Largest resident set of any finished child process, in MB; None on Windows, where it is unknown."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit / MEGABYTE


def encode_all(sources: Sequence[Source], vocabulary: Path, workers: int) -> None:
    tokenizer = load_tokenizer(vocabulary)
    chunks = read_chunks(lambda on_read: read_pieces(sources, on_read=on_read), 4 * MEGABYTE)
    for _ in encode_in_order(tokenizer, chunks, "error", token_dtype(tokenizer.vocab_size), workers):
        pass


def measure(sources: Sequence[Source], inputs: Sequence[str], vocab_size: int, slice_mb: float) -> list[Row]:
    megabytes = sum(len(block) for source in sources for block in unpacked_blocks(source)) / MEGABYTE
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "tokens"
        command = [sys.executable, str(ROOT / "tokenize_local_bpe.py"), "--input", *inputs]
        command += ["--output_dir", str(output), "--vocab_size", str(vocab_size)]
        whole = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        vocabulary = output / "bpe_tokenizer.json"
        texts = (piece.text for piece in read_pieces(sources))
        rows.append(Row("learning the vocabulary", megabytes, timed(lambda: BPETokenizer.train(texts, vocab_size))))
        for workers in dict.fromkeys((os.cpu_count() or 1, 1)):
            seconds = timed(functools.partial(encode_all, sources, vocabulary, workers))
            rows.append(Row(f"encoding alone, {workers} thread{'s' * (workers > 1)}", megabytes, seconds))
        rows.append(Row("the whole command", megabytes, whole))

        pieces, size = [], 0
        for piece in read_pieces(sources):
            pieces.append(piece.text)
            size += len(piece.text.encode())
            if size > slice_mb * MEGABYTE:
                break
        slow = Tokenizer.from_file(str(vocabulary))
        slow.encode_special_tokens = True
        seconds = timed(lambda: slow.encode_batch_fast(pieces, add_special_tokens=False))
        rows.append(Row("`tokenizers` alone, all cores, on a slice", size / MEGABYTE, seconds))
    return rows


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/tokenizing.py", description=__doc__.split("\n")[0])
    parser.add_argument("--input", nargs="+", metavar="PATH", help="text to tokenize (default: generated text)")
    parser.add_argument("--generate_mb", type=float, default=20, help="size of the generated text (default: 20)")
    parser.add_argument("--vocab_size", type=int, default=32000, help="(default: 32000)")
    parser.add_argument("--slice_mb", type=float, default=10, help="text for `tokenizers` alone (default: 10)")
    add_debug(parser)
    flags = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        inputs = flags.input
        if not inputs:
            path = Path(folder) / "generated.txt"
            path.write_text(generated_text(flags.generate_mb), encoding="utf-8")
            inputs = [str(path)]
        rows = measure(find_sources(inputs), inputs, flags.vocab_size, flags.slice_mb)

    versions = ", ".join(f"{name} {version(name)}" for name in ("tiktoken", "tokenizers"))
    print(f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}")
    print(f"vocabulary of {flags.vocab_size:,}\n")
    cells = [[r.what, f"{r.megabytes:.1f}", f"{r.seconds:.1f}", f"{r.megabytes / r.seconds:.1f}"] for r in rows]
    print(markdown_table(["what", "MB", "s", "MB/s"], cells))
    if peak := peak_memory_of_children():
        print(f"\nPeak memory of the whole command: {peak:,.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
