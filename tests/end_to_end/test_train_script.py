"""The trainer as a user meets it: the files of a run, what it prints, and one clear message for each mistake."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train_colab_mmap as script
from tests.helpers import Killed, call_before, columns, generated_text, snapshot
from tokenize_local_bpe import tokenize
from training.records import read_metrics

PNG = b"\x89PNG\r\n\x1a\n"
ALWAYS = {"step", "epoch", "tokens"}
TRAINING = {"train_loss", "lr", "grad_norm", "ms_per_step", "tokens_per_second", "peak_memory_gb", "elapsed_seconds"}
EVALUATION = {"val_loss", "val_bits_per_byte"}


@pytest.fixture(scope="module")
def finished(train: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A finished run with prompts, and how its command ended. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("finished")
    prompts = [{"prompt": "the cat ", "answer": "sat on a mat."}, {"prompt": "a|b"}, {"prompt": "one big"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    flags = {"max_steps": 60, "log_interval": 5, "eval_interval": 20, "checkpoint_steps": 30, "warmup_steps": 4}
    flags |= {"eval_prompts": folder / "prompts.jsonl", "units_per_hour": 8, "learning_rate": 0.02}
    return folder / "run", train(folder / "run", **flags)


def test_a_run_leaves_the_files_of_the_contract(finished: tuple[Path, Any]) -> None:
    run, result = finished
    assert result.code == 0 and result.err == ""
    assert sorted(os.listdir(run)) == [
        "best", "checkpoints", "config.json", "loss_curve.png", "metrics.jsonl", "samples.jsonl", "samples.md",
        "summary.md",
    ]  # fmt: skip
    assert sorted(os.listdir(run / "checkpoints")) == ["step_00000040", "step_00000060"]
    assert (run / "loss_curve.png").read_bytes().startswith(PNG)
    for folder in (run / "best", run / "checkpoints" / "step_00000060"):
        files = {"config.json", "manifest.json", "model.safetensors", "tokenizer.json", "training_state.json"}
        assert set(os.listdir(folder)) == files | ({"optimizer.safetensors"} if folder.name != "best" else set())


def test_config_json_says_every_value_and_where_it_came_from(finished: tuple[Path, Any], token_folder: Path) -> None:
    saved = json.loads((finished[0] / "config.json").read_text())
    config, sources = saved["config"], saved["sources"]
    assert set(config) == set(sources)
    assert (config["embed_dim"], sources["embed_dim"]) == (32, "flag")
    assert (config["weight_decay"], sources["weight_decay"]) == (0.1, "default")
    assert config["data_dir"] == str(token_folder)


def test_metrics_hold_what_was_measured_and_nothing_else(finished: tuple[Path, Any]) -> None:
    rows = read_metrics(finished[0])
    assert [row["step"] for row in rows] == [1, *range(5, 61, 5)]  # the first step is a sign of life
    for row in rows:
        evaluated = EVALUATION if row["step"] % 20 == 0 else set()
        assert set(row) == ALWAYS | TRAINING | {"compute_units"} | evaluated  # no mfu: this CPU's peak is not known
        assert row["tokens"] == row["step"] * 4 * 2 * 16
        assert all(math.isfinite(value) for value in row.values())
        assert row["compute_units"] == pytest.approx(row["elapsed_seconds"] / 3600 * 8, rel=0.05)
    epochs = [row["epoch"] for row in rows]
    windows = 27_000 // 16
    assert epochs[-1] == pytest.approx(60 * 8 / windows, rel=0.01)
    assert [row["elapsed_seconds"] for row in rows] == sorted(row["elapsed_seconds"] for row in rows)


def test_the_loss_falls_on_text_that_can_be_learned(finished: tuple[Path, Any]) -> None:
    rows = read_metrics(finished[0])
    assert rows[0]["train_loss"] < math.log(31) + 0.3  # about that of a guess among the vocabulary's 31 characters
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] - 0.5
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses == sorted(losses, reverse=True)


def test_best_holds_the_weights_with_the_lowest_validation_loss(finished: tuple[Path, Any]) -> None:
    rows = [row for row in read_metrics(finished[0]) if "val_loss" in row]
    lowest = min(rows, key=lambda row: row["val_loss"])
    state = json.loads((finished[0] / "best" / "training_state.json").read_text())
    assert state["step"] == lowest["step"]
    assert state["best_val_loss"] == pytest.approx(lowest["val_loss"], rel=1e-5)


def test_samples_have_a_table_for_each_evaluation_and_a_row_for_each_prompt(finished: tuple[Path, Any]) -> None:
    sections = (finished[0] / "samples.md").read_text().split("## Step ")[1:]
    assert [re.match(r"(\d+), [01] of 1 exactly right", section)[1] for section in sections] == ["20", "40", "60"]
    for section in sections:
        table = [columns(row) for row in section.splitlines() if row.startswith("|")]
        assert [row[0] for row in table[2:]] == ["the cat", "a\\|b", "one big"]
        assert table[2][2] == ("yes" if table[2][1] == "sat on a mat." else "no: sat on a mat.")
        assert table[4][1:] == [table[4][1], ""]  # an answer without a known right one is shown all the same


def test_records_that_cannot_be_written_are_reported_once_and_stop_nothing(train: Callable, tmp_path: Path) -> None:
    prompts, run = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text(json.dumps({"prompt": "the cat"}))
    assert train(run, eval_prompts=prompts, max_steps=2, eval_interval=2).code == 0
    for name in ("metrics.jsonl", "samples.jsonl", "samples.md", "summary.md"):
        (run / name).unlink()
        (run / name).mkdir()
    more = train(run, eval_prompts=prompts, max_steps=6, eval_interval=2)
    assert more.code == 0 and more.err == ""
    for name in ("metrics.jsonl", "samples.jsonl", "samples.md"):
        assert more.out.count(f"Warning: {run / name} cannot be rewound to step 2 (") == 1
    for name in ("metrics.jsonl", "samples.jsonl", "samples.md", "summary.md"):
        assert more.out.count(f"Warning: {run / name} cannot be written (") == 1
    assert "Best " in more.out and re.search(r"\b6 steps", more.out)


def test_the_summary_and_the_last_lines_tell_what_was_reached(finished: tuple[Path, Any]) -> None:
    run, result = finished
    summary = (run / "summary.md").read_text()
    last = read_metrics(run)[-1]
    for told in (summary, result.out):
        assert f"{last['val_loss']:.4f}" in told
        assert f"{math.exp(last['val_loss']):.2f}" in told
        assert "Compute units" in told and "of 1 exactly right" in told
    assert "| learning_rate | 0.02 | flag |" in summary
    assert "weight_decay" not in summary  # it has its default
    assert "generate.py" in result.out
    assert "step 60/60" in result.out and "\r" not in result.out


def test_a_run_killed_before_its_summary_writes_it_at_the_next_start(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outdated summary of an earlier, shorter run is replaced, too."""
    assert train(tmp_path / "run", max_steps=6).code == 0

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        call_before(patch, script, "summarize", die)
        with pytest.raises(Killed):
            train(tmp_path / "run", max_steps=12)
    assert train(tmp_path / "run", max_steps=12).code == 0
    assert re.search(r"\b12 steps", (tmp_path / "run" / "summary.md").read_text())


