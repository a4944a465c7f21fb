"""Errors a user can act on, and the exit code each of them ends a script with."""

from __future__ import annotations

import errno
import importlib.util

INTERRUPTED = 130
# How allocators that raise a plain RuntimeError say it: the CPU's (Linux, Windows), CUDA's, the compiler's, cuBLAS's.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA out of memory",  # in the words of a compiler that met it
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # it finds no memory for its workspace
    "could not create a memory object",
    "can't start new thread",
)
ONEDNN_OUT_OF_MEMORY = "could not create a primitive"  # with more words behind it, it means something else


class UserError(Exception):
    """Something the user can put right; the message says what is wrong and what to type instead."""

    exit_code = 2


class ConfigError(UserError):
    """A flag, a key of a config file, or a combination of them."""


class DataError(UserError):
    """Text, token files, metadata or a tokenizer."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted."""

    exit_code = 4


class MemoryExhausted(UserError):
    """The model, the batch or the data do not fit in memory."""

    exit_code = 5


class ProcessLost(UserError):
    """A peer process of the same training died or never joined."""

    exit_code = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it is one of the ways in which Python, PyTorch and the allocators say that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY))
        or (isinstance(error, RuntimeError) and str(error) == ONEDNN_OUT_OF_MEMORY)
    )


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_packages(*names: str) -> None:
    """Raise ConfigError if some are not installed: training needs none of requirements-extras.txt."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"This needs {' and '.join(missing)}: pip install -r requirements-extras.txt")
