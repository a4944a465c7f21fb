"""Errors a user can act on, and the exit code each of them ends a script with."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from common.output import Unbreakable, drop

INTERRUPTED = 130
LONGEST_MESSAGE = 5_000  # characters
# How allocators that raise a plain RuntimeError say it: the CPU's (Linux, Windows), CUDA's and cuBLAS's.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUDA out of memory",  # in the words of a compiler that met it
    "CUBLAS_STATUS_ALLOC_FAILED",
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
    """True for Python's, PyTorch's and the allocators' ways of saying so."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY))
        or (isinstance(error, RuntimeError) and str(error) == ONEDNN_OUT_OF_MEMORY)
    )


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def full_disk_told(kind: type[UserError], folder: str | Path) -> Iterator[None]:
    """Turn a full disk into a `kind` of error that names `folder`, where most of what is written inside goes."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise kind(
            f"The disk is full: {error.filename or folder} cannot be written. Free some space and run the same command "
            f"again; it continues where this one stopped."
        ) from None


class Script(Protocol):
    """What a shell, a test or a notebook cell calls; without arguments it takes those of the command line."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def script(main: Callable[[Sequence[str] | None], int | None]) -> Script:
    """Wrap a script's `main(argv=None)`: returns its exit code, and turns a user's mistake into one message on stderr.

    An exception that carries `exit_code` is a user's mistake. Any other exception is a bug of ours and keeps its
    traceback; `--debug` shows the traceback of both.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        debug = "--debug" in (sys.argv[1:] if argv is None else argv)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller, as by `2>&-`
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as we run)
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):  # a notebook's streams lack it
                reconfigure(errors="replace")  # text that a terminal or a Windows pipe cannot show
        try:
            done = main(argv) or 0
            sys.stdout.flush()  # not at exit, where what cannot be written is no error of the script's any more
            return done
        except KeyboardInterrupt:
            print("\nInterrupted.", file=Unbreakable(sys.stderr))
            return INTERRUPTED
        except BrokenPipeError:
            drop(sys.stdout)  # the reader of our output (`| head`) is gone, and has what it wanted
            return 0
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"  # of a library in Rust; no Exception
            if not isinstance(error, Exception) and not is_panic:
                raise
            code, message = getattr(error, "exit_code", None), str(error)
            if is_panic:
                code, message = DataError.exit_code, f"A file cannot be used, a tokenizer's probably: {message}."
            if code is None and is_out_of_memory(error):
                code = MemoryExhausted.exit_code
                message = (
                    f"Out of memory ({message or 'the allocation failed'}). Choose a smaller model, or less at once."
                )
            elif code is None and isinstance(error, OSError):
                code, message = DataError.exit_code, f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
                if is_full_disk(error):
                    message = f"The disk is full: {error.filename or 'the output'} cannot be written. Free some space."
                elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    message += ". Choose another folder or file, or change who may read and write it."
            if code is None or debug:
                raise
            Unbreakable(sys.stdout).flush()
            if len(message) > LONGEST_MESSAGE:  # of a file whose values are that long
                message = f"{message[:LONGEST_MESSAGE]} ..."
            print(f"error: {message}", file=Unbreakable(sys.stderr))
            return code

    return run
