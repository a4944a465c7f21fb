"""A companion: a run that reads other text first, and one's own as every second sequence of its last part."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import train_colab_mmap
from common.checkpoint import Checkpoint, find_problems
from common.output import log
from tests.docs.what_you_get import DOCUMENT, companion_table
from tests.forked import Forked
from tests.helpers import WORDS, call_before, run_script
from tests.kills import Kill
from tests.training.helpers import final_weights, steps_of
from tests.training.pretended import MACHINES, Pretended, text_of
from tests.training.test_data import make_folder, open_data
from tests.training.test_growth import write_book
from tokenizer import load_tokenizer
from training.companion import forecast_own
from training.config import Config, parse_config
from training.dial import Choice, Dial
from training.records import CONFIG, read_metrics
from training.schedule import find_switch, learning_rate, progress
from training.state import Switch, TrainState, read_state
from training.text import measure_token_ratio

STEPS = 100
TEXTS = ["--input", "mine.txt", "--companion", "books", "--device", "cpu", "--compile", "off"]
SHAPE = ["--num_layers", "2", "--embed_dim", "16", "--num_heads", "2", "--max_seq_len", "32", "--vocab_size", "300"]
BY_STEPS = [*TEXTS, *SHAPE, "--batch_size", "4", "--max_steps", str(STEPS), "--dropout", "0.1", "--eval_interval", "20"]
BY_STEPS += ["--checkpoint_steps", "10", "--checkpoint_dir", "drive", "--output_dir", "runs/mine"]
# The epoch ends it, long before the minutes.
BY_MINUTES = [*TEXTS, "--minutes", "2", "--epochs", "1", "--num_layers", "2", "--embed_dim", "64"]
RUN = Path("runs/mine")


def train(flags: list[str], *more: str) -> str:
    result = run_script(train_colab_mmap.main, *flags, *more)
    assert result.code == 0, result.err
    return result.out


def switch_of(run: Path) -> Switch:
    state = read_state(Checkpoint(max((run / "checkpoints").iterdir()))).state
    assert state.switch is not None
    return state.switch


def write_texts(folder: Path) -> None:
    write_book(folder / "books" / "one.txt", WORDS, seed=4, characters=25_000)
    write_book(folder / "books" / "two.txt", WORDS, seed=5, characters=15_000)
    write_book(folder / "mine.txt", [*WORDS, "miller"], seed=6, characters=3_000)


def original(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_texts(folder)
        return folder, train(flags)


@pytest.fixture(scope="module")
def by_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with both texts and a finished run, and what was printed. Not to be changed by a test."""
    return original(tmp_path_factory, BY_STEPS)


@pytest.fixture(scope="module")
def by_minutes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same, with the model chosen for the minutes."""
    return original(tmp_path_factory, BY_MINUTES)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both texts, in which the test runs."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    write_texts(tmp_path / "home")
    return tmp_path / "home"


def copy(folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(folder, to)
    monkeypatch.chdir(to)
    return to


@pytest.fixture
def home(by_steps: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `by_steps`, in which the test runs."""
    return copy(by_steps[0], tmp_path / "home", monkeypatch)


