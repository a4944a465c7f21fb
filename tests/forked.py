"""Scripts in processes of their own, to be killed, signalled or limited, that begin where torch is imported already.

Importing it takes seconds for each. What torch reads from the environment when it is imported is as for the tests here,
TORCHDYNAMO_DISABLE aside.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch._dynamo

from benchmarks import measure
from tests import leftovers
from tests.helpers import ROOT

CAN_FORK = hasattr(os, "fork")
if CAN_FORK:
    SERVER = multiprocessing.get_context("forkserver")
    SERVER.set_forkserver_preload(["tests.forked", "train_colab_mmap", "matplotlib.backends.backend_agg"])
TRAINER = ROOT / "train_colab_mmap.py"


class Forked:
    """`python -u SCRIPT FLAGS`, with the attributes and methods of a subprocess.Popen whose output is read as text.

    `environment` is added to ours, `closed` are streams (1, 2) that nobody has opened, and `first` is called in the
    process before the script."""

    def __init__(
        self,
        flags: Sequence[object],
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        closed: Sequence[int] = (),
        script: Path = TRAINER,
        first: Callable[[], object] = int,
    ):
        (out, of_out), (err, of_err) = SERVER.Pipe(duplex=False), SERVER.Pipe(duplex=False)
        words = [str(word) for word in (script, *flags)]
        place = cwd or Path.cwd(), {**os.environ, **(environment or {})}
        with contextlib.chdir(ROOT):  # where the server finds what it imports; elsewhere it goes without, in silence
            forkserver.ensure_running()
        self.process = SERVER.Process(target=run_script, args=(words, *place, of_out, of_err, closed, first))
        self.process.start()
        leftovers.STARTED.append(self)
        self.pid = self.process.pid
        of_out.close()
        of_err.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno()), errors="replace") for pipe in (out, err))

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float) -> int:
        """Fails after `timeout` seconds."""
        self.process.join(timeout)
        assert self.returncode is not None, f"still there after {timeout} s"
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """Return the rest of both streams. Kills a process that is still there after `timeout` seconds."""
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


def start_interpreter(
    flags: Sequence[object],
    environment: Mapping[str, str] | None = None,
    script: Path = TRAINER,
    first: Callable[[], object] = int,
) -> subprocess.Popen[str]:
    """The same on Windows, in a new interpreter. `first` is a function of a module."""
    code = (
        f"import runpy, sys; from {first.__module__} import {first.__name__} as first; first(); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [sys.executable, "-u", "-c", code, *map(str, (script, *flags))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    return subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


if not CAN_FORK:
    Forked = start_interpreter


def check_output(command: Sequence[str], text: bool) -> str:
    """subprocess.check_output, for one of our scripts."""
    python, script, *flags = command
    assert python == sys.executable and text
    process = Forked(flags, script=Path(script))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def fork_what_is_measured(patch: pytest.MonkeyPatch, benchmark: ModuleType = measure) -> None:
    """Run the scripts of a benchmark as forks."""
    patch.setattr(benchmark, "subprocess", SimpleNamespace(check_output=check_output))


def run_script(
    words: list[str],
    cwd: Path,
    environment: Mapping[str, str],
    out: Connection,
    err: Connection,
    closed: Sequence[int],
    first: Callable[[], object],
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    for pipe, number in ((out, 1), (err, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    for number in closed:
        os.close(number)
    sys.stdout, sys.stderr = (  # as an interpreter finds them
        None if number in closed else os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = words
    gc.freeze()  # as if this had been imported before: not to be looked through at each collection
    first()
    # Python looks beside the script, and not in the project: the script has to.
    project = [path for path in sys.path if Path(path).resolve() == ROOT]
    sys.path[:] = [str(Path(words[0]).parent), *(path for path in sys.path if path not in project)]
    runpy.run_path(words[0], run_name="__main__")
