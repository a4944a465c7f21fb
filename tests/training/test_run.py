"""A run survives what happens to it: kills, signals, damaged files, a lost disk, other settings, another start."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.torch
import torch

from common import script
from common.checkpoint import find_problems, open_checkpoint, step_folders
from model import TransformerLanguageModel
from tests.forked import Forked
from tests.helpers import call_before, flip, full_disk, snapshot, write_tokens
from tests.training.helpers import at_step, final_weights, measured, save_at_once, steps_of
from training import evaluate, stop
from training.data import TokenData
from training.records import read_metrics
from training.saver import Saver
from training.store import KEPT_CHECKPOINTS


def test_best_stays_the_best_of_all_sessions(
    interrupt: Callable, train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.2])
    monkeypatch.setattr(evaluate, "validation_loss", lambda *_: next(losses))
    interrupt(tmp_path / "run", after=13, eval_interval=6)
    assert train(tmp_path / "run", eval_interval=6).code == 0
    assert json.loads((tmp_path / "run" / "best" / "training_state.json").read_text())["step"] == 12


@pytest.fixture
def finished_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in hand, however busy the machine is; and clicks come within moments."""
    for name, seconds in (("LONG_STEP_SECONDS", math.inf), ("DOUBLE_SIGNAL_SECONDS", 60.0)):
        monkeypatch.setattr(stop, name, seconds)


@pytest.fixture
def given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in hand, however fast the machine is."""
    monkeypatch.setattr(stop, "LONG_STEP_SECONDS", 0.0)


def pause() -> None:
    stop.DOUBLE_SIGNAL_SECONDS = 0.0


@pytest.mark.parametrize(
    ("sent", "saved"),
    [
        ([signal.SIGINT], 9),
        ([signal.SIGTERM], 9),
        ([signal.SIGHUP], 9),
        ([signal.SIGINT, signal.SIGINT], 9),  # a click on Colab's stop button
        ([signal.SIGINT, signal.SIGHUP], 9),  # on Jupyter's
        ([signal.SIGINT] * 3, 6),  # at once, without saving
        ([signal.SIGINT, pause, signal.SIGINT], 6),
    ],
)
def test_a_signal_saves_and_the_same_command_finishes(
    sent: list[Any], saved: int, train: Callable, unbroken: Path, tmp_path: Path, finished_first: None
) -> None:
    def send() -> None:
        for each in sent:
            each() if callable(each) else os.kill(os.getpid(), each)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        save_at_once(patch)
        at_step(patch, 8, send)
        result = train(tmp_path / "run")
    assert result.code == 130 and ("same command continues" in result.out) == (saved == 9)
    assert steps_of(tmp_path / "run")[0] == saved
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert train(tmp_path / "run").code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    assert measured(tmp_path / "run") == measured(unbroken)


def no_step_is_long() -> None:
    stop.LONG_STEP_SECONDS = math.inf


def test_sigterm_to_a_real_process_saves_within_moments(train_flags: Callable, tmp_path: Path) -> None:
    flags = train_flags(tmp_path / "run", max_steps=100_000, checkpoint_steps=0, eval_interval=0)
    process = Forked(flags, first=no_step_is_long)
    assert any(line.startswith("step ") for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "same command continues" in out and "then saving" in err
    (step,) = steps_of(tmp_path / "run")
    assert step == read_metrics(tmp_path / "run")[-1]["step"]


def end_once_there(file: Path) -> None:
    """A process that takes its time to end."""
    end = script.end

    def end_slowly(main: Callable) -> NoReturn:
        try:
            end(main)
        finally:
            while not file.exists():
                time.sleep(0.01)

    script.end = end_slowly


def test_signals_that_follow_a_save_leave_the_exit_code(train_flags: Callable, tmp_path: Path) -> None:
    """A notebook's stop button sends `!python` SIGINT, SIGHUP and SIGINT again: a small model is saved by then."""
    flags = train_flags(tmp_path / "run", max_steps=100_000, checkpoint_steps=0, eval_interval=0)
    process = Forked(flags, first=functools.partial(end_once_there, tmp_path / "all sent"))
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("step ") for line in lines)
    process.send_signal(signal.SIGINT)
    assert any("same command continues" in line for line in lines)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # while the process winds up
        process.send_signal(number)
    (tmp_path / "all sent").touch()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert len(steps_of(tmp_path / "run")) == 1


