"""Training gives the numbers it always gave: a small fp32 run on the CPU against the losses committed beside this file.

A change that is meant to be about speed must not move a digit. One that changes the numbers on purpose records them
anew, `python -m tests.end_to_end.test_loss_trace`, and says why in its commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy
import torch

from tests.helpers import ROOT, flags_of_a_tiny_run, generated_text, write_tokens
from training.records import read_metrics

TRACE = Path(__file__).parent / "data" / "loss_trace.json"
# Instruction sets differ between machines, and with them the order of additions: these pin one order for all.
SAME_ON_EVERY_CPU = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


def run_trainer(flags: list[str]) -> None:
    command = [sys.executable, str(ROOT / "train_colab_mmap.py"), *flags, "--precision", "fp32", "--compile", "off"]
    subprocess.run(command, check=True, env={**os.environ, **SAME_ON_EVERY_CPU}, capture_output=True)


def read_trace(run_dir: Path) -> dict[str, object]:
    rows = read_metrics(run_dir)
    weights = safetensors.numpy.load_file(run_dir / "checkpoints" / "step_00000024" / "model.safetensors")
    return {
        "torch": torch.__version__.split("+")[0],
        "train_loss": [row["train_loss"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "val_loss": [row["val_loss"] for row in rows if "val_loss" in row],
        "weights_sha256": hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest(),
    }


def test_the_losses_are_those_on_record(tmp_path: Path, train_flags: Callable[..., list[str]]) -> None:
    constraints = (path.read_text() for path in ROOT.glob("constraints*.txt"))
    tried = {line.removeprefix("torch==") for text in constraints for line in text.splitlines()}
    if torch.__version__.split("+")[0] not in tried:
        pytest.skip(f"torch {torch.__version__} is in none of constraints*.txt, and may add in another order")
    run_trainer(train_flags(tmp_path / "run"))
    recorded = json.loads(TRACE.read_text())
    assert read_trace(tmp_path / "run") == {**recorded, "torch": torch.__version__.split("+")[0]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens", generated_text(30_000))
        run_trainer(flags_of_a_tiny_run(tokens, Path(folder) / "run"))
        TRACE.write_text(json.dumps(read_trace(Path(folder) / "run"), indent=1) + "\n")
