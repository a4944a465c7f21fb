"""The mirror: verified copies beside the training, whatever becomes of the Drive."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint import STATE, find_problems, make_entry, open_checkpoint, step_folders, write_manifest
from common.errors import CheckpointError
from common.files import read_json, write_json
from tests.helpers import call_before, flip, snapshot, wait_until
from tests.training.helpers import at_step, checkpoint_of, final_weights, measured, steps_of
from tests.training.test_memory import out_of_memory_once
from training import mirror as mirror_module
from training import stop
from training import store as store_module
from training.mirror import Mirror, MirrorStore
from training.store import KEPT_CHECKPOINTS, Store, copy_files, is_better, read_best_state

Copy = Callable[[Iterable[Path], Path], object]


def only_best(mirror: Path) -> Path:
    (best,) = mirror.glob("best_*")
    return best


def copied_at_once(run_dir: Path, drive: Path, run_id: str = "the run") -> Mirror:
    """A session of another machine, which copies what its run folder holds."""
    session = Mirror(run_dir, str(drive))
    session.store.run_id = run_id
    session.request_copy()
    session.copy_new()
    return session


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> list[Mirror]:
    """Those that have begun."""
    begun = list[Mirror]()
    call_before(monkeypatch, Mirror, "start", lambda mirror, run_id: begun.append(mirror))
    return begun


@contextlib.contextmanager
def copying(copy: Copy) -> Iterator[None]:
    """Inside, a mirror copies files like this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "copy_files", copy)
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("MAX_PAUSE_SECONDS", 0.05),
        ("LAST_RETRY_SECONDS", 0.5),
        ("LAST_COPY_SECONDS", 1.5),
        ("LAST_COPY_SECONDS_IF_STOPPED", 1.5),
        ("THREAD_JOIN_SECONDS", 0.1),
    ):
        monkeypatch.setattr(mirror_module, name, seconds)


# Continuing from copies


def test_a_run_continues_from_the_mirror_when_its_folder_is_gone(
    train: Callable, interrupt: Callable, unbroken: Path, tmp_path: Path
) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive"}
    interrupt(tmp_path / "run", after=20, **flags)
    copies = tmp_path / "drive" / "run"
    assert steps_of(copies)[0] == 18 and find_problems(only_best(copies)) == []
    shutil.rmtree(tmp_path / "run")
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and f"{copies}/step_00000018-" in result.out and "was restored" in result.out
    assert final_weights(tmp_path / "run") == final_weights(copies) == final_weights(unbroken)
    assert measured(tmp_path / "run") == measured(checkpoint_of(copies) / "run") == measured(unbroken)
    assert "24 steps" in (checkpoint_of(copies) / "run" / "summary.md").read_text()
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == (
        only_best(copies) / "model.safetensors"
    ).read_bytes()
    assert len(steps_of(copies)) == KEPT_CHECKPOINTS


def test_a_run_that_ends_without_a_new_step_copies_its_summary(train: Callable, tmp_path: Path) -> None:
    """As when it was killed after its last checkpoint was copied, and the time is over by then."""
    flags = {"checkpoint_dir": tmp_path / "drive"}
    assert train(tmp_path / "run", **flags).code == 0
    (tmp_path / "run" / "summary.md").unlink()
    (copy,) = (path for path in step_folders(tmp_path / "drive" / "run") if path.name.startswith("step_00000024"))
    (copy / "run" / "summary.md").unlink()
    recorded = {path.relative_to(copy).as_posix(): make_entry(path) for path in copy.rglob("*") if path.is_file()}
    write_manifest(copy, {name: entry for name, entry in recorded.items() if name != "manifest.json"})
    assert train(tmp_path / "run", **flags).code == 0
    shutil.rmtree(tmp_path / "run")
    assert "This run is finished" in train(tmp_path / "run", **flags).out
    assert "24 steps" in (tmp_path / "run" / "summary.md").read_text()