def test_a_long_step_is_abandoned_and_the_state_before_it_saved(
    train: Callable, unbroken: Path, tmp_path: Path, given_up_at_once: None
) -> None:
    """Whoever stops a notebook's cell kills it soon after: there may be no time for the rest of a step."""

    def stop_here(data: TokenData, sequences_seen: int, *_: Any) -> None:
        if sequences_seen == 9 * 8:
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the step went on")

    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, TokenData, "batch", stop_here)
        result = train(tmp_path / "run")
    assert result.code == 130 and "Interrupted after step 9" in result.out
    assert steps_of(tmp_path / "run")[0] == 9
    assert train(tmp_path / "run").code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    assert measured(tmp_path / "run") == measured(unbroken)


def test_a_wish_to_stop_is_not_taken_for_an_error(
    train: Callable, tmp_path: Path, given_up_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that compiles a model catches errors of all kinds, and tells them as its own."""
    forward, calls = TransformerLanguageModel.forward, list[int]()

    def compiled(model: TransformerLanguageModel, *args: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        try:
            if len(calls) == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            return forward(model, *args)
        except Exception:
            raise RuntimeError("the compiler failed") from None

    monkeypatch.setattr(TransformerLanguageModel, "forward", compiled)
    result = train(tmp_path / "run")
    assert result.code == 130 and result.err.count("error") == 0
    assert steps_of(tmp_path / "run")[0] == 9


@pytest.mark.parametrize("step", [12, 24], ids=["in between", "the last one"])
def test_a_signal_in_an_evaluation_saves_at_once_and_the_evaluation_is_repeated(
    step: int, train: Callable, unbroken: Path, tmp_path: Path, given_up_at_once: None
) -> None:
    batches = []

    def stop_here(data: TokenData, first: int, rows: int, of: int) -> None:
        batches.append(first)
        if len(batches) == 4 * (step // 12) - 2:  # of four an evaluation
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, TokenData, "validation_batch", stop_here)
        result = train(tmp_path / "run")
    assert result.code == 130
    assert len(batches) == 4 * (step // 12) - 2, "the evaluation went on"
    assert steps_of(tmp_path / "run")[0] == step
    assert not any(row["step"] == step and "val_loss" in row for row in read_metrics(tmp_path / "run"))
    again = train(tmp_path / "run")
    assert again.code == 0, again
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    assert measured(tmp_path / "run") == measured(unbroken)
    for name in ("best/model.safetensors", "checkpoints/step_00000024/optimizer.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (unbroken / name).read_bytes(), name


def test_a_run_stops_at_its_limit_saved_and_continues_with_more_of_it(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = 1 / 3600
    with monkeypatch.context() as patch:
        at_step(patch, 8, lambda: time.sleep(1))
        result = train(tmp_path / "run", max_hours=second)
    stopped = steps_of(tmp_path / "run")
    assert result.code == 130 and f"Stopped after step {stopped[0]}: --max_hours " in result.out and stopped[0] < 10
    again = train(tmp_path / "run", max_hours=second)
    assert again.code == 130 and steps_of(tmp_path / "run") == stopped, "the limit is not that of all sessions"
    assert train(tmp_path / "run", max_hours=10).code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)


# Whose folder it is


@pytest.mark.parametrize("flag", ["output_dir", "checkpoint_dir"])
def test_a_folder_of_the_users_is_not_taken_over(flag: str, train: Callable, tmp_path: Path) -> None:
    mine = tmp_path / "run" if flag == "output_dir" else tmp_path / "drive" / "run"
    (mine / ".tmp-photos").mkdir(parents=True)
    (mine / ".old-thesis").mkdir()
    for name in (".tmp-photos/a.png", ".old-thesis/b.tex", ".draft.tmp", "summary.md", "config.json"):
        (mine / name).write_text("{}")
    before = snapshot(mine)
    for more in ({}, {"resume": "never"}, {"dry_run": "true"} if flag == "output_dir" else {}):
        result = train(tmp_path / "run", **({} if flag == "output_dir" else {flag: tmp_path / "drive"}), **more)
        assert result.code == 2 and str(mine) in result.err and f"--{flag}" in result.err and "summary.md" in result.err
        assert snapshot(mine) == before


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize("flag", ["output_dir", "checkpoint_dir"])
def test_a_folder_that_cannot_be_one_is_reported_with_what_is_in_the_way(
    flag: str, dry_run: str, train: Callable, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for way, kind in (("file", "a file"), ("file/x", "a file"), ("link", "a link"), ("link/x/y", "a link")):
        folders = {"output_dir": tmp_path / "run", flag: tmp_path / way}
        result = train(**folders, dry_run=dry_run)
        assert result.code == 2 and f"({'--' + flag}) cannot be created" in result.err, result
        assert f"because {tmp_path / way.partition('/')[0]} is {kind}" in result.err and result.err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_only_names_of_ours_are_cleaned_up_in_a_run_folder(train: Callable, copy_of: Path) -> None:
    """Leftovers of a killed process are deleted; the user's files stay."""
    ours = [
        ".tmp-best/x",
        "checkpoints/.tmp-step_00000004/x",
        ".old-best/x",
        ".config.json.77.tmp",
        ".samples.jsonl.77.tmp",
        ".samples.md.77.tmp",
    ]
    theirs = [".draft.tmp", ".tmp-photos/a.png", "checkpoints/.old-thesis/b.tex", "notes.md", ".notes.md.5.tmp"]
    for name in ours + theirs:
        (copy_of / name).parent.mkdir(exist_ok=True)
        (copy_of / name).write_text("x")
    assert train(copy_of, max_steps=26).code == 0
    assert not any((copy_of / name).exists() for name in ours)
    assert all((copy_of / name).read_text() == "x" for name in theirs)


def test_the_config_of_a_run_continues_it(train: Callable, train_flags: Callable, tmp_path: Path) -> None:
    import train_colab_mmap

    assert train(tmp_path / "run", max_steps=6, seed=5).code == 0
    assert train_colab_mmap.main(["--config", str(tmp_path / "run" / "config.json"), "--max_steps", "8"]) == 0
    assert steps_of(tmp_path / "run")[0] == 8
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["seed"] == 5


def test_a_second_training_in_the_same_folder_names_the_holder(
    train: Callable, train_flags: Callable, tmp_path: Path
) -> None:
    process = Forked(train_flags(tmp_path / "run", max_steps=10**6))
    assert any(line.startswith("First step") for line in iter(process.stdout.readline, ""))
    result = train(tmp_path / "run")
    assert result.code == 4 and f"({process.pid} on " in result.err and "since 20" in result.err
    process.kill()  # no chance to let go of anything
    process.communicate()
    assert train(tmp_path / "run", max_steps=40).code == 0


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_a_dry_run_finds_what_would_keep_the_run_from_continuing(dry_run: str, train: Callable, copy_of: Path) -> None:
    before = snapshot(copy_of)
    for change, said in (
        ({"embed_dim": 64}, "embed_dim"),
        ({"resume_from": copy_of.parent / "nowhere"}, "nowhere"),
        ({"checkpoint_dir": copy_of / "no" / "drive"}, "drive.mount"),
        ({"output_dir": copy_of / "config.json"}, "is a file"),
    ):
        output_dir = change.pop("output_dir", copy_of if "resume_from" not in change else copy_of.parent / "other")
        result = train(output_dir, **change, max_steps=30, dry_run=dry_run)
        assert result.code in (2, 4) and said in result.err, change
        assert snapshot(copy_of) == before


# Losing the output


def test_a_reader_that_ends_does_not_end_the_training(train_flags: Callable, unbroken: Path, tmp_path: Path) -> None:
    """`| head`, or `| tee log` when Ctrl-C reaches tee first."""
    process = Forked(train_flags(tmp_path / "run"))
    assert process.stdout.readline().startswith("Run ")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    assert (tmp_path / "run" / "summary.md").exists()


@pytest.mark.parametrize("closed", [(2,), (1,), (1, 2)])
def test_closed_streams_do_not_matter(
    closed: tuple[int, ...], train_flags: Callable, unbroken: Path, tmp_path: Path
) -> None:
    process = Forked(train_flags(tmp_path / "run"), closed=closed)
    process.communicate()
    assert process.returncode == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)


