"""The dial: a text and minutes in, a configuration out. What it chooses, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import math
import random
import shlex
import shutil
import time
from pathlib import Path

import pytest

import train_colab_mmap
from common.errors import ConfigError, DataError
from tests.helpers import WORDS, generated_text, run_script
from tests.training.launching import join
from tests.training.pretended import MACHINES, Pretended
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import tokenize
from training.choice import CHOSEN
from training.config import Config, parse_config
from training.dial import Dial, choose, choose_sequences, choose_settings
from training.hardware import CPU_DROPOUT_SLOWDOWN, DEFAULT_THREADS
from training.text import measure_text
from training.timing import StepTimes


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
    return train_colab_mmap.choose_model(argv, parse_config(argv), time.perf_counter())


def test_it_says_what_it_chose_and_marks_it(book: Path, capsys: pytest.CaptureFixture) -> None:
    config = choice(flags(book))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["Text", "Choice", "Expected", "Reading", "With"]
    assert "60.0 kB of text in 1 file" in said[0] and f"{config.num_layers} layers x {config.embed_dim}" in said[1]
    assert "0.1 minutes: " in said[4] and "0.4 minutes: " in said[4]
    assert config.run_dir == Path("runs/my.book") and config.vocab_size == 512 and config.optimizer == "muon"
    assert config.sources["num_layers"] == config.sources["epochs"] == CHOSEN and config.sources["minutes"] == "flag"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("books/*.txt", "books"),
        ("my code/**/*.py", "my_code"),
        ("notes.2023.txt", "notes.2023"),
        ("notes.2024.txt.gz", "notes.2024"),
        ("my.folder", "my.folder"),
        ("builtin:conversations", "conversations"),
        ("a[1].txt", "a_1"),
    ],
)
def test_a_run_is_called_after_its_text(given: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.folder").mkdir()
    (tmp_path / "a[1].txt").write_text("text")
    assert parse_config(["--input", given, "--minutes", "1"]).run_dir == Path("runs", name)


def test_a_text_of_a_few_kilobytes_gets_a_context_that_fits_its_held_out_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.txt").write_text(generated_text(2_100))
    flags = ["--input", "small.txt", "--minutes", "1", "--dry_run", "--device", "cpu"]  # it opens the data, too
    result = run_script(train_colab_mmap.main, *flags)
    assert result.code == 0 and "context 32" in result.out, result
    assert "(-" not in result.out


def test_the_key_of_the_text_is_the_one_that_the_pre_tokenizer_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = generated_text(9_000)
    Path("a.jsonl").write_text(json.dumps({"story": text, "title": "x"}) + "\n")
    flags = ["--input", "a.jsonl", "--minutes", "1", "--dry_run", "--device", "cpu"]
    refused = run_script(train_colab_mmap.main, *flags)
    assert refused.code == 3 and "name the one with the text with --text_key" in refused.err
    assert run_script(train_colab_mmap.main, *flags, "--text_key", "story").code == 0


def pretended_dial(argv: list[str], all_threads: StepTimes, one_thread: StepTimes | None = None) -> Dial:
    """One to which every candidate's step takes as long."""
    asked = parse_config(argv)
    dial = Dial(argv, measure_text(asked), asked, Pretended(MACHINES["laptop"]))
    dial.first_timed_at = -math.inf  # no time is left to time any
    counts = {DEFAULT_THREADS: all_threads} | ({0: one_thread} if one_thread else {})
    dial.step_times = {count: {each.flops: timed for each in dial.candidates} for count, timed in counts.items()}
    return dial