def test_intervals_of_zero_are_off_and_validation_can_read_the_whole_split(train: Callable, tmp_path: Path) -> None:
    quiet = train(tmp_path / "quiet", max_steps=4, log_interval=0, eval_interval=0, checkpoint_steps=0)
    assert quiet.code == 0
    assert read_metrics(tmp_path / "quiet") == []
    assert not (tmp_path / "quiet" / "best").exists()
    whole = train(tmp_path / "whole", max_steps=4, eval_batches=0, eval_interval=4, checkpoint_steps=0)
    assert whole.code == 0
    assert "val_loss" in read_metrics(tmp_path / "whole")[-1]


# Mistakes


def assert_refused(result: Any, code: int, *named: str) -> None:
    """One message, on stderr, without a traceback, with what is wrong in it."""
    assert result.code == code, result.err
    assert result.err.startswith("error: ") and result.err.count("error:") == 1
    assert "Traceback" not in result.err + result.out
    for part in named:
        assert re.search(part, result.err), f"{part!r} is not in {result.err!r}"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"epochs": 3,\n  "batch_size": 4,,}', [r"line 2, column \d+"]),
        ('{"batchsize": 4}', ["batchsize", "Did you mean batch_size"]),
        ('{"batch_size": "four", "dropout": 1.5}', ["batch_size", '"four"', "dropout", r"1\.5", "less than 1"]),
        ('{"embed_dim": 32, "num_heads": 5}', ["num_heads is 5", "embed_dim 32", "4, 8"]),
        ("[1, 2]", ["list"]),
        ("{'epochs': 3}", ["line 1, column 2"]),
    ],
    ids=["syntax", "unknown key", "two values", "heads", "a list", "quotes"],
)
def test_a_mistake_in_a_config_file_is_reported_with_its_place(
    config: str, named: list[str], train: Callable, tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(config)
    before = snapshot(tmp_path)
    shape = {"embed_dim": None, "num_heads": None, "batch_size": None, "dropout": None}
    result = train(tmp_path / "run", config=tmp_path / "mine.json", **shape)
    assert_refused(result, 2, "mine.json" if "heads" not in config else "num_heads", *named)
    assert snapshot(tmp_path) == before and not (tmp_path / "run").exists()
    assert "Training " not in result.out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"batchsize": 4}, ["--batchsize", "--batch_size"]),
        ({"learning_rate": "fast"}, ["learning_rate", "fast"]),
        ({"config": "nowhere.json"}, [r"nowhere\.json", r"gpt2_small\.json"]),
        ({"max_seq_len": 5000}, ["5000", "3,000", "validation", "--max_seq_len"]),
        ({"device": "cuda"}, ["CUDA", "--device auto"]),
        ({"precision": "fp16"}, ["fp16", "bf16 or fp32"]),
        ({"placement": "gpu"}, ["--placement auto"]),
    ],
    ids=str,
)
def test_a_wrong_flag_is_reported_before_anything_is_written(
    flags: dict[str, Any], named: list[str], train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(train(tmp_path / "run", **flags), 2, *named)
    assert list(tmp_path.iterdir()) == []


def cut_tokens(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-7])


