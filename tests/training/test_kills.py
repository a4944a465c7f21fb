"""Kill the process, or cut the power, at every operation on files: what is found afterwards is the old state or the new
one, whole.

What a run does with its files (save, replace, copy, delete, set aside) is done in a child process, which a signal ends
right before its Nth operation, for every N.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tokenize_local_bpe
from common.checkpoint import find_newest_valid, find_problems, step_folders, step_of
from common.errors import CheckpointError, ConfigError, DataError
from common.files import read_json, sha256_file, write_json
from tests.helpers import generated_text
from tests.kills import Kill, PowerCut, Site, copy_disk, read_sites
from tokenization.metadata import TokenMetadata
from tokenization.settings import Settings
from tokenization.token_folder import REPORT
from training.mirror import Mirror
from training.records import CONFIG
from training.store import Store, finish_setting_aside, set_aside

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX")
WEIGHTS = "model.safetensors"
OLD, NEW = 18, 24  # the steps of the finished run's checkpoints


class Case(NamedTuple):
    before: Callable[[Path], Any]  # prepares the folder
    act: Callable[[Path], Any]
    check: Callable[[Path, bool], Any]  # what the next session does and finds; with True the act was over


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


def saved(place: Path, is_over: bool) -> None:
    checkpoints = place / "run/checkpoints"
    Store(place / "run").clean_up()
    assert newest(checkpoints) in ((30,) if is_over else (NEW, 30))
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


def replaced(place: Path, is_over: bool) -> None:
    Store(place / "run").clean_up()
    assert find_problems(place / "run/best") == []
    assert not is_over or (place / "run/best" / WEIGHTS).read_bytes().endswith(b" ")
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


def copied(place: Path, is_over: bool) -> None:
    copies = place / "drive/run"
    assert newest(copies) in ((NEW,) if is_over else (OLD, NEW))
    copy_new(place)
    assert newest(copies) == NEW and all(find_problems(path) == [] for path in step_folders(copies))
    (best,) = copies.glob("best_*")
    assert find_problems(best) == []


def first_copied(place: Path, is_over: bool) -> None:
    assert not is_over or newest(place / "drive/run") == NEW
    copy_new(place)
    assert newest(place / "drive/run") == NEW


def delete_old(place: Path) -> None:
    mirror_of(place).store.delete(step(OLD, place / "drive/run"))


def deleted(place: Path, is_over: bool) -> None:
    assert newest(place / "drive/run") == NEW
    assert all(find_problems(path) == [] for path in step_folders(place / "drive/run"))


def start_over(place: Path) -> None:
    def prepare(moves: dict[Path, Path], new: Path) -> None:
        write_json(new / CONFIG, {"config": {}})

    set_aside(Store(place / "run"), mirror_of(place).store, prepare)


def started_over(place: Path, is_over: bool) -> None:
    if is_over:
        assert os.listdir(place / "run") == [CONFIG] and not (place / "drive/run").exists()
    finish_setting_aside(Store(place / "run"), mirror_of(place).store)
    (old,) = [path for path in place.glob("run*") if (path / "checkpoints").is_dir()]
    assert newest(old / "checkpoints") == NEW, "the old run is whole"
    (copies,) = [path for path in (place / "drive").iterdir() if step_folders(path)]
    assert newest(copies) == NEW
    if old.name != "run":
        assert os.listdir(place / "run") == [CONFIG]


def overwrite(place: Path) -> None:
    write_json(place / "run" / CONFIG, {"new": 1})


def overwritten(place: Path, is_over: bool) -> None:
    assert set(read_json(place / "run" / CONFIG, ConfigError)) & ({"new"} if is_over else {"new", "config"})


def begin(place: Path) -> None:
    store = Store(place / "runs/first")
    store.save(files_of(step(NEW, place / "run/checkpoints")), store.step_path(NEW))


def begun(place: Path, is_over: bool) -> None:
    found = find_newest_valid(place / "runs/first/checkpoints")
    assert found is not None or not is_over


def write_text(place: Path) -> None:
    (place / "text.txt").write_text(generated_text(3000))


def tokenize_it(place: Path) -> None:
    settings = Settings(input=(str(place / "text.txt"),), output_dir=str(place / "cache/tokens"), vocab_size=270)
    tokenize_local_bpe.tokenize_text(replace(settings, num_workers=1), quiet=True)


def tokenized(place: Path, is_over: bool) -> None:
    written = place / "cache/tokens/tokens_bpe_metadata.json"
    assert written.exists() or not is_over
    if written.exists():
        metadata = TokenMetadata.read(written)
        assert sha256_file(metadata.path_beside("bin_file")) == metadata.tokens_sha256
        assert sha256_file(metadata.path_beside("tokenizer_file")) == metadata.tokenizer_sha256
        assert (written.parent / REPORT).read_text()


CASES = {
    "save": Case(nothing, save, saved),
    "the first save": Case(nothing, begin, begun),
    "replace best": Case(nothing, replace_best, replaced),
    "the first copy": Case(nothing, copy_new, first_copied),
    "copy": Case(copy_old, copy_new, copied),
    "delete a copy": Case(lambda place: (copy_old(place), copy_new(place)), delete_old, deleted),
    "start over": Case(copy_new, start_over, started_over),
    "overwrite a file": Case(nothing, overwrite, overwritten),
    "tokenize": Case(write_text, tokenize_it, tokenized),
}
AFTER_THE_END = 10**6  # no act has so many operations
CUTS_POWER = os.path.isdir("/proc/self/fd")


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


def prepare(case: Case, unbroken: Path, place: Path) -> None:
    shutil.copytree(unbroken, place / "run")
    case.before(place)


def interrupt(
    case: Case, number: int, unbroken: Path, scratch: Path, without: Site | None = None
) -> tuple[bool, set[Site]]:
    """Kill the process before operation `number`. Check what is left after that and, on Linux, after a power cut that
    takes names and bytes, or bytes alone. Return whether all was over before, and where the program called fsync."""
    place, disk, copies = scratch / "place", scratch / "disk", [scratch / "no_name", scratch / "no_bytes"]
    for folder in (place, disk, *copies):
        shutil.rmtree(folder, ignore_errors=True)
    prepare(case, unbroken, place)
    kill = PowerCut(number, (place,), disk=disk, without=without) if CUTS_POWER else Kill(number, (place,))
    code = child(kill, lambda: case.act(place))
    assert code in (0, -9)
    for copy in copies if CUTS_POWER else []:
        copy_disk(place, disk, copy, keeps_names=copy.name == "no_bytes")
    case.check(place, code == 0)
    for copy in copies if CUTS_POWER else []:
        shutil.rmtree(place)
        copy.rename(place)
        case.check(place, code == 0)
    return code == 0, read_sites(disk)


@pytest.mark.parametrize("name", CASES)
def test_a_kill_or_a_power_cut_at_any_operation_leaves_the_old_state_or_the_new_one(
    name: str, unbroken: Path, tmp_path: Path
) -> None:
    for number in itertools.count():
        is_over, _ = interrupt(CASES[name], number, unbroken, tmp_path)
        if is_over:
            break
    assert number > 1, "operations were counted"


@pytest.mark.skipif(not CUTS_POWER, reason="Linux")
def test_without_any_one_fsync_a_power_cut_would_lose_something(unbroken: Path, tmp_path: Path) -> None:
    needless = set()
    for case in CASES.values():
        _, sites = interrupt(case, AFTER_THE_END, unbroken, tmp_path)
        needless |= sites
    for site in sorted(needless):
        for case in CASES.values():
            try:
                interrupt(case, AFTER_THE_END, unbroken, tmp_path, without=site)
            except (AssertionError, OSError, ValueError, CheckpointError, DataError):
                needless.discard(site)
                break
    assert needless == set()
