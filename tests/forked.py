"""The trainer in a process of its own, to be killed or signalled, that begins where torch is imported already.

Importing it takes seconds for each. What torch reads from the environment when it is imported is as for the tests here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import train_colab_mmap
from common.launch import end

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.forked", "training.run", "torch._dynamo", "matplotlib.backends.backend_agg"])


class Forked:
    """`python -u train_colab_mmap.py FLAGS`, with the attributes and methods of a subprocess.Popen whose output is read
    as text; `environment` is added to ours, and `closed` are streams (1, 2) that nobody has opened."""

    def __init__(
        self,
        flags: Sequence[object],
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        closed: Sequence[int] = (),
    ):
        (out, of_out), (err, of_err) = SERVER.Pipe(duplex=False), SERVER.Pipe(duplex=False)
        words = [str(flag) for flag in flags]
        self.process = SERVER.Process(
            target=run_trainer, args=(words, cwd or Path.cwd(), dict(environment or {}), of_out, of_err, closed)
        )
        self.process.start()
        self.pid = self.process.pid
        of_out.close()
        of_err.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno()), errors="replace") for pipe in (out, err))

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float) -> int:
        """Fails after `timeout` seconds."""
        self.process.join(timeout)
        assert self.returncode is not None, f"still there after {timeout} s"
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """What is left to be read of both streams. A process that is still there after `timeout` seconds is killed."""
        late = threading.Timer(timeout, self.kill)
        late.start()
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self.stderr.read()))
        reader.start()
        out = "" if self.stdout.closed else self.stdout.read()
        reader.join()
        self.process.join()
        late.cancel()
        return out, said[0]


def run_trainer(
    flags: list[str],
    cwd: Path,
    environment: Mapping[str, str],
    out: Connection,
    err: Connection,
    closed: Sequence[int],
) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    for pipe, number in ((out, 1), (err, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    for number in closed:
        os.close(number)
    sys.stdout, sys.stderr = (  # as an interpreter finds them
        None if number in closed else os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["train_colab_mmap.py", *flags]
    end(train_colab_mmap.main)
