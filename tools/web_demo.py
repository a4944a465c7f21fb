"""A page to try trained models on: text as it is generated, checkpoints side by side, alternatives to each token.

    python tools/web_demo.py
    python tools/web_demo.py runs/gpt2_small runs/lora --port 8080
    python tools/web_demo.py --share

In a notebook the page appears below the cell: %run tools/web_demo.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import require_packages
from common.flags import Parser
from common.script import script
from serving.server import Settings


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "tools/web_demo.py",
        description="A page to try trained models on. By default only this machine can open it. With --host or "
        "--share, others need a password, which is printed.",
    )
    settings = parser.settings(argv, Settings)
    require_packages("fastapi", "uvicorn", "gradio")
    from serving.serve import serve  # here, because --help must not import torch

    serve(settings, for_programs=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
