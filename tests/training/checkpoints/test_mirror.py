"""The mirror: verified copies beside the training, whatever becomes of the Drive."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from common.checkpoint import KEEP, open_checkpoint, problems_of, step_folders
from common.files import write_json
from tests.helpers import flip, logged, snapshot
from tests.training.helpers import at_step, final_weights, measured, steps_of
from training.checkpoints import lease
from training.checkpoints import mirror as mirror_module
from training.checkpoints import start as start_module
from training.checkpoints.mirror import Mirror, copy_checkpoint, copy_file
from training.reports.records import read_metrics


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> list[Mirror]:
    """Those that have begun."""
    begun = list[Mirror]()
    begin = Mirror.begin
    monkeypatch.setattr(Mirror, "begin", lambda mirror, *args: (begun.append(mirror), begin(mirror, *args)))
    return begun


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """Those that any mirror was given."""
    given = list[threading.Event]()
    wake = Mirror.wake
    monkeypatch.setattr(Mirror, "wake", lambda mirror: (wake(mirror), given.append(mirror.request)))
    return given


def wait_until_idle(mirror: Mirror, step: int, requests: list[threading.Event]) -> None:
    """It holds this step, its first one, and has nothing to do. Two requests came, at its begin and for the step: the
    first one may have found the step already."""
    wait_until(lambda: steps_of(mirror.dir) == [step] and len(requests) >= 2 and requests[-1].is_set())


def test_a_run_continues_from_the_mirror_when_its_folder_is_gone(
    train: Callable, interrupt: Callable, unbroken: Path, tmp_path: Path
) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive"}
    interrupt(tmp_path / "run", after=20, **flags)
    mirrored = tmp_path / "drive" / "run"
    assert steps_of(mirrored)[0] == 18
    assert problems_of(mirrored / "best") == []
    shutil.rmtree(tmp_path / "run")
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and str(mirrored / "checkpoints") in result.out
    assert final_weights(tmp_path / "run") == final_weights(mirrored) == final_weights(unbroken)
    assert measured(tmp_path / "run") == measured(unbroken)
    assert problems_of(tmp_path / "run" / "best") == []
    assert len(steps_of(mirrored)) == KEEP


def test_the_mirror_is_as_good_as_the_run_to_whoever_generates(train: Callable, tmp_path: Path) -> None:
    """By the folder that was given to the trainer, too, which holds runs."""
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=6).code == 0
    for folder in ("drive", "drive/run"):
        assert open_checkpoint(tmp_path / folder).path == tmp_path / "drive" / "run" / "checkpoints" / "step_00000006"


def test_a_damaged_local_checkpoint_is_replaced_by_the_mirrors(train: Callable, tmp_path: Path) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive", "max_steps": 14}
    assert train(tmp_path / "run", **{**flags, "max_steps": 12}).code == 0
    assert "is whole and fits" in train(tmp_path / "run", **flags, dry_run="true").out
    flip(tmp_path / "run" / "checkpoints" / "step_00000012" / "model.safetensors")
    result = train(tmp_path / "run", **flags)
    assert result.code == 0
    assert f"Continuing from {tmp_path / 'drive' / 'run' / 'checkpoints' / 'step_00000012'}" in result.out


def test_a_drive_that_is_not_mounted_is_not_made_up_on_the_local_disk(train: Callable, tmp_path: Path) -> None:
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive" / "MyDrive" / "checkpoints")
    assert (
        result.code == 2 and "drive.mount" in result.err and f"mkdir -p {tmp_path / 'drive' / 'MyDrive'}" in result.err
    )
    assert not (tmp_path / "drive").exists() and not (tmp_path / "run").exists()
    (tmp_path / "drive").write_text("not a folder")
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive").code == 2


def test_a_drive_that_goes_while_it_is_looked_through_is_not_taken_for_empty(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is the newest; without it the run would go on from an older one."""
    drive = tmp_path / "drive"
    mirrored = {"checkpoint_dir": drive / "MyDrive" / "copies", "checkpoint_steps": 3}
    (drive / "MyDrive").mkdir(parents=True)
    assert train(tmp_path / "run", **mirrored, max_steps=6).code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    find = start_module.find_old

    def find_without_drive(*args: Any) -> Any:
        drive.rename(tmp_path / "away")
        drive.mkdir()
        return find(*args)

    monkeypatch.setattr(start_module, "find_old", find_without_drive)
    result = train(tmp_path / "run", **mirrored, max_steps=9)
    assert result.code == 2 and "Mount the Drive first" in result.err
    drive.rmdir()
    (tmp_path / "away").rename(drive)
    monkeypatch.undo()
    result = train(tmp_path / "run", **mirrored, max_steps=9)
    assert result.code == 0 and "step_00000006: step 6" in result.out


