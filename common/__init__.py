"""The ground that the three wings stand on: errors, flags, files, checkpoints, the machine, formatting."""

import importlib.util
import sys

__version__ = "1.0.0"

# fmt: off
PACKAGES = (  # those of requirements.txt
    "torch", "numpy", "tokenizers", "tqdm", "safetensors", "filelock", "tiktoken", "matplotlib", "pydantic",
)
# fmt: on

# Every script imports this first, so that another Python than the environment's ends with one sentence.
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    print(
        f"error: {sys.executable} lacks {', '.join(missing)}. Activate the environment (. .venv/bin/activate), or "
        "install the packages: pip install -r requirements.txt",
        file=sys.stderr,
    )
    sys.exit(2)