def alter_tokens(folder: Path) -> None:
    data = bytearray((folder / "tokens.bin").read_bytes())
    data[100] ^= 1
    (folder / "tokens.bin").write_bytes(data)


def edit_metadata(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "tokens_metadata.json"
        metadata = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in metadata.items() if value is not None}))

    return edit


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"z"', '"Z"'))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (cut_tokens, [r"tokens\.bin has 59,993 bytes", "60,000"]),
        (alter_tokens, [r"tokens\.bin", "SHA-256"]),
        (edit_metadata(total_tokens=None, vocab_size=None), ["total_tokens is missing", "vocab_size is missing"]),
        (lambda folder: (folder / "tokens_metadata.json").write_text("{,}"), ["line 1, column 2"]),
        (lambda folder: (folder / "tokens_metadata.json").unlink(), ["[Nn]o token file", r"tokenize_local_bpe\.py"]),
        (other_tokenizer, [r"tokenizer\.json", "SHA-256"]),
    ],
    ids=["cut", "altered", "fields", "JSON", "empty", "tokenizer"],
)
def test_spoiled_data_is_refused_and_left_as_it_is(
    spoil: Callable[[Path], Any], named: list[str], train: Callable, token_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(token_folder, data)
    spoil(data)
    before = snapshot(tmp_path)
    assert_refused(train(tmp_path / "run", data_dir=data), 3, *named)
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ('{"prompt": "the cat"}\n{"prompt": 3}\n', ["line 2", "prompt"]),
        ('{"prompt": "the cat"}\nthe dog\n', ["line 2"]),
        ("\n\n", ["no prompts"]),
        (None, [r"prompts\.jsonl", "--eval_prompts"]),
        ('{"prompt": "the cat 7"}\n', ["'7'", "the cat 7|prompts.jsonl"]),
    ],
    ids=["number", "not JSON", "empty", "no file", "unknown character"],
)
def test_prompts_that_cannot_be_asked_are_reported_before_the_first_step(
    prompts: str | None, named: list[str], train: Callable, tmp_path: Path
) -> None:
    """The first evaluation may be hours of training later."""
    path = tmp_path / "prompts.jsonl"
    if prompts is not None:
        path.write_text(prompts)
    result = train(tmp_path / "run", eval_prompts=path, max_steps=2, eval_interval=2)
    assert "Training " not in result.out
    assert_refused(result, 3, *named)
    assert "--unknown" not in result.err  # that is a flag of the pre-tokenizer


