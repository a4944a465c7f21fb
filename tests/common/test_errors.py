"""How a script ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

import pytest

from common.errors import is_out_of_memory
from common.script import script
from tests.helpers import ROOT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_what_cannot_be_said_leaves_the_exit_code() -> None:
    """Where the disk behind `> log 2>&1` is full."""
    words = [sys.executable, str(ROOT / "tokenize_local_bpe.py"), "--vocab_sise", "300"]
    assert subprocess.run(["sh", "-c", f"{shlex.join(words)} > /dev/full 2>&1"], check=False).returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_runs_out_is_known_in_the_words_of_each_library(words: str) -> None:
    assert is_out_of_memory(RuntimeError(words)) and not is_out_of_memory(ValueError(words))


class PanicException(BaseException):
    """As a library in Rust raises it."""


def test_a_panic_of_a_library_is_an_error_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    @script
    def main(argv: Sequence[str] | None) -> int:
        raise PanicException("index out of bounds")

    assert main([]) == 3
    assert capsys.readouterr().err == "error: A file cannot be used, a tokenizer's probably: index out of bounds.\n"