def on_a_terminal(name: str) -> None:
    """The first terminal that the leader of a session opens is its own."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(terminal, number)


def test_a_terminal_that_closes_saves(train_flags: Callable, tmp_path: Path) -> None:
    flags = train_flags(tmp_path / "run", max_steps=100_000, checkpoint_steps=0, eval_interval=0)
    ours, theirs = pty.openpty()
    process = Forked(flags, first=functools.partial(on_a_terminal, os.ttyname(theirs)))
    seen = b""
    while b"First step" not in seen:
        assert select.select([ours], [], [], 60)[0], seen
        seen += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    assert process.wait(30) == 130
    (step,) = steps_of(tmp_path / "run")
    assert step > 0


# Going on, starting over


def test_a_finished_run_says_so_and_names_ways_on_that_work(train: Callable, copy_of: Path) -> None:
    before = snapshot(copy_of)
    again = train(copy_of)
    assert again.code == 0
    assert "finished" in again.out and "--resume never" in again.out
    assert snapshot(copy_of) == before

    advised = re.findall(r"--(epochs|max_steps) (\d+)", again.out)
    assert advised
    for number, (flag, value) in enumerate(advised):
        other = copy_of.with_name(f"copy_{number}")
        shutil.copytree(copy_of, other)
        assert train(other, **{flag: value}).code == 0
        assert steps_of(other)[0] > 24, f"--{flag} {value} was advised and does not go on"


def test_more_epochs_continue_a_finished_run(train: Callable, short_token_folder: Path, tmp_path: Path) -> None:
    flags = {"data_dir": short_token_folder, "max_steps": None, "checkpoint_steps": 0}
    assert train(tmp_path / "run", epochs=1, **flags).code == 0
    first, *_ = steps_of(tmp_path / "run")
    advised = re.findall(r"--epochs (\d+)", train(tmp_path / "run", epochs=1, **flags).out)
    assert advised == ["2"]
    result = train(tmp_path / "run", epochs=2, **flags)
    assert result.code == 0 and f"step {first:,}" in result.out
    assert max(steps_of(tmp_path / "run")) == pytest.approx(2 * first, abs=1)
    assert read_metrics(tmp_path / "run")[-1]["epoch"] == pytest.approx(2, abs=0.05)


def test_resume_never_keeps_every_old_run_aside(train: Callable, copy_of: Path) -> None:
    """Even several times within the same second."""
    before = snapshot(copy_of)
    flags = {"resume": "never", "max_steps": 2, "checkpoint_steps": 1}
    for already in (1, 2, 3):
        result = train(copy_of, **flags)
        assert result.code == 0
        assert steps_of(copy_of) == [2, 1], "it continued the old run"
        aside = sorted(path for path in copy_of.parent.iterdir() if path != copy_of)
        assert len(aside) == already
        assert str(max(aside, key=lambda path: path.stat().st_mtime_ns)).rsplit(".")[0] in result.out
    assert before in [snapshot(path) for path in aside]


def test_resume_never_of_a_linked_folder_moves_the_folder_and_leaves_the_link(train: Callable, copy_of: Path) -> None:
    disk, link = copy_of.parent / "disk" / "run", copy_of.parent / "link"
    disk.parent.mkdir()
    copy_of.rename(disk)
    link.symlink_to(disk)
    result = train(link, resume="never")
    (aside,) = disk.parent.glob("run.*")
    assert result.code == 0 and f"Renamed the old run: {disk} is now {aside}." in result.out
    assert link.is_symlink() and steps_of(disk) == steps_of(aside) != []


def test_resume_never_also_keeps_the_mirror_aside(train: Callable, tmp_path: Path) -> None:
    flags = {"checkpoint_dir": tmp_path / "drive", "max_steps": 4, "checkpoint_steps": 2}
    assert train(tmp_path / "run", **flags).code == 0
    before = snapshot(tmp_path / "drive" / "run")
    assert train(tmp_path / "run", resume="never", **{**flags, "max_steps": 2}).code == 0
    assert steps_of(tmp_path / "run") == [2]
    assert steps_of(tmp_path / "drive" / "run") == [2]
    assert before in [snapshot(path) for path in (tmp_path / "drive").iterdir()]


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_an_old_run_is_not_set_aside_by_a_command_that_stands_in_it(
    dry_run: str, train: Callable, copy_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files in . would still be there, under another name, and the same command would continue them."""
    before = snapshot(copy_of)
    again = {"resume": "never", "max_steps": 2, "dry_run": dry_run}
    for folder, given in ((".", "."), ("checkpoints", ".."), ("best", copy_of)):
        monkeypatch.chdir(copy_of / folder)
        result = train(given, **again)
        assert result.code == 2 and f"cd {copy_of.parent}" in result.err and result.err.count("\n") == 1, result
        assert snapshot(copy_of) == before
    monkeypatch.chdir(tmp_path)
    assert train("run/../run", **again).code == 0
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert train(".", **again).code == 0  # where there is nothing to set aside
    assert len(list(tmp_path.glob("new*"))) == 1


