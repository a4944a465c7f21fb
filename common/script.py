"""Wrap the `main` of a script: errors, Ctrl-C, closed output, full disks, ranks, exit code."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, cast

from common.errors import INTERRUPTED, DataError, MemoryExhausted, UserError, is_full_disk, is_out_of_memory
from common.output import print_log

MAX_MESSAGE_CHARACTERS = 5_000


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started. Without torchrun there is one, of rank 0."""

    rank: int = 0
    size: int = 1  # processes on all machines
    local_rank: int = 0
    local_size: int = 1  # processes on this machine


def count_cores() -> int:
    """Return the cores that this process may use: those of its affinity, within the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def world() -> World:
    """Read the environment variables that torchrun sets."""
    if not all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return World()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return World(*(int(os.environ.get(name, 1)) for name in names))


def is_main_process() -> bool:
    """Return whether this is rank 0, the process that prints and writes files."""
    return world().rank == 0


class Script(Protocol):
    """A wrapped `main`, called by a shell, a test or a notebook cell. By default it takes the command line."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


Main = Callable[[Sequence[str] | None], int | None]


def script(main: Main) -> Script:
    """Wrap `main(argv=None)` so that it returns an exit code, and prints a user's mistake as one message on stderr.

    An exception with an `exit_code` is a user's mistake. Any other one is a bug and keeps its traceback; `--debug`
    shows the traceback of both.
    """
    return wrap(main, None)


def writing_script(full_disk: type[UserError]) -> Callable[[Main], Script]:
    """Wrap a script that writes files. As `script`, but a closed stdout does not stop it, only rank 0 prints, and a
    full disk is a `full_disk` error."""
    return lambda main: wrap(main, full_disk)


def wrap(main: Main, full_disk: type[UserError] | None) -> Script:
    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        debug = "--debug" in (sys.argv[1:] if argv is None else argv)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller (`2>&-`)
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process ends)
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):  # a notebook's streams lack it
                reconfigure(errors="replace")  # a terminal or Windows pipe may not show all characters
        print_log()
        try:
            with _safe_output() if full_disk else contextlib.nullcontext():
                done = main(argv) or 0
            sys.stdout.flush()  # an error at exit would come too late to report
            return done
        except KeyboardInterrupt:
            print("\nInterrupted.", file=Unbreakable(sys.stderr))
            return INTERRUPTED
        except BrokenPipeError:
            drop(sys.stdout)  # the reader (`| head`) has what it wanted
            return 0
        except BaseException as error:
            code, message = explain(error, full_disk)
            if code is None or debug:
                raise
            Unbreakable(sys.stdout).flush()
            if world().local_rank == 0:
                print(f"error: {message[:MAX_MESSAGE_CHARACTERS]}", file=Unbreakable(sys.stderr))
            return code

    return run


def check_flags(parse: Callable[[Sequence[str] | None], object]) -> None:
    """Parse the command line. If it is wrong, or asks for --help, answer and end the process.

    A script calls this before it imports torch, which takes seconds.
    """

    def only_parse(argv: Sequence[str] | None) -> None:
        parse(argv)

    if code := script(only_parse)():
        sys.exit(code)


def explain(error: BaseException, full_disk: type[UserError] | None) -> tuple[int | None, str]:
    """Return the exit code and message of an error; the code is None for a bug."""
    code, message = getattr(error, "exit_code", None), str(error)
    if type(error).__name__ == "PanicException":  # raised by Rust libraries
        return DataError.exit_code, f"A file, probably a tokenizer, cannot be used: {message}."
    if code is not None or not isinstance(error, Exception):
        return code, message
    if is_out_of_memory(error):
        remedy = "Lower --micro_batch_size or --max_seq_len, or choose a smaller model"
        message = f"Out of memory ({message or 'the allocation failed'}). {remedy}."
        return MemoryExhausted.exit_code, message
    if not isinstance(error, OSError):
        return None, message
    if is_full_disk(error):
        again = " and run the same command again to continue" if full_disk else ""
        message = f"The disk is full: {error.filename or 'the output'} cannot be written. Free some space{again}."
        return (full_disk or DataError).exit_code, message
    message = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        message += ". Choose another folder or file, or change its permissions."
    return DataError.exit_code, message


class Unbreakable:
    """A stream whose writes never fail. Text that cannot be written is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        with self.drop_unencodable():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.drop_unencodable():
            self.stream.flush()

    @contextlib.contextmanager
    def drop_unencodable(self) -> Iterator[None]:
        try:
            yield
        except UnicodeError:  # only this text cannot be written
            pass
        except (OSError, ValueError):  # ValueError: the stream was closed
            with contextlib.suppress(OSError, ValueError):  # the stream has no file
                drop(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def drop(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, because Python would flush it at exit and report an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def _safe_output() -> Iterator[None]:
    """Ignore errors of printing in this context, and print on rank 0 only."""
    with contextlib.ExitStack() as stack:
        out, err = (cast(TextIO, Unbreakable(stream)) for stream in (sys.stdout, sys.stderr))
        if world().rank:
            out = err = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            yield
        finally:
            out.flush()
            err.flush()


def end(main: Script) -> NoReturn:
    """Run a script and end the process with its exit code.

    Skip the interpreter's shutdown, which takes a second or two with torch. With several processes, gloo's threads may
    even abort the process there and lose the exit code (pytorch pull request 179291).
    """
    try:
        code = main()
    except SystemExit as left:
        code = int(left.code or 0)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(code)
