"""Time the pre-tokenizer on this machine: training the vocabulary, encoding, and the whole command.

python benchmarks/tokenizing.py --input my_text.txt
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, markdown_table
from common.flags import Parser, add_debug
from common.script import script
from tokenization.corpus import find_sources, read_blocks
from tokenization.documents import read_pieces
from tokenization.encoding import encode_in_order, read_chunks
from tokenization.metadata import choose_dtype
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer

MEGABYTE = 1_000_000


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/tokenizing.py", description=__doc__.split("\n")[0])
    parser.add_argument("--input", nargs="+", metavar="PATH", required=True, help="text to tokenize")
    parser.add_argument("--vocab_size", type=int, default=32000, help="(default: 32000)")
    add_debug(parser)
    flags = parser.parse_args(argv)
    sources = find_sources(flags.input)
    megabytes = sum(len(block) for source in sources for block in read_blocks(source)) / MEGABYTE
    rows: list[list[str]] = []

    def time_row(what: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        rows.append([what, f"{megabytes:.1f}", f"{seconds:.1f}", f"{megabytes / seconds:.1f}"])

    def encode(workers: int) -> None:
        chunks = read_chunks(lambda on_read: read_pieces(sources, on_read=on_read), 4 * MEGABYTE)
        for _ in encode_in_order(tokenizer, chunks, "error", choose_dtype(tokenizer.vocab_size), workers):
            pass

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "tokenize_local_bpe.py"), "--input", *flags.input]
        command += ["--output_dir", folder, "--vocab_size", str(flags.vocab_size)]
        time_row("the whole command", lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        tokenizer = load_tokenizer(Path(folder) / "bpe_tokenizer.json")
    texts = (piece.text for piece in read_pieces(sources))
    time_row("training the vocabulary", lambda: BPETokenizer.train(texts, flags.vocab_size))
    for workers in dict.fromkeys((os.cpu_count() or 1, 1)):
        time_row(f"encoding alone, {workers} thread{'s' * (workers > 1)}", lambda workers=workers: encode(workers))  # type: ignore[misc]
    print(markdown_table(["what", "MB", "s", "MB/s"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