def test_a_folder_that_cannot_be_renamed_is_reported(
    train: Callable, copy_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk is mounted on it."""
    before = snapshot(copy_of)

    def busy(source: Path, target: Path) -> None:
        if source == copy_of:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))

    call_before(monkeypatch, os, "replace", busy)
    result = train(copy_of, resume="never")
    assert result.code == 4 and "resource busy" in result.err and "remove `--resume never`" in result.err
    assert snapshot(copy_of) == before


# What may change, what may not


@pytest.mark.parametrize("change", ["other text is tokenized into it", "it is deleted"])
def test_checkpoints_keep_the_tokenizer_of_the_start_whatever_becomes_of_the_data_folder(
    change: str, train: Callable, token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokens"
    shutil.copytree(token_folder, folder)
    expected = (folder / "tokenizer.json").read_bytes()

    def replace() -> None:
        shutil.rmtree(folder)
        if change != "it is deleted":
            write_tokens(folder, "0123456789 " * 3000, alphabet="0123456789 ")

    at_step(monkeypatch, 2, replace)
    assert train(tmp_path / "run", data_dir=folder).code == 0
    saved = [*(tmp_path / "run").glob("checkpoints/*/tokenizer.json"), tmp_path / "run" / "best" / "tokenizer.json"]
    assert len(saved) == 3 and all(path.read_bytes() == expected for path in saved)


@pytest.mark.parametrize("other", ["tokens", "tokenizer"])
def test_other_data_is_refused_with_both_hashes(
    other: str, train: Callable, token_folder: Path, copy_of: Path, tmp_path: Path
) -> None:
    text = "a mat and a cat on a hill.\n" * 60
    if other == "tokens":
        folder = write_tokens(tmp_path / "other", text)
    else:  # the same ids and another meaning: only the tokenizer's own hash can tell
        folder = tmp_path / "other"
        shutil.copytree(token_folder, folder)
        tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
        swapped = tokenizer.replace('"y"', '"?"').replace('"z"', '"y"').replace('"?"', '"z"')
        (folder / "tokenizer.json").write_text(swapped, encoding="utf-8")
        metadata = json.loads((folder / "tokens_metadata.json").read_text())
        metadata["tokenizer_sha256"] = hashlib.sha256(swapped.encode()).hexdigest()
        (folder / "tokens_metadata.json").write_text(json.dumps(metadata))
    before = snapshot(copy_of)
    result = train(copy_of, data_dir=folder, max_steps=30)
    assert result.code == 4
    key = f"{other}_sha256"
    old, new = (json.loads((path / "tokens_metadata.json").read_text())[key][:16] for path in (token_folder, folder))
    assert old != new
    assert old in result.err and new in result.err and key in result.err
    assert snapshot(copy_of) == before


def test_changed_settings_take_effect_and_are_reported(train: Callable, copy_of: Path) -> None:
    changes = {"learning_rate": 0.002, "batch_size": 8, "eval_interval": 3, "dropout": 0.0, "max_steps": 27}
    result = train(copy_of, **changes)
    assert result.code == 0
    told = {line.split()[1]: line for line in result.out.splitlines() if line.startswith("  changed: ")}
    assert set(told) == set(changes)
    for key, old in {"learning_rate": 0.005, "batch_size": 4, "eval_interval": 12, "dropout": 0.1}.items():
        assert f"{old} -> {changes[key]} (flag)" in told[key]
    rows = read_metrics(copy_of)
    assert rows[-1]["tokens"] - rows[-2]["tokens"] == 8 * 2 * 16
    assert rows[-1]["lr"] <= 0.002 and "val_loss" in rows[-1]
    saved = json.loads((copy_of / "checkpoints/step_00000027/config.json").read_text())
    assert saved["dropout"] == 0.0
    again = train(copy_of, **{**changes, "max_steps": 30})
    assert "dropout" not in again.out and "max_steps 27 -> 30" in again.out


@pytest.mark.parametrize(
    "change", [{"eval_batches": 2}, {"batch_size": 8}, {"batch_size": 8, "eval_batches": 2}], ids=str
)
def test_best_is_not_replaced_by_worse_weights_when_the_validation_windows_change(
    change: dict[str, int], train: Callable, copy_of: Path
) -> None:
    """Losses over other windows do not compare: the best weights are evaluated again over those of now."""
    before = snapshot(copy_of / "best")
    spoiled = train(copy_of, **change, learning_rate=5.0, max_steps=30, eval_interval=3)
    assert spoiled.code == 0
    assert snapshot(copy_of / "best") == before
    state = open_checkpoint(copy_of).training_state()
    assert state["best_windows"] == change.get("batch_size", 4) * change.get("eval_batches", 4)
    losses = [row["val_loss"] for row in read_metrics(copy_of) if row["step"] > 24 and "val_loss" in row]
    assert len(losses) == 2 and state["best_val_loss"] < min(losses)
    again = train(copy_of, **change, learning_rate=5.0, max_steps=33, eval_interval=3)
    assert "Evaluating the best weights" not in again.out


def test_every_window_comes_once_an_epoch_though_the_batch_size_changes(
    interrupt: Callable, train: Callable, short_token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"data_dir": short_token_folder, "max_steps": None, "epochs": 1, "eval_interval": 0}
    seen: list[int] = []
    opened = []

    def note(data: TokenData, starts: np.ndarray) -> None:
        opened.append(data)
        seen.extend(starts.tolist())

    call_before(monkeypatch, TokenData, "gather", note)
    interrupt(tmp_path / "run", after=12, **flags)  # its last checkpoint has 12 of the 13 steps it took
    del seen[12 * 8 :]
    assert train(tmp_path / "run", batch_size=3, **flags).code == 0
    windows = opened[0].windows
    first_epoch = sorted(seen[:windows])
    assert windows > 12 * 8 and len(seen) < windows + 6
    assert np.unique(np.diff(first_epoch)).tolist() == [16], "a window twice, or one left out, or two that overlap"


# Damaged checkpoints


@pytest.mark.parametrize("damage", ["altered", "missing", "manifest cut"])
def test_a_damaged_newest_checkpoint_is_skipped_and_reported(
    damage: str, train: Callable, unbroken: Path, copy_of: Path
) -> None:
    newest = copy_of / "checkpoints" / "step_00000024"
    if damage == "altered":
        flip(newest / "model.safetensors")
    elif damage == "missing":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:99])
    result = train(copy_of)
    assert result.code == 0, result.err
    files = {"altered": "model.safetensors", "missing": "optimizer.safetensors", "manifest cut": "manifest.json"}
    assert files[damage] in result.err and "training_state.json" in result.err  # what is wrong, and what is there
    assert "step_00000018" in result.out
    assert final_weights(copy_of) == final_weights(unbroken)
    assert measured(copy_of) == measured(unbroken)
    assert find_problems(newest) == []


def test_with_every_checkpoint_damaged_nothing_is_trained_and_nothing_deleted(train: Callable, copy_of: Path) -> None:
    for folder in step_folders(copy_of / "checkpoints"):
        flip(folder / "training_state.json")
    before = snapshot(copy_of)
    result = train(copy_of)
    assert result.code == 4
    error, *damaged, last = result.err.splitlines()
    assert error.startswith("error: ") and "--resume never" in last
    for line, folder in zip(damaged, step_folders(copy_of / "checkpoints"), strict=True):
        assert str(folder) in line and "training_state.json was altered" in line
    assert snapshot(copy_of) == before
    assert train(copy_of, resume="never", max_steps=2).code == 0  # what the message says works


# Starting from a checkpoint elsewhere


def test_resume_from_continues_in_another_folder_and_then_from_there(
    train: Callable, interrupt: Callable, unbroken: Path, tmp_path: Path
) -> None:
    source, other = unbroken / "checkpoints" / "step_00000018", tmp_path / "other"
    before = snapshot(unbroken)
    interrupt(other, after=22, resume_from=source, checkpoint_steps=2)
    assert steps_of(other) == [22, 20]
    again = train(other, resume_from=source, checkpoint_steps=2)
    assert again.code == 0 and "step_00000022" in again.out
    assert final_weights(other) == final_weights(unbroken)
    assert [row["step"] for row in measured(other)] == list(range(1, 25))
    assert snapshot(unbroken) == before
    finished = train(other, resume_from=source, checkpoint_steps=2)
    assert finished.code == 0 and "finished" in finished.out


def test_resume_from_takes_a_run_folder_and_paths_of_any_form(
    train: Callable, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(tmp_path / "from_run", resume_from=unbroken, max_steps=26)
    assert result.code == 0 and "step_00000024" in result.out
    assert [row["step"] for row in read_metrics(tmp_path / "from_run")] == list(range(1, 27))

    best = train(tmp_path / "from_best", resume_from=unbroken / "best", max_steps=26)
    assert best.code == 4 and f"--init_from {unbroken / 'best'}" in best.err  # it has no optimizer state

    # A folder that was copied by itself to where the user stands, named without any path.
    shutil.copytree(unbroken / "checkpoints" / "step_00000024", tmp_path / "alone" / "ckpt")
    monkeypatch.chdir(tmp_path / "alone")
    alone = train(tmp_path / "from_alone", resume_from="ckpt", max_steps=26)
    assert alone.code == 0, alone.err
    assert steps_of(tmp_path / "from_alone")[0] == 26


def test_resume_from_another_place_than_a_run_in_progress_is_refused(
    train: Callable, unbroken: Path, copy_of: Path
) -> None:
    before = snapshot(copy_of)
    result = train(copy_of, resume_from=unbroken / "checkpoints" / "step_00000018", max_steps=30)
    assert result.code == 4
    assert "--output_dir" in result.err and "step_00000024" in result.err
    assert snapshot(copy_of) == before


def test_init_from_takes_weights_and_shape_and_starts_at_zero(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "new_data", "the old hill and a red mat. " * 60)
    source = unbroken / "checkpoints" / "step_00000024"
    flags = dict.fromkeys(("num_layers", "embed_dim", "num_heads", "max_seq_len"))  # adopted from the weights
    flags |= {"data_dir": data, "init_from": source, "learning_rate": 1e-12, "min_lr": 0, "weight_decay": 0}
    result = train(tmp_path / "tuned", max_steps=2, **flags)
    assert result.code == 0, result.err
    assert [row["step"] for row in read_metrics(tmp_path / "tuned")] == [1, 2]
    trained, before = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (tmp_path / "tuned/checkpoints/step_00000002", source)
    )
    for name, tensor in before.items():  # at this learning rate the weights are still those of the checkpoint
        torch.testing.assert_close(trained[name], tensor, atol=1e-7, rtol=0)
    more = train(tmp_path / "tuned", max_steps=4, **flags)
    assert more.code == 0 and "step_00000002" in more.out
    assert [row["step"] for row in read_metrics(tmp_path / "tuned")] == [1, 2, 3, 4]


def test_a_run_continues_when_the_weights_it_started_from_are_gone(
    train: Callable, unbroken: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(unbroken, source)
    flags = {"init_from": source, "embed_dim": None, "num_heads": None, "num_layers": None, "max_seq_len": None}
    assert train(tmp_path / "run", **flags, max_steps=6).code == 0
    shutil.rmtree(source)
    result = train(tmp_path / "run", **flags, max_steps=8)
    assert result.code == 0 and steps_of(tmp_path / "run")[0] == 8, result
    assert train(tmp_path / "new", **flags, max_steps=8).code == 4  # a new run needs them


def test_init_from_refuses_another_tokenizer_or_shape(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "digits", "0123456789 " * 200, alphabet="0123456789 ")
    other = train(tmp_path / "a", data_dir=data, init_from=unbroken)
    assert other.code == 4
    command = re.search(r"python tokenize_local_bpe\.py .*--tokenizer_file (\S+)", other.err)
    assert command and Path(command[1]).is_file()
    shape = train(tmp_path / "b", embed_dim=16, init_from=unbroken)
    assert shape.code == 2
    assert re.search(r"embed_dim is 16 \(flag\), but 32 in ", shape.err)
    assert "num_layers" not in shape.err
    assert not (tmp_path / "a" / "checkpoints").exists() and not (tmp_path / "b").exists()


def test_starting_over_from_the_weights_of_the_run_itself(train: Callable, copy_of: Path) -> None:
    """--resume never moves the old run aside; the weights asked for must not move away before they are read."""
    result = train(copy_of, init_from=copy_of / "best", resume="never", max_steps=2)
    assert result.code == 0, result.err
    assert steps_of(copy_of) == [2]


# When checkpoints are due


@pytest.fixture
def saved_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The steps at which runs of this test save."""
    steps: list[int] = []
    call_before(monkeypatch, Saver, "save", lambda saver: steps.append(saver.run.state.step))
    return steps


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [26]),
        ({"checkpoint_steps": 10}, [10, 20, 26]),
        ({"checkpoint_minutes": 1e-9}, list(range(1, 27))),
        ({"checkpoint_minutes": 60}, [26]),
        ({"checkpoint_interval": 1}, "epochs"),
        ({"checkpoint_interval": 2}, [26]),
    ],
    ids=str,
)
def test_each_interval_saves_and_zero_is_off(
    flags: dict[str, Any],
    expected: Any,
    train: Callable,
    saved_steps: list[int],
    short_token_folder: Path,
    tmp_path: Path,
) -> None:
    off = {"checkpoint_steps": 0, "checkpoint_interval": 0, "checkpoint_minutes": 0, "eval_interval": 0}
    result = train(tmp_path / "run", data_dir=short_token_folder, max_steps=26, **{**off, **flags})
    assert result.code == 0
    if expected == "epochs":  # the first step after which an epoch is complete
        rows = read_metrics(tmp_path / "run")
        expected = [next(row["step"] for row in rows if row["epoch"] >= 1), 26]
        assert 0 < expected[0] < 26
    assert saved_steps == expected
    assert len(steps_of(tmp_path / "run")) == min(KEPT_CHECKPOINTS, len(expected))


