"""Runs a part of `gpu_suite.py` in its own process, and kills it with everything that it started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.suite_parts import PARTS, Setting
from benchmarks.suite_rows import append

LOG_LINES = 15
KILLED_SECONDS = 3.0  # a process that the GPU's driver holds does not end, even killed; the command goes on


def fresh_processes() -> multiprocessing.context.ForkServerContext:
    """Processes forked from one that has only imported torch: they start fast, and use no GPU yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.workload", "torch._dynamo"])
    return context


def run_part(name: str, setting: Setting, limit: float, rows: Path) -> dict[str, Any]:
    """Run one part in its own process, which writes its rows to the file. Returns its status and seconds."""
    started = time.monotonic()
    log = setting.folder / "log"
    process = fresh_processes().Process(target=work, args=(name, setting, rows, log))
    process.start()
    assert process.pid is not None
    try:
        process.join(limit)
        status = "out of time" if process.is_alive() else "failed" if process.exitcode else "done"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all the processes it started
        process.kill()  # if it has no group yet
        process.join(KILLED_SECONDS)
    ended: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if status != "done" and log.exists():
        ended["log"] = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return ended


def end_with_the_command() -> None:
    """Kill this part when its command is gone: a killed command cannot, and the part would disturb the next one."""
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os.killpg(0, signal.SIGKILL)


def work(name: str, setting: Setting, rows: Path, log: Path) -> None:
    """Run a part in this process: append its rows to the file `rows`, and what it prints to `log`."""
    os.setpgid(0, 0)  # its own group, to kill all its processes; a kill of the command's session reaches it too
    threading.Thread(target=end_with_the_command, daemon=True).start()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(setting.cache_dir / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(setting.cache_dir / "triton")
    for row in PARTS[name](setting):
        append(rows, {"part": name, "row": row})