def test_the_speed_of_what_was_not_timed(book: Path) -> None:
    dial = pretended_dial(flags(book), StepTimes(0.1, 0.0, 1.0))
    sizes = [candidate.flops for candidate in dial.candidates]
    dial.step_times = {DEFAULT_THREADS: {sizes[1]: StepTimes(0.1, 0.0, 1.0), sizes[3]: StepTimes(0.3, 0.0, 3.0)}}
    seconds = [dial.interpolate_times(candidate, False)[0].per_token for candidate in dial.candidates]
    assert seconds[1] == 1.0 < seconds[2] < seconds[3] == 3.0  # between
    assert seconds[0] == pytest.approx(sizes[0] / sizes[1])  # below
    assert seconds[4:] == pytest.approx([3.0 * size / sizes[3] for size in sizes[4:]])  # above


@pytest.mark.parametrize(("of_one", "is_chosen"), [(0.8e-4, True), (0.95e-4, False), (2e-4, False)])
def test_fewer_threads_are_chosen_where_they_are_clearly_faster(book: Path, of_one: float, is_chosen: bool) -> None:
    argv = flags(book, "--dropout", "0", minutes="2")
    dial = pretended_dial(argv, StepTimes(0.0, 0.0, 1e-4), StepTimes(0.0, 0.0, of_one))
    assert (dial.find_best().tokens_per_second == pytest.approx(1 / of_one)) == is_chosen


def test_timing_a_huge_context_takes_no_longer(book: Path) -> None:
    book.write_text(" ".join(WORDS) * 20_000)
    began = time.perf_counter()
    argv = flags(book, "--max_seq_len", "60000", "--num_layers", "2", "--embed_dim", "64", "--num_heads", "1")
    assert choice(argv).max_seq_len == 60_000 and time.perf_counter() - began < 20


def test_flags_count_in_what_is_forecast(book: Path) -> None:
    """A longer context or a larger step leaves fewer steps, and as many evaluations."""
    timed = StepTimes(0.0, 0.0, 1e-4)
    for more, of_step in (([], 256), (["--max_seq_len", "512"], 512), (["--batch_size", "32"], 32 * 128)):
        dial = pretended_dial(flags(book, "--dropout", "0", *more, minutes="0.25"), timed)
        choice = dial.find_best()
        config = dial.build_config(choice)
        assert config.batch_size * config.max_seq_len == of_step
        assert choice.steps == int(0.95 * 15 / 1e-4 / of_step)
        assert config.eval_interval == max(1, choice.steps // 20)
        assert config.epochs == choice.useful_passes  # also on a machine that is faster than timed


def test_on_a_cpu_dropout_takes_its_time(book: Path) -> None:
    """Timed without it, and chosen by how often the time allows the text to be read."""
    timed, passes, dropouts = StepTimes(0.0, 0.0, 1e-4), [], []
    for minutes in (0.15, 0.18, 0.2, 0.22, 0.25):
        dial = pretended_dial(flags(book, minutes=str(minutes)), timed)
        choice = dial.find_best()
        passes.append(choice.passes)
        dropouts.append(dial.build_config(choice).dropout)
        of_token = 1e-4 * (CPU_DROPOUT_SLOWDOWN if dropouts[-1] else 1.0)
        assert 1 / choice.tokens_per_second == pytest.approx(of_token) and choice.seconds <= 60 * minutes + 0.01
    assert passes == sorted(passes) and dropouts == sorted(dropouts) and {*dropouts} == {0.0, 0.1}


def test_the_step_follows_the_length_of_the_run() -> None:
    steps = [128 * choose_sequences(10.0**power, 128) for power in range(4, 11)]
    assert steps == sorted(steps) and steps[0] == 128 and 64_000 < steps[-1] < 300_000
    assert choose_sequences(3e6, 256) * 256 == 2048 < choose_sequences(3e6, 256, busy=4000) * 256 <= 3e6 / 300
    betas = [choose_settings(256, tokens, 4)["beta2"] for tokens in (512, 2048, 20_480, 10**6)]
    assert betas == pytest.approx([0.9975, 0.995, 0.95, 0.95])


@pytest.mark.parametrize(("of_a_token", "is_spare"), [(1e-9, True), (1e-3, False)])
def test_unused_minutes_come_with_advice(
    book: Path, capsys: pytest.CaptureFixture, of_a_token: float, is_spare: bool
) -> None:
    given = flags(book, minutes="2")
    pretended_dial(given, StepTimes(0.0, 0.0, of_a_token)).choose_config()
    lines = capsys.readouterr().out.splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith("python train_colab_mmap.py")]
    assert len(commands) == is_spare
    for command in commands:
        argv = shlex.split(command)[2:]
        assert argv[: len(given)] == given and parse_config(argv).companion.startswith("hf://datasets/")


