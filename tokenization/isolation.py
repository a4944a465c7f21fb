"""A process of its own in which files of other programs are read, one at a time. Whatever a file does to it (a crash of
a library, an exception, a bomb, a table without end) is the reason why that file is left out."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import DataError, is_full_disk
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
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> subprocess.Popen[bytes]:
        """Not by multiprocessing, which would import the user's script again."""
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, start_new_session=True
        )
        self.answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=receive, args=(process, self.answers), daemon=True).start()
        return process

    def end(self) -> int:
        """Returns the exit code."""
        if self.process is None:
            return 0
        with contextlib.suppress(AttributeError, ProcessLookupError):  # Windows has no groups
            os.killpg(self.process.pid, signal.SIGKILL)  # and what it has started
        self.process.kill()
        code = self.process.wait()
        for unfinished in EXTRACTED.glob(f".*.{self.process.pid}.tmp"):
            unfinished.unlink(missing_ok=True)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self.process.stdin.close()
        self.process = None
        return code

    def call(self, work: Work, source: Source, settings: Settings, while_waiting: Callable[[], None]) -> list[Source]:
        """What `work`, a function of a module, returns there. Raises Unreadable."""
        self.process = self.process or self.begin()
        limit = self.seconds + SECONDS_A_MEGABYTE * source.size / 1e6
        deadline = time.monotonic() + limit
        request = [work.__module__, work.__name__, asdict(source), asdict(settings)]
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has crashed, which is seen below
            self.process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self.process.stdin.flush()
        line = None
        while line is None:
            with contextlib.suppress(queue.Empty):
                line = self.answers.get(timeout=min(WAITING_SECONDS, max(0.0, deadline - time.monotonic())))
            if line is None and time.monotonic() >= deadline:
                self.end()
                raise Unreadable(f"reading it takes longer than {limit:.0f} s")
            while_waiting()
        if not line:
            raise Unreadable(f"the library that reads it crashed (exit code {self.end()})")
        answer = json.loads(line)
        if "full_disk" in answer:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), answer["full_disk"])
        if "reason" in answer:
            raise Unreadable(answer["reason"])
        return [source_of(fields) for fields in answer["sources"]]


def source_of(fields: dict[str, Any]) -> Source:
    return Source(**{**fields, "path": Path(fields["path"])})


def receive(process: subprocess.Popen[bytes], answers: queue.Queue[bytes]) -> None:
    """Its lines, and an empty one at its end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put(b"")


def serve() -> None:
    """Read files until the other side is gone. What the libraries print is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # its own reserves memory that it may never use
    is_limited = False
    for line in sys.stdin.buffer:
        module, name, source, settings = json.loads(line)
        work = getattr(importlib.import_module(module), name)
        if not is_limited:  # the limit is for the file, not for the code that reads it
            is_limited = True
            with contextlib.suppress(NameError, OSError, ValueError):
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
        made = answer(work, source_of(source), Settings(**{**settings, "input": tuple(settings["input"])}))
        out.write(json.dumps(made, default=str).encode() + b"\n")
        out.flush()


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
        if is_full_disk(error):
            return {"full_disk": str(getattr(error, "filename", None) or EXTRACTED)}
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return {"reason": f"it unpacks to more than {MOST_UNPACKED} times its size, as only a bomb does"}
        if isinstance(error, OSError) and error.errno is not None:
            return {"reason": f"it cannot be read: {error.strerror}"}
        return {"reason": f"it is damaged ({type(error).__name__}: {error})"[:500]}
