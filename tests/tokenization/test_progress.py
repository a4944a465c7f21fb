"""A bar where a line can be written over, and readable lines where it cannot."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest

from tokenization import progress
from tokenization.progress import ByteProgress


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_a_log_gets_a_line_now_and_then(pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("Encoding", 100_000_000) as read:
        read.start_at(40_000_000)  # by a session before
        for _ in range(120):
            pass_time(0.5)
            read.add(500_000)
    told = capsys.readouterr()
    assert "\r" not in told.out + told.err and "\x1b" not in told.out + told.err and told.err == ""
    lines = told.out.splitlines()
    assert len(lines) == 6
    assert lines[0] == "Encoding: 50% of 100.0 MB, 1.0 MB/s, 0:50 left"


def test_a_terminal_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ByteProgress("Learning", 4_000) as read:
        for text in read.until_end(["a", "b"]):
            read.add(2_000 * len(text))
        assert terminal.getvalue().split("\r")[-1].startswith("Learning:")
        read.wait("merging pairs")
    drawn = terminal.getvalue()
    assert re.search(r"\rLearning:   0%\|.*\| 0.00/4.00k", drawn)
    assert re.search(r"\rLearning: text read, merging pairs \[00:00\]", drawn)
    assert capsys.readouterr().out == ""