def test_flags_win_and_the_rest_is_chosen_around_them(book: Path) -> None:
    config = choice(flags(book, "--embed_dim", "32", "--num_heads", "2", "--num_layers", "2", "--epochs", "3"))
    assert (config.embed_dim, config.num_layers, config.epochs) == (32, 2, 3)
    assert config.max_seq_len in (128, 256) and config.sources["max_seq_len"] == CHOSEN


@pytest.mark.parametrize(("width", "heads"), [("96", 1), ("200", 2)])
def test_a_width_alone_gets_heads_that_divide_it(book: Path, width: str, heads: int) -> None:
    config = choice(flags(book, "--embed_dim", width, "--num_layers", "1"))
    assert (config.embed_dim, config.num_heads) == (int(width), heads)


@pytest.mark.parametrize(
    "flag",
    [
        "--num_heads 6", "--num_heads 5", "--embed_dim 100", "--num_layers 3", "--ff_dim 200", "--max_seq_len 100",
        "--activation gelu", "--norm layernorm", "--position learned", "--qk_norm false", "--embed_norm false",
        "--bias true", "--tie_embeddings true", "--zero_init false", "--dropout 0.1", "--optimizer adamw",
        "--batch_size 3", "--micro_batch_size 3", "--learning_rate 0.1", "--epochs 2",
    ],
)  # fmt: skip
def test_any_single_flag_beside_the_dial_is_kept_and_the_rest_fits_it(
    book: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dial = pretended_dial(flags(book, *flag.split(), minutes="60"), StepTimes(0.0, 0.0, 1e-4))
    config, name = dial.choose_config(), flag.split()[0].removeprefix("--")
    assert str(getattr(config, name)).lower() == flag.split()[1] and config.embed_dim >= 64
    assert f"{config.num_layers} layers x {config.embed_dim}, context" in capsys.readouterr().out


def test_tokens_that_are_there_keep_their_vocabulary(book: Path, capsys: pytest.CaptureFixture) -> None:
    vocabulary = TokenMetadata.read(tokenize([str(book)], "tokens", vocab_size=300, quiet=True)).vocab_size
    argv = ["--data_dir", "tokens", "--minutes", "0.2", "--device", "cpu", "--compile", "off"]
    config = choice(argv)
    assert "60.0 kB of text in 1 file" in (out := capsys.readouterr().out) and f"of {vocabulary}" in out
    assert config.run_dir == Path("runs/tokens") and config.sources["num_layers"] == CHOSEN
    of_text = measure_text(parse_config(flags(book)))
    assert measure_text(parse_config(argv)).difficulty == pytest.approx(of_text.difficulty, rel=0.05)
    path = Path("tokens/tokens_bpe_metadata.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in content.items() if not key.endswith("_bytes")}))
    assert measure_text(parse_config(argv)).bytes == pytest.approx(60_000, rel=0.05), "as much as the tokens hold"


def test_conversations_are_known(book: Path) -> None:
    path = book.with_name("chats.jsonl")
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": " ".join(WORDS)}) + "\n" for i in range(100)))
    text = measure_text(parse_config(flags(path)))
    assert text.is_chat and not measure_text(parse_config(flags(book))).is_chat


def test_a_run_is_trained_in_its_minutes_and_its_choice_is_kept(book: Path, capsys: pytest.CaptureFixture) -> None:
    argv = flags(book, "--checkpoint_dir", str(book.with_name("drive")))
    assert train_colab_mmap.main(argv) == 0
    run = Path("runs/my.book")
    chosen = json.loads((run / "choice.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("val_loss" in row for row in rows) >= 3
    expected = chosen["forecast"]["bits_per_byte"]
    got = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Expected    "))
    assert f"{expected:.2f} bits per byte, got {rows[-1]['val_bits_per_byte']:.2f}: " in got

    assert train_colab_mmap.main(argv) == 0  # the same command
    out = capsys.readouterr().out
    assert "This run is finished" in out and "Choice" not in out

    chosen["settings"]["eval_interval"] = 1003  # by hand
    (run / "choice.json").write_text(json.dumps(chosen))
    assert choice(argv).eval_interval == 1003
    assert choice([*argv, "--eval_interval", "9"]).eval_interval == 9
    shutil.rmtree(run)  # with its machine
    kept = choice(argv)
    assert kept.values() == choice([*argv]).values() and kept.eval_interval != 1003
    assert kept.forecast and kept.forecast.bits_per_byte == expected
    assert "Choice" not in capsys.readouterr().out
    assert "Choice" in (choice([*argv, "--resume", "never"]) and capsys.readouterr().out)


def test_a_choice_that_cannot_be_read_is_made_again(book: Path) -> None:
    assert train_colab_mmap.main(argv := flags(book, "--epochs", "1")) == 0
    path = Path("runs/my.book/choice.json")
    settings = json.loads(path.read_text())["settings"]
    assert settings["num_layers"] and not settings.keys() & {"threads", "compile", "resume"}
    path.unlink()
    assert choice(argv).num_layers == settings["num_layers"]
    for content in ("{", "[]", '{"settings": {}}'):
        path.write_text(content)
        assert choice(argv).num_layers == settings["num_layers"]


def test_the_recipe_follows_the_width_and_the_passes() -> None:
    of = (128, 0.5), (256, 1), (256, 4), (512, 6), (1024, 99)
    runs = [choose_settings(width, 2048, passes) for width, passes in of]
    rates, dropouts = ([run[key] for run in runs] for key in ("learning_rate", "dropout"))
    assert rates == sorted(rates, reverse=True) and rates[1] == pytest.approx(2 * rates[2], rel=0.03)
    assert dropouts[:2] == [0, 0] and 0 < dropouts[3] < dropouts[4] < 0.5


# What it refuses


def test_input_alone_names_the_dial(book: Path, capsys: pytest.CaptureFixture) -> None:
    assert train_colab_mmap.main(["--input", str(book)]) == 2
    assert "--minutes 60" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [("", "it is empty"), ("ten bytes.", "at least 2,000")])
def test_a_text_that_is_too_short(book: Path, content: str, said: str) -> None:
    book.write_text(content)
    with pytest.raises(DataError, match=said):
        choice(flags(book))


def test_too_few_minutes_for_a_step(book: Path, capsys: pytest.CaptureFixture) -> None:
    assert train_colab_mmap.main(flags(book, minutes="0.0001")) == 2
    assert "--minutes 0.0001 ran out before the first step" in capsys.readouterr().err
    assert train_colab_mmap.main([*flags(book, minutes="5"), "--dry_run"]) == 0
    assert "\nChoice     " in capsys.readouterr().out, "the model is chosen again for the new minutes"


def test_several_processes_get_the_choice_of_one(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = flags(book)
    join(monkeypatch, 2)
    with pytest.raises(ConfigError, match="torchrun"):
        choose(argv, parse_config(argv), time.perf_counter())


def test_a_config_a_size_or_a_checkpoint_leave_no_choice(book: Path) -> None:
    for more in (["--config", "tiny"], ["--model_size", "tiny"], ["--init_from", "c"], ["--resume_from", "c"]):
        assert not parse_config(flags(book, *more)).needs_dial
    assert parse_config(flags(book)).needs_dial
    assert not parse_config(["--data_dir", "d", "--minutes", "5", "--num_layers", "2"]).needs_dial
