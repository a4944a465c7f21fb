"""A companion: a base learns it first, and one's own text at the end, in the same minutes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import train_colab_mmap
import train_colab_mmap as script
from common.checkpoint import Checkpoint, step_folders
from tests.docs.what_you_get import DOCUMENT, companion_table
from tests.forked import Forked
from tests.helpers import WORDS, run_script
from tests.training.pretended import MACHINES, Pretended, text_of
from tests.training.test_growth import OTHER_WORDS, write_book
from training.companion import OwnForecast, forecast_own, own_minutes
from training.config import parse_config
from training.dial import Dial
from training.records import CONFIG
from training.text import TextStats, measure_token_ratio

# The epochs end both runs, long before their minutes.
ALONE = ["--input", "mine.txt", "--minutes", "2", "--epochs", "1", "--num_layers", "2", "--embed_dim", "64"]
ALONE += ["--device", "cpu", "--compile", "off"]
COMMAND = [*ALONE, "--companion", "books", "--checkpoint_dir", "drive"]
BASE, OWN = Path("runs/base_books"), Path("runs/mine")


def train(*more: str) -> str:
    result = run_script(train_colab_mmap.main, *COMMAND, *more)
    assert result.code == 0, result.err
    return result.out


def settings_of(run: Path) -> dict[str, Any]:
    return json.loads((run / CONFIG).read_text())["config"]


def total_steps(run: Path) -> int:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def steps_in(run: Path) -> list[str]:
    return [path.name for path in step_folders(run / "checkpoints")]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with both texts and what was trained on them, and what was printed. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_book(folder / "books" / "one.txt", WORDS, seed=4, characters=25_000)
        write_book(folder / "books" / "two.txt", WORDS, seed=5, characters=15_000)
        write_book(folder / "mine.txt", [*WORDS, "miller"], seed=6, characters=15_000)
        return folder, train()


@pytest.fixture
def home(original: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which the test runs."""
    shutil.copytree(original[0], tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def test_the_base_learns_the_companion_and_the_run_starts_from_it(
    original: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = original
    monkeypatch.chdir(folder)
    base, own = settings_of(BASE), settings_of(OWN)
    assert base["input"] == "books" and base["companion"] is None and base["minutes"] < 2
    assert own["input"] == "mine.txt" and own["companion"] == "books" and own["init_from"] == str(BASE / "best")
    assert own["muon_learning_rate"] == 0.5 * base["muon_learning_rate"] and own["minutes"] < 2
    assert (
        Checkpoint(OWN / "best").tokenizer_path().read_bytes()
        == Checkpoint(BASE / "best").tokenizer_path().read_bytes()
    )
    assert re.search(r"Your text +mine.txt: 1\d.\d kB, read at most 2 times; expected \d\.\d\d bits per byte", out)
    was, now = map(float, re.search(r"New text +([\d.]+) -> ([\d.]+) bits per byte", out).groups())
    assert now < was
    summary = (OWN / "summary.md").read_text()
    assert re.search(r"books: \d\d% of all tokens read, .* it seems (not )?to have helped", summary)
    assert [path.name for path in sorted(Path("drive").iterdir())] == ["base_books", "mine"]


@pytest.mark.parametrize("path", ["books", "books/", "{}/books"])
def test_the_same_command_again_finds_both_finished_however_the_path_is_written(
    original: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(original[0])
    before = steps_in(BASE), steps_in(OWN)
    out = train("--companion", path.format(original[0]))
    assert "This run is finished" in out and "has changed since" not in out
    assert (steps_in(BASE), steps_in(OWN)) == before and sorted(os.listdir("runs")) == ["base_books", "mine"]


def test_a_stop_while_the_base_is_summarized_ends_the_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree("runs")
    shutil.rmtree("drive")
    original = script.summarize

    def summarize(*given: Any) -> None:
        original(*given)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(script, "summarize", summarize)
    assert run_script(train_colab_mmap.main, *COMMAND).code == 130
    assert (BASE / "summary.md").is_file() and not OWN.exists()


def test_a_base_serves_another_text_too(home: Path) -> None:
    write_book(home / "other.txt", WORDS, seed=7, characters=12_000)
    before = steps_in(BASE)
    out = train("--input", "other.txt")
    assert (
        "runs/base_books was trained on books" in out
        and out.count("Training   steps") == 1
        and steps_in(BASE) == before
    )
    assert settings_of(Path("runs/other"))["init_from"] == str(BASE / "best")


def test_another_machine_continues_from_the_copies_and_does_not_read_the_companion(home: Path) -> None:
    for folder in ("runs", "datasets_cache", "books"):
        shutil.rmtree(folder)
    Path("books").mkdir()
    write_book(home / "books" / "one.txt", OTHER_WORDS, seed=9)
    assert "This run is finished" in train()
    shutil.rmtree("drive/mine")
    shutil.rmtree("runs")
    assert "Starting from the weights of drive/base_books/best_" in train()


def test_a_text_that_has_changed_is_learned_from_the_base_again(home: Path) -> None:
    write_book(home / "mine.txt", WORDS, seed=8, characters=15_000)
    before = steps_in(BASE)
    assert "Starting from the weights of runs/base_books/best" in train()
    assert steps_in(BASE) == before and [*Path("runs").glob("mine.*")], "the run on the old text is kept aside"


def test_more_minutes_train_the_base_on_and_start_again_from_it(home: Path) -> None:
    before = total_steps(BASE)
    out = train("--minutes", "5", "--epochs", "2")
    assert total_steps(BASE) > before and "Starting from the weights" in out and [*Path("runs").glob("mine.*")]


def test_a_finished_run_stays_when_its_base_was_trained_on_for_another(home: Path) -> None:
    write_book(home / "other.txt", WORDS, seed=7, characters=12_000)
    train("--input", "other.txt", "--minutes", "5", "--epochs", "2")
    path = BASE / "checkpoints" / steps_in(BASE)[0] / "training_state.json"
    state = json.loads(path.read_text())
    assert state["elapsed_seconds"] > 1
    out = train("--minutes", str(state["elapsed_seconds"] / 61))
    assert "This run is finished" in out and not [*Path("runs").glob("mine.*")]


@pytest.mark.parametrize("run", ["base_books", "mine"])
def test_a_kill_in_either_run_loses_neither(home: Path, run: str) -> None:
    shutil.rmtree("runs")
    shutil.rmtree("drive")
    process, printed = Forked(COMMAND), ""
    for line in process.stdout:
        printed += line
        if line.startswith("Training  ") and line.rstrip().endswith(f"/{run}"):
            process.kill()
    process.wait(30)
    assert process.returncode == -signal.SIGKILL
    out = train()
    assert out.count("Training   steps") == (2 if run == "base_books" else 1)
    assert (OWN / "summary.md").exists() and sorted(os.listdir("runs")) == ["base_books", "mine"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--config", "tiny.json"], "--companion needs --input and --minutes alone"),
        (["--init_from", "runs/base_books"], "--companion needs --input and --minutes alone"),
        (["--companion", "mine.txt"], "--companion mine.txt is also in --input mine.txt"),
        (["--companion", "nothing"], "No such file or folder: nothing"),
        (["--max_mb", "5"], "max_mb applies only to an --input that begins with hf://"),
    ],
)
def test_impossible_flags_are_reported_before_anything_is_trained(home: Path, more: list[str], said: str) -> None:
    shutil.rmtree("runs")
    result = run_script(train_colab_mmap.main, *ALONE, "--companion", "books", *more)
    assert result.code in (2, 3) and said in result.err and not Path("runs").exists()


@pytest.mark.parametrize("missing", ["--input", "--minutes"])
def test_a_companion_alone_is_not_enough(missing: str) -> None:
    given = ["--input", "a.txt", "--minutes", "1"]
    del given[given.index(missing) : given.index(missing) + 2]
    result = run_script(train_colab_mmap.main, *given, "--companion", "books")
    assert result.code == 2 and "--companion also needs --input" in result.err


def test_a_folder_that_holds_the_base_of_another_text(home: Path) -> None:
    shutil.move("books", "old")
    (home / "new").mkdir()
    write_book(home / "new" / "books" / "one.txt", OTHER_WORDS, seed=9)
    result = run_script(train_colab_mmap.main, *ALONE, "--companion", "new/books")
    assert result.code == 2 and "runs/base_books was trained on books, not on new/books" in result.err


def test_a_base_with_another_shape_than_the_flags_ask_for(home: Path) -> None:
    result = run_script(train_colab_mmap.main, *COMMAND, "--embed_dim", "128")
    assert result.code == 2 and "runs/base_books was trained with --embed_dim 64" in result.err


def test_a_companion_with_new_files_is_noticed(home: Path) -> None:
    write_book(home / "books" / "three.txt", WORDS, seed=7)
    before = steps_in(BASE)
    out = train()
    assert "books has changed since this base was trained" in out and steps_in(BASE) == before


def test_a_base_that_is_trained_on_learns_new_files_too(home: Path) -> None:
    write_book(home / "books" / "three.txt", WORDS, seed=7)
    out = train("--minutes", "5", "--epochs", "2")
    assert "because the text has changed; the old run will be renamed" in out and "Starting from the weights of" in out
    assert "has changed since this base was trained" not in out
    assert "This run is finished" in train("--minutes", "5", "--epochs", "2")


def test_a_run_with_another_companion_is_kept_aside_and_that_is_reported_first(home: Path) -> None:
    write_book(home / "new" / "one.txt", WORDS, seed=9, characters=25_000)
    out = train("--companion", "new")
    assert out.index("runs/mine holds a run with books. It is renamed") < out.index("Training ")
    assert [*Path("runs").glob("mine.*")] and settings_of(OWN)["companion"] == "new"


def test_own_files_in_the_companion_are_counted(home: Path) -> None:
    shutil.copy("mine.txt", "books/three.txt")
    Path("mine.txt").unlink()
    out = train("--input", "books/three.txt", "--resume", "never")
    assert "1 files are in both" in out


# What is planned


def pretended(own: float, companion: float, minutes: float, machine: str) -> tuple[TextStats, Dial]:
    argv = ["--input", "companion", "--minutes", str(minutes)]
    dial = Dial(argv, text_of(companion), parse_config(argv), Pretended(MACHINES[machine]))
    dial.own_text = text_of(own)
    return dial.own_text, dial


@pytest.mark.parametrize("machine", ["T4", "A100 40 GB", "laptop"])
def test_an_hour_is_used_for_a_megabyte_with_a_companion(machine: str) -> None:
    own, dial = pretended(1e6, 1e9, 60, machine)
    config = dial.choose_config()
    reserved = own_minutes(own, config)
    assert 0 < reserved < 10
    choice = dial.find_best()
    assert choice.seconds + 60 * reserved >= 50 * 60
    assert choice.seconds + 60 * reserved <= 61 * 60


def test_the_page_says_what_is_planned() -> None:
    assert companion_table() in DOCUMENT.read_text(encoding="utf-8"), "run `python tests/docs/what_you_get.py`"


def test_a_large_own_text_takes_at_most_half_of_the_time() -> None:
    own, dial = pretended(1e9, 1e9, 10, "laptop")
    assert own_minutes(own, dial.choose_config()) == 5


def sample(words: list[str], seed: int, count: int = 20_000) -> str:
    return " ".join(random.Random(seed).choices(words, k=count))


def test_two_texts_take_more_tokens_with_each_others_vocabulary_the_less_they_share() -> None:
    words = ["".join(random.Random(seed).choices("aeioustrnlm", k=5)) for seed in range(900)]
    other = ["".join(random.Random(seed).choices("aeiousbcdfg", k=5)) for seed in range(900)]
    own, mixed = sample(words, 1), sample(words[:300] + other, 2)
    assert measure_token_ratio(own, sample(words, 2)) == pytest.approx(1, abs=0.05)
    assert 1.1 < measure_token_ratio(own, mixed) < measure_token_ratio(own, sample(other, 2))
    assert measure_token_ratio(mixed, own) == pytest.approx(measure_token_ratio(own, mixed))


def test_a_companion_in_another_language_is_refused(home: Path) -> None:
    shutil.rmtree("runs")
    write_book(home / "mine.txt", [word[::-1] for word in WORDS], seed=6, characters=30_000)
    shutil.rmtree("books")
    write_book(home / "books" / "one.txt", ["ﷺ" * 3, "ж" * 5, "щы", "юэ"], seed=6)
    result = run_script(train_colab_mmap.main, *ALONE, "--companion", "books")
    assert result.code == 2 and "times as many tokens" in result.err and not Path("runs").exists()


def expected(companion: float, ratio: float) -> OwnForecast:
    config = parse_config(["--input", "a", "--minutes", "1", "--num_layers", "4", "--embed_dim", "256"])
    return forecast_own(text_of(1e6), text_of(companion), config, 1.0, ratio)


def test_a_larger_companion_is_expected_to_help_more_and_one_of_another_kind_less() -> None:
    small, large, other = expected(1e7, 1.1), expected(1e8, 1.1), expected(1e7, 1.3)
    assert large.loss < small.loss < other.loss < other.alone == small.alone
