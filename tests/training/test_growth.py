"""Text that grows: the same command goes on from what was learned, says what changed, and measures the outcome."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import train_colab_mmap
from tests.forked import Forked
from tests.helpers import WORDS, run_script
from tests.kills import Kill
from tokenization.metadata import TokenMetadata
from tools import compare
from training.growth import describe_changes
from training.recipe import read_recipe
from training.records import CONFIG

OTHER_WORDS = [f"{word[::-1]}ish" for word in WORDS]
# The epoch ends it: on a busy machine, so few minutes might be over before it has begun.
COMMAND = ["--input", "books", "--minutes", "0.3", "--epochs", "1", "--device", "cpu", "--compile", "off"]


def write_book(path: Path, words: list[str], seed: int, characters: int = 60_000) -> None:
    path.parent.mkdir(exist_ok=True)
    drawn = random.Random(seed)
    lines = (" ".join(drawn.choices(words, k=9)).capitalize() + "." for _ in range(characters // 40))
    path.write_text("\n".join(lines)[:characters])


def trained(*more: str) -> str:
    result = run_script(train_colab_mmap.main, *COMMAND, *more)
    assert result.code == 0, result.err
    return result.out


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one book, and the run that has learned it. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_book(folder / "books" / "one.txt", WORDS, seed=4)
        trained("--checkpoint_dir", "drive")
    return folder


@pytest.fixture
def home(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which the test runs. The files are as old as the originals."""
    shutil.copytree(original, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def grown(original: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy of it that got another book and has learned it, and what was printed. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("grown") / "home"
    shutil.copytree(original, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_book(folder / "books" / "two.txt", OTHER_WORDS, seed=3)
        return folder, trained("--checkpoint_dir", "drive")


def asides() -> list[Path]:
    return sorted(Path("runs").glob("books.*"))


def test_the_same_command_continues_and_says_what_became_of_it(
    grown: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, out = grown
    monkeypatch.chdir(home)
    assert "1 new (two.txt): " in out
    (aside,) = asides()
    assert (aside / "checkpoints").is_dir() and [*Path("drive").glob("books.*")], "the old run is kept, here and there"
    old, new = (json.loads((run / CONFIG).read_text())["config"] for run in (aside, Path("runs/books")))
    assert new["init_from"] == str(aside / "best") and new["muon_learning_rate"] == 0.5 * old["muon_learning_rate"]
    assert new["batch_size"] < read_recipe()["batch_size"], "a step follows the length of the run"
    assert all(new[key] == old[key] for key in ("num_layers", "embed_dim", "max_seq_len"))
    change = re.search(r"New text +([\d.]+) -> ([\d.]+) bits per byte, on all tokens of \d+ held-out", out)
    was, now = map(float, change.groups())
    assert now < was - 0.2
    assert re.search(r"Old text +[\d.]+ -> [\d.]+ bits per byte", out)
    assert re.search("Learned +it learned the new text", out)

    again = trained("--checkpoint_dir", "drive")
    assert "This run is finished" in again and asides() == [aside]

    said = run_script(compare.main, aside, "runs/books")
    assert said.code == 0 and f"books.{aside.suffix[1:]}" in said.out
    for group in ("all", "books"):
        assert re.search(rf"passages held out by {group}: \d+ \| [\d.]+ \| [\d.]+ \([+-][\d.]+ ± [\d.]+\)", said.out)


def test_a_run_that_was_cut_off_when_it_had_just_begun_continues_from_the_same_weights(home: Path) -> None:
    write_book(home / "books" / "two.txt", OTHER_WORDS, seed=3)
    assert begin()
    (aside,) = asides()
    out = begin()
    assert out and "Choice" not in out and asides() == [aside], "it goes on, and neither chooses nor renames again"
    assert json.loads(Path("runs/books", CONFIG).read_text())["config"]["init_from"] == str(aside / "best")


def test_a_machine_that_is_lost_when_it_had_just_begun_loses_nothing(home: Path) -> None:
    write_book(home / "books" / "two.txt", OTHER_WORDS, seed=3)
    process = Forked([*COMMAND, "--checkpoint_dir", "drive"])
    while process.returncode is None and not [*Path("drive/books").glob("step_00000001-*")]:
        time.sleep(0.01)
    process.kill()
    process.wait(30)
    (aside,) = asides()
    shutil.rmtree("runs")
    assert "drive/books/step_00000001-" in begin("--checkpoint_dir", "drive"), "it goes on from the copy"
    assert json.loads(Path("runs/books", CONFIG).read_text())["config"]["init_from"] == str(aside / "best")


def begin(*more: str, first: Callable[[], object] = int) -> str:
    """Run the command until it trains, and kill it. Returns what it printed, or nothing if it did not come so far."""
    process, printed = Forked([*COMMAND, *more], first=first), ""
    for line in process.stdout:
        printed += line
        if line.startswith("Training  "):
            process.kill()
            process.wait(30)
            return printed
    process.wait(30)
    return ""


def test_growth_that_is_cut_off_at_any_operation_on_a_file_continues_as_growth(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_book(home / "books" / "two.txt", OTHER_WORDS, seed=3)
    best, mirror = (home / "runs/books/best/model.safetensors").read_bytes(), ["--checkpoint_dir", "drive"]
    trained("--dry_run")  # tokenizes it
    for number in range(100):
        place = tmp_path / str(number)
        shutil.copytree(home, place)
        monkeypatch.chdir(place)
        has_begun = begin(*mirror, first=Kill(number, (place / "runs", place / "drive")))
        assert has_begun or begin(*mirror)
        config = json.loads(Path("runs/books", CONFIG).read_text())["config"]
        assert Path(config["init_from"], "model.safetensors").read_bytes() == best, number
        if has_begun:  # there was no such operation
            break
    assert number > 4


def test_a_run_that_has_grown_can_be_moved_and_its_machine_lost(
    grown: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copytree(grown[0], tmp_path / "moved"))
    monkeypatch.chdir(moved)
    assert "This run is finished" in trained("--checkpoint_dir", "drive")
    shutil.rmtree("runs")
    shutil.move(moved / "drive", moved / "another" / "drive")
    shutil.move(moved / "books", moved / "another" / "books")
    monkeypatch.chdir(moved / "another")
    assert "This run is finished" in trained("--checkpoint_dir", "drive")


def test_a_dry_run_renames_nothing(home: Path) -> None:
    write_book(home / "books" / "two.txt", OTHER_WORDS, seed=3)
    assert "1 new (two.txt)" in trained("--dry_run")
    assert not asides()


def test_files_that_were_only_copied_are_the_same_text(home: Path) -> None:
    os.utime("books/one.txt")
    assert "This run is finished" in trained() and not asides()


def test_a_text_that_shrank_and_whose_old_tokens_are_gone(home: Path) -> None:
    write_book(home / "books" / "two.txt", OTHER_WORDS, seed=3)
    (home / "books" / "one.txt").unlink()
    shutil.rmtree("datasets_cache")
    out = trained()
    assert "the tokens of the old text are gone" in out and "New text" not in out
    (home / "books" / "two.txt").write_text("")
    empty = run_script(train_colab_mmap.main, *COMMAND)
    assert empty.code == 3 and "it is empty" in empty.err


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"a": 5}, {"a": 5, "b": 5}, "1 new (b): 50% of the text"),
        ({"a": 5, "b": 5}, {"a": 15}, "1 changed (a), 1 gone (b): 100%"),
        ({}, dict.fromkeys("abcde", 1), "5 new (a, b, c, ...): 100%"),
        ({"a": 5}, {"a": 5}, "some text was edited"),
    ],
)
def test_changes_are_reported_by_file(before: dict[str, int], after: dict[str, int], said: str) -> None:
    then, now = (
        TokenMetadata(300, 9, 5, source_files=tuple({"name": name, "size": size} for name, size in files.items()))
        for files in (before, after)
    )
    assert said in describe_changes(then, now)