def test_a_copy_that_another_machine_replaces_is_found_again(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive"}
    assert train(tmp_path / "run", **flags).code == 0
    shutil.rmtree(tmp_path / "run")
    calls = list[str]()

    def replace_once(store: Store, source: Path, name: str, *_: Any) -> None:
        calls.append(name)
        if len(calls) == 1:
            source.rename(source.with_name("step_00000024-0123abcd"))

    call_before(monkeypatch, Store, "copy", replace_once)
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "This run is finished" in result.out, result.err
    assert steps_of(tmp_path / "run") == [24]


def test_the_mirror_is_as_good_as_the_run_to_whoever_generates(train: Callable, tmp_path: Path) -> None:
    """The folder that was given to the trainer, which contains runs, works, too."""
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive", max_steps=6).code == 0
    for folder in ("drive", "drive/run"):
        assert open_checkpoint(tmp_path / folder).path == checkpoint_of(tmp_path / "drive" / "run", 6)


@pytest.mark.parametrize("damaged", ["here", "there"])
def test_a_damaged_checkpoint_is_skipped_for_the_same_one_elsewhere(
    damaged: str, train: Callable, tmp_path: Path
) -> None:
    run, copies = tmp_path / "run", tmp_path / "drive" / "run"
    flags = {"checkpoint_dir": tmp_path / "drive", "max_steps": 14}
    assert train(run, **{**flags, "max_steps": 12}).code == 0
    assert "Continuing from" in train(run, **flags, dry_run="true").out
    flip(checkpoint_of(run if damaged == "here" else copies, 12) / "model.safetensors")
    result = train(run, **flags)
    assert result.code == 0
    assert f"Continuing from {checkpoint_of(run, 12)}" in result.out
    assert (f"{checkpoint_of(copies, 12)}, the newest checkpoint, was restored" in result.out) == (damaged == "here")
    assert steps_of(copies)[0] == 14


def test_a_damaged_newest_copy_is_skipped_reported_and_left(train: Callable, tmp_path: Path) -> None:
    """It may only be on its way through the Drive. It does not stop a training that is behind it either."""
    run, copies = tmp_path / "run", tmp_path / "drive" / "run"
    flags = {"checkpoint_dir": tmp_path / "drive", "checkpoint_steps": 4, "eval_interval": 0}
    # Two runs: a run that is faster than its copies leaves out all but the newest.
    assert train(run, **flags, max_steps=4).code == 0 and train(run, **flags, max_steps=8).code == 0
    shutil.rmtree(run)
    damaged = checkpoint_of(copies, 8)
    flip(damaged / "model.safetensors")
    result = train(run, **{**flags, "checkpoint_steps": 1}, max_steps=12)
    assert result.code == 0 and f"{damaged} is damaged" in result.err and "step_00000004-" in result.out
    assert steps_of(copies)[0] == 12


def test_the_one_that_is_behind_continues_from_the_newest_copy_with_all_that_belongs_to_it(
    train: Callable, tmp_path: Path
) -> None:
    """Metrics, samples and best weights are those of the state that is continued."""
    run, elsewhere, drive = tmp_path / "run", tmp_path / "elsewhere", tmp_path / "drive"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    flags = {"checkpoint_dir": drive, "eval_interval": 6, "eval_prompts": tmp_path / "prompts.jsonl"}

    def recorded(run: Path, best: Path) -> list[Any]:
        samples = [(run / name).read_text() for name in ("samples.jsonl", "samples.md")]
        return [snapshot(best), measured(run), samples]

    assert train(run, max_steps=12, **flags).code == 0
    run.rename(elsewhere)  # the first machine; the second has the Drive alone
    assert train(run, max_steps=20, **flags).code == 0
    second = recorded(run, run / "best")
    shutil.rmtree(run)
    elsewhere.rename(run)
    assert train(run, max_steps=20, **flags).code == 0
    copy = checkpoint_of(drive / "run", 20) / "run"
    assert recorded(run, run / "best") == recorded(copy, only_best(drive / "run")) == second


def test_a_best_that_was_lost_comes_back_from_the_mirror(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    """It is copied when a mirror is given later, too."""
    before = snapshot(copy_of / "best")
    assert train(copy_of, checkpoint_dir=tmp_path / "drive", max_steps=25, eval_interval=0).code == 0
    shutil.rmtree(copy_of / "best")
    assert train(copy_of, checkpoint_dir=tmp_path / "drive", max_steps=26, eval_interval=0).code == 0
    assert snapshot(copy_of / "best") == before


# Whose copies they are


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


def test_copies_of_a_run_in_the_same_folder_are_told_from_this_ones(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(Path("run"), checkpoint_dir="drive", seed=1).code == 0
    shutil.rmtree("run")
    assert train(Path("run"), seed=2).code == 0
    result = train(Path("run"), checkpoint_dir="drive", seed=2)
    assert result.code == 4 and "copies of another run (also in run, but begun at another time" in result.err


def test_a_run_is_known_by_its_output_dir_in_any_working_directory(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps, (place, spelled) in enumerate([("home", "x/run"), ("elsewhere", "./x/run"), ("home", "x/y/../run")], 1):
        (tmp_path / place).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / place)
        result = train(spelled, checkpoint_dir=tmp_path / "drive", max_steps=steps, eval_interval=0)
        assert result.code == 0 and f"steps {steps - 1} to {steps} " in result.out
        shutil.rmtree(spelled)


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_run_is_not_copied_onto_itself(dry_run: str, train: Callable, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    for folder in (tmp_path / "drive" / "run", tmp_path / "drive" / ".." / "drive" / "run"):
        result = train(folder, checkpoint_dir=tmp_path / "drive", dry_run=dry_run)
        assert result.code == 2 and "into the run folder itself" in result.err, result
    assert os.listdir(tmp_path / "drive") == []


def test_a_run_that_ended_before_its_first_copy_begins_again(
    interrupt: Callable, train: Callable, unbroken: Path, tmp_path: Path
) -> None:
    for start in ({}, {"resume_from": unbroken, "max_steps": 30}):
        flags = {**start, "checkpoint_dir": tmp_path / f"drive{len(start)}"}
        interrupt(tmp_path / "run", after=26 if start else 2, **flags)
        wait_until((tmp_path / f"drive{len(start)}" / "run" / "run.json").exists)
        shutil.rmtree(tmp_path / "run")
        assert train(tmp_path / "run", **flags).code == 0
        shutil.rmtree(tmp_path / "run")


# A Drive that is not there


def test_an_unmounted_drive_is_not_created_on_the_local_disk(train: Callable, tmp_path: Path) -> None:
    my_drive = tmp_path / "drive" / "MyDrive"
    result = train(tmp_path / "run", checkpoint_dir=my_drive / "checkpoints")
    assert result.code == 2 and "drive.mount" in result.err and f"mkdir -p {my_drive}" in result.err
    assert not (tmp_path / "drive").exists() and not (tmp_path / "run").exists()
    (tmp_path / "drive").write_text("not a folder")
    assert train(tmp_path / "run", checkpoint_dir=tmp_path / "drive").code == 2


def test_a_drive_that_is_unmounted_later_is_reported_and_not_created(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrors: list[Mirror]
) -> None:
    """Its mount point stays as an empty folder. When the Drive is back, copying continues."""
    drive, away = tmp_path / "drive", tmp_path / "away"
    drive.mkdir()

    def unmount() -> None:
        wait_until(lambda: steps_of(drive / "checkpoints" / "run") == [6] and mirrors[0].request.is_set())
        drive.rename(away)
        drive.mkdir()

    def mount() -> None:
        wait_until(lambda: mirrors[0].problem is not None)
        assert os.listdir(drive) == []
        drive.rmdir()
        away.rename(drive)

    at_step(monkeypatch, 8, unmount)
    at_step(monkeypatch, 20, mount)
    result = train(tmp_path / "run", checkpoint_dir=drive / "checkpoints")
    assert result.code == 0
    said = [line for line in result.out.splitlines() if line.startswith(("Copied", "Warning"))]
    assert any("unmounted" in line for line in said), result.out
    assert said[0].startswith("Copied step_00000006") and said[-1].startswith("Copied step_00000024")
    assert final_weights(drive / "checkpoints" / "run") == final_weights(unbroken)


def test_a_copy_makes_no_folder_where_a_drive_was_unmounted_a_moment_before(copy_of: Path, tmp_path: Path) -> None:
    copies = MirrorStore(tmp_path / "drive" / "run")
    newest = checkpoint_of(copy_of)
    with pytest.raises(OSError):
        copies.copy(newest, newest.name)
    assert not (tmp_path / "drive").exists()


@pytest.mark.parametrize("root", ["usb", "usb/copies"])
@pytest.mark.parametrize("resumes", ["auto", "never"])
def test_a_mount_point_that_is_left_behind_gets_no_copies(
    root: str, resumes: str, train: Callable, tmp_path: Path
) -> None:
    """As external disks and network drives leave it; the run folder knows that its copies are elsewhere."""
    usb, away = tmp_path / "usb", tmp_path / "away"
    usb.mkdir()
    flags = {"checkpoint_dir": tmp_path / root, "eval_interval": 0}
    assert train(tmp_path / "run", **flags, max_steps=3).code == 0
    usb.rename(away)
    usb.mkdir()
    result = train(tmp_path / "run", **flags, max_steps=6, resume=resumes)
    assert result.code == 2 and "mount it again" in result.err and os.listdir(usb) == []
    assert steps_of(tmp_path / "run") == [3]
    shutil.rmtree(away)
    (tmp_path / "run" / "run.json").unlink()  # as the message advises for copies that were deleted
    assert train(tmp_path / "run", **flags, max_steps=7).code == 0
    assert steps_of(tmp_path / root / "run")[0] == 7


# A Drive that fails


def failing(error: BaseException, times: float = math.inf) -> Copy:
    """Let `times` copies of checkpoints fail with this error after their first file."""
    failed = 0

    def fail(paths: Iterable[Path], target: Path) -> None:
        nonlocal failed
        paths = list(paths)
        if "step" not in target.name or failed >= times:
            return copy_files(paths, target)
        failed += 1
        copy_files(paths[:1], target)
        raise error

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOTCONN])
def test_a_failing_mirror_is_reported_and_completed_by_the_same_command(
    number: int, train: Callable, unbroken: Path, tmp_path: Path, impatient: None
) -> None:
    """Full, read-only, broken, disconnected."""
    drive = tmp_path / "drive"
    with copying(failing(OSError(number, os.strerror(number)))):
        result = train(tmp_path / "run", checkpoint_dir=drive)
    assert result.code == 0 and result.err == ""
    assert f"({os.strerror(number)})" in result.out
    assert f"Warning: the copies in {drive / 'run'} are not up to date" in result.out
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    # What an attempt under way when the run ended had begun is gone once it has failed.
    wait_until(lambda: sorted(path.name[:5] for path in (drive / "run").iterdir()) == ["best_", "run.j"])

    again = train(tmp_path / "run", checkpoint_dir=drive)
    assert again.code == 0 and "This run is finished" in again.out and "Copied step_00000024" in again.out
    assert final_weights(drive / "run") == final_weights(unbroken)
    assert measured(checkpoint_of(drive / "run") / "run") == measured(unbroken)
    assert "Copied" not in train(tmp_path / "run", checkpoint_dir=drive).out  # nothing is left to do


def test_a_mirror_that_is_read_only_from_the_start_is_reported(
    train: Callable, tmp_path: Path, impatient: None
) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive", "eval_interval": 0}
    assert train(tmp_path / "run", **flags, max_steps=12).code == 0
    before, copies = snapshot(tmp_path / "drive"), tmp_path / "drive" / "run"

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with copying(refuse):
        result = train(tmp_path / "run", **flags, max_steps=14)
    why = "(Read-only file system)"
    assert result.code == 0 and f"Warning: the copies in {copies} are not up to date {why}" in result.out
    assert result.out.count(f"Warning: copying to {copies} failed {why}") == 1, result.out
    assert snapshot(tmp_path / "drive") == before


def test_a_drive_that_is_slow_does_not_hold_the_training(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied to it before the training is done; then only what is newest. A checkpoint that is deleted while
    it is copied is copied whole."""
    done = threading.Event()

    def slow(paths: Iterable[Path], target: Path) -> None:
        assert done.wait(30), "the training waits for the copy"
        copy_files(paths, target)

    at_step(monkeypatch, 23, done.set)
    with copying(slow):
        result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    assert result.code == 0 and "no copy yet" in result.out
    assert final_weights(tmp_path / "drive" / "run") == final_weights(unbroken)
    assert len(steps_of(tmp_path / "drive" / "run")) <= 2  # the one that was begun, and the newest


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_drive_that_hangs_holds_neither_the_saves_nor_the_end(
    is_stopped: bool, train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """A call that does not come back."""
    back, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(stop, "LONG_STEP_SECONDS", math.inf)  # however busy the machine is
    if is_stopped:
        at_step(monkeypatch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with copying(lambda *_: back.wait(60)):
        result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    back.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()  # what it says of its copy is not for the next test
    assert (result.code, steps_of(tmp_path / "run")[0]) == ((130, 9) if is_stopped else (0, 24))
    assert steps_of(tmp_path / "drive" / "run") == []
    assert "Waiting for the copy" in result.out and "not done within" in result.out


def test_running_out_of_memory_does_not_wait_for_a_drive_that_hangs(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    back, before = threading.Event(), set(threading.enumerate())
    out_of_memory_once(monkeypatch, 20)
    with copying(lambda *_: back.wait(60)):
        result = train(tmp_path / "run", checkpoint_dir=tmp_path / "drive")
    back.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert result.code == 0 and "Out of memory" in result.out
    assert result.out.count("Waiting for the copy") == 1, "only at the end"


# What is copied, and what is deleted


def test_best_weights_that_are_damaged_do_not_keep_the_steps_from_the_mirror(
    train: Callable, copy_of: Path, tmp_path: Path, impatient: None
) -> None:
    (copy_of / "best" / "tokenizer.json").unlink()
    result = train(copy_of, checkpoint_dir=tmp_path / "drive", max_steps=26, eval_interval=0)
    assert result.code == 0
    assert f"failed ({copy_of / 'best'} is damaged: tokenizer.json is missing)" in result.out
    assert steps_of(tmp_path / "drive" / "run")[0] == 26


def test_the_best_weights_with_the_lowest_loss_stay(train: Callable, tmp_path: Path) -> None:
    """Those of two machines, whichever comes first; losses over other windows cannot be compared."""
    flags = {"eval_interval": 6, "checkpoint_steps": 6}
    runs = {steps: tmp_path / str(steps) / "run" for steps in (6, 18)}
    for steps, run in runs.items():
        assert train(run, **flags, max_steps=steps).code == 0
    early, late = (read_best_state(run / "best") for run in runs.values())
    assert early is not None and late is not None and is_better(late, early) and not is_better(early, late)
    for name, order in (("one", (6, 18)), ("other", (18, 6))):
        for steps in order:
            session = Mirror(runs[steps], str(tmp_path / name))
            session.write_marker()
            session.store.copy_best(runs[steps] / "best")
        assert snapshot(only_best(tmp_path / name / "run")) == snapshot(runs[18] / "best")
    late.best_windows = None
    late.best_val_loss = 100.0
    assert is_better(late, early) and not is_better(early, late)


def test_best_weights_stay_until_better_ones_are_copied(copy_of: Path, tmp_path: Path) -> None:
    """Here better ones replace them while they are being read."""
    run, drive = copy_of, tmp_path / "drive"
    drive.mkdir()
    copies = copied_at_once(run, drive).store
    (best,) = copies.best_copies()
    state = read_json(run / "best" / STATE, CheckpointError)
    better = {"best_val_loss": state["best_val_loss"] - 1, "step": state["step"] + 1}
    write_json(run / "best" / STATE, state | better)
    write_manifest(
        run / "best", {path.name: make_entry(path) for path in (run / "best").iterdir() if path.name != "manifest.json"}
    )

    def replaced(paths: Iterable[Path], target: Path) -> None:
        (run / "best" / "manifest.json").write_text("{}")
        raise FileNotFoundError

    with copying(replaced):
        copies.copy_best(run / "best")
    assert copies.best_copies() == [best] and find_problems(best) == []


def test_what_is_new_after_a_request_waits_for_the_next(copy_of: Path, tmp_path: Path) -> None:
    """The last checkpoint of a run is copied once, with the summary."""
    run, drive = copy_of, tmp_path / "drive"
    drive.mkdir()
    last = checkpoint_of(run, 24)
    last.rename(run / "later")
    mirror = Mirror(run, str(drive))
    mirror.request_copy()
    (run / "later").rename(last)
    mirror.start("the run")
    assert mirror.request.wait(10) and steps_of(mirror.dir) == [18]
    mirror.finish()
    mirror.close()
    assert steps_of(mirror.dir) == [24, 18]


def test_old_copies_are_emptied_before_they_are_deleted_and_go_last(train: Callable, tmp_path: Path) -> None:
    """Deleted files on Drive stay in its bin and count against the quota."""
    drive = tmp_path / "drive" / "run"
    flags = {"checkpoint_dir": tmp_path / "drive"}
    assert train(tmp_path / "run", max_steps=6, **flags).code == 0
    with open(checkpoint_of(drive, 6) / "model.safetensors", "rb") as in_the_bin:
        for steps in (7, 8):
            assert os.fstat(in_the_bin.fileno()).st_size > 0
            assert train(tmp_path / "run", max_steps=steps, **flags).code == 0
        assert steps_of(drive) == [8, 7] and os.fstat(in_the_bin.fileno()).st_size == 0


def test_unfinished_copies_stay_a_day(train: Callable, tmp_path: Path) -> None:
    """Another machine may be copying it right now."""
    drive = tmp_path / "drive" / "run"
    flags = {"checkpoint_dir": tmp_path / "drive"}
    assert train(tmp_path / "run", max_steps=6, **flags).code == 0
    for name, days in (("old", 1.01), ("new", 0.99)):
        (drive / f".tmp-{name}").mkdir()
        os.utime(drive / f".tmp-{name}", times=(0, time.time() - 86_400 * days))
    (drive / ".old-0123abcd").mkdir()
    assert train(tmp_path / "run", max_steps=7, **flags).code == 0
    assert [path.name for path in drive.glob(".*")] == [".tmp-new"]


def test_links_are_removed_and_never_followed(train: Callable, tmp_path: Path) -> None:
    """A backup by hard links stays whole, and so does what a link leads to."""
    drive, backup = tmp_path / "drive" / "run", tmp_path / "backup"
    flags = {"checkpoint_dir": tmp_path / "drive", "eval_interval": 0}
    for steps in (6, 7):
        assert train(tmp_path / "run", max_steps=steps, **flags).code == 0
    shutil.copytree(drive, backup, copy_function=os.link)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    (checkpoint_of(drive, 6) / "notes.txt").symlink_to(theirs / "thesis.txt")
    (checkpoint_of(drive, 6) / "folder").symlink_to(theirs)
    for name in (".tmp-one", ".old-two"):
        (drive / name).mkdir()
        (drive / name / "link").symlink_to(theirs / "thesis.txt")
        (drive / f"{name}-link").symlink_to(theirs)
    os.utime(drive / ".tmp-one", times=(0, 0))
    os.utime(drive / ".tmp-one-link", times=(0, 0), follow_symlinks=False)
    before = [snapshot(backup), snapshot(theirs)]
    for steps in (8, 9):
        assert train(tmp_path / "run", max_steps=steps, **flags).code == 0
    assert steps_of(drive) == [9, 8] and not list(drive.glob(".*")) and [snapshot(backup), snapshot(theirs)] == before


@pytest.mark.parametrize("name", ["model.safetensors", "run/metrics.jsonl", "manifest.json"])
def test_a_damaged_copy_is_made_again(name: str, train: Callable, tmp_path: Path) -> None:
    """The command of a finished run copies it, too, with its records."""
    drive = tmp_path / "drive" / "run"
    flags = {"checkpoint_dir": tmp_path / "drive", "max_steps": 6}
    assert train(tmp_path / "run", **flags).code == 0
    damaged = checkpoint_of(drive, 6) / name
    damaged.write_bytes(damaged.read_bytes()[:40])
    result = train(tmp_path / "run", **flags)
    assert result.code == 0 and "This run is finished" in result.out and "Copied step_00000006" in result.out
    assert sum(find_problems(copy) == [] for copy in step_folders(drive)) == 1
    shutil.rmtree(tmp_path / "run")
    again = train(tmp_path / "run", **flags)
    assert again.code == 0 and "step 6" in again.out and len(measured(tmp_path / "run")) > 0


# Two machines


def test_a_run_that_another_machine_has_taken_further_stops_and_continues_from_there(
    train: Callable,
    interrupt: Callable,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mirrors: list[Mirror],
) -> None:
    run, drive, elsewhere = tmp_path / "run", tmp_path / "drive", tmp_path / "elsewhere" / "run"
    interrupt(run, after=8)
    shutil.copytree(run, elsewhere)
    assert train(elsewhere).code == 0
    at_step(monkeypatch, 8, lambda: copied_at_once(elsewhere, drive, mirrors[0].store.run_id))
    at_step(monkeypatch, 13, lambda: wait_until(lambda: mirrors[0].overtaken is not None))
    result = train(run, checkpoint_dir=drive)
    assert result.code == 4 and "Another session has trained this run further" in result.err
    assert "Traceback" not in result.err and steps_of(run)[0] in (12, 13, 14), "its own state was not saved"
    again = train(run, checkpoint_dir=drive)
    assert again.code == 0 and f"{checkpoint_of(drive / 'run')}, the newest checkpoint, was restored" in again.out
    assert final_weights(run) == final_weights(unbroken) and measured(run) == measured(unbroken)
    assert snapshot(run / "best") == snapshot(elsewhere / "best")


def test_a_session_that_slept_takes_nothing_away(
    copy_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """Stopped right before any of its renames, while another machine copies a newer state."""
    older, newer = tmp_path / "older" / "run", tmp_path / "newer" / "run"
    for folder, kept in ((older, 18), (newer, 24)):
        shutil.copytree(copy_of, folder)
        for step in step_folders(folder / "checkpoints"):
            if step != checkpoint_of(folder, kept):
                shutil.rmtree(step)
    planned = list[Callable[[], None]]()

    def overtake_first(*_: object) -> None:
        if planned and threading.current_thread().name == "mirror":
            planned.pop(0)()

    call_before(monkeypatch, os, "replace", overtake_first)
    for position in range(100):
        drive, theirs = tmp_path / "drive" / str(position), dict[str, bytes]()
        drive.mkdir(parents=True)

        def overtake(drive: Path = drive, theirs: dict[str, bytes] = theirs) -> None:
            copies = snapshot(copied_at_once(newer, drive).dir).items()
            theirs |= {path: file for path, file in copies if path.startswith(("best", "step"))}

        planned[:] = [*[lambda: None] * position, overtake]
        session = Mirror(older, str(drive))
        session.start("the run")
        session.request_copy()
        session.finish()
        session.close()
        if not theirs:
            break  # all its renames were tried
        assert theirs.items() <= snapshot(session.dir).items()
        assert steps_of(session.dir)[0] == 24
    assert position >= 3


def test_the_second_of_two_runs_on_one_mirror_continues_without_copies(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrors: list[Mirror]
) -> None:
    """Here the first of them to copy is one of another shape."""
    run, drive, theirs = tmp_path / "run", tmp_path / "drive", tmp_path / "theirs" / "run"
    assert train(theirs, embed_dim=16, num_heads=1, max_steps=6).code == 0
    drive.mkdir()
    copied_at_once(theirs, drive)
    shutil.rmtree(theirs)
    os.rename(drive, tmp_path / "later")

    def copies_appear() -> None:
        wait_until(lambda: mirrors[0].request.is_set() and not steps_of(drive / "run"))
        shutil.rmtree(drive)
        os.rename(tmp_path / "later", drive)

    at_step(monkeypatch, 3, copies_appear)
    result = train(run, checkpoint_dir=drive)
    assert result.code == 0 and result.out.count("holds the copies of another run") == 1
    assert final_weights(run) == final_weights(unbroken) and steps_of(drive / "run") == [6]


def test_machines_that_begin_one_run_at_once_share_it_and_other_settings_make_another_run(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrors: list[Mirror]
) -> None:
    for number, settings in enumerate([{}, {}, {"learning_rate": 0.01}, {"resume": "never"}]):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        assert train("run", checkpoint_dir=tmp_path / f"drive{number}", max_steps=2, **settings).code == 0
    ids = [mirror.store.run_id for mirror in mirrors]
    assert len(ids) == 4 and ids[0] == ids[1] and len(set(ids)) == 3
