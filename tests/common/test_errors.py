"""How a script ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_what_cannot_be_said_leaves_the_exit_code() -> None:
    """Where the disk behind `> log 2>&1` is full."""
    words = [sys.executable, str(ROOT / "tokenize_local_bpe.py"), "--vocab_sise", "300"]
    assert subprocess.run(["sh", "-c", f"{shlex.join(words)} > /dev/full 2>&1"], check=False).returncode == 2