def test_a_full_disk_ends_the_run_and_the_same_command_continues(
    train: Callable, unbroken: Path, tmp_path: Path
) -> None:
    with full_disk("step_00000018"):
        result = train(tmp_path / "run")
    assert result.code == 4
    assert result.err.startswith("error: ") and "No space left" in result.err and "step_00000018" in result.err
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step_00000006", "step_00000012"]
    assert all(find_problems(folder) == [] for folder in step_folders(tmp_path / "run" / "checkpoints"))
    assert train(tmp_path / "run").code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)


def test_divergence_before_the_first_checkpoint_promises_none(train: Callable, tmp_path: Path) -> None:
    flags = {"checkpoint_steps": 6, "learning_rate": 1e30, "use_lr_scheduler": "constant"}
    for run, said in (
        ("first", "No checkpoint was saved yet"),
        ("later", "from step"),
    ):
        if run == "later":
            assert train(tmp_path / run, max_steps=1, eval_interval=0).code == 0
        result = train(tmp_path / run, **flags)
        assert result.code == 2 and "diverged" in result.err and said in result.err
        assert steps_of(tmp_path / run) == ([1] if run == "later" else [])
        assert ("Saved checkpoints are intact" in result.err) is (run == "later")


@pytest.mark.parametrize("log_interval", [1, 0])
def test_divergence_stops_with_advice_and_keeps_finite_checkpoints(
    log_interval: int, train: Callable, copy_of: Path
) -> None:
    """Seen in the loss; or, where that is never read, in the weights before they are saved."""
    flags = {"log_interval": log_interval, "max_steps": 60, "checkpoint_steps": 6, "use_lr_scheduler": "constant"}
    result = train(copy_of, learning_rate=1e30, **flags)
    assert result.code == 2
    assert result.err.startswith("error: ") and "--learning_rate" in result.err and "finite" in result.err
    for folder in [*step_folders(copy_of / "checkpoints"), copy_of / "best"]:
        weights = safetensors.torch.load_file(open_checkpoint(folder).path / "model.safetensors")
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    assert train(copy_of, **{**flags, "max_steps": 26}).code == 0  # as the message says


def test_another_architecture_is_refused_with_both_values(train: Callable, copy_of: Path) -> None:
    before = snapshot(copy_of)
    result = train(copy_of, embed_dim=16, num_layers=2, max_steps=30)
    assert result.code == 4
    assert result.err.startswith("error: ")
    assert re.search(r"embed_dim: 32 .* 16 now", result.err) and re.search(r"num_layers: 1 .* 2 now", result.err)
    assert "num_heads" not in result.err
    assert snapshot(copy_of) == before


def test_a_finished_run_is_evaluated_if_that_is_asked_for_later(train: Callable, tmp_path: Path) -> None:
    assert train(tmp_path / "run", max_steps=6, eval_interval=0).code == 0
    again = train(tmp_path / "run", max_steps=6, eval_interval=6)
    assert again.code == 0 and "step 6: validation loss" in again.out
    assert "This run is finished" in train(tmp_path / "run", max_steps=6, eval_interval=6).out
