"""What a test starts ends with it, and gets the signals that it is sent, however the tests were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

LEAVES = """
import signal, subprocess, sys
from pathlib import Path
from tests.conftest import *

WAITS = "import time; print(1, flush=True); time.sleep(300)"
STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"

def test_that_fails():
    parent = subprocess.Popen([sys.executable, "-c", STARTS, WAITS], stdout=subprocess.PIPE)
    parent.stdout.readline()
    (child,) = leftovers.children(parent.pid)
    Path("pids").write_text(f"{parent.pid} {child}")
    ignored = [n.name for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_IGN]
    Path("ignored").write_text(str(ignored))
    assert False, "as planned"
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux tells who started what")
def test_a_test_that_fails_leaves_nothing_running_though_signals_were_ignored(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(LEAVES)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-c", os.devnull, "--rootdir", ".", "test_inner.py"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 1 and "as planned" in run.stdout, run.stdout + run.stderr
    assert (tmp_path / "ignored").read_text() == "[]"
    for pid in (tmp_path / "pids").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", f"{pid} runs"
