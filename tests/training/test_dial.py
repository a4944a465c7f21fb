"""The dial: a text and minutes in, a configuration out. What it chooses, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import train_colab_mmap
from common.errors import ConfigError, DataError
from tests.helpers import ROOT, WORDS
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import tokenize
from training.config import Config, parse_config
from training.dial import LAW, SOURCE, Dial, Law, Timed, choose, dropout_for, look_at, vocabulary_for
from training.machine.hardware import ALL_THREADS

SIMPLE = Law(floor=1, of_size=8, size_power=0.5, of_text=8, text_power=0.5, worth=4, worth_power=0, error=0)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.book.txt"
    words = random.Random(1).choices(WORDS, k=15_000)
    path.write_text(" ".join(words)[:60_000])
    return path


def flags(book: Path, *more: str, minutes: str = "0.2") -> list[str]:
    return ["--input", str(book), "--minutes", minutes, "--device", "cpu", "--compile", "off", *more]


def choice(argv: list[str]) -> Config:
    return choose(argv, parse_config(argv))


def test_the_law_of_simple_constants() -> None:
    assert SIMPLE.loss(64, 16, 1) == pytest.approx(1 + 8 / 8 + 8 / (16 * 4 * 0.2212) ** 0.5, abs=1e-4)
    assert SIMPLE.loss(64, 16, 1000) == pytest.approx(1 + 8 / 8 + 8 / 8)  # all passes together are worth four
    assert SIMPLE.most_passes(64, 16) == 12


@pytest.mark.parametrize("text_bytes", [1e5, 1e6, 1e7, 1e9])
def test_text_passes_and_parameters_lower_the_loss_and_a_large_text_is_read_more_often(text_bytes: float) -> None:
    loss = LAW.loss(1e6, text_bytes, 2)
    assert loss > LAW.loss(4e6, text_bytes, 2) and loss > LAW.loss(1e6, 2 * text_bytes, 2)
    assert loss > LAW.loss(1e6, text_bytes, 3) > LAW.loss(1e6, 2 * text_bytes, 1.5)  # new text is worth more
    assert LAW.most_passes(1e5, text_bytes) >= LAW.most_passes(1e7, text_bytes) >= 1
    assert 0.5 < loss < 4


def test_the_law_is_that_of_the_runs_on_record() -> None:
    """As far as the passes over a text pay."""
    runs = json.loads((ROOT / "docs/benchmarks/law.json").read_text())["runs"]
    of = [(run["parameters"], run["bytes"], run["passes"], run["lowest"]) for run in runs]
    apart = [abs(LAW.loss(*run[:3]) - run[3]) for run in of if run[2] <= 16]
    assert len(apart) >= 10 and sum(each <= LAW.error for each in apart) >= 0.9 * len(apart)


def test_the_larger_the_text_the_larger_the_vocabulary() -> None:
    sizes = [vocabulary_for(10.0**power).size for power in range(3, 11)]
    assert sizes == sorted(sizes) and sizes[0] == 512 and sizes[-1] == 32_000


def test_it_says_what_it_chose_and_marks_it(book: Path, capsys: pytest.CaptureFixture) -> None:
    config = choice(flags(book))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["Text", "Choice", "Expected", "Reading", "Instead"]
    assert "60.0 kB of text in 1 file" in said[0] and f"{config.num_layers} layers x {config.embed_dim}" in said[1]
    assert "0.1 minutes: " in said[4] and "0.4 minutes: " in said[4]
    assert config.run_dir == Path("runs/my") and config.vocab_size == 512 and config.optimizer == "muon"
    assert config.sources["num_layers"] == config.sources["epochs"] == SOURCE and config.sources["minutes"] == "flag"


def test_more_minutes_never_choose_a_smaller_model_and_are_expected_to_bring_more(book: Path) -> None:
    argv = flags(book)
    dial = Dial(argv, look_at(parse_config(argv)), parse_config(argv))
    sizes = [candidate.model.flops_per_token() for candidate in dial.candidates]
    dial.timed = {ALL_THREADS: {size: Timed(size / 3e10, 0.0, 1.0) for size in sizes}}
    choices = [dial.best(minutes) for minutes in (0.02, 10, 10_000)]
    widths, losses = ([choice.candidate.shape.embed_dim for choice in choices], [choice.loss for choice in choices])
    assert widths == sorted(widths) and widths[0] < widths[-1] and losses == sorted(losses, reverse=True)


def test_the_speed_of_what_was_not_timed(book: Path) -> None:
    argv = flags(book)
    asked = parse_config(argv)
    dial = Dial(argv, look_at(asked), asked)
    sizes = [candidate.model.flops_per_token() for candidate in dial.candidates]
    dial.timed = {ALL_THREADS: {sizes[0]: Timed(1.0, 0.0, 1.0), sizes[2]: Timed(3.0, 0.0, 1.0)}}
    seconds = [dial.speed(candidate)[0].seconds for candidate in dial.candidates]
    assert seconds[0] == 1.0 < seconds[1] < seconds[2] == 3.0  # between
    assert seconds[3:] == pytest.approx([3.0 * size / sizes[2] for size in sizes[3:]])  # above


def timed_dial(argv: list[str], all_threads: Timed, one_thread: Timed) -> Dial:
    """One to which every candidate's token takes as long."""
    asked = parse_config(argv)
    dial = Dial(argv, look_at(asked), asked)
    sizes = [candidate.model.flops_per_token() for candidate in dial.candidates]
    counts = {1: one_thread, 2: all_threads} if ALL_THREADS > 1 else {1: all_threads, 0: one_thread}
    dial.timed = {count: dict.fromkeys(sizes, timed) for count, timed in counts.items()}
    return dial