def test_a_drive_that_is_unmounted_on_the_way_is_told_and_not_made_up(
    train: Callable,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mirrors: list[Mirror],
    requests: list[threading.Event],
) -> None:
    """What is left of it is the empty folder it was mounted on; once it is back, the copies go on."""
    drive, away = tmp_path / "drive", tmp_path / "away"
    drive.mkdir()

    def unmount() -> None:
        wait_until_idle(mirrors[0], 6, requests)
        drive.rename(away)
        drive.mkdir()

    def mount() -> None:
        wait_until(lambda: mirrors[0].problem is not None)
        assert os.listdir(drive) == []
        drive.rmdir()
        away.rename(drive)

    with monkeypatch.context() as patch:
        at_step(patch, 8, unmount)
        at_step(patch, 20, mount)
        result = train(tmp_path / "run", checkpoint_dir=drive / "checkpoints")
    assert result.code == 0
    said = [line for line in result.out.splitlines() if line.startswith(("Copied", "Warning"))]
    assert any("unmounted" in line for line in said), result.out
    assert said[0].startswith("Copied step_00000006") and said[-1].startswith("Copied step_00000024")
    assert final_weights(drive / "checkpoints" / "run") == final_weights(unbroken)


def test_the_mirror_of_another_run_of_the_same_name_is_refused_with_both_named(train: Callable, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    first, second = tmp_path / "lr1" / "run", tmp_path / "lr2" / "run"
    assert train(first, checkpoint_dir=drive).code == 0
    before = snapshot(drive)
    for more in ({}, {"resume": "never"}):
        result = train(second, checkpoint_dir=drive, **more)
        assert result.code == 4 and str(first) in result.err and str(second) in result.err
        assert snapshot(drive) == before and not second.exists()
    assert train(second).code == 0
    assert train(second, checkpoint_dir=drive, max_steps=30).code == 4  # it has checkpoints of its own, of another run
    shutil.rmtree(first)
    assert train(first, checkpoint_dir=drive, max_steps=26).code == 0  # the machine went away; only the Drive is left


def test_a_run_is_known_by_its_folder_however_it_is_spelled(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the Drive is left; the command comes from wherever a new session happens to stand."""
    home, elsewhere, drive = tmp_path / "home", tmp_path / "elsewhere", tmp_path / "drive"
    run = home / "sweep" / "lr1" / "run"
    run.parent.mkdir(parents=True)
    (elsewhere / "sweep" / "lr2" / "run").mkdir(parents=True)
    steps = 0

    def goes_on(start: Path, spelled: str | Path) -> bool:
        nonlocal steps
        monkeypatch.chdir(start)
        result = train(spelled, checkpoint_dir=drive, max_steps=steps + 1, eval_interval=0)
        if result.code == 0:
            assert f"steps {steps} to {steps + 1} " in result.out
            shutil.rmtree(spelled)
            steps += 1
        else:
            assert result.code == 4 and "holds the copies of another run" in result.err, result
        return result.code == 0

    same = "sweep/lr1/run"
    ways = [(home, same), (home, f"{same}/"), (home, f"./{same}"), (home, "sweep/lr2/../lr1/run"), (home, run)]
    for start, spelled in [
        *ways,
        (run.parent, "../lr1/run"),
        (run.parent, "run"),
        (home, same),
        (elsewhere, same),
        (home, same),
    ]:
        assert goes_on(start, spelled), (start, spelled)
    for start, spelled in ((home, "sweep/lr2/run"), (elsewhere, home / "lr2" / "run"), (elsewhere, "run")):
        assert not goes_on(start, spelled), (start, spelled)
    monkeypatch.chdir(home)
    assert train(same, checkpoint_dir=drive, max_steps=steps + 1, eval_interval=0).code == 0
    steps += 1
    assert not goes_on(elsewhere, same), "the run is still where it was"


def test_the_copies_of_the_current_folder_lie_in_one_of_its_name(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lr1/run", "lr2/run"):
        (tmp_path / name).mkdir(parents=True)
    flags = {"checkpoint_dir": tmp_path / "drive", "max_steps": 2, "eval_interval": 0}
    monkeypatch.chdir(tmp_path / "lr1" / "run")
    assert train(".", **flags).code == 0
    assert os.listdir(tmp_path / "drive") == ["run"] and steps_of(tmp_path / "drive" / "run") == [2]
    monkeypatch.chdir(tmp_path / "lr2" / "run")
    other = train(".", **flags)  # spelled the same, and another one
    assert other.code == 4 and f"--output_dir {tmp_path / 'lr1' / 'run'}" in other.err


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_run_is_not_copied_onto_itself(dry_run: str, train: Callable, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    for folder in (tmp_path / "drive" / "run", tmp_path / "drive" / ".." / "drive" / "run"):
        result = train(folder, checkpoint_dir=tmp_path / "drive", dry_run=dry_run)
        assert result.code == 2 and "would lie in the run folder itself" in result.err, result
    assert os.listdir(tmp_path / "drive") == []


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(mirror_module, "LAST_ATTEMPTS_SECONDS", 0.5)


def failing_copies(patch: pytest.MonkeyPatch, number: int, name: str = "") -> None:
    """Every copied file whose name holds `name` fails as the system call does."""

    def fail(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
        if name in target.name:
            target.write_bytes(source.read(10))
            raise OSError(number, os.strerror(number), str(target))
        copy_file(source, target, between)

    patch.setattr(mirror_module, "copy_file", fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOTCONN])
def test_a_mirror_that_fails_is_told_and_made_up_for_by_the_same_command(
    number: int,
    train: Callable,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_retries: None,
) -> None:
    """Full, read-only, broken, disconnected."""
    drive = tmp_path / "drive"
    with monkeypatch.context() as patch:
        failing_copies(patch, number, "optimizer")
        result = train(tmp_path / "run", checkpoint_dir=drive)
    assert result.code == 0 and result.err == ""
    assert (
        f"({os.strerror(number)})" in result.out
        and f"Warning: the copies in {drive / 'run'} are not up to date" in result.out
    )
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    # What an attempt under way when the run ended had begun is gone once it has failed.
    wait_until(lambda: os.listdir(drive / "run" / "checkpoints") == [])

    again = train(tmp_path / "run", checkpoint_dir=drive)
    assert again.code == 0 and "This run is finished" in again.out and "Copied step_00000024" in again.out
    assert final_weights(drive / "run") == final_weights(unbroken)
    assert problems_of(drive / "run" / "best") == []
    assert measured(drive / "run") == measured(unbroken)
    assert "Copied" not in train(tmp_path / "run", checkpoint_dir=drive).out  # nothing is left to do


def test_what_lies_in_a_mirror_that_is_read_only_from_the_start_is_told(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_retries: None
) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive", "eval_interval": 0}
    assert train(tmp_path / "run", **flags, max_steps=12).code == 0
    before = snapshot(tmp_path / "drive")

    def refuse(path: Path, *_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for module, name in ((lease, "write_json"), (mirror_module, "atomic_write"), (mirror_module, "copy_file")):
        monkeypatch.setattr(module, name, refuse)
    copies, why = tmp_path / "drive" / "run", "(Read-only file system); the newest checkpoint there is step_00000012."
    finished = train(tmp_path / "run", **flags, max_steps=12)
    assert finished.code == 0
    assert finished.out.count(f"Warning: copying to {copies} failed {why}") == 1, finished.out
    assert f"Warning: the copies in {copies} are not up to date {why}" in finished.out

    longer = train(tmp_path / "run", **flags, max_steps=14)
    assert longer.code == 0 and f"Warning: the copies in {copies} are not up to date {why}" in longer.out
    assert re.search(r"step 13/14, .*, copy \d:\d\d old", longer.out), longer.out
    assert "no copy yet" not in longer.out and snapshot(tmp_path / "drive") == before


def test_a_mirror_that_is_given_later_gets_the_best_too(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    assert train(copy_of, checkpoint_dir=tmp_path / "drive", max_steps=25, eval_interval=0).code == 0
    for name in ("best", "checkpoints/step_00000025"):
        assert snapshot(tmp_path / "drive" / "run" / name) == snapshot(copy_of / name)


def test_a_drive_that_is_slow_does_not_hold_the_training(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied to it before the training is done; then only what is newest."""
    done = threading.Event()

    def slow(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
        assert done.wait(30), "the training waits for the copy"
        copy_file(source, target, between)

    monkeypatch.setattr(mirror_module, "copy_file", slow)
    at_step(monkeypatch, 23, done.set)
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    assert result.code == 0
    assert final_weights(tmp_path / "drive" / "run") == final_weights(unbroken)
    assert len(steps_of(tmp_path / "drive" / "run")) <= 2  # the one that was begun, and the newest
    assert "no copy yet" in result.out


def test_a_drive_that_hangs_holds_neither_the_saves_nor_the_end(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of giving a copy its name: a call that does not come back."""
    replace, back = os.replace, threading.Event()

    def hanging(source: Path, target: Path) -> None:
        if Path(target).parent == tmp_path / "drive" / "run" / "checkpoints":
            back.wait(60)
        replace(source, target)

    monkeypatch.setattr(mirror_module, "COPY_SECONDS", 0.5)
    monkeypatch.setattr(mirror_module, "LAST_CALL_SECONDS", 0.1)
    monkeypatch.setattr(os, "replace", hanging)
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    back.set()
    assert result.code == 0 and "not done within" in result.out
    assert final_weights(tmp_path / "run") == final_weights(unbroken)


@pytest.mark.parametrize("meanwhile", ["the metrics are copied", "its checkpoint makes way", "its copy begins"])
def test_metrics_and_best_weights_in_the_mirror_go_as_far_as_its_newest_checkpoint(
    meanwhile: str, copy_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the training goes on: whoever is left with the copies alone has lost nothing. Seen where the checkpoint
    gets its name."""
    steps, metrics, best = copy_of / "checkpoints", copy_of / "metrics.jsonl", copy_of / "best"
    rows, weights = metrics.read_text(), snapshot(best)
    os.rename(steps / "step_00000024", tmp_path / "later")
    os.rename(best, tmp_path / "better")
    metrics.write_text("".join(line for line in rows.splitlines(keepends=True) if json.loads(line)["step"] <= 18))
    copy_files, copy_if_new, publish = Mirror.copy_files, Mirror.copy_if_new, mirror_module.publish
    mirror = Mirror(copy_of, str(tmp_path / "drive"))

    def train_on() -> None:
        if (tmp_path / "later").exists():
            metrics.write_text(rows)
            os.rename(tmp_path / "better", best)
            os.rename(tmp_path / "later", steps / "step_00000024")

    def copy_files_meanwhile(self: Mirror) -> None:
        copy_files(self)
        if meanwhile == "the metrics are copied":
            train_on()

    def copy_if_new_meanwhile(self: Mirror, folder: Path, *args: Any) -> bool:
        if meanwhile == "its checkpoint makes way" and folder.name == "step_00000018":
            train_on()
            shutil.rmtree(folder)
        return copy_if_new(self, folder, *args)

    def copy_checkpoint_meanwhile(folder: Path, *args: Any) -> str | None:
        if meanwhile == "its copy begins" and folder.name == "step_00000018":
            train_on()
            shutil.rmtree(folder)
        return copy_checkpoint(folder, *args)

    def look_and_publish(temporary: Path, folder: Path, truncate: bool) -> None:
        publish(temporary, folder, truncate)
        if folder.name == "step_00000024":
            assert (mirror.dir / "metrics.jsonl").read_text() == rows
            assert snapshot(mirror.dir / "best") == weights

    monkeypatch.setattr(Mirror, "copy_files", copy_files_meanwhile)
    monkeypatch.setattr(Mirror, "copy_if_new", copy_if_new_meanwhile)
    monkeypatch.setattr(mirror_module, "copy_checkpoint", copy_checkpoint_meanwhile)
    monkeypatch.setattr(mirror_module, "publish", look_and_publish)
    mirror.bring_up_to_date()  # what made way is no failure
    mirror.bring_up_to_date()  # as the save of the newer one requests
    assert steps_of(mirror.dir) == [24]


def test_best_weights_that_are_damaged_do_not_keep_the_steps_from_the_mirror(
    train: Callable, copy_of: Path, tmp_path: Path, quick_retries: None
) -> None:
    (copy_of / "best" / "optimizer.safetensors").unlink()
    result = train(copy_of, checkpoint_dir=tmp_path / "drive", max_steps=26, eval_interval=0)
    assert result.code == 0
    assert "failed (the copy of best is damaged: optimizer.safetensors is missing)" in result.out
    assert steps_of(tmp_path / "drive" / "run")[0] == 26


def test_pauses_between_attempts_double_up_to_a_minute_and_new_work_is_tried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, now, pauses = Mirror(tmp_path / "run", str(tmp_path / "no" / "drive")), 0.0, list[float]()

    class Woken(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            pauses.append(timeout)
            now += timeout
            if len(pauses) == 10:
                mirror.wake()
            mirror.closed = len(pauses) == 12
            return self.is_set()

    mirror.woken = Woken()
    monkeypatch.setattr(mirror_module, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    mirror.wake()
    with logged() as said:
        mirror.work()
    assert pauses == [60, 1, 1, 2, 4, 8, 16, 32, 60, 60, 1, 1]
    assert len(said) == 1, "the same reason was told twice"


def test_an_attempt_that_began_before_the_end_does_not_shorten_the_last_one(
    copy_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_retries: None, requests: list[threading.Event]
) -> None:
    mirror, has_begun = Mirror(copy_of, str(tmp_path / "drive")), threading.Event()
    (tmp_path / "drive" / "run").mkdir(parents=True)

    def copy(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
        if mirror.problem is None:
            has_begun.set()
            wait_until(lambda: len(requests) == 2)  # of begin() and finish()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.1)  # all of a checkpoint: longer than failures are borne with
        copy_file(source, target, between)

    monkeypatch.setattr(mirror_module, "copy_file", copy)
    with logged() as said:
        mirror.begin("the run", checkpoint_bytes=1)
        assert has_begun.wait(30)
        mirror.finish()
        mirror.close()
    (warning,) = [line for line in said if "Warning" in line]
    assert f"copying to {mirror.dir} failed" in warning
    assert steps_of(tmp_path / "drive" / "run")[0] == 24


def test_a_marker_that_was_cut_off_is_written_anew(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "drive" / "run" / "run.json"
    at_step(monkeypatch, 8, lambda: (wait_until(marker.exists), marker.write_text('{"run')))
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    assert result.code == 0 and "Warning" not in result.out
    assert steps_of(tmp_path / "drive" / "run")[0] == 24


def test_an_error_of_any_kind_while_copying_is_told_and_tried_again(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_retries: None
) -> None:
    original, steps = mirror_module.problems_of, list[Path]()

    def fails_at_first(folder: Path) -> list[str]:
        if "step" in folder.name:
            steps.append(folder)
        if len(steps) == 1:
            raise MemoryError
        return original(folder)

    monkeypatch.setattr(mirror_module, "problems_of", fails_at_first)
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    assert result.code == 0 and "(MemoryError)" in result.out
    assert steps_of(tmp_path / "drive" / "run")[0] == 24


def test_a_run_that_is_started_where_an_interrupt_is_being_handled_waits_for_its_copies(
    train: Callable, tmp_path: Path
) -> None:
    """As in a notebook's cell that cleans up."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive").code == 0
    assert steps_of(tmp_path / "drive" / "run")[0] == 24


def test_whoever_stops_waits_a_stated_time_for_the_copy(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = threading.Event()

    def stuck(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
        given_up.wait(30)
        between()

    monkeypatch.setattr(mirror_module, "COPY_SECONDS_IF_STOPPED", 1.5)
    monkeypatch.setattr(mirror_module, "copy_file", stuck)
    at_step(monkeypatch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    original = mirror_module.Mirror.close
    monkeypatch.setattr(mirror_module.Mirror, "close", lambda mirror: (given_up.set(), original(mirror)))
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    assert result.code == 130
    assert steps_of(tmp_path / "run")[0] == 9 and steps_of(tmp_path / "drive" / "run") == []
    assert "Waiting for the copy" in result.out and "not done within" in result.out


def test_old_copies_are_emptied_before_they_are_deleted_and_go_last(train: Callable, tmp_path: Path) -> None:
    """What is deleted on Drive lies in its bin and counts against the quota."""
    drive = tmp_path / "drive" / "run"
    flags = {"checkpoint_dir": tmp_path / "drive"}
    assert train(tmp_path / "run", max_steps=6, **flags).code == 0
    kept = tmp_path / "in_the_bin"
    os.link(drive / "checkpoints" / "step_00000006" / "model.safetensors", kept)  # as the bin does
    for steps in (7, 8):
        assert kept.stat().st_size > 0
        assert train(tmp_path / "run", max_steps=steps, **flags).code == 0
    assert steps_of(drive) == [8, 7] and kept.stat().st_size == 0


def test_a_drive_without_room_is_told_at_the_start(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=2)
    assert result.code == 0 and "kB more, and 300.0 kB are free there" in result.out


def test_two_machines_and_one_drive_the_one_that_is_behind_takes_over_all_of_it(
    train: Callable, unbroken: Path, tmp_path: Path
) -> None:
    """Metrics, samples and best weights belong to the state that is continued."""
    drive = tmp_path / "drive"
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    flags = {"checkpoint_dir": drive, "eval_interval": 6, "eval_prompts": tmp_path / "prompts.jsonl"}

    def recorded(folder: Path) -> tuple[dict, list, list]:
        return (
            snapshot(folder / "best"),
            measured(folder),
            [(folder / name).read_text() for name in ("samples.jsonl", "samples.md")],
        )

    assert train(run, max_steps=12, **flags).code == 0
    run.rename(elsewhere)  # the first machine; the second has the Drive alone
    assert train(run, max_steps=20, **flags).code == 0
    second = recorded(run)
    shutil.rmtree(run)
    elsewhere.rename(run)
    result = train(run, max_steps=20, **flags)
    assert result.code == 0, result
    assert recorded(run) == recorded(drive / "run") == second


@pytest.fixture
def another_machine(train: Callable, tmp_path: Path) -> Callable[..., Path]:
    """`another_machine()`: the run in a mirror that a process elsewhere trained into a moment ago."""

    def write() -> Path:
        assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=6).code == 0
        marker = tmp_path / "drive" / "run" / "run.json"
        content = json.loads(marker.read_text())
        assert "holder" not in content, "the mirror was not let go of"
        holder = {"pid": 1, "machine": "another", "started": "2026-01-01 12:00:00"}
        marker.write_text(json.dumps({**content, "holder": holder, "seen": time.time()}))
        return marker

    return write


@pytest.mark.parametrize("clock_is_off", [-200.0, 0.0, 200.0])
def test_a_mirror_that_another_machine_trains_into_is_refused_with_its_name(
    clock_is_off: float, train: Callable, another_machine: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its signs of life, whatever its clock says."""
    marker = another_machine()
    write_json(marker, {**json.loads(marker.read_text()), "seen": time.time() + clock_is_off})
    monkeypatch.setattr(lease, "DEAD_AFTER", 20.0)
    before, is_over = snapshot(tmp_path / "run"), threading.Event()

    def live() -> None:
        while not is_over.wait(0.2):
            write_json(marker, {**json.loads(marker.read_text()), "seen": time.time() + clock_is_off})

    other = threading.Thread(target=live)
    other.start()
    try:
        result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=12)
    finally:
        is_over.set()
        other.join()
    assert result.code == 4 and "process 1 on another (started 2026-01-01 12:00:00) trains this run" in result.err
    assert snapshot(tmp_path / "run") == before


def test_whoever_trains_gives_signs_of_life_and_copies_metrics_with_checkpoints_alone(
    train: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mirrors: list[Mirror],
    requests: list[threading.Event],
) -> None:
    for module in (lease, mirror_module):
        monkeypatch.setattr(module, "HEARTBEAT", 0.02)
    seen: list[float] = []
    copied: list[list[dict[str, Any]]] = []

    def look() -> None:
        folder = tmp_path / "drive" / "run"
        wait_until_idle(mirrors[0], 6, requests)
        wait_until(lambda: not seen or json.loads((folder / "run.json").read_text())["seen"] > seen[-1])
        seen.append(json.loads((folder / "run.json").read_text())["seen"])
        copied.append(read_metrics(folder))

    for step in (8, 9, 10):
        at_step(monkeypatch, step, look)
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=11).code == 0
    assert len(seen) == 3 and seen == sorted(set(seen))
    assert copied[0] == copied[1] == copied[2] and len(copied[0]) >= 6


def test_a_long_copy_gives_signs_of_life_too(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lease, mirror_module):
        monkeypatch.setattr(module, "HEARTBEAT", 0.02)
    marker, seen = tmp_path / "drive" / "run" / "run.json", list[float]()

    def long(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
        for _ in range(4):
            time.sleep(0.03)
            between()
            seen.append(json.loads(marker.read_text())["seen"])
        copy_file(source, target, between)

    monkeypatch.setattr(mirror_module, "copy_file", long)
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=2, eval_interval=0).code == 0
    assert len(seen) >= 24 and len(set(seen)) > 20


def test_whoever_was_taken_for_dead_stops_copying(
    train: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_retries: None,
    mirrors: list[Mirror],
    requests: list[threading.Event],
) -> None:
    marker = tmp_path / "drive" / "run" / "run.json"
    theirs = {"pid": 1, "machine": "another", "started": "2026-01-01 12:00:00"}

    def take_over() -> None:
        wait_until_idle(mirrors[0], 6, requests)
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "holder": theirs}))

    at_step(monkeypatch, 8, take_over)
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    assert result.code == 4 and "process 1 on another (started 2026-01-01 12:00:00) took over the copies" in result.err
    assert "trains this run since" in result.err and steps_of(tmp_path / "run")[0] > 8, "its own state was not saved"
    assert steps_of(tmp_path / "drive" / "run") == [6]
    assert json.loads(marker.read_text())["holder"] == theirs


def test_whoever_is_taken_for_dead_in_a_copy_does_not_publish_it(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_retries: None
) -> None:
    marker = tmp_path / "drive" / "run" / "run.json"
    theirs = {"pid": 1, "machine": "another", "started": "2026-01-01 12:00:00"}

    def taken_over(source: BinaryIO, target: Path, between: Callable[[], None]) -> None:
        copy_file(source, target, between)
        if target.parent.name == ".tmp-step_00000012":
            write_json(marker, {**json.loads(marker.read_text()), "holder": theirs})

    at_step(monkeypatch, 8, lambda: wait_until(lambda: steps_of(tmp_path / "drive" / "run") == [6]))
    monkeypatch.setattr(mirror_module, "copy_file", taken_over)
    at_step(monkeypatch, 13, lambda: wait_until(lambda: json.loads(marker.read_text()).get("holder") == theirs))
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", eval_interval=0)
    assert result.code == 4 and "process 1 on another (started 2026-01-01 12:00:00) took over the copies" in result.err
    assert "trains this run since" in result.err and steps_of(tmp_path / "run")[0] > 8, "its own state was not saved"
    assert steps_of(tmp_path / "drive" / "run") == [6]
    assert json.loads(marker.read_text())["holder"] == theirs
    assert not list((tmp_path / "drive" / "run" / "checkpoints").glob(".tmp-*"))


def test_a_summary_of_a_shorter_run_goes_from_the_mirror_too(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "drive" / "run" / "summary.md"
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=12).code == 0 and summary.exists()
    at_step(monkeypatch, 14, lambda: wait_until(lambda: not summary.exists()))
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=18).code == 0
    assert "18 steps" in summary.read_text()


def test_a_machine_that_was_killed_does_not_keep_the_mirror(
    train: Callable, another_machine: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_machine()
    monkeypatch.setattr(lease, "DEAD_AFTER", 1.0)
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=12)
    assert result.code == 0 and "was in use by process 1 on another" in result.out
    assert steps_of(tmp_path / "drive" / "run") == [12, 6]


def test_a_process_of_this_machine_that_is_dead_is_not_waited_for(
    train: Callable, another_machine: Callable, tmp_path: Path
) -> None:
    marker = another_machine()
    content = json.loads(marker.read_text())
    content["holder"] |= {"pid": 2**22 + 1, "system": lease.system()}  # beyond the largest number of a process
    marker.write_text(json.dumps(content))
    result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=12)
    assert result.code == 0 and "was in use" not in result.out


# A session that sleeps, while another machine takes the mirror over, trains and ends


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Callable[[], None]]:
    """What to do right before each next rename into the mirror by the first session."""
    replace, planned = os.replace, list[Callable[[], None]]()

    def replace_later(source: str | Path, target: str | Path) -> None:
        if planned and Path(target).is_relative_to(tmp_path / "drive") and threading.current_thread().name == "mirror":
            planned.pop(0)()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_later)
    return planned


