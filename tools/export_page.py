"""Write a trained model as one HTML file that runs in a browser: offline, also on a phone, with nothing to install.

    python tools/export_page.py runs/gpt2_small mine.html
    python tools/export_page.py runs/gpt2_small mine.html --type f16

Weights are rounded to int8, or to f16, which takes twice the space and changes almost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option


@dataclass(frozen=True, config=STRICT)
class Options:
    """Write a trained model as one HTML file that runs in a browser, offline."""

    checkpoint: NonEmptyText = option(..., "", "checkpoint folder, or run folder for its newest", word="CHECKPOINT")
    out: NonEmptyText = option(..., "", "new file to write", word="OUT.html")
    type: Literal["int8", "f16"] = option("int8", "page", "type of the weights")


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/export_page.py").settings(argv, Options)
    from exchange.page import export_page  # imported here, because --help should not wait for torch

    out = Path(options.out)
    size, proof = export_page(options.checkpoint, out, options.type)
    print(f"Exported {options.checkpoint} to {out}, {size / 1e6:.1f} MB. Rounded to {options.type}, {proof}.")
    print(f"\nOpen it in a browser: {out.resolve().as_uri()}\nOr send the file: it needs no server and no network.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
