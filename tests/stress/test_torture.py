"""The stress tool kills for real, notices a loss, and says so."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.helpers import ROOT
from tests.stress.torture_round import Machine, Round, Session, Tally, damage, is_possible, result, wait


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_few_kills_lose_nothing_and_are_written_down(tmp_path: Path) -> None:
    torture = Forked(["--output_dir", tmp_path, "--kills", "4"], script=ROOT / "tests" / "stress" / "torture.py")
    out, err = torture.communicate(timeout=240)
    assert torture.returncode == 0, out + err
    (written,) = tmp_path.glob("torture-*.json")
    counts = json.loads(written.read_text())
    assert counts["losses"] == []
    assert sum(count for name, count in counts.items() if name.startswith("SIGKILL")) >= 4
    assert "| **losses** | **0** |" in written.with_suffix(".md").read_text()


def test_a_session_that_is_killed_before_it_says_anything_does_not_speak_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(lambda argv: 0, [], tmp_path / "log")
    session.log.write_text("First step")
    monkeypatch.setattr(os, "fork", lambda: 1)  # the parent goes on, the child never comes to its turn
    session.start()
    assert session.output() == ""


def test_a_loss_is_told_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tally = Tally()
    tally.require(True, "nothing")
    tally.require(False, "a checkpoint is gone")
    assert tally.losses == ["a checkpoint is gone"] and "LOSS       a checkpoint is gone" in capsys.readouterr().out
    empty = Round(tmp_path / "round", random.Random(0), tally)
    empty.tokens.mkdir()
    assert "missing" in result(empty).values()  # which no undisturbed round has


def test_damage_changes_the_folder(tmp_path: Path) -> None:
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for name in ("a", "b"):
            (folder / name).write_bytes(bytes(range(100)))
        damage(folder, random.Random(seed))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} != dict.fromkeys("ab", bytes(range(100)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_machine_has_a_disk_a_name_and_a_clock_of_its_own(tmp_path: Path) -> None:
    if not is_possible(tmp_path):
        pytest.skip("this system forbids namespaces")
    machine = Machine("another", tmp_path / "there", tmp_path / "here", 300.0)
    (tmp_path / "here" / "ours").write_text("")

    def look(argv: list[str]) -> int:
        seen = socket.gethostname(), os.listdir(tmp_path / "here"), time.time() - before > 299
        os.write(1, repr(seen).encode())  # not print, which pytest has to itself
        (tmp_path / "here" / "theirs").write_text("")
        return 0

    session, before = Session(look, [], tmp_path / "log", machine), time.time()
    assert wait(session.start(), 60) == 0 and session.output() == "('another', [], True)"
    assert os.listdir(tmp_path / "here") == ["ours"] and os.listdir(tmp_path / "there") == ["theirs"]
    assert socket.gethostname() != "another"
