"""A process of its own in which files of other programs are read, one at a time. Whatever a file does to it (a crash of
a library, an exception, a bomb, a table without end) is the reason why that file is left out."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.output import byte_size
from tokenization.corpus import MOST_UNPACKED, SMALL, Source, Unreadable
from tokenization.settings import EXTRACTED, Settings

with contextlib.suppress(ImportError):  # Windows has none, and there are no limits there
    import resource

Work = Callable[[Source, Settings], list[Source]]
MEMORY_BYTES = 2_000_000_000  # for any one file
SECONDS, SECONDS_A_MEGABYTE = 30.0, 30.0
WAITING_SECONDS = 1.0  # between two calls while a file is read


class Isolated:
    """The process, which starts with the first call."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        methods = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self.connection: Connection | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> Connection:
        if hasattr(self.context, "set_forkserver_preload"):
            self.context.set_forkserver_preload(["tokenization.extract"])
        ours: Connection
        ours, theirs = self.context.Pipe()
        self.process = self.context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        return ours

    def end(self) -> None:
        if self.connection is not None:
            self.process.kill()
            self.process.join()
            for unfinished in EXTRACTED.glob(f".*.{self.process.pid}.tmp"):
                unfinished.unlink(missing_ok=True)
            self.connection.close()
            self.connection = None

    def call(self, work: Work, source: Source, settings: Settings, while_waiting: Callable[[], None]) -> list[Source]:
        """What `work` returns there. Raises Unreadable."""
        if self.connection is None:
            self.connection = self.begin()
        limit = self.seconds + SECONDS_A_MEGABYTE * source.size / 1e6
        deadline = time.monotonic() + limit
        self.connection.send((work, source, settings))
        try:
            while not self.connection.poll(min(WAITING_SECONDS, max(0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    self.end()
                    raise Unreadable(f"reading it takes longer than {limit:.0f} s")
                while_waiting()
            answer = json.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            self.end()
            raise Unreadable(f"the library that reads it crashed (exit code {code})") from None
        if "reason" in answer:
            raise Unreadable(answer["reason"])
        return [Source(**{**fields, "path": Path(fields["path"])}) for fields in answer["sources"]]


def serve(connection: Connection) -> None:
    """Read files until the other side is gone. What the libraries print is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # its own reserves memory that it may never use
    with contextlib.suppress(NameError, OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    with contextlib.suppress(EOFError):
        while True:
            work, source, settings = connection.recv()
            connection.send_bytes(json.dumps(answer(work, source, settings), default=str).encode())


def answer(work: Work, source: Source, settings: Settings) -> dict[str, object]:
    with contextlib.suppress(NameError, OSError, ValueError):
        most = int(max(SMALL, MOST_UNPACKED * source.size))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        return {"sources": [asdict(made) for made in work(source, settings)]}
    except DataError as problem:
        return {"reason": str(problem)}
    except MemoryError:
        return {"reason": f"reading it needs more than {byte_size(MEMORY_BYTES)} of memory"}
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return {"reason": f"it unpacks to more than {MOST_UNPACKED} times its size, as only a bomb does"}
        return {"reason": f"it is damaged ({type(error).__name__}: {error})"[:500]}