@pytest.mark.parametrize("flag", ["eval_prompts", "tokenizer_file", "metadata_file", "bin_file"])
def test_a_pipe_is_refused_where_a_file_is_needed(
    flag: str, train: Callable, token_folder: Path, pipe: Path, tmp_path: Path
) -> None:
    """Nobody may ever write into it."""
    names = {"bin_file": "tokens.bin", "tokenizer_file": "tokenizer.json", "metadata_file": "tokens_metadata.json"}
    files = {"data_dir": None, **{key: token_folder / name for key, name in names.items()}}
    said = "not a regular file" if flag != "bin_file" else "has 0 bytes"
    assert_refused(train(tmp_path / "run", **{**files, flag: pipe}), 3, f"{pipe}.* {said}")


def test_a_bug_of_ours_keeps_its_traceback(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> None:
        raise ZeroDivisionError

    call_before(monkeypatch, script, "forward_backward", bug)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run")


def test_inputs_of_one_name_do_not_share_a_folder(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, text in (("a", "the cat sat on a mat. " * 300), ("b", "0 1 2 3 4 5 6 7 8 9. " * 300)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.txt").write_text(text)
    shape = {"data_dir": None, "max_steps": 2, "eval_interval": 0}
    ways = [("a", "char", None), ("b", "char", None), ("a", "bpe", 300)]
    for i, (folder, tokenizer, size) in enumerate(ways):
        flags = {**shape, "input": f"{folder}/my.txt", "tokenizer": tokenizer, "vocab_size": size}
        for _ in range(2):  # again: the tokens are there
            assert train(tmp_path / f"run{i}", **flags).code == 0
    folders = sorted((tmp_path / "datasets_cache").iterdir())
    assert len(folders) == 3 and all(folder.name.startswith("my-") for folder in folders)


@pytest.mark.parametrize("survives", ["run folder", "mirror"])
def test_a_run_whose_tokens_were_lost_keeps_its_vocabulary(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(generated_text(20_000))
    # What a new machine would learn is another vocabulary: here, for the pairs it is asked to learn.
    tokenize(["my.txt"], "tokens", min_frequency=500, quiet=True)
    run = tmp_path / "run"
    flags = {"checkpoint_dir": tmp_path / "mirror", "eval_interval": 0}
    assert train(run, data_dir="tokens", max_steps=6, **flags).code == 0
    shutil.rmtree("tokens")
    if survives == "mirror":
        shutil.rmtree(run)
    continuing = {**flags, "data_dir": None, "input": "my.txt"}
    result = train(run, max_steps=8, **continuing)
    assert result.code == 0 and "steps 6 to 8" in result.out, result.err
    (tokens,) = Path("datasets_cache").iterdir()
    before = snapshot(tokens), (tokens / "tokens_bpe.bin").stat().st_mtime_ns
    assert train(run, max_steps=10, **continuing).code == 0
    assert before == (snapshot(tokens), (tokens / "tokens_bpe.bin").stat().st_mtime_ns), "they are there"
    result = train(run, max_steps=10, vocab_size=280, **continuing)
    assert result.code == 4 and "cannot be continued" in result.err, "the flag is not passed over without a word"


def test_the_tokens_of_a_run_are_not_made_again_to_continue_it(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(generated_text(20_000))
    flags = {"data_dir": None, "input": "my.txt", "vocab_size": 280, "eval_interval": 0}
    written = []
    for steps in (6, 8):
        assert train(tmp_path / "run", max_steps=steps, **flags).code == 0
        written += [path.stat().st_mtime_ns for path in Path("datasets_cache").glob("*/tokens_bpe.bin")]
    assert len(written) == 2 and written[0] == written[1]


def test_a_book_that_is_added_leaves_the_tokens_of_the_run(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names both ways on, and both work."""
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/one.txt").write_text(generated_text(20_000))
    flags = {"data_dir": None, "input": "books", "vocab_size": 280, "eval_interval": 0}
    assert train("run", **flags, max_steps=4).code == 0
    (tokens,) = Path("datasets_cache").iterdir()
    before = snapshot(tokens)
    Path("books/two.txt").write_text(generated_text(20_000, seed=1))
    for dry_run in ("true", "false"):
        result = train("run", **flags, max_steps=8, dry_run=dry_run)
        assert result.code == 4 and "1 new (two.txt)" in result.err and snapshot(tokens) == before
        assert f"--data_dir {tokens} --output_dir run" in result.err
        assert "--input books --epochs 10 --init_from run --output_dir run_2" in result.err
    assert train("run", data_dir=tokens, eval_interval=0, max_steps=8).code == 0
    result = train("run_2", data_dir=None, input="books", eval_interval=0, init_from="run", max_steps=2)
    assert result.code == 0 and "Starting from the weights of run/checkpoints/step_00000008" in result.out
    Path("books/two.txt").unlink()
    assert train("run", **flags, max_steps=10).code == 0 and snapshot(tokens) == before


def test_a_dry_run_finds_that_the_tokens_are_of_another_tokenizer(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(generated_text(20_000))
    flags = {"data_dir": None, "input": "my.txt", "max_steps": 2, "eval_interval": 0}
    assert train("run", vocab_size=280, **flags).code == 0
    tokenize(["my.txt"], "tokens", vocab_size=290, quiet=True)
    for dry_run in ("true", "false"):
        result = train("other", data_dir="tokens", init_from="run", max_steps=2, dry_run=dry_run)
        assert result.code == 4 and "not tokenized with the tokenizer of" in result.err
    result = train("other", **flags, init_from="run", vocab_size=290)
    assert result.code == 2 and "vocab_size has no effect with --init_from" in result.err


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a file name any bytes")
def test_names_that_are_not_utf8(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9")
    Path(f"{name}.txt").write_text("the cat sat on a mat. " * 300)
    flags = {"data_dir": None, "input": f"{name}.txt", "tokenizer": "char", "max_steps": 2}
    for _ in range(2):  # again: a finished run is read back
        assert train(tmp_path / "run", **flags).code == 0
    assert "caf" in (tmp_path / "run" / "summary.md").read_text(encoding="utf-8")
    for result in (train(Path(name), **flags), train(tmp_path / "other", checkpoint_dir=name, **flags)):
        assert result.code == 2 and r"'caf\udce9' is not UTF-8" in result.err


def test_tokens_that_lost_their_metadata_are_not_replaced(train: Callable, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(generated_text(3_000))
    tokenize([str(tmp_path / "my.txt")], tmp_path / "tokens", vocab_size=300, quiet=True)
    (tmp_path / "tokens" / "tokens_bpe_metadata.json").unlink()
    before = snapshot(tmp_path / "tokens")
    (tmp_path / "other.txt").write_text(generated_text(3_000, seed=1))
    result = train(tmp_path / "run", data_dir=tmp_path / "tokens", input=tmp_path / "other.txt")
    assert result.code == 3 and "tokens_bpe.bin without metadata" in result.err
    assert snapshot(tmp_path / "tokens") == before


@pytest.mark.parametrize(
    "given",
    ["another name", "same name", "same name and size", "folder", "pattern", "appended", "vocabulary", "characters"],
)
def test_tokens_of_another_text_are_not_replaced(train: Callable, tmp_path: Path, given: str) -> None:
    one, two, precious = tmp_path / "one", tmp_path / "two", tmp_path / "precious"
    for folder, text in ((one, generated_text(3_000)), (two, generated_text(3_000, seed=1))):
        folder.mkdir()
        (folder / "my.txt").write_text(text + ("" if given == "same name and size" else " " * len(str(folder))))
    (two / "more.txt").write_text("0 1 2 3 4 5 6 7 8 9. " * 300)
    tokenize([str(one / "my.txt")], precious, vocab_size=300, quiet=True)
    before = snapshot(precious)
    if given == "appended":
        with open(one / "my.txt", "a") as file:
            file.write(generated_text(1_000, seed=2))
    texts = {"another name": two / "more.txt", "folder": two, "pattern": two / "*.txt"}
    texts |= dict.fromkeys(("same name", "same name and size"), two / "my.txt")
    kinds: dict[str, dict[str, object]] = {"vocabulary": {"vocab_size": 270}, "characters": {"tokenizer": "char"}}
    flags = {"input": texts.get(given, one / "my.txt"), **kinds.get(given, {"vocab_size": 300})}
    result = train(tmp_path / "run", data_dir=precious, **flags)
    assert result.code == 3 and f"{precious} holds bpe tokens of my.txt" in result.err
    assert str(flags["input"]) in result.err and "another --data_dir" in result.err
    assert snapshot(precious) == before