def test_a_session_that_slept_writes_nothing_over_a_newer_mirror(
    copy_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_retries: None, renames: list
) -> None:
    """Stopped right before any of its renames: no state is mixed, and it says who took over. The other machine is
    played by a second mirror, which takes over as a training does, copies a newer state and ends."""
    older, newer = tmp_path / "older" / "run", tmp_path / "newer" / "run"
    for folder, kept in ((older, "step_00000018"), (newer, "step_00000024")):
        shutil.copytree(copy_of, folder)
        for step in step_folders(folder / "checkpoints"):
            if step.name != kept:
                shutil.rmtree(step)
    shutil.rmtree(older / "best")
    shutil.copytree(older / "checkpoints" / "step_00000018", older / "best")
    (older / "metrics.jsonl").write_text('{"step": 18}\n')
    slept_in, position = 0, 0
    while True:
        drive = tmp_path / "drive" / str(position)
        drive.mkdir(parents=True)
        first, second = Mirror(older, str(drive)), Mirror(newer, str(drive))
        taken: list[dict[str, bytes]] = []

        def take_over(second: Mirror = second, taken: list = taken) -> None:
            second.lease.run_id = "the run"
            with monkeypatch.context() as patch:  # as the first session's thread does, but for its name
                patch.setattr(threading.current_thread(), "name", "another machine")
                second.lease.require_free()
                second.lease.announce()
                second.lease.renew()
                second.bring_up_to_date()
                second.lease.release()
            taken.append(snapshot(second.dir))

        renames[:] = [*[lambda: None] * position, take_over]
        first.begin("the run", checkpoint_bytes=1)
        first.finish()
        first.close()
        if not taken:
            break  # all its renames were tried
        slept_in, position = slept_in + 1, position + 1
        assert snapshot(first.dir) == taken[0]
        assert steps_of(first.dir) == [24] and snapshot(first.dir / "best") == snapshot(newer / "best")
        assert first.taken_over is not None and "has trained this run since" in str(first.taken_over)
        assert not list(first.dir.rglob(".session-*"))
    assert slept_in >= 8


