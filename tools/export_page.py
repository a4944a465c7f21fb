"""Write a trained model as one HTML file that talks in a browser: offline, on a phone too, and nothing to install.

    python tools/export_page.py runs/gpt2_small mine.html
    python tools/export_page.py runs/gpt2_small mine.html --type f16

The weights are rounded to int8, or to f16, which takes twice the space and changes almost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.flags import Parser, add_debug
from common.script import script

TYPES = ("int8", "f16")


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="tools/export_page.py",
        usage="%(prog)s CHECKPOINT OUT.html",
        description="Write a trained model as one HTML file that talks in a browser, offline.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder for its newest")
    parser.add_argument("out", metavar="OUT.html", help="file to write; not there yet")
    parser.add_argument("--type", choices=TYPES, default=TYPES[0], help="of the weights [int8]")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    from exchange.page import export_page  # here, because --help must not import torch

    out = Path(arguments.out)
    size, proof = export_page(arguments.checkpoint, out, arguments.type)
    print(f"{arguments.checkpoint} is now {out}, {size / 1e6:.1f} MB. Rounded to {arguments.type}, {proof}.")
    print(f"\nOpen it in a browser: {out.resolve().as_uri()}\nOr send the file: it needs no server and no network.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
