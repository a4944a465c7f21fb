"""Read files of other programs in an isolated process, one at a time. Whatever goes wrong there (a crash, an exception,
a zip bomb, an endless table) becomes the reason for leaving out the file."""

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
from tokenization.corpus import ALWAYS_ALLOWED_BYTES, MAX_UNPACK_RATIO, Source, UnreadableError
from tokenization.settings import EXTRACTED, Settings

with contextlib.suppress(ImportError):  # missing on Windows, where there are no limits
    import resource

Work = Callable[[Source, Settings], list[Source]]
MAX_MEMORY_BYTES = 2_000_000_000  # per file
TIMEOUT_SECONDS, TIMEOUT_SECONDS_PER_MB = 30.0, 30.0
POLL_SECONDS = 1.0


class IsolatedReader:
    """The isolated process. It starts with the first call."""

    def __init__(self, seconds: float = TIMEOUT_SECONDS):
        self.seconds = seconds
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> IsolatedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process. multiprocessing would import the user's script again."""
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, start_new_session=True
        )
        self.answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_receive_lines, args=(process, self.answers), daemon=True).start()
        return process

    def stop(self) -> int:
        """Kill the process. Return its exit code."""
        if self.process is None:
            return 0
        with contextlib.suppress(AttributeError, ProcessLookupError):  # Windows has no process groups
            os.killpg(self.process.pid, signal.SIGKILL)  # includes its children
        self.process.kill()
        code = self.process.wait()
        for unfinished in EXTRACTED.glob(f".*.{self.process.pid}.tmp"):
            unfinished.unlink(missing_ok=True)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # input it did not read
            self.process.stdin.close()
        self.process = None
        return code

    def call(self, work: Work, source: Source, settings: Settings, while_waiting: Callable[[], None]) -> list[Source]:
        """Return what `work`, a function of a module, returns there. Raises UnreadableError."""
        self.process = self.process or self.start()
        limit = self.seconds + TIMEOUT_SECONDS_PER_MB * source.size / 1e6
        deadline = time.monotonic() + limit
        request = [work.__module__, work.__name__, asdict(source), asdict(settings)]
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a crash is detected below
            self.process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self.process.stdin.flush()
        line = None
        while line is None:
            with contextlib.suppress(queue.Empty):
                line = self.answers.get(timeout=min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            if line is None and time.monotonic() >= deadline:
                self.stop()
                raise UnreadableError(f"reading it took longer than {limit:.0f} s")
            while_waiting()
        if not line:
            raise UnreadableError(f"the library that reads it crashed (exit code {self.stop()})")
        answer = json.loads(line)
        if "full_disk" in answer:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), answer["full_disk"])
        if "reason" in answer:
            raise UnreadableError(answer["reason"])
        return [_build_source(fields) for fields in answer["sources"]]


def _build_source(fields: dict[str, Any]) -> Source:
    return Source(**{**fields, "path": Path(fields["path"])})


def _receive_lines(process: subprocess.Popen[bytes], answers: queue.Queue[bytes]) -> None:
    """Put the lines that a process prints into a queue, and b"" at its end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put(b"")


def serve() -> None:
    """Answer requests until the other side is gone. Output of libraries is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # Arrow's own pool reserves memory that it may never use
    is_limited = False
    for line in sys.stdin.buffer:
        module, name, source, settings = json.loads(line)
        work = getattr(importlib.import_module(module), name)
        if not is_limited:  # set after the import, because the limit is for the file, not the library
            is_limited = True
            with contextlib.suppress(NameError, OSError, ValueError):
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))
        result = _run_work(work, _build_source(source), Settings(**{**settings, "input": tuple(settings["input"])}))
        out.write(json.dumps(result, default=str).encode() + b"\n")
        out.flush()


def _run_work(work: Work, source: Source, settings: Settings) -> dict[str, object]:
    with contextlib.suppress(NameError, OSError, ValueError):
        limit = int(max(ALWAYS_ALLOWED_BYTES, MAX_UNPACK_RATIO * source.size))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return {"sources": [asdict(text_source) for text_source in work(source, settings)]}
    except DataError as problem:
        return {"reason": str(problem)}
    except MemoryError:
        return {"reason": f"reading it needs more than {byte_size(MAX_MEMORY_BYTES)} of memory"}
    except Exception as error:
        if is_full_disk(error):
            return {"full_disk": str(getattr(error, "filename", None) or EXTRACTED)}
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return {"reason": f"it unpacks to more than {MAX_UNPACK_RATIO} times its size, like a zip bomb"}
        if isinstance(error, OSError) and error.errno is not None:
            return {"reason": f"it cannot be read: {error.strerror}"}
        return {"reason": f"it is damaged ({type(error).__name__}: {error})"[:500]}