def test_a_run_that_another_machine_has_taken_further_stops_and_continues_from_there(
    train: Callable,
    interrupt: Callable,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mirrors: list[Mirror],
    requests: list[threading.Event],
) -> None:
    run, drive, elsewhere = tmp_path / "run", tmp_path / "drive", tmp_path / "elsewhere" / "run"
    interrupt(run, after=8)
    shutil.copytree(run, elsewhere)
    assert train(elsewhere).code == 0

    def sleep() -> None:
        wait_until(lambda: steps_of(drive / "run") == [6] and requests[-1].is_set())
        second = Mirror(elsewhere, str(drive))
        second.lease.require_free()
        second.lease.announce()
        second.lease.run_id = mirrors[0].lease.run_id
        second.bring_up_to_date()
        second.lease.release()

    at_step(monkeypatch, 8, sleep)
    result = train(run, checkpoint_dir=drive)
    assert result.code == 4 and "has trained this run since" in result.err and "Traceback" not in result.err
    assert steps_of(drive / "run")[0] == 24 and steps_of(run)[0] < 24
    again = train(run, checkpoint_dir=drive)
    assert again.code == 0 and f"{drive / 'run' / 'checkpoints' / 'step_00000024'}: step 24" in again.out
    assert final_weights(run) == final_weights(unbroken) and measured(run) == measured(unbroken)
    assert snapshot(run / "best") == snapshot(elsewhere / "best")