@pytest.mark.parametrize(("of_one", "is_chosen"), [(0.8e-4, True), (0.95e-4, False), (2e-4, False)])
def test_fewer_threads_are_chosen_where_they_are_clearly_faster(book: Path, of_one: float, is_chosen: bool) -> None:
    dial = timed_dial(flags(book, minutes="2"), Timed(1e-4, 0.0, 1.0), Timed(of_one, 0.0, 1.0))
    assert (dial.choice().tokens_per_second == pytest.approx(1 / of_one)) == is_chosen


def test_steps_that_scatter_widen_the_interval(book: Path) -> None:
    timed = [[Timed(1e-4, scatter, 1.0)] * 2 for scatter in (0.0, 1.0)]
    steady, unsteady = (timed_dial(flags(book, minutes="0.1"), *each).choice() for each in timed)
    assert steady.loss == unsteady.loss and steady.error + 0.01 < unsteady.error


def test_timing_a_huge_context_takes_no_longer(book: Path) -> None:
    book.write_text(" ".join(WORDS) * 20_000)
    began = time.perf_counter()
    argv = flags(book, "--max_seq_len", "60000", "--num_layers", "2", "--embed_dim", "64", "--num_heads", "1")
    assert choice(argv).max_seq_len == 60_000 and time.perf_counter() - began < 20


def test_flags_win_and_the_rest_is_chosen_around_them(book: Path) -> None:
    config = choice(flags(book, "--embed_dim", "32", "--num_heads", "2", "--num_layers", "2", "--epochs", "3"))
    assert (config.embed_dim, config.num_layers, config.epochs) == (32, 2, 3)
    assert config.max_seq_len in (128, 256) and config.sources["max_seq_len"] == SOURCE


def test_flags_may_leave_nothing_to_choose(book: Path, capsys: pytest.CaptureFixture) -> None:
    shape = ["--num_layers", "1", "--embed_dim", "32", "--num_heads", "2", "--max_seq_len", "32", "--batch_size", "4"]
    config = choice(flags(book, *shape))
    assert (config.num_layers, config.embed_dim, config.max_seq_len, config.batch_size) == (1, 32, 32, 4)
    assert "the only size" in capsys.readouterr().out


def test_characters_have_no_vocabulary_to_choose(book: Path) -> None:
    config = choice(flags(book, "--tokenizer", "char"))
    assert config.sources["vocab_size"] == "default"


