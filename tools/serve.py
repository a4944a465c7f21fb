"""Serve a trained model to programs that speak OpenAI's API, and a page to try it on.

    python tools/serve.py
    python tools/serve.py runs/gpt2_small --port 8080
    SERVE_API_KEY=SECRET python tools/serve.py --host 0.0.0.0

It answers GET /v1/models, POST /v1/completions, POST /v1/chat/completions and GET /health. It generates one text at a
time; other requests wait.
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
from serving.server import KEY_VARIABLE, Settings


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "tools/serve.py",
        description="Serve a trained model to programs that speak OpenAI's API. Requests need the key in the "
        f"environment variable {KEY_VARIABLE} if there is one, and a new one where other machines are let in.",
    )
    settings = parser.settings(argv, Settings)
    require_packages("fastapi", "uvicorn")
    from serving.serve import serve  # here, because --help must not import torch

    serve(settings, for_programs=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