def test_a_mirror_that_is_taken_over_while_it_is_looked_through_is_not_taken_for_damaged(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine deletes old checkpoints, which look damaged on the way."""
    run, drive = tmp_path / "run", tmp_path / "drive"
    assert train(run, checkpoint_dir=drive, max_steps=6).code == 0
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    find = start_module.find_old

    def find_meanwhile(*args: Any) -> Any:
        second = Mirror(run, str(drive))
        second.lease.require_free()
        second.lease.announce()
        shutil.rmtree(drive / "run" / "checkpoints" / "step_00000006")
        return find(*args)

    monkeypatch.setattr(start_module, "find_old", find_meanwhile)
    result = train(run, checkpoint_dir=drive, max_steps=12)
    assert result.code == 4 and "took over the copies" in result.err and "Training   steps" not in result.out


@pytest.mark.parametrize("root", ["usb", "usb/copies"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_mount_point_that_is_left_behind_gets_no_copies(
    root: str, resume: str, train: Callable, tmp_path: Path
) -> None:
    """As external disks and network drives leave it; the run folder knows that its copies are elsewhere."""
    usb, away = tmp_path / "usb", tmp_path / "away"
    usb.mkdir()
    flags = {"checkpoint_dir": tmp_path / root, "eval_interval": 0}
    assert train(tmp_path / "run", **flags, max_steps=3).code == 0
    usb.rename(away)
    usb.mkdir()
    result = train(tmp_path / "run", **flags, max_steps=6, resume=resume)
    assert result.code == 2 and "Mount it again" in result.err and os.listdir(usb) == []
    assert steps_of(tmp_path / "run") == [3]
    usb.rmdir()
    away.rename(usb)
    assert train(tmp_path / "run", **flags, max_steps=6).code == 0
    shutil.rmtree(usb)
    usb.mkdir()
    (tmp_path / "run" / "run.json").unlink()  # as the message advises for copies that were deleted
    assert train(tmp_path / "run", **flags, max_steps=7).code == 0
    assert steps_of(tmp_path / root / "run")[0] == 7


def test_a_new_run_says_that_its_mirror_holds_nothing_yet(train: Callable, tmp_path: Path) -> None:
    """All that is left to say where neither the run folder nor the disk with its copies is there."""
    flags = {"checkpoint_dir": tmp_path / "drive", "eval_interval": 0}
    line = f"Copies     go to {tmp_path / 'drive' / 'run'}. There are none of this run yet"
    assert line in train(tmp_path / "run", **flags, max_steps=2).out
    assert "Copies     go" not in train(tmp_path / "run", **flags, max_steps=3).out


# One copy


def test_a_copy_is_verified_and_replaces_the_one_before(unbroken: Path, tmp_path: Path) -> None:
    target = tmp_path / "best"
    for name in ("checkpoints/step_00000018", "checkpoints/step_00000024"):
        assert copy_checkpoint(unbroken / name, target) is None
        assert snapshot(target) == snapshot(unbroken / name)
        assert os.listdir(tmp_path) == ["best"]


def test_a_checkpoint_that_goes_while_it_is_copied_is_copied_whole(
    copy_of: Path, unbroken: Path, tmp_path: Path
) -> None:
    """The training does not wait: a folder may be pruned, or best/ replaced."""
    folder = copy_of / "best"

    def replace() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    assert copy_checkpoint(folder, tmp_path / "drive", replace) is None
    assert snapshot(tmp_path / "drive") == snapshot(unbroken / "best") and not folder.exists()


@pytest.mark.parametrize("cause", ["unmounted", "read-only", "altered on the way", "manifest cut on the way"])
def test_a_copy_that_fails_gives_a_reason_and_keeps_the_one_there_was(
    cause: str, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "drive" / "run" / "best"
    if cause != "unmounted":
        target.parent.mkdir(parents=True)
        assert copy_checkpoint(unbroken / "checkpoints" / "step_00000018", target) is None
    before = snapshot(tmp_path)

    def copy(source: BinaryIO, copied: Path, between: Callable[[], None]) -> None:
        if cause == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(copied))
        copy_file(source, copied, between)
        if cause == "altered on the way" and copied.name == "model.safetensors":
            flip(copied)
        if cause == "manifest cut on the way" and copied.name == "manifest.json":
            copied.write_bytes(copied.read_bytes()[:40])

    with monkeypatch.context() as patch:
        patch.setattr(mirror_module, "copy_file", copy)
        assert copy_checkpoint(unbroken / "best", target)
    assert snapshot(tmp_path) == before
    assert not target.parent.exists() or os.listdir(target.parent) == ["best"]
