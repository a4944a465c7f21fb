"""How a script ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.errors import is_out_of_memory
from common.script import script


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
    assert capsys.readouterr().err == "error: A file, probably a tokenizer, cannot be used: index out of bounds.\n"
