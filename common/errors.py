"""Errors that a user can act on, with the exit code of each."""

from __future__ import annotations

import errno
import importlib.util

INTERRUPTED = 130
# Messages of allocators that raise a plain RuntimeError: the CPU's (Linux, Windows), CUDA's, the compiler's, cuBLAS's.
OUT_OF_MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA out of memory",  # quoted by the compiler
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for its workspace
    "could not create a memory object",
    "can't start new thread",
)
ONEDNN_OUT_OF_MEMORY = "could not create a primitive"  # the whole message; longer ones mean something else


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong and what to type instead."""

    exit_code = 2


class ConfigError(UserError):
    """A wrong flag, config key, or combination of them."""


class DataError(UserError):
    """Wrong or missing text, token files, metadata or tokenizer."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted."""

    exit_code = 4


class MemoryExhausted(UserError):
    """Model, batch or data do not fit in memory."""

    exit_code = 5


class ProcessLost(UserError):
    """Another process of the same training died or never joined."""

    exit_code = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, PyTorch or an allocator means that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS))
        or (isinstance(error, RuntimeError) and str(error) == ONEDNN_OUT_OF_MEMORY)
    )


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_packages(*names: str) -> None:
    """Raise ConfigError if packages of requirements-extras.txt are missing."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"This needs {' and '.join(missing)}: pip install -r requirements-extras.txt")
