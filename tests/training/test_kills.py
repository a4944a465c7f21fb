"""Kill the process at every operation on files: what is found afterwards is the old state or the new one, whole.

What a run does with its files (save, replace, copy, delete, set aside) is done in a child process, which a signal ends
right before its Nth operation, for every N. A file is on the disk (fsync) before it gets its name.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.checkpoint import find_newest_valid, find_problems, step_folders, step_of
from common.errors import ConfigError
from common.files import read_json, write_json
from tests.kills import Kill
from training.mirror import Mirror
from training.records import CONFIG
from training.store import Store, finish_setting_aside, set_aside

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX")
WEIGHTS = "model.safetensors"
OLD, NEW = 18, 24  # the steps of the finished run's checkpoints


class Case(NamedTuple):
    before: Callable[[Path], Any]  # prepares the folder
    act: Callable[[Path], Any]
    check: Callable[[Path], Any]  # after the kill: what the next session does and finds


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def step(number: int, parent: Path) -> Path:
    return next(path for path in step_folders(parent) if step_of(path) == number)


def newest(parent: Path) -> int:
    found = find_newest_valid(parent)
    assert found is not None
    return step_of(found.path)


def nothing(place: Path) -> None:
    pass


def save(place: Path) -> None:
    checkpoints = place / "run/checkpoints"
    store = Store(place / "run")
    store.save(files_of(step(NEW, checkpoints)), store.step_path(30), ["best", "base"])


def saved(place: Path) -> None:
    checkpoints = place / "run/checkpoints"
    Store(place / "run").clean_up()
    assert newest(checkpoints) in (NEW, 30)
    assert all(find_problems(path) == [] for path in checkpoints.iterdir()), "nothing that is half there"
    made = [place / "run/best", *(place / "run").glob("base")]
    assert all(find_problems(path) == [] for path in made)
    if newest(checkpoints) == 30:  # a resumed run does not write them
        assert len(made) == 2 and all(
            os.path.samefile(path / WEIGHTS, step(30, checkpoints) / WEIGHTS) for path in made
        )


def replace_best(place: Path) -> None:
    store, contents = Store(place / "run"), files_of(place / "run/best")
    store.save({name: data + b" " for name, data in contents.items()}, place / "run/best")


def replaced(place: Path) -> None:
    Store(place / "run").clean_up()
    assert find_problems(place / "run/best") == []
    assert not [path.name for path in (place / "run").iterdir() if path.name.startswith(".")]


def mirror_of(place: Path) -> Mirror:
    mirror = Mirror(place / "run", str(place / "drive"))
    mirror.store.run_id = "the run"
    mirror.request_copy()
    return mirror


def copy_old(place: Path) -> None:
    """The mirror holds the older checkpoint; then the newer one is there."""
    (place / "run/checkpoints/step_00000024").rename(place / "aside")
    mirror_of(place).copy_new()
    (place / "aside").rename(place / "run/checkpoints/step_00000024")


def copy_new(place: Path) -> None:
    mirror_of(place).copy_new()


def copied(place: Path) -> None:
    copies = place / "drive/run"
    assert newest(copies) in (OLD, NEW)
    copy_new(place)
    assert newest(copies) == NEW and all(find_problems(path) == [] for path in step_folders(copies))
    (best,) = copies.glob("best_*")
    assert find_problems(best) == []


def delete_old(place: Path) -> None:
    mirror_of(place).store.delete(step(OLD, place / "drive/run"))


def deleted(place: Path) -> None:
    assert newest(place / "drive/run") == NEW
    assert all(find_problems(path) == [] for path in step_folders(place / "drive/run"))


def start_over(place: Path) -> None:
    def prepare(moves: dict[Path, Path], new: Path) -> None:
        write_json(new / CONFIG, {"config": {}})

    set_aside(Store(place / "run"), mirror_of(place).store, prepare)


def started_over(place: Path) -> None:
    finish_setting_aside(Store(place / "run"), mirror_of(place).store)
    (old,) = [path for path in place.glob("run*") if (path / "checkpoints").is_dir()]
    assert newest(old / "checkpoints") == NEW, "the old run is whole"
    (copies,) = [path for path in (place / "drive").iterdir() if step_folders(path)]
    assert newest(copies) == NEW
    if old.name != "run":
        assert os.listdir(place / "run") == [CONFIG]


def overwrite(place: Path) -> None:
    write_json(place / "run" / CONFIG, {"new": 1})


def overwritten(place: Path) -> None:
    assert set(read_json(place / "run" / CONFIG, ConfigError)) & {"new", "config"}


CASES = {
    "save": Case(nothing, save, saved),
    "replace best": Case(nothing, replace_best, replaced),
    "copy": Case(copy_old, copy_new, copied),
    "delete a copy": Case(lambda place: (copy_old(place), copy_new(place)), delete_old, deleted),
    "start over": Case(copy_new, start_over, started_over),
    "overwrite a file": Case(nothing, overwrite, overwritten),
}


def child(first: Callable[[], object], act: Callable[[], object]) -> int:
    """Fork a process that does this; return its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            first()
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_any_operation_leaves_the_old_state_or_the_new_one(name: str, unbroken: Path, tmp_path: Path) -> None:
    case = CASES[name]
    for number in itertools.count():
        place = tmp_path / str(number)
        shutil.copytree(unbroken, place / "run")
        case.before(place)
        code = child(Kill(number, (place,)), lambda: case.act(place))  # noqa: B023
        assert code in (0, -9)
        case.check(place)
        shutil.rmtree(place)
        if code == 0:
            break
    assert number > 1, "operations were counted"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux")
def test_a_file_is_on_the_disk_before_it_gets_its_name(name: str, unbroken: Path, tmp_path: Path) -> None:
    case, written, synced, fsync = CASES[name], set[str](), set[str](), os.fsync
    shutil.copytree(unbroken, tmp_path / "run")
    case.before(tmp_path)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        name = str(arguments[0]) if arguments else ""
        if event == "open" and name.startswith(str(tmp_path)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            written.add(name)
        if event == "os.rename" and (missing := [path for path in written - synced if path.startswith(name)]):
            print("not on the disk before they are renamed:", missing, file=sys.stderr)
            os._exit(3)

    def counted(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def first() -> None:
        os.fsync = counted
        sys.addaudithook(watch)

    assert child(first, lambda: case.act(tmp_path)) == 0