def test_tokens_that_are_there_keep_their_vocabulary(book: Path, capsys: pytest.CaptureFixture) -> None:
    vocabulary = TokenMetadata.read(tokenize([str(book)], "tokens", vocab_size=300, quiet=True)).vocab_size
    argv = ["--data_dir", "tokens", "--minutes", "0.2", "--device", "cpu", "--compile", "off"]
    config = choice(argv)
    assert "60.0 kB of text in 1 file" in (out := capsys.readouterr().out) and f"of {vocabulary}" in out
    assert config.run_dir == Path("runs/tokens") and config.sources["num_layers"] == SOURCE
    of_text = look_at(parse_config(flags(book)))
    assert look_at(parse_config(argv)).difficulty == pytest.approx(of_text.difficulty, rel=0.05)


def test_conversations_are_known(book: Path) -> None:
    path = book.with_name("chats.jsonl")
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": " ".join(WORDS)}) + "\n" for i in range(100)))
    text = look_at(parse_config(flags(path)))
    assert text.is_chat and not look_at(parse_config(flags(book))).is_chat


def test_a_run_is_trained_in_its_minutes_and_its_choice_is_kept(book: Path, capsys: pytest.CaptureFixture) -> None:
    argv = flags(book, "--checkpoint_dir", str(book.with_name("drive")))
    assert train_colab_mmap.main(argv) == 0
    run = Path("runs/my")
    chosen = json.loads((run / "config.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("val_loss" in row for row in rows) >= 3
    expected = chosen["forecast"]["bits_per_byte"]
    got = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Expected    "))
    assert f"{expected:.2f} bits per byte, got {rows[-1]['val_bits_per_byte']:.2f}: " in got

    assert train_colab_mmap.main(argv) == 0  # the same command
    out = capsys.readouterr().out
    assert "This run is finished" in out and "Choice" not in out

    chosen["config"]["eval_interval"] = 7  # by hand
    (run / "config.json").write_text(json.dumps(chosen))
    assert choice(argv).eval_interval == 7
    assert choice([*argv, "--eval_interval", "9"]).eval_interval == 9
    shutil.rmtree(run)  # with its machine
    kept = choice(argv)
    assert kept.values() == choice([*argv]).values() and kept.eval_interval != 7
    assert kept.forecast and kept.forecast.bits_per_byte == expected
    assert "Choice" not in capsys.readouterr().out
    assert "Choice" in (choice([*argv, "--resume", "never"]) and capsys.readouterr().out)


def test_dropout_is_for_a_text_that_is_read_often() -> None:
    assert dropout_for(4) == 0 < dropout_for(8)


# What it refuses


def test_input_alone_names_the_dial(book: Path, capsys: pytest.CaptureFixture) -> None:
    assert train_colab_mmap.main(["--input", str(book)]) == 2
    assert "--minutes 60" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [("", "it is empty"), ("ten bytes.", "too few to learn from")])
def test_a_text_that_is_too_short(book: Path, content: str, said: str) -> None:
    book.write_text(content)
    with pytest.raises(DataError, match=said):
        choice(flags(book))


def test_a_folder_without_text(book: Path) -> None:
    folder = book.with_name("empty")
    folder.mkdir()
    with pytest.raises(DataError, match="no file"):
        choice(flags(folder))


def test_too_few_minutes_for_a_step(book: Path, capsys: pytest.CaptureFixture) -> None:
    train_colab_mmap.main(flags(book, minutes="0.0001"))
    assert "leaves no time for the learning rate to fall" in capsys.readouterr().out


def test_several_processes_get_the_choice_of_one(book: Path) -> None:
    argv = flags(book)
    with pytest.raises(ConfigError, match="torchrun"):
        choose(argv, replace(parse_config(argv), processes=2))


def test_a_config_a_size_or_a_checkpoint_leave_no_choice(book: Path) -> None:
    for more in (["--config", "tiny"], ["--model_size", "tiny"], ["--init_from", "c"], ["--resume_from", "c"]):
        assert not parse_config(flags(book, *more)).leaves_the_choice
    assert parse_config(flags(book)).leaves_the_choice
    assert not parse_config(["--data_dir", "d", "--minutes", "5", "--num_layers", "2"]).leaves_the_choice