@pytest.fixture
def timed_home(by_minutes: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `by_minutes`, in which the test runs."""
    return copy(by_minutes[0], tmp_path / "home", monkeypatch)


# Which sequences are read, and at which rate


@given(st.integers(0, 90), st.none() | st.integers(0, 60), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_from_the_switch_on_every_second_sequence_is_of_the_own_text(
    tmp_path_factory: pytest.TempPathFactory, first: int, switch: int | None, sizes: list[int]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "two_texts"
    if not folder.exists():
        make_folder(folder / "own", tokens=np.arange(200) % 10)
        make_folder(folder / "other", tokens=10 + np.arange(400) % 10)
    data, own, other = (open_data(folder / name) for name in ("own", "own", "other"))
    data.companion = other
    count = of_own = 0
    expected = []
    for number in range(first + sum(sizes)):
        if switch is not None and number >= switch and (number - switch) % 2 == 0:
            sequence, of_own = own.train_windows(of_own, 1), of_own + 1
        else:
            sequence, count = other.train_windows(count, 1), count + 1
        expected += [sequence] if number >= first else []
    starts = first + np.cumsum([0, *sizes[:-1]])
    read = [data.train_windows(int(start), rows, switch) for start, rows in zip(starts, sizes, strict=True)]
    assert torch.equal(torch.cat(read), torch.cat(expected))


@pytest.mark.parametrize("max_steps", [100, 1000])
@pytest.mark.parametrize("at", [34, 60, 95])
def test_the_rate_begins_again_at_half_of_the_peak_and_ends_with_the_passes(max_steps: int, at: int) -> None:
    config = Config(learning_rate=1e-2, min_lr=1e-4, warmup_steps=5, max_steps=max_steps, batch_size=4)
    plain = TrainState(step=at - 1, sequences_seen=4 * (at - 1))
    switch = Switch(4 * at, 4 * at + 120, progress=at / max_steps)
    states = [TrainState(step=at + k, sequences_seen=4 * (at + k), switch=switch) for k in range(31)]
    rates = [learning_rate(state, 1000, config) for state in states]
    assert rates[0] == pytest.approx(5e-3) and rates[-1] == pytest.approx(1e-4)
    assert np.allclose(np.diff(rates), (1e-4 - 5e-3) / 30) or max_steps == 100  # whose steps may end it earlier
    assert learning_rate(plain, 1000, config) == learning_rate(replace(plain, switch=None), 1000, config)
    assert progress(states[-1], 1000, config) >= 1 > progress(states[0], 1000, config)


@pytest.mark.parametrize(
    ("windows", "slowdown", "passes"), [(100, 1.0, 3.0), (100, 2.0, 1.5), (20, 1.0, 3.0), (1000, 1.0, 0.8)]
)
def test_with_minutes_the_switch_is_where_the_passes_fill_the_rest(
    windows: int, slowdown: float, passes: float
) -> None:
    config = Config(minutes=10, max_steps=10**6, batch_size=4)  # 600 steps of a second
    state, of_companion = TrainState(), 10**6
    while progress(state, of_companion, config) < 1:
        state.step, state.sequences_seen = state.step + 1, state.sequences_seen + 4
        state.elapsed_seconds += slowdown if state.switch else 1.0
        pace = 1.0 if state.step > 5 else 0.0
        state.switch = state.switch or find_switch(state, of_companion, windows, config, pace)
    assert state.switch is not None and 595 <= state.elapsed_seconds <= 602
    assert (state.sequences_seen - state.switch.sequences) / 2 / windows == pytest.approx(passes, rel=0.02)
    assert state.switch.progress >= 1 / 3 - 0.01


def test_the_own_text_gets_its_passes_at_the_end(by_steps: tuple[Path, str]) -> None:
    folder, out = by_steps
    switch = switch_of(folder / RUN)
    windows = int(re.search(r"Splits .*\((\d+) windows", out)[1])  # type: ignore[index]
    assert switch.end - switch.sequences == 6 * windows and switch.end <= 4 * STEPS < switch.end + 4
    assert f"Your text  from step {switch.sequences // 4:,} on" in out and "mine.txt, which is read 3 times" in out
    losses = {row["step"]: row["val_loss"] for row in read_metrics(folder / RUN) if "val_loss" in row}
    assert losses[max(losses)] == min(losses.values())
    summary = (folder / RUN / "summary.md").read_text()
    assert "the text was read 3 times" in summary and re.search(r"books: \d\d% of all tokens read", summary)


def test_in_a_short_run_the_own_text_gets_a_third(texts: Path) -> None:
    train(BY_STEPS, "--max_steps", "30")
    assert switch_of(RUN).sequences in (40, 44)


# One run, however it is ended


@pytest.mark.parametrize("path", ["books", "books/", "{}/books"])
def test_the_same_command_finds_the_finished_run_however_the_path_is_written(home: Path, path: str) -> None:
    assert "This run is finished" in train(BY_STEPS, "--companion", path.format(home))
    assert os.listdir("runs") == os.listdir("drive") == ["mine"]


@dataclass
class SignalAt:
    """Called in a process, it sends the process a signal right before it logs a message that begins with `sign`."""

    sign: str
    number: signal.Signals

    def __call__(self) -> None:
        log.addFilter(self.filter)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(self.sign):
            os.kill(os.getpid(), self.number)
        return True


@pytest.mark.parametrize("sign", ["First step", "Your text", "step 60:", "Scoring"])
def test_a_kill_changes_no_weight(by_steps: tuple[Path, str], texts: Path, sign: str) -> None:
    assert Forked(BY_STEPS, first=SignalAt(sign, signal.SIGKILL)).wait(60) == -signal.SIGKILL
    train(BY_STEPS)
    assert final_weights(RUN, STEPS) == final_weights(by_steps[0] / RUN, STEPS)
    assert switch_of(RUN) == switch_of(by_steps[0] / RUN)
    assert find_problems(RUN / "base") == []


def test_a_kill_while_the_base_is_written_does_not_lose_it(texts: Path) -> None:
    assert Forked(BY_STEPS, first=Kill(0, (texts / RUN / ".tmp-base",))).wait(60) == -signal.SIGKILL
    train(BY_STEPS)
    assert find_problems(RUN / "base") == []


def test_another_machine_continues_with_the_mirror_and_keeps_the_base(by_steps: tuple[Path, str], home: Path) -> None:
    assert [path.name[:5] for path in sorted(Path("drive/mine").glob("b*"))] == ["base-", "best_"]
    for folder in ("runs", "datasets_cache", f"drive/mine/{max(os.listdir('drive/mine'))}"):
        shutil.rmtree(folder)
    out = train(BY_STEPS)
    assert "Continuing from" in out and final_weights(RUN, STEPS) == final_weights(by_steps[0] / RUN, STEPS)


@pytest.mark.parametrize("sign", ["Your text", "Scoring"])
def test_a_signal_ends_the_command_and_the_mirror_has_everything(texts: Path, sign: str) -> None:
    code = Forked(BY_STEPS, first=SignalAt(sign, signal.SIGTERM)).wait(60)
    assert code == (130 if sign == "Your text" else 0)
    assert steps_of(RUN)[0] == steps_of(Path("drive/mine"))[0]


def test_a_drive_that_is_away_at_the_switch_stops_nothing(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmount(message: str, *_: Any) -> None:
        if message.startswith("Your text"):
            os.rename("drive", "gone")

    call_before(monkeypatch, log, "info", unmount)
    monkeypatch.setattr("training.mirror.LAST_RETRY_SECONDS", 0.1)
    train(BY_STEPS)
    assert (RUN / "summary.md").exists() and not Path("drive").exists()


def test_the_base_is_kept_once_and_starts_another_run(home: Path) -> None:
    base = Checkpoint(RUN / "base")
    assert find_problems(base.path) == [] and not (RUN / "base/optimizer.safetensors").exists()
    assert read_state(base).state.sequences_seen == switch_of(RUN).sequences
    write_book(home / "other.txt", WORDS, seed=7, characters=12_000)
    out = train(["--input", "other.txt", "--init_from", "runs/mine/base", "--max_steps", "5", "--device", "cpu"])
    assert "Starting from the weights of runs/mine/base" in out


# What may change


def test_a_companion_with_other_files_is_read_from_then_on(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(BY_STEPS, "--max_steps", "30")
    for path in Path("books").iterdir():
        path.touch()
    shutil.copytree(texts, moved := texts.parent / "moved")
    monkeypatch.chdir(moved)
    folders = sorted(Path("datasets_cache").iterdir())
    assert "has changed" not in train(BY_STEPS, "--max_steps", "30")
    assert sorted(Path("datasets_cache").iterdir()) == folders, "the text was tokenized again"
    write_book(moved / "books" / "three.txt", WORDS, seed=7)
    assert "the companion has changed" in train(BY_STEPS, "--max_steps", "60")


def test_a_run_keeps_its_companion(home: Path) -> None:
    result = run_script(train_colab_mmap.main, *BY_STEPS[:2], *BY_STEPS[4:])
    assert result.code == 4 and "companion_sha256" in result.err


def test_a_run_without_the_companion_is_kept_aside(timed_home: Path) -> None:
    out = train([*BY_MINUTES[:2], *BY_MINUTES[4:]])
    assert "It will be renamed" in out and [*Path("runs").glob("mine.*")]
    assert json.loads((RUN / CONFIG).read_text())["config"]["companion"] is None


def test_a_text_that_has_changed_is_learned_from_the_base(timed_home: Path) -> None:
    write_book(timed_home / "mine.txt", WORDS, seed=8, characters=4_000)
    assert "Starting from the weights of runs/mine" in (out := train(BY_MINUTES)) and "/base" in out
    assert [*Path("runs").glob("mine.*")], "the run on the old text is kept aside"
    assert "This run is finished" in train(BY_MINUTES)


# What is chosen, and what is refused


def test_the_model_is_chosen_for_both_texts_and_the_outcome_compared(by_minutes: tuple[Path, str]) -> None:
    folder, out = by_minutes
    assert re.search(r"Expected +\d\.\d\d bits per byte on mine.txt .*\nReading +books .* and mine.txt 3 times", out)
    alone = re.search(r"Alone +(\d\.\d\d) bits per byte", out)
    assert alone and f"Forecast without it: {alone[1]} bits per byte" in (folder / RUN / "summary.md").read_text()
    assert os.listdir(folder / "runs") == ["mine"]


def test_minutes_that_are_too_short_for_a_companion_go_to_the_own_text(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.companion.MIN_PASSES", 1000)
    assert "too short for a companion" in train(BY_MINUTES)
    assert json.loads((RUN / CONFIG).read_text())["config"]["companion"] is None
    assert "This run is finished" in train(BY_MINUTES)


@pytest.mark.parametrize("more", [["--vocab_size", "40000"], ["--tokenizer", "char"]])
def test_any_vocabulary_is_of_both_texts(texts: Path, more: list[str]) -> None:
    Path("mine.txt").write_text(Path("mine.txt").read_text() + " Ž")
    train(BY_MINUTES, *more)
    tokenizer = load_tokenizer(RUN / "best/tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("the Ž")) == "the Ž"


@pytest.mark.parametrize("flags", [BY_STEPS, BY_MINUTES])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--companion", "mine.txt"], "--companion mine.txt is also in --input mine.txt"),
        (["--companion", "nothing"], "No such file or folder: nothing"),
        (["--companion", "foreign"], "times as many tokens"),
        (["--max_mb", "5"], "max_mb applies only to an --input that begins with hf://"),
        (["--data_dir", "books"], "--companion needs --input"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_trained(
    texts: Path, flags: list[str], more: list[str], said: str
) -> None:
    write_book(texts / "foreign" / "one.txt", ["ﷺ" * 3, "ж" * 5, "щы", "юэ"], seed=6)
    result = run_script(train_colab_mmap.main, *flags, *more)
    assert result.code in (2, 3) and said in result.err and not [*Path("runs").glob("*")]


def pretended(own: float, companion: float, minutes: float, machine: str) -> Choice:
    argv = ["--input", "companion", "--minutes", str(minutes)]
    dial = Dial(argv, text_of(companion), parse_config(argv), Pretended(MACHINES[machine]))
    dial.own_text = text_of(own)
    return dial.find_best()


@pytest.mark.parametrize("machine", ["T4", "A100 40 GB", "laptop"])
def test_an_hour_is_used_for_a_megabyte_with_a_companion(machine: str) -> None:
    choice = pretended(1e6, 1e9, 60, machine)
    assert 50 * 60 < choice.seconds < 61 * 60 and choice.own_passes == pytest.approx(3)


def test_a_large_own_text_takes_a_third_of_what_is_read() -> None:
    choice = pretended(1e9, 1e9, 10, "laptop")
    assert choice.own_passes == pytest.approx(choice.passes / 2)


def test_the_page_says_what_is_planned() -> None:
    assert companion_table() in DOCUMENT.read_text(encoding="utf-8"), "run `python tests/docs/what_you_get.py`"


def sample(words: list[str], seed: int, count: int = 20_000) -> str:
    return " ".join(random.Random(seed).choices(words, k=count))


def test_two_texts_take_more_tokens_with_each_others_vocabulary_the_less_they_share() -> None:
    words = ["".join(random.Random(seed).choices("aeioustrnlm", k=5)) for seed in range(900)]
    other = ["".join(random.Random(seed).choices("aeiousbcdfg", k=5)) for seed in range(900)]
    own, mixed = sample(words, 1), sample(words[:300] + other, 2)
    assert measure_token_ratio(own, sample(words, 2)) == pytest.approx(1, abs=0.05)
    assert 1.1 < measure_token_ratio(own, mixed) < measure_token_ratio(own, sample(other, 2))
    assert measure_token_ratio(mixed, own) == pytest.approx(measure_token_ratio(own, mixed))


def test_a_larger_companion_is_expected_to_help_more_and_one_of_another_kind_less() -> None:
    choice = pretended(1e6, 1e8, 60, "laptop")

    def expected(companion: float, ratio: float) -> float:
        return forecast_own(text_of(1e6), text_of(companion), choice, ratio)[0]

    assert expected(1e8, 1.1) < expected(1e7, 1.1) < expected(1e7, 1.3)


# A text in the companion that is one's own


def test_own_passages_and_repeated_ones_are_left_out_of_the_companion(texts: Path) -> None:
    shutil.copy("mine.txt", "books/three.txt")
    shutil.copy("books/one.txt", "books/four.txt")
    out = train(BY_STEPS, "--max_steps", "10")
    assert re.search(r"Repeated +left out: passages of this text that occur twice \(\d.*own text \(\d", out)
